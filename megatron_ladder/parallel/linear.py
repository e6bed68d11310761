"""Linear layers sharded over the tensor-parallel ranks.

Shapes per rank, with t ranks, s positions, b samples:

    ColumnParallelLinear   x [s, b, in]         weight_shard_out [out/t, in]   ->  [s, b, out/t]
    RowParallelLinear      x_shard [s, b, in/t] weight_shard_in [out, in/t]    ->  InFlight of [s, b, out]

ZeRO-3 gathers a parameter before each use and releases it after; `linear` and `reached_by_backward` allow for that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ladder.blueprint.tensors import Matrix
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, Launch, start_all_reduce
from megatron_ladder.comm.regions import copy_to_tensor_parallel_region, sum_gradient_rows
from megatron_ladder.parallel.input_gradient import InputGradient, linear_with_input_gradient
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.weight_gradient import gradient_sum, weight_gradient

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) -> [..., out]."""


class _LinearOfParameter(Function):
    """Saves the parameter for backward, before which ZeRO-3 gathers it again, and adds to its `GradientSum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sum, ctx.has_bias = gradient_sum(weight), bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return input_gradient, weight_gradient(gradient, x, ctx.sum), of_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias`, for x [..., in] and weight [out, in].

    torch's own function saves a view of the weight for backward, and with it the memory of the whole weight, and leaves
    its gradient to autograd. A parameter that ZeRO-3 partitions (it has a `ds_id`), or whose gradients are summed
    elsewhere, therefore goes through a function that saves the parameter.
    """
    if not hasattr(weight, "ds_id") and gradient_sum(weight) is None:
        return F.linear(x, weight, bias)
    return _LinearOfParameter.apply(x, weight, bias)


class _Reached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        return None, None


def reached_by_backward(x: Tensor) -> Tensor:
    """Return x for a module whose input gradient does not go through autograd.

    ZeRO-3 releases a module's weight when backward arrives at its input, so the input must appear to need a gradient.
    As a leaf it would stay in memory until then.
    """
    return _Reached.apply(x, x.new_empty(0).requires_grad_())


class ColumnParallelLinear(ParallelModule):
    """`y_shard = x @ weight_shard^T + bias_shard`, for one or several matrices of the same input side by side.

    The gradient of x is summed over the group, unless each rank has a separate x. The gradient of rows that several
    ranks hold is summed over these ranks.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        matrices: Sequence[Matrix],
        *,
        group: CommGroup,
        kv_replica_group: CommGroup,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFunction = linear,
        sum_input_gradient: bool = True,
    ) -> None:
        """`linear` multiplies where autograd computes the input's gradient, summed if `sum_input_gradient`."""
        super().__init__()
        self.group = group
        self.linear = linear
        self.sum_input_gradient = sum_input_gradient
        self.kv_replica_group = kv_replica_group
        self.widths = [matrix.weight.width(group.size) for matrix in matrices]
        self.biased = [matrix.bias is not None for matrix in matrices]
        self._replicated = [matrix.weight.replicas(group.size) > 1 for matrix in matrices]
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        self.add_parameter("weight", [matrix.weight for matrix in matrices], group, dtype, device)
        if biases:
            self.add_parameter("bias", biases, group, dtype, device)
        else:
            self.bias = None

    def forward(self, hidden_states: Tensor, input_gradient: InputGradient | None = None) -> Tensor:
        """[s, b, in] -> [s, b, sum of widths]: the columns of one share after another.

        `input_gradient` receives the gradient of `hidden_states` with its sum over the group started, instead of
        autograd, which would wait for the sum.
        """
        weight = self._sum_replicated(self.weight, self.widths, self._replicated)
        bias = self._bias_of_all_columns()
        if input_gradient is not None:
            return linear_with_input_gradient(hidden_states, weight, bias, input_gradient)
        return self.linear(self.share_input(hidden_states), weight, bias)

    def share_input(self, hidden_states: Tensor, input_gradient: InputGradient | None = None) -> Tensor:
        """Return the layer's input for another use on this rank, whose gradient is summed as the layer's is."""
        if input_gradient is not None:
            return input_gradient.use(hidden_states)
        return copy_to_tensor_parallel_region(hidden_states, self.group) if self.sum_input_gradient else hidden_states

    def _bias_of_all_columns(self) -> Tensor | None:
        if self.bias is None:
            return None
        with_bias = [i for i, biased in enumerate(self.biased) if biased]
        widths = [self.widths[i] for i in with_bias]
        bias = self._sum_replicated(self.bias, widths, [self._replicated[i] for i in with_bias])
        if len(with_bias) == len(self.widths):
            return bias
        pieces = iter(torch.split(bias, widths))
        widths_by_bias = zip(self.biased, self.widths, strict=True)
        return torch.cat([next(pieces) if biased else bias.new_zeros(width) for biased, width in widths_by_bias])

    def _sum_replicated(self, parameter: Tensor, widths: Sequence[int], replicated_rows: Sequence[bool]) -> Tensor:
        """Return the parameter; the gradient of rows that several ranks hold is summed over these ranks."""
        start = 0
        for width, is_replicated in zip(widths, replicated_rows, strict=True):
            if is_replicated:
                parameter = sum_gradient_rows(parameter, start, start + width, self.kv_replica_group)
            start += width
        return parameter


class RowParallelLinear(ParallelModule):
    """`y = sum over ranks of x_shard @ weight_shard^T`, + bias, returned while the sum is in flight.

    The bias enters the partial sum of rank 0 only, so it counts once. Its gradient is that of the sum, and equal on
    every rank. Added here instead of after the sum, the bias needs no second hook on the handle: it crosses a pipeline
    boundary in the unreduced partial sum, and under ZeRO-3 it is used while it is gathered.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        matrix: Matrix,
        *,
        group: CommGroup,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFunction = linear,
        equal_gradients: bool = True,
    ) -> None:
        """`equal_gradients` is False if each rank continues with its own partial sum, so that gradients differ."""
        super().__init__()
        self.group = group
        self.linear = linear
        self.equal_gradients = equal_gradients
        self.add_parameter("weight", [matrix.weight], group, dtype, device)
        if matrix.bias is not None:
            self.add_parameter("bias", [matrix.bias], group, dtype, device)
        else:
            self.bias = None

    def forward(self, x_shard: Tensor, launch: Launch | None = None) -> InFlight:
        """[s, b, in/t] -> the handle of the sum over the ranks, [s, b, out].

        `launch` starts the sum of this rank's partial sum; an all-reduce if not given. `leave_unreduced` is for a
        caller that adds to the partial sum, or sends it elsewhere, before the sum starts.
        """
        partial = self.linear(x_shard, self.weight, None)
        if self.bias is not None:
            partial = _AddOnRankZero.apply(partial, self.bias, self.group, self.equal_gradients)
        return start_all_reduce(partial, self.group) if launch is None else launch(partial)


class _AddOnRankZero(Function):
    """Add the bias on rank 0; in backward, every rank has the gradient of the sum, which is also the bias's.

    Where partial sums stay separate, the bias entered rank 0's stream only, and rank 0 broadcasts its gradient.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, bias: Tensor, group: CommGroup, equal_gradients: bool) -> Tensor:
        ctx.group, ctx.equal_gradients = group, equal_gradients
        return partial + bias if group.rank == 0 else partial.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        bias_gradient = gradient.flatten(0, -2).sum(0)
        return gradient, bias_gradient if ctx.equal_gradients else ctx.group.broadcast(bias_gradient), None, None
