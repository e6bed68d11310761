"""Tensors of Hugging Face directories, in FP8 as DeepSeek-V3 is published, or as they are.

    X.weight            [rows, columns], float8_e4m3fn
    X.weight_scale_inv  [blocks of rows, blocks of columns], a factor for each block of 128 x 128

The last block of rows or columns may be smaller. A matrix of 192 x 300 has 2 x 3 factors:

                   columns 0..127   128..255   256..299
    rows   0..127            f00        f01        f02
    rows 128..191            f10        f11        f12

A weight is the product of value and factor in fp32, rounded once to bf16. The data stay in the mapped file; a read
dequantises the elements that it returns, one block of rows at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.checkpoint.format import HF_CONFIG
from megatron_ladder.checkpoint.quantization import BLOCK, QUANTIZATION, unconverted_modules
from megatron_ladder.checkpoint.tensor_file import all_finite, element_name
from megatron_ladder.errors import limited, raise_user_errors

_SUFFIX = "_scale_inv"
"""The factors of a tensor have its name with this suffix."""
_FP8 = torch.float8_e4m3fn
_FACTORS = (torch.float32, torch.bfloat16)
"""The element types of factors; those of Qwen3's dense models are bf16."""


@dataclass(frozen=True)
class StoredWeight:
    """A stored tensor, or rows of one."""

    values: Tensor
    factors: Tensor | None = None
    """The factors of all blocks of the whole matrix; None if the values are the weights."""
    first_row: int = 0
    """The first row of `values` in the whole matrix."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the element type of the weights."""
        return self.values.dtype if self.factors is None else torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Return the stored bytes."""
        return self.values.nbytes + (0 if self.factors is None else self.factors.nbytes)

    def rows(self, matrix: int, rows: slice) -> "StoredWeight":
        """Return rows of a matrix of a stack."""
        factors = None if self.factors is None else self.factors[matrix]
        return StoredWeight(self.values[matrix][rows], factors, rows.start)

    def read(self, box: tuple[slice, ...], out: Tensor) -> None:
        """Fill `out`, of any dtype and on any device, with a box of the tensor."""
        if self.factors is None:
            out.copy_(self.values[box])
            return
        rows, columns = box
        begin, end = self.first_row + rows.start, self.first_row + rows.stop
        width, left = columns.stop - columns.start, columns.start % BLOCK
        blocks = slice(columns.start // BLOCK, _ceiling(columns.stop))
        for block in range(begin // BLOCK, _ceiling(end)):
            low, high = max(begin, block * BLOCK), min(end, (block + 1) * BLOCK)
            factors = self.factors[block, blocks].float().repeat_interleave(BLOCK)[left : left + width]
            products = self.values[low - self.first_row : high - self.first_row, columns].float() * factors
            out[low - begin : high - begin].copy_(products.bfloat16())

    def whole(self) -> Tensor:
        """Return the whole tensor: if it is not quantised, in its file."""
        if self.factors is None:
            return self.values
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read(tuple(slice(0, size) for size in self.shape), out)
        return out


def _ceiling(size: int) -> int:
    """Return the number of blocks that cover so many rows or columns."""
    return -(-size // BLOCK)


def join_factors(path: Path, config: Mapping[str, Any], found: Mapping[str, Tensor]) -> dict[str, StoredWeight]:
    """Return the tensors of a directory by name, those in FP8 with their factors.

    Raises UserError if factors are missing, unused, of another shape or element type, or not finite.
    """
    is_quantised = config.get(QUANTIZATION) is not None
    values, factors = dict(found), dict[str, Tensor]()
    if is_quantised:
        factors = {name: values.pop(name) for name in found if name.endswith(_SUFFIX)}
    unconverted = unconverted_modules(config) if is_quantised else set()
    weights, errors = dict[str, StoredWeight](), list[str]()
    for name, stored in values.items():
        is_fp8 = stored.dtype == _FP8
        weights[name] = StoredWeight(stored, factors.pop(f"{name}{_SUFFIX}", None) if is_fp8 else None)
        if is_fp8 and not is_quantised:
            errors.append(f"{name}: is in FP8, but {HF_CONFIG} has no {QUANTIZATION}: restore the published one")
        elif is_fp8:
            errors += _errors(name, weights[name], unconverted)
    for name in factors:
        of = name.removesuffix(_SUFFIX)
        reason = f"{of} is {element_name(values[of].dtype)}" if of in values else f"there is no {of}"
        errors.append(f"{name}: scales FP8 weights, but {reason}: copy both from one model")
    raise_user_errors(limited([f"{path}: {error}" for error in errors]))
    return weights


def _errors(name: str, weight: StoredWeight, unconverted: set[str]) -> Iterator[str]:
    """Yield the reasons why a tensor in FP8 cannot be dequantised."""
    parts = name.split(".")
    if listed := unconverted.intersection(".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        yield f"{name}: is in FP8, but {HF_CONFIG} lists {min(listed)} as not quantised: remove it from the list"
    scales, factors = f"{name}{_SUFFIX}", weight.factors
    expected = [*weight.shape[:-2], *map(_ceiling, weight.shape[-2:])]
    if len(weight.shape) < 2:
        yield f"{name}: is in FP8 and has the shape {list(weight.shape)}: only matrices are read in FP8"
    elif factors is None:
        yield f"{scales}: is missing; expected shape {expected}, one for each block of {name}"
    elif list(factors.shape) != expected:
        yield f"{scales}: found shape {list(factors.shape)}, expected {expected}, one for each block of {name}"
    elif factors.dtype not in _FACTORS:
        yield f"{scales}: found {element_name(factors.dtype)}, expected {' or '.join(map(element_name, _FACTORS))}"
    elif not all_finite(factors):
        yield f"{scales}: contains NaN or infinity: download the file again"
