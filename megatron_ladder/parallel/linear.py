"""Linear layers cut over the tensor-parallel ranks.

Shapes per rank, with t ranks, s positions, b samples:

    ColumnParallelLinear   x [s, b, in]         weight_shard_out [out/t, in]   ->  [s, b, out/t]
    RowParallelLinear      x_shard [s, b, in/t] weight_shard_in [out, in/t]    ->  InFlight of [s, b, out]
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.tensors import Matrix
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.regions import copy_to_tensor_parallel_region, sum_gradient_rows
from megatron_ladder.comm.stream import ReplicatedStream, StreamLayout
from megatron_ladder.parallel.input_gradient import InputGradient, linear_giving_input_gradient
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.partitioned import linear


class ColumnParallelLinear(ParallelModule):
    """`y_shard = x @ weight_shard^T + bias_shard`, for one or several matrices of the same input side by side.

    The gradient of x is summed over the group, unless each rank has an x of its own; so is that of rows which several
    ranks hold, over those ranks.
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
        sum_input_gradient: bool = True,
    ) -> None:
        """
        Args:
            sum_input_gradient: False for an input that is each rank's own, or whose gradient the caller sums.
        """
        super().__init__()
        self.group = group
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
        """[s, b, in] -> [s, b, sum of widths]: the shares' columns one after another.

        Args:
            input_gradient: takes the gradient of `hidden_states`, its sum over the group started, in place of
                autograd, which would wait for the sum.
        """
        weight = self._whole_gradient(self.weight, self.widths, self._replicated)
        bias = self._bias_of_all_columns()
        if input_gradient is not None:
            return linear_giving_input_gradient(hidden_states, weight, bias, input_gradient)
        if self.sum_input_gradient:
            hidden_states = copy_to_tensor_parallel_region(hidden_states, self.group)
        return linear(hidden_states, weight, bias)

    def _bias_of_all_columns(self) -> Tensor | None:
        """The biases in the order of the columns, zeros for shares that have none."""
        if self.bias is None:
            return None
        with_bias = [i for i, biased in enumerate(self.biased) if biased]
        widths = [self.widths[i] for i in with_bias]
        bias = self._whole_gradient(self.bias, widths, [self._replicated[i] for i in with_bias])
        if len(with_bias) == len(self.widths):
            return bias
        pieces = iter(torch.split(bias, widths))
        return torch.cat(
            [
                next(pieces) if biased else bias.new_zeros(width)
                for biased, width in zip(self.biased, self.widths, strict=True)
            ]
        )

    def _whole_gradient(self, parameter: Tensor, widths: Sequence[int], replicated_rows: Sequence[bool]) -> Tensor:
        """The parameter, with the gradient of rows that several ranks hold summed over those ranks."""
        start = 0
        for width, is_replicated in zip(widths, replicated_rows, strict=True):
            if is_replicated:
                parameter = sum_gradient_rows(parameter, start, start + width, self.kv_replica_group)
            start += width
        return parameter


class RowParallelLinear(ParallelModule):
    """`y = sum over ranks of x_shard @ weight_shard^T, + bias`, returned while the sum is under way.

    The bias enters the partial sum of rank 0 alone, so it counts once; its gradient is that of the sum and equal
    on every rank. Added there instead of after the wait, it needs no second hook on the handle: it travels with
    an unreduced partial across a pipeline boundary, and under ZeRO-3 it is used while it is gathered.
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
        layout: StreamLayout | None = None,
        reduce: bool = False,
        equal_gradients: bool = True,
    ) -> None:
        """
        Args:
            layout: how the ranks share the sum; each holds all of it if not given.
            reduce: wait for the sum and return it as a plain tensor.
            equal_gradients: False when each rank goes on with its partial sum, so that its gradient is not the others'.
        """
        super().__init__()
        self.group = group
        self.layout = layout or ReplicatedStream(group)
        self.reduce = reduce
        self.equal_gradients = equal_gradients
        self.add_parameter("weight", [matrix.weight], group, dtype, device)
        if matrix.bias is not None:
            self.add_parameter("bias", [matrix.bias], group, dtype, device)
        else:
            self.bias = None

    def forward(self, x_shard: Tensor, launch: bool = True) -> InFlight | Tensor:
        """[s, b, in/t] -> the sum over the ranks, in flight (or there, with `reduce`): [s, b, out], or this rank's
        positions of it.

        Args:
            launch: False leaves the partial sum unreduced, with no handle, for a caller that adds to it or sends
                it elsewhere before it starts the reduce itself.
        """
        partial = linear(x_shard, self.weight)
        if self.bias is not None:
            partial = _add_once(partial, self.bias, self.group, self.equal_gradients)
        if not launch:
            return InFlight(partial, None)
        in_flight = self.layout.start_write(partial)
        return in_flight.wait() if self.reduce else in_flight


class _AddOnRankZero(torch.autograd.Function):
    """Forward: rank 0 adds the bias. Backward: every rank has the gradient of the sum, so also the bias's.

    Where the partial sums are not added up, the bias met rank 0's stream alone, and the others get its gradient.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, bias: Tensor, group: CommGroup, equal_gradients: bool) -> Tensor:
        ctx.group, ctx.equal_gradients = group, equal_gradients
        return partial + bias if group.rank == 0 else partial.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_bias = gradient.flatten(0, -2).sum(0)
        return gradient, of_bias if ctx.equal_gradients else ctx.group.broadcast(of_bias), None, None


def _add_once(partial: Tensor, bias: Tensor, group: CommGroup, equal_gradients: bool) -> Tensor:
    added: Tensor = _AddOnRankZero.apply(partial, bias, group, equal_gradients)
    return added
