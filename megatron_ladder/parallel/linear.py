"""Linear layers sharded over the tensor-parallel ranks.

Shapes per rank, with t ranks, s positions, b samples:

    ColumnParallelLinear   x [s, b, in]         weight_shard_out [out/t, in]   ->  [s, b, out/t]
    RowParallelLinear      x_shard [s, b, in/t] weight_shard_in [out, in/t]    ->  partial sum of [s, b, out]

The walk of `model/sub_block.py` starts the sum of the partial sums over the ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ladder.blueprint.specs import Matrix
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.stream import copy_to_tensor_parallel_region
from megatron_ladder.parallel.layout import ParallelModule, Placement
from megatron_ladder.parallel.products import InputGradient


class ColumnParallelLinear(ParallelModule):
    """`y_shard = x @ weight_shard^T + bias_shard`, for one or several matrices of the same input side by side.

    The gradient of x is summed over the group, unless each rank has a separate x. The gradient of rows that several
    ranks hold is a partial sum (`Section.is_partial`).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, matrices: Sequence[Matrix], placement: Placement, sum_input_gradient: bool = True) -> None:
        """The gradient of x that autograd computes is summed if `sum_input_gradient`."""
        super().__init__(placement)
        self.linear = placement.linear
        self.sum_input_gradient = sum_input_gradient
        self.widths = [matrix.weight.width(self.group.size) for matrix in matrices]
        self.biased = [matrix.bias is not None for matrix in matrices]
        self.add_parameter("weight", [matrix.weight for matrix in matrices], placement)
        self.add_parameter("bias", [matrix.bias for matrix in matrices if matrix.bias is not None], placement)

    def forward(self, hidden_states: Tensor, input_gradient: InputGradient | None = None) -> Tensor:
        """[s, b, in] -> [s, b, sum of widths]: the columns of one share after another.

        `input_gradient` receives the gradient of `hidden_states` with its sum over the group started, instead of
        autograd, which would wait for the sum.
        """
        bias = self._bias_of_all_columns()
        if input_gradient is None and self.sum_input_gradient:
            hidden_states = copy_to_tensor_parallel_region(hidden_states, self.group)
        return self.linear(hidden_states, self.weight, bias, input_gradient)

    def _bias_of_all_columns(self) -> Tensor | None:
        bias: Tensor | None = self.bias
        if bias is None:
            return None
        if not all(self.biased):
            pairs = list(zip(self.biased, self.widths, strict=True))
            pieces = iter(bias.split([width for biased, width in pairs if biased]))
            bias = torch.cat([next(pieces) if biased else bias.new_zeros(width) for biased, width in pairs])
        return bias


class RowParallelLinear(ParallelModule):
    """`y = sum over ranks of x_shard @ weight_shard^T`, + bias; returns this rank's partial sum.

    The bias enters the partial sum of rank 0 only, so it counts once. Its gradient is that of the sum, and equal on
    every rank. Added here instead of after the sum, it crosses a pipeline boundary in the unreduced partial sum, and
    under ZeRO-3 it is used while it is gathered.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, matrix: Matrix, placement: Placement, equal_gradients: bool = True) -> None:
        """`equal_gradients` is False if the gradients of the ranks' partial sums differ."""
        super().__init__(placement)
        self.linear = placement.linear
        self.equal_gradients = equal_gradients
        self.add_parameter("weight", [matrix.weight], placement)
        self.add_parameter("bias", [] if matrix.bias is None else [matrix.bias], placement)

    def forward(self, x_shard: Tensor) -> Tensor:
        """[s, b, in/t] -> this rank's partial sum [s, b, out]."""
        partial = self.linear(x_shard, self.weight, None)
        if self.bias is not None:
            partial = _AddOnRankZero.apply(partial, self.bias, self.group, self.equal_gradients)
        return partial


class _AddOnRankZero(Function):
    """Add the bias on rank 0; in backward, every rank has the gradient of the sum, which is also the bias's.

    Where partial sums stay separate, the bias entered rank 0's stream only, and rank 0 broadcasts its gradient.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, bias: Tensor, group: CommGroup, equal_gradients: bool) -> Tensor:
        ctx.group, ctx.equal_gradients = group, equal_gradients
        return partial + bias if group.rank == 0 else partial.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        bias_gradient = gradient.flatten(0, -2).sum(0)
        return gradient, bias_gradient if ctx.equal_gradients else ctx.group.broadcast(bias_gradient), None, None
