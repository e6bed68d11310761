"""Tensors at the borders of a tensor-parallel region: how long they live, and which ones are left unchanged."""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.stream import ShardedStream, copy_to_tensor_parallel_region, sum_gradient_rows


class _Pending:
    def wait(self) -> None:
        pass


class _Group(CommGroup):
    """Two ranks; a reduce-scatter that keeps no reference to its input, as torch after the wait."""

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        return tensor.new_zeros(tensor.shape[0] // 2, *tensor.shape[1:]), _Pending()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return tensor.mul_(2)


def test_handle_of_a_write_keeps_the_partial_sum() -> None:
    partial = torch.ones(4, 1, 3)
    alive = weakref.ref(partial)
    in_flight = ShardedStream(_Group([0, 1], 0, None)).start_write(partial)
    del partial
    assert in_flight.wait().shape == (2, 1, 3) and alive() is not None
    del in_flight
    assert alive() is None


def test_sums_of_gradients_leave_the_incoming_gradient_unchanged() -> None:
    group = _Group([0, 1], 0, None)
    for enter, expected in (
        (lambda x: sum_gradient_rows(x, 1, 3, group), [1, 2, 2, 1]),
        (lambda x: copy_to_tensor_parallel_region(x, group), [2, 2, 2, 2]),
    ):
        leaf, gradient = torch.zeros(4, 1, requires_grad=True), torch.ones(4, 1)
        enter(leaf).backward(gradient)
        assert leaf.grad is not None and leaf.grad.flatten().tolist() == expected
        assert gradient.flatten().tolist() == [1, 1, 1, 1]
