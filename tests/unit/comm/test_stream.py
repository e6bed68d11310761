"""The borders of a sharded stream: the lifetime of the tensors that are being communicated."""

import weakref

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.stream import ShardedStream


class _Pending:
    def wait(self) -> None:
        pass


class _Group(CommGroup):
    """Two ranks; a reduce-scatter that keeps no reference to its input, as torch after the wait."""

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        return tensor.new_zeros(tensor.shape[0] // 2, *tensor.shape[1:]), _Pending()


def test_handle_of_a_write_keeps_the_partial_sum() -> None:
    partial = torch.ones(4, 1, 3)
    alive = weakref.ref(partial)
    in_flight = ShardedStream(_Group([0, 1], 0, None)).start_write(partial)
    del partial
    assert in_flight.wait().shape == (2, 1, 3) and alive() is not None
    del in_flight
    assert alive() is None
