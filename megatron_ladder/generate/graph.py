"""One step of the decode loop, captured once and replayed for every token.

On a GPU a decoded token is hundreds of small kernels, and the processor cannot launch them as fast as they run. A CUDA
graph launches them at once. It repeats what was captured address for address, so what changes from token to token
(ids and columns) is copied into buffers that stay where they are, and attention sees all columns of the cache, those
ahead hidden by the mask.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

WARM_UP_RUNS = 3
"""Before the capture, as torch's manual asks for: libraries and NCCL prepare themselves at their first calls."""


class StepGraph(Protocol):
    """Records a computation on buffers, and repeats it."""

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """Records `step`, which may run several times; returns the tensor in which every replay leaves its result."""

    def replay(self) -> None:
        """Runs what was recorded on what the buffers hold now."""


class CudaStepGraph:
    """A `StepGraph` of the current CUDA device."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """As `StepGraph.capture`; collectives are captured with the rest."""
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                step()
        current.wait_stream(aside)
        # NCCL's watchdog asks for events from a thread of its own, which a global capture would forbid.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return step()

    def replay(self) -> None:
        """As `StepGraph.replay`."""
        self._graph.replay()


class CapturedDecode:
    """A decode step on buffers of its own, captured at its first call.

    A step may run more than once on the same ids and columns: it overwrites those columns of the cache alike.
    """

    def __init__(
        self, step: Callable[[Tensor, Tensor], Tensor], samples: int, device: torch.device, graph: StepGraph
    ) -> None:
        """`step`: (ids [b, 1], columns [b]) -> logits [b, V], the same computation whatever the values."""
        self._step = step
        self._graph = graph
        self._tokens = torch.zeros(samples, 1, dtype=torch.int64, device=device)
        self._columns = torch.zeros(samples, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None

    def __call__(self, tokens: Tensor, columns: Tensor) -> Tensor:
        """Ids [b, 1] and columns [b] -> logits [b, V], which hold until the next call."""
        self._tokens.copy_(tokens)
        self._columns.copy_(columns)
        if self._logits is None:
            self._logits = self._graph.capture(lambda: self._step(self._tokens, self._columns))
        self._graph.replay()
        return self._logits
