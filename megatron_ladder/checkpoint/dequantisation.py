"""Dequantisation of tensors in Hugging Face directories: only of the elements that are read, some rows at a time.

FP8, as DeepSeek-V3 is published:

    X.weight            [rows, columns], float8_e4m3fn
    X.weight_scale_inv  [blocks of rows, blocks of columns], a factor for each block of 128 x 128

The last block of rows or columns may be smaller. A matrix of 192 x 300 has 2 x 3 factors:

                   columns 0..127   128..255   256..299
    rows   0..127            f00        f01        f02
    rows 128..191            f10        f11        f12

A weight is the product of value and factor in fp32, rounded once to bf16.

MXFP4, as the experts of gpt-oss are published:

    X_blocks  [E, rows, groups, 16], uint8: two weights of four bits a byte, the first one in the lower bits
    X_scales  [E, rows, groups], uint8: the power of two, plus 127, that scales a group of 32 weights

The rows are the outputs of a matrix; as in transformers, the weight X is transposed, [E, 32 x groups, rows]. In a group
with the scale 128, byte 0x3a is the weights -1 x 2 and 1.5 x 2, from the codes 0xa and 0x3. They are exact in bf16,
unless they are too large or too small for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.checkpoint.format import HF_CONFIG
from megatron_ladder.checkpoint.quantization import BLOCK, GROUP, QUANTIZATION, is_quantised_with, unconverted_module
from megatron_ladder.checkpoint.stored_weights import Index, StoredWeight, read_whole
from megatron_ladder.checkpoint.tensor_file import all_finite, element_name

_FACTORS = "_scale_inv"
"""The factors of a tensor have its name with this suffix."""
_FP8 = torch.float8_e4m3fn
_FACTOR_DTYPES = (torch.float32, torch.bfloat16)
"""The element types of factors; those of Qwen3's dense models are bf16."""
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a stack in MXFP4."""
_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of codes 0 to 7; codes 8 to 15 are these with a minus sign."""
_BIAS = 127
_PIECE = 1 << 20
"""About how many weights in MXFP4 are dequantised at a time."""


def take_quantised(config: Mapping[str, Any], found: dict[str, Tensor], errors: list[str]) -> dict[str, StoredWeight]:
    """Remove quantised tensors and their scales from `found`, and return the weights by name.

    Appends an error for each tensor whose scales are missing, unused, of another shape or element type, or not finite.
    """
    return _take_fp8(config, found, errors) | _take_mxfp4(config, found, errors)


