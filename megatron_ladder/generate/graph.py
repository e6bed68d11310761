"""Decode steps on GPUs, captured once for all tokens.

On a GPU, a decode step consists of hundreds of small kernels, which the host cannot launch as fast as they run. A CUDA
graph launches all of them at once. It replays the captured addresses, so the inputs of a step (ids, positions and
random numbers) are copied into a fixed buffer, and attention gets all columns of its states. The number of filled
columns, or a mask, is computed on the device.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatron_ladder.comm.capture import capturing
from megatron_ladder.comm.watch import Watch
from megatron_ladder.errors import Problem, UserError

_WARM_UP_RUNS = 3
"""Runs before the capture, as torch's manual requires: libraries and NCCL initialise at their first calls."""


class StepGraph(Protocol):
    """Captures a computation on fixed buffers and replays it."""

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """Capture `step`, which may run several times; return the tensor that every replay writes its result to.

        Raise a UserError if it cannot be captured.
        """

    def replay(self) -> None:
        """Run the captured computation on the current contents of the buffers, and wait for its end."""

    def close(self) -> None:
        """Free what was captured; the groups of its collectives must still exist."""


class CudaStepGraph:
    """A `StepGraph` on the current CUDA device."""

    def __init__(self, watch: Watch | None = None) -> None:
        """`watch` ends the process when a rank is gone that takes part in the step; None for one rank."""
        self._graph = torch.cuda.CUDAGraph()
        self._waiting = nullcontext if watch is None else watch.waiting

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """See `StepGraph.capture`; collectives are captured too."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                step()
        current.wait_stream(stream)
        try:
            with capturing(self._graph, stream, torch.cuda.graph_pool_handle()):
                return step()
        except RuntimeError as error:
            reason = "{cuda_graph}: a step cannot be captured: {error}; use {no_cuda_graph}"
            raise UserError(Problem({"cuda_graph": None}, reason, error=error)) from error

    def replay(self) -> None:
        """See `StepGraph.replay`."""
        with self._waiting():
            self._graph.replay()
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """See `StepGraph.close`; a communicator cannot be destroyed before the graphs of its collectives."""
        self._graph.reset()
