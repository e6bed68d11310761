"""The capture of a CUDA graph, which leaves nothing behind if it fails.

torch ends a failed capture only halfway, because `CUDAGraph.capture_end` raises before it notifies the allocators:

    current stream        remains that of the capture
    device memory         the allocator still assumes a capture: it neither reuses memory that another stream has used
                          nor frees cached memory, so a run that fits only without graphs runs out of memory
    page-locked memory    the allocator still asks the graph whether a stream belongs to its capture
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs of failed captures. The allocator of page-locked memory keeps asking them, so they must never be freed."""


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
    """Capture the work of the block on this stream, with memory of this pool (`torch.cuda.graph_pool_handle()`)."""
    failure: BaseException | None = None
    with torch.cuda.stream(stream):
        try:
            # NCCL's watchdog thread queries events, which a global capture mode would forbid.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            _end_failed(graph, pool)
            # The end of the capture raises another error, which explains less than the error of the work.
            raise (failure or error) from None


def _end_failed(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    memory, device = torch.cuda.memory, torch.cuda.current_device()
    try:
        memory._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
    except RuntimeError:
        # `capture_end` has ended the capture: the work of the block failed, not its capture.
        graph.reset()
        return
    memory._cuda_releasePool(device, pool)  # type: ignore[attr-defined]
    _FAILED.append(graph)


class PeakMemory:
    """Measures the memory of pieces of work, to predict whether their capture will get as much."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._needed: dict[Any, int] = {}
        """The most bytes by key."""
        self._left: dict[Any, int] = {}
        """Bytes that the work of a key has left."""

    @contextlib.contextmanager
    def measuring(self, key: Any) -> Iterator[None]:
        """Measure the work of the block, which comes after the earlier work with its key."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        left = self._left.get(key, 0)
        peak = left + torch.cuda.max_memory_allocated(self._device) - before
        self._needed[key] = max(peak, self._needed.get(key, 0))
        self._left[key] = left + torch.cuda.memory_allocated(self._device) - before

    def capture_problem(self, pool_of: Callable[[Any], Any]) -> str:
        """Return why a capture will fail for lack of memory; an empty string if it will not.

        `pool_of` maps a key to the pool of its work, whose keys need memory one after the other. Pools have separate
        memory: all that no tensor uses, except for the rest of a block that a tensor uses in part.
        """
        pools: dict[Any, int] = {}
        for key, size in self._needed.items():
            pools[pool_of(key)] = max(size, pools.get(pool_of(key), 0))
        needed = sum(pools.values())
        stats = torch.cuda.memory_stats(self._device)
        in_use = stats["allocated_bytes.all.current"]
        cached = stats["reserved_bytes.all.current"] - in_use - stats["inactive_split_bytes.all.current"]
        available = torch.cuda.mem_get_info(self._device)[0] + cached
        if needed <= available:
            return ""
        return f"it needs {needed / 1e9:.1f} GB of GPU memory, and {available / 1e9:.1f} GB can be freed"
