"""What a layer must heed where ZeRO-3 gathers its weight before each use and gives the memory back behind it."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.parallel.panels import panel_product


class _LinearOfPartitionedWeight(Function):
    """Keeps the parameter for backward, before which ZeRO-3 gathers it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = rows.t() @ x.reshape(-1, weight.shape[1])
        return of_input, of_weight, rows.sum(0) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`, for x [..., in] and weight [out, in].

    torch's own function keeps a view of the weight for backward, and with it the memory of the whole weight. So where
    ZeRO-3 partitions the parameter (it has a `ds_id` then), a function of ours takes its place. A weight may also lie
    in panels, see `panels.py`.
    """
    if weight.dim() == 3:
        product = panel_product(x, weight)
        return product if bias is None else product + bias
    if not hasattr(weight, "ds_id"):
        return F.linear(x, weight, bias)
    output: Tensor = _LinearOfPartitionedWeight.apply(x, weight, bias)
    return output


class _Reached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        return None, None


def reached_by_backward(x: Tensor) -> Tensor:
    """x, for a module whose input gradient goes another way than through autograd.

    ZeRO-3 gives a module's weight back when backward arrives at its input. So the input must seem to need a gradient;
    as a leaf it would stay in memory until then.
    """
    reached: Tensor = _Reached.apply(x, x.new_empty(0).requires_grad_())
    return reached
