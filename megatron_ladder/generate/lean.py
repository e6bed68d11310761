"""Operations of a decode step on a CPU, in as few torch calls as possible, and the layout of the weights for them.

A decoded token of a small model is hundreds of operations on a few thousand numbers each, so the number of calls
determines the time. The functions equal those of `model/operations.py` up to rounding, but they have no backward and
overwrite inputs that are not read again.

Matrices are laid out in panels. In the usual layout of a matrix [out, in], one row of x is multiplied at half of the
memory's rate, because rows of 768 numbers are too short for the processor's prefetcher. In panels of a few output
columns,

    weight [out, in]   ->   panels [out / width, in, width]

the same product reads the weight from end to end, and the sums of a panel stay in registers. A weight with
three dimensions is in panels.

Weights are stored in large pages. Linux uses pages of 4 KiB by default; a processor looks up the address of each page,
and its prefetcher stops at the end of one. With pages of 2 MiB, a product with one row reads a weight a quarter faster,
and fresh memory is allocated and filled several times as fast.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import Operations, attend
from megatron_ladder.model.rotary import RotaryTable
from megatron_ladder.parallel.layout import ParallelModule

_LARGE_PAGE = 2 << 20
"""Bytes, on x86-64, and on ARM with small pages of 4 KiB."""
_PANEL_WIDTHS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
"""Output columns of a panel: one 512-bit vector register in fp32, and the fastest width of oneDNN's half-precision
products."""


def load_for_cpu(model: LanguageModel, fill: Callable[[nn.Module], None]) -> None:
    """Load a model that was built on the meta device with `LEAN_OPERATIONS`; `fill` reads the weights of a part of it.

    The model can only generate afterwards: its parameters no longer correspond to their sections. Each matrix is laid
    out in panels as soon as it is read, and the next one is read into the same buffer, because fresh memory costs more
    time than reading a cached file.
    """
    modules = [module for module in model.modules() if isinstance(module, ParallelModule)]
    table_only = None if model.lm_head is None else model.embedding
    in_panels = {
        module
        for module in modules
        if not isinstance(module, RMSNorm) and module is not table_only and _fits_panels(module.get_parameter("weight"))
    }
    largest = max((module.get_parameter("weight").numel() for module in in_panels), default=0)
    buffer = _empty_in_large_pages((largest,), model.compute_dtype)
    for module in modules:
        for name, described in list(module.named_parameters(recurse=False)):
            if name == "weight" and module in in_panels:
                memory = buffer[: described.numel()].view(described.shape)
            else:
                memory = _empty_in_large_pages(described.shape, described.dtype)
            module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        fill(module)
        if module in in_panels:
            panels = _to_panels(module.get_parameter("weight"))
            module.register_parameter("weight", nn.Parameter(panels, requires_grad=False))


def _fits_panels(weight: Tensor) -> bool:
    """Return whether the dtype of a weight [out, in] has a panel width, and that width divides `out`."""
    width = _PANEL_WIDTHS.get(weight.dtype)
    return weight.dim() == 2 and width is not None and weight.shape[0] % width == 0


@torch.no_grad()
def _to_panels(weight: Tensor) -> Tensor:
    """[out, in] -> [out / width, in, width], a copy. The weight must fit, see `_fits_panels`."""
    width = _PANEL_WIDTHS[weight.dtype]
    panels = _empty_in_large_pages((weight.shape[0] // width, weight.shape[1], width), weight.dtype)
    # torch transposes one matrix in blocks, but a stack of matrices number by number, which is slow in rows of 4 KiB.
    for panel, rows in zip(panels, weight.detach().split(width), strict=True):
        panel.copy_(rows.t())
    return panels


def _empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in large pages as far as it fills them and the system has them."""
    count = math.prod(shape) * dtype.itemsize
    if count < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    mapping = mmap.mmap(-1, count + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    # The kernel may lack large pages. The last page, which is not filled, uses small ones.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE, start, count // _LARGE_PAGE * _LARGE_PAGE)
    return memory[start : start + count].view(dtype).view(*shape)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight^T + bias` for x [..., in] and a weight [out, in] or in panels -> [..., out]."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    count, _, width = weight.shape
    rows = x.flatten(0, -2)
    products = torch.bmm(rows.expand(count, -1, -1), weight)
    if len(rows) > 1:
        products = products.transpose(0, 1)
    product = products.reshape(*x.shape[:-1], count * width)
    return product if bias is None else product + bias


def _embed(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a weight [out, in] or in panels: indices [...] -> [..., in]."""
    if weight.dim() == 2:
        return F.embedding(indices, weight)
    width = weight.shape[-1]
    return weight.transpose(1, 2)[indices // width, indices % width]


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x [..., n] by weight [n]; half precision is computed in fp32."""
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
    rows = exact.reshape(-1, 1, x.shape[-1])
    mean_square = torch.bmm(rows, rows.view(-1, x.shape[-1], 1)).mul_(1 / x.shape[-1])
    normed = (rows * mean_square.add_(epsilon).rsqrt_()).mul_(weight)
    return normed.view(x.shape).to(x.dtype)


def _add_norm(stream: Tensor, output: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the sum, which overwrites `output`, and its norm."""
    total = output.add_(stream)
    return total, _rms_norm(total, weight, epsilon)


def _swiglu(gate_up: Tensor) -> Tensor:
    """Gate and up side by side [..., 2 n] -> silu(gate) * up [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


def _split_heads(
    projected: Tensor, widths: Sequence[int], head_dim: int, table: RotaryTable,
    norm_weights: tuple[Tensor, Tensor] | None, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split heads as `Operations.split_heads` does; queries and keys, which are adjacent, are rotated together."""
    positions, samples, _ = projected.shape
    heads = projected.view(positions, samples, -1, head_dim)
    queries, keys, values = (width // head_dim for width in widths)
    rotating, v = heads.narrow(2, 0, queries + keys), heads.narrow(2, queries + keys, values)
    if norm_weights is not None:
        q, k = rotating.narrow(2, 0, queries), rotating.narrow(2, queries, keys)
        rotating = torch.cat((_rms_norm(q, norm_weights[0], epsilon), _rms_norm(k, norm_weights[1], epsilon)), dim=2)
    half = head_dim // 2
    rotated, sin = rotating * table.cos, table.sin.narrow(-1, 0, half)
    rotated.narrow(-1, 0, half).addcmul_(rotating.narrow(-1, half, half), sin, value=-1)
    rotated.narrow(-1, half, half).addcmul_(rotating.narrow(-1, 0, half), sin)
    rotated = rotated.to(projected.dtype).permute(1, 2, 0, 3)
    return rotated.narrow(1, 0, queries), rotated.narrow(1, queries, keys), v.permute(1, 2, 0, 3)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend as `model.operations.attend` does, with two products that copy no head for one query per sample."""
    samples, heads, length, head_dim = q.shape
    if length > 1:
        return attend(q, k, v, mask)
    kv_heads, positions = k.shape[1:3]
    grouped = q.reshape(samples * kv_heads, heads // kv_heads, head_dim)
    empty = q.new_empty(())
    scores = torch.baddbmm(empty, grouped, k.flatten(0, 1).transpose(1, 2), beta=0, alpha=head_dim**-0.5)
    if mask is not None:
        scores.view(samples, heads, 1, positions).masked_fill_(~mask, -torch.inf)
    attended = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
    return attended.view(samples, heads, 1, head_dim)


LEAN_OPERATIONS = Operations(_rms_norm, _add_norm, _split_heads, _attend, _swiglu, _linear, _embed)
"""For models that `load_for_cpu` loads."""
