"""Products of sorted rows with stacked matrices: the rows of each expert with its matrix.

    rows sorted by expert   [ 0 0 0 | 1 | 2 2 2 2 | ... ]      weight [E, out, in]
    offsets                        3   4         8             the end of each expert's rows

A rank that holds only some of the experts sorts their rows first; what lies behind the last offset belongs to others,
and is zero in every result. Rows are not sorted by hand on the host, which never reads how many an expert has, except
where torch's grouped product cannot be used.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.parallel.products import InputGradient

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16
"""Bytes of which a row of an operand of torch's grouped product must be a multiple."""


class SortedRows(NamedTuple):
    """The order of n k rows, one for each token and chosen expert, by expert."""

    order: Tensor
    """Index of each sorted row among the choices of all tokens, [n k]."""
    offsets: Tensor
    """The end of the rows of each local expert, [E] int32."""
    back: Tensor
    """Index of each choice among the sorted rows, [n k]."""
    shape: torch.Size
    """That of the choices: [..., k]."""

    @staticmethod
    def of(chosen: Tensor, first: int, count: int) -> "SortedRows":
        """Sort the choices [..., k] for a rank with `count` experts from `first` on."""
        # Experts of other ranks are sorted behind the last one.
        local = chosen.flatten() - first
        local = torch.where((local >= 0) & (local < count), local, count)
        counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, local, torch.ones_like(local))
        offsets = counts[:-1].cumsum(0).to(torch.int32)
        order = local.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return SortedRows(order, offsets, back, chosen.shape)

    @property
    def tokens(self) -> Tensor:
        """Index of the token of each sorted row."""
        return self.order // self.shape[-1]

    def sort(self, values: Tensor) -> Tensor:
        """Values of the choices [..., k] -> those of the sorted rows [n k]."""
        return values.flatten()[self.order]

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows [n k, h] -> their sum for each token [..., h], in a fixed order."""
        return rows[self.back].view(*self.shape, -1).sum(-2)


def _is_grouped(*operands: Tensor) -> bool:
    rows_fit = all(one.shape[-1] * one.element_size() % _ALIGNMENT == 0 for one in operands)
    return operands[0].dtype in _GROUPED_DTYPES and rows_fit and not operands[0].is_meta


def reads_on_host(weight: Tensor) -> bool:
    """Whether torch's product on CUDA makes the host wait for the offsets: weight [E, out, in]."""
    return (
        weight.dtype != torch.bfloat16
        or not _is_grouped(weight, weight.transpose(1, 2))
        or torch.cuda.get_device_capability(weight.device) < (9, 0)
    )


def _multiply(rows: Tensor, matrices: Tensor, sorted_rows: SortedRows) -> Tensor:
    """[n k, in] x [E, in, out] -> [n k, out]."""
    offsets = sorted_rows.offsets
    if rows.is_meta:
        return rows.new_empty(len(rows), matrices.shape[-1])
    if _is_grouped(rows, matrices, matrices.transpose(1, 2)):
        product = torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)
        is_local = torch.arange(len(rows), device=rows.device) < offsets[-1]
        return torch.where(is_local.unsqueeze(-1), product, 0)
    product, start = rows.new_zeros(len(rows), matrices.shape[-1]), 0
    for matrix, end in zip(matrices, offsets.tolist(), strict=True):
        product[start:end] = rows[start:end] @ matrix
        start = end
    return product


def _multiply_outer(left: Tensor, right: Tensor, sorted_rows: SortedRows) -> Tensor:
    """[n k, out], [n k, in] -> the sum over the rows of each expert of left^T right, [E, out, in]."""
    offsets = sorted_rows.offsets
    if left.is_meta:
        return left.new_empty(len(offsets), left.shape[-1], right.shape[-1])
    if _is_grouped(left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=offsets)
    product, start = left.new_zeros(len(offsets), left.shape[-1], right.shape[-1]), 0
    for expert, end in enumerate(offsets.tolist()):
        product[expert] = left[start:end].t() @ right[start:end]
        start = end
    return product


class _GroupedLinear(Function):
    """Saves the parameter for backward, before which ZeRO-3 gathers it again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sorted_rows: SortedRows) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sorted_rows = sorted_rows
        return _multiply(rows, weight.transpose(1, 2), sorted_rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        return (
            _multiply(gradient, weight, ctx.sorted_rows),
            _multiply_outer(gradient, rows, ctx.sorted_rows),
            None,
        )


def grouped_linear(rows: Tensor, weight: Tensor, sorted_rows: SortedRows) -> Tensor:
    """Sorted rows [n k, in], weight [E, out, in] -> [n k, out]."""
    result: Tensor = _GroupedLinear.apply(rows, weight, sorted_rows)
    return result


class _ExpertInputs(Function):
    """Keeps the tokens, not the sorted rows, of which there are k times as many."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, sorted_rows: SortedRows, input_gradient: InputGradient | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, *((x,) if input_gradient is None else input_gradient.use(x)))
        ctx.sorted_rows, ctx.input_gradient = sorted_rows, input_gradient
        rows = x.flatten(0, -2)[sorted_rows.tokens]
        return torch.cat([_multiply(rows, weight.transpose(1, 2), sorted_rows) for weight in (gate, up)], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        gate, up, *kept = ctx.saved_tensors
        sorted_rows, input_gradient = ctx.sorted_rows, ctx.input_gradient
        of_gate, of_up = (part.contiguous() for part in gradient.chunk(2, dim=-1))
        of_rows = _multiply(of_gate, gate, sorted_rows) + _multiply(of_up, up, sorted_rows)
        of_x: Tensor | None = sorted_rows.sum_by_token(of_rows)
        if input_gradient is not None:
            input_gradient.add(of_x)
            of_x = None
        x = kept[0] if kept else input_gradient.input_again.wait()
        rows = x.flatten(0, -2)[sorted_rows.tokens]
        return (
            of_x,
            _multiply_outer(of_gate, rows, sorted_rows),
            _multiply_outer(of_up, rows, sorted_rows),
            None,
            None,
        )


def expert_inputs(
    x: Tensor, gate: Tensor, up: Tensor, sorted_rows: SortedRows, input_gradient: InputGradient | None
) -> Tensor:
    """x [s, b, h], gate and up [E, f, h] -> the products of the sorted rows with both, side by side, [n k, 2 f].

    The gradient of x goes to `input_gradient`, if given.
    """
    result: Tensor = _ExpertInputs.apply(x, gate, up, sorted_rows, input_gradient)
    return result
