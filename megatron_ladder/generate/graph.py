"""Decode steps on GPUs: captured once for all tokens, and with attention to the filled part of the cache.

On a GPU a decoded token is hundreds of small kernels, which the host cannot launch as fast as they run. A CUDA graph
launches all of them at once. It replays the captured addresses, so the inputs of a step (ids, columns and random
numbers) are copied into a fixed buffer, and attention gets all columns of the cache. The number of filled ones, or a
mask, is computed on the device.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_ladder.comm.capture import capturing
from megatron_ladder.comm.watch import Watch
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.model.flash_attention import flash_attention

_LARGEST_FLASH_HEAD, _FIRST_FLASH_DEVICE = 256, (8, 0)
"""Limits of FlashAttention: the head's size, and the compute capability."""
PAGE = 256
"""FlashAttention splits the keys of a head among multiprocessors if a table lists their pages, multiples of this."""
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


def counts_filled_columns(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether torch has the kernel of `FilledColumns` for this device."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _LARGEST_FLASH_HEAD
    return (
        fits
        and device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= _FIRST_FLASH_DEVICE
    )


class FilledColumns(NamedTuple):
    """Attention to the filled columns of each sample, by a kernel for GPUs that reads no others.

    Neither the shapes nor the values on the host change from token to token, so the call can be captured.
    """

    query_starts: Tensor
    """[b kv_heads/t + 1] int32: each key-value head of each sample is a sequence of one query."""
    key_starts: Tensor
    """[b kv_heads/t + 1] int32: its first row among the columns of all heads."""
    pages: Tensor
    """[b kv_heads/t, 1] int32: its columns are one page of the cache."""
    filled: Tensor
    """[b kv_heads/t] int32, the number of filled columns."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """See `Operations.attend`; there is no mask."""
        kv_heads, positions, head_dim = k.shape[1:]
        attended = flash_attention(
            q.reshape(-1, q.shape[1] // kv_heads, head_dim),
            k.reshape(-1, 1, head_dim),
            v.reshape(-1, 1, head_dim),
            self.query_starts,
            self.key_starts,
            1,
            positions,
            scale,
            used_keys=self.filled,
            pages=self.pages,
        )
        return attended.view(q.shape)