@dataclass(frozen=True)
class _FP8Weight:
    """A matrix, or a stack of them."""

    values: Tensor
    factors: Tensor
    dtype = torch.bfloat16
    quantization = "FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.factors.nbytes

    def read(self, index: Index, out: Tensor) -> None:
        *stack, rows, columns = index
        if stack:
            (experts,) = stack
            for values, factors, target in zip(self.values[experts], self.factors[experts], out, strict=True):
                _FP8Weight(values, factors).read((rows, columns), target)
            return
        width, left = columns.stop - columns.start, columns.start % BLOCK
        blocks = slice(columns.start // BLOCK, _ceiling(columns.stop))
        for block in range(rows.start // BLOCK, _ceiling(rows.stop)):
            low, high = max(rows.start, block * BLOCK), min(rows.stop, (block + 1) * BLOCK)
            factors = self.factors[block, blocks].float().repeat_interleave(BLOCK)[left : left + width]
            products = self.values[low:high, columns].float() * factors
            out[low - rows.start : high - rows.start].copy_(products.bfloat16())

    def whole(self) -> Tensor:
        return read_whole(self)


def _ceiling(size: int) -> int:
    """Return the number of blocks that cover so many rows or columns."""
    return -(-size // BLOCK)


def _take_fp8(config: Mapping[str, Any], found: dict[str, Tensor], errors: list[str]) -> dict[str, StoredWeight]:
    is_described = is_quantised_with(config, "fp8")
    values = {name: found.pop(name) for name, tensor in [*found.items()] if tensor.dtype == _FP8}
    factors = dict[str, Tensor]()
    if is_described:
        factors = {name: found.pop(name) for name in [*found] if name.endswith(_FACTORS)}
    weights = dict[str, StoredWeight]()
    for name, stored in values.items():
        if not is_described:
            errors.append(f"{name}: is in FP8, but {HF_CONFIG} has no {QUANTIZATION}: restore the published one")
            continue
        of_tensor = factors.pop(f"{name}{_FACTORS}", None)
        errors += _fp8_errors(config, name, stored, of_tensor)
        if of_tensor is not None:
            weights[name] = _FP8Weight(stored, of_tensor)
    for name in factors:
        of = name.removesuffix(_FACTORS)
        reason = f"{of} is {element_name(found[of].dtype)}" if of in found else f"there is no {of}"
        errors.append(f"{name}: scales FP8 weights, but {reason}: copy both from one model")
    return weights


def _fp8_errors(config: Mapping[str, Any], name: str, values: Tensor, factors: Tensor | None) -> Iterator[str]:
    """Yield the reasons why a tensor in FP8 cannot be dequantised."""
    if listed := unconverted_module(config, name):
        yield f"{name}: is in FP8, but {HF_CONFIG} lists {listed} as not quantised: remove it from the list"
    scales = f"{name}{_FACTORS}"
    expected = [*values.shape[:-2], *map(_ceiling, values.shape[-2:])]
    if values.dim() < 2:
        yield f"{name}: is in FP8 and has the shape {list(values.shape)}: only matrices are read in FP8"
    elif factors is None:
        yield f"{scales}: is missing; expected shape {expected}, one for each block of {name}"
    elif list(factors.shape) != expected:
        yield f"{scales}: found shape {list(factors.shape)}, expected {expected}, one for each block of {name}"
    elif factors.dtype not in _FACTOR_DTYPES:
        dtypes = " or ".join(map(element_name, _FACTOR_DTYPES))
        yield f"{scales}: found {element_name(factors.dtype)}, expected {dtypes}"
    elif not all_finite(factors):
        yield f"{scales}: contains NaN or infinity: download the file again"


@lru_cache(maxsize=1)
def _pairs() -> Tensor:
    """Return the two weights of each byte with each scale, [256 scales x 256 bytes, 2] bf16."""
    codes = torch.tensor(_CODES)
    bytes_ = torch.arange(256)
    values = torch.cat([codes, -codes])[torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1)]
    return torch.ldexp(values.expand(256, 256, 2), (bytes_ - _BIAS)[:, None, None]).flatten(0, 1).bfloat16()


@dataclass(frozen=True)
class _MXFP4Weight:
    """A stack of transposed matrices."""

    blocks: Tensor
    scales: Tensor
    dtype = torch.bfloat16
    quantization = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups = self.scales.shape
        return experts, GROUP * groups, rows

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    def read(self, index: Index, out: Tensor) -> None:
        experts, columns, rows = index
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        left = columns.start % GROUP
        inside = slice(left, left + columns.stop - columns.start)
        most_rows = max(1, _PIECE // (GROUP * (groups.stop - groups.start)))
        for blocks, scales, target in zip(self.blocks[experts], self.scales[experts], out.mT, strict=True):
            pieces = (part[rows, groups].split(most_rows) for part in (blocks, scales))
            for *piece, target_rows in zip(*pieces, target.split(most_rows), strict=True):
                target_rows.copy_(_dequantised(*piece)[:, inside])

    def whole(self) -> Tensor:
        return read_whole(self)


def _dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, groups, 16] and [rows, groups] -> weights [rows, 32 x groups]."""
    pairs = (scales.int() << 8).unsqueeze(-1) | blocks
    return _pairs().index_select(0, pairs.flatten()).view(len(blocks), -1)


def _take_mxfp4(config: Mapping[str, Any], found: dict[str, Tensor], errors: list[str]) -> dict[str, StoredWeight]:
    is_described = is_quantised_with(config, "mxfp4")
    if config.get(QUANTIZATION) is not None and not is_described:
        return {}
    blocks, scales = (
        {name.removesuffix(suffix): found.pop(name) for name in [*found] if name.endswith(suffix)}
        for suffix in (_BLOCKS, _SCALES)
    )
    weights = dict[str, StoredWeight]()
    for name in dict.fromkeys([*blocks, *scales]):
        if not is_described:
            stored = name + (_BLOCKS if name in blocks else _SCALES)
            errors.append(f"{stored}: is in MXFP4, but {HF_CONFIG} has no {QUANTIZATION}: restore the published one")
            continue
        problems = [*_mxfp4_errors(config, name, blocks.get(name), scales.get(name))]
        if name in found:
            problems.append(f"{name}: is in the files, and so is {name}{_BLOCKS}: remove one of them")
        errors += problems
        if not problems:
            weights[name] = _MXFP4Weight(blocks[name], scales[name])
    return weights


def _mxfp4_errors(config: Mapping[str, Any], name: str, blocks: Tensor | None, scales: Tensor | None) -> Iterator[str]:
    """Yield the reasons why blocks cannot be dequantised."""
    if listed := unconverted_module(config, name):
        yield f"{name}{_BLOCKS}: is in MXFP4, but {HF_CONFIG} lists {listed} as not quantised: remove it from the list"
    bytes_ = GROUP // 2
    if blocks is None:
        yield f"{name}{_BLOCKS}: is missing, but there is {name}{_SCALES}: copy both from one model"
    elif blocks.dim() != 4 or blocks.shape[-1] != bytes_:
        expected = f"[experts, rows, groups, {bytes_}]: only groups of {GROUP} weights are read"
        yield f"{name}{_BLOCKS}: found shape {list(blocks.shape)}, expected {expected}; import the model in bf16"
    elif scales is None:
        expected = f"expected shape {list(blocks.shape[:-1])}, one for each group of {name}{_BLOCKS}"
        yield f"{name}{_SCALES}: is missing; {expected}: copy both from one model"
    elif scales.shape != blocks.shape[:-1]:
        expected = f"{list(blocks.shape[:-1])}, one for each group of {name}{_BLOCKS}: copy both from one model"
        yield f"{name}{_SCALES}: found shape {list(scales.shape)}, expected {expected}"
    for suffix, tensor in ((_BLOCKS, blocks), (_SCALES, scales)):
        if tensor is not None and tensor.dtype != torch.uint8:
            yield f"{name}{suffix}: found {element_name(tensor.dtype)}, expected uint8: download the file again"
