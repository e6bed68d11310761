"""A second CUDA stream for a chain of small operations and collectives that runs alongside a sub-block.

With a sharded stream, the input of the next sub-block has to be waited for, added, normed and gathered while the
current sub-block computes:

    compute   [ h_1                          ].-[ h_2 ...
    side      [ wait ][ add ][ norm ][ gather ]'

A CPU has no second queue; there the chain runs between the sub-blocks.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaSideQueue:
    """Runs chains on a second CUDA stream, one after another.

    The allocator knows the stream that a tensor was created on and reuses its memory on that stream, without checking
    which other streams use it. Therefore tensors that the computation created and a chain uses are held here until
    `join`. Tensors that a chain created and the computation uses may be dropped at any time: a later chain gets their
    memory, and it first waits for all work that the compute stream was given until then.
    """

    def __init__(self, device: torch.device) -> None:
        # A product of the compute stream fills every multiprocessor; the chain's kernels get the next free ones.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._held: list[object] = []

    def run(self, chain: Callable[[], T], uses: object) -> T:
        """Return the chain's result, which later work of the current stream may use after `join`.

        `uses` holds every tensor that the chain uses and did not create; None if the caller holds them until the
        current stream has waited for the chain.
        """
        if uses is not None:
            self._held.append(uses)
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            return chain()

    def join(self) -> None:
        """Make later work of the current stream run after the chains so far."""
        # Otherwise there is nothing to wait for, and a capture must not wait for work outside of it.
        if self._held:
            torch.cuda.current_stream().wait_event(self._stream.record_event())
            self._held.clear()
