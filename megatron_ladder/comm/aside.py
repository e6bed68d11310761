"""Where a chain of small operations and collectives runs beside a sub-block.

With a sharded stream, what the next sub-block reads must be waited for, added, normed and gathered while this one
computes. On CUDA that chain has a stream of its own, from the beginning of the sub-block:

    compute   [ h_1                          ].-[ h_2 ...
    aside     [ wait ][ add ][ norm ][ gather ]'

On a CPU there is no second queue: the chain takes its turn when the sub-block is halfway, and its collectives fly under
what comes before and behind.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Aside(Protocol):
    """Runs chains, one after another."""

    halfway: bool
    """Whether a chain is run when the sub-block beside it is halfway; else when it begins."""

    def run(self, chain: Callable[[], T], uses: object) -> T:
        """What the chain gives, which later work of the current stream may use after `join`.

        Args:
            uses: holds every tensor that the chain uses and did not make.
        """

    def join(self) -> None:
        """Later work of the current stream runs after the chains so far."""


class TakingTurns:
    """On the stream that computes."""

    halfway = True

    def run(self, chain: Callable[[], T], uses: object) -> T:
        """Runs it at once."""
        return chain()

    def join(self) -> None:
        """Nothing to wait for."""


class OnSideStream:
    """On a CUDA stream beside the one that computes.

    The allocator knows the stream that a tensor was made on and gives its memory away again on that stream, without
    asking who else has used it. What the computation made and a chain uses is therefore held here until `join`. What a
    chain made and the computation uses may be dropped at any time: its memory goes to a later chain, and that one first
    waits for all that the computation was given until then.
    """

    halfway = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._held: list[object] = []

    def run(self, chain: Callable[[], T], uses: object) -> T:
        """Launches it behind what the current stream has so far."""
        self._held.append(uses)
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            return chain()

    def join(self) -> None:
        """The current stream waits for the chains; the host does not."""
        torch.cuda.current_stream().wait_event(self._stream.record_event())
        self._held.clear()


def beside(device: torch.device) -> Aside:
    """The way to run chains beside what computes on this device."""
    return OnSideStream(device) if device.type == "cuda" else TakingTurns()
