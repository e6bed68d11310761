"""All-reduces that run while the next sub-block computes.

Three operations, of which compiled graphs contain the last as well:

    ladder::start(partial, latest, group) -> buffer         launch the sum of `partial` over the ranks
    ladder::wait(buffer, partial, latest, group)            wait for it
    ladder::hold(reading, latest)                           nothing

A wait is declared to write the buffer: no reader is scheduled before it, and the sum is not copied. A compiler could
only save the old contents of a buffer for a later reader, and there is none; the wait of a copy would be an error.
Some arguments are not read. They exist because a graph has no other dependencies, and inductor would compute before a
launch what should hide it:

* `latest` is the buffer of the preceding launch or wait, the stream that consumed this buffer, or an output computed
  since then that waits for its launch. Every scheduler therefore keeps the order of all launches and waits, and none
  waits before such an output.
* `reading` is declared to be written by the hold. A sub-block whose input arrived before the latest launch, as that of
  the routed experts in farskip, is therefore not computed before it.
* `partial` of a wait stays allocated until then, since another stream reads it. A launch is declared to write it, since
  a compiler could otherwise compute a cheap partial twice, and pass the second copy to the wait.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import in_piecewise_cudagraph
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.utils.torch_utils import direct_register_custom_op

Norm = RMSNorm | GemmaRMSNorm
"""A norm that can add a tensor first. The second one multiplies by 1 + its weight."""
Transport = Callable[[Tensor], tuple[Tensor, Any]]
"""Launches the sum over the tensor-parallel ranks of a tensor, which must not change until it is done.

Returns the buffer of the sum, and a handle whose `wait` blocks the host (CPU) or the current stream (CUDA) until then.
"""


def asynchronous(group: GroupCoordinator) -> Transport:
    """Return asynchronous collectives of torch.distributed: gloo on a CPU.

    vLLM's own all-reduce of a CPU goes through shared memory and blocks the caller.
    """

    def start(partial: Tensor) -> tuple[Tensor, Any]:
        buffer = partial.clone(memory_format=torch.contiguous_format)
        return buffer, dist.all_reduce(buffer, group=group.device_group, async_op=True)

    return start


def on_side_stream(group: GroupCoordinator) -> Transport:
    """Return vLLM's own all-reduce of a GPU (FlashInfer, custom, symmetric memory or NCCL), on one side stream.

    All all-reduces of the model and of its drafting head run there. Those of a draft model use the same communicators
    on the main stream. They are ordered against them because each launch waits for the main stream, and the model waits
    for all launches before its head.
    """
    # A product of the main stream fills every multiprocessor; reduces get the next free ones.
    stream = torch.cuda.Stream(priority=-1)
    ready = torch.cuda.Event()
    idle: list[torch.cuda.Event] = []

    def start(partial: Tensor) -> tuple[Tensor, Any]:
        ready.record()
        ready.wait(stream)
        done = idle.pop() if idle else torch.cuda.Event()
        with torch.cuda.stream(stream):
            # The side stream reuses this memory after the next launch at the earliest, which waits for all readers of
            # the buffer on the main stream.
            buffer = group._all_reduce_out_place(partial)
            done.record()

        def wait() -> None:
            done.wait()
            # The stream already waits for this record of the event, so another launch may record it again.
            idle.append(done)

        return buffer, SimpleNamespace(wait=wait)

    return start


def in_order(group: GroupCoordinator) -> Transport:
    """Return all-reduces with the same sums, each of which ends before the next computation."""

    def start(partial: Tensor) -> tuple[Tensor, Any]:
        if group.device.type == "cuda":
            buffer = group._all_reduce_out_place(partial)
        else:
            buffer = partial.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(buffer, group=group.device_group)
        return buffer, SimpleNamespace(wait=lambda: None)

    return start


class AllReduces:
    """The all-reduces in flight of one tensor-parallel group; the embedding uses it as its group."""

    def __init__(self, group: GroupCoordinator, overlap: bool = True) -> None:
        self.name = group.unique_name
        self.rank_in_group = group.rank_in_group
        self.world_size = group.world_size
        overlapping = on_side_stream if group.device.type == "cuda" else asynchronous
        self.transport = overlapping(group) if overlap else in_order(group)
        # By the address of the buffer: a compiled graph passes another tensor of the same memory to the wait.
        self._works: dict[int, Any] = {}
        _by_group[self.name] = self

    def start(self, partial: Tensor) -> Tensor:
        """Launch the sum of `partial`; return its buffer, which is undefined until `wait`.

        Nothing is launched for no tokens: all ranks have the same ones, and empty buffers have no address.

        Raises:
            RuntimeError: vLLM captures a piecewise CUDA graph, which would not contain the wait.
        """
        if in_piecewise_cudagraph():
            raise RuntimeError(
                "vLLM fell back to piecewise CUDA graphs, which cannot contain all-reduces that run during attention "
                '(its warnings above name the cause); pass --compilation-config \'{"cudagraph_mode": "NONE"}\', or '
                "choose an attention backend with full graphs"
            )
        if partial.numel() == 0:
            return torch.empty_like(partial)
        buffer, work = self.transport(partial)
        self._works[buffer.data_ptr()] = work
        return buffer

    def wait(self, buffer: Tensor) -> None:
        """Wait for the sum of a launched buffer."""
        if buffer.numel() > 0:
            self._works.pop(buffer.data_ptr()).wait()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial`, launched as the others are: FlashInfer's for PCIe allows only one stream."""
        buffer = torch.ops.ladder.start(partial, None, self.name)
        torch.ops.ladder.wait(buffer, partial, partial, self.name)
        return buffer


_by_group: weakref.WeakValueDictionary[str, AllReduces] = weakref.WeakValueDictionary()
"""Operations of a graph receive the name of a group, not the object. An entry disappears with its model."""


def all_reduces_of(group: GroupCoordinator) -> AllReduces | None:
    """Return the all-reduces of the model that this group computes, for its drafting head; None for a single rank."""
    return _by_group[group.unique_name] if group.world_size > 1 else None


def _start(partial: Tensor, latest: Tensor | None, group: str) -> Tensor:
    return _by_group[group].start(partial)


def _wait(buffer: Tensor, partial: Tensor, latest: Tensor, group: str) -> None:
    _by_group[group].wait(buffer)


def _hold(reading: Tensor, latest: Tensor) -> None:
    pass


_library = torch.library.Library("ladder", "DEF")
direct_register_custom_op(
    "start",
    _start,
    mutates_args=["partial"],
    fake_impl=lambda partial, *_: partial.new_empty(partial.shape),
    target_lib=_library,
)
direct_register_custom_op("wait", _wait, mutates_args=["buffer"], fake_impl=lambda *_: None, target_lib=_library)
direct_register_custom_op("hold", _hold, mutates_args=["reading"], fake_impl=lambda *_: None, target_lib=_library)


class PendingOutputs:
    """Outputs that are missing from the residual stream, by number, oldest first."""

    def __init__(self, all_reduces: AllReduces | None, summed: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """
        Args:
            all_reduces: None for a single rank, whose outputs are complete.
            summed: outputs that a previous pipeline stage did not add, oldest first, counted back from the newest.
        """
        self._all_reduces = all_reduces
        # The sums [tokens, hidden_size], and this rank's parts of those that are in flight and so still undefined.
        self._sums = {-back: output for back, output in summed.items()}
        self._parts: dict[int, Tensor] = {}
        self._launched = 0
        self._joining: Tensor | None = None
        self._latest: Tensor | None = None
        self._launched_last = False

    def arriving(self, missing: Collection[int]) -> list[int]:
        """Return the outputs that a sub-block sees which misses these, counted back from the newest."""
        return [number for number in self._sums if self._launched - number not in missing]

    def launch(self, partial: Tensor, joins_next: bool = False) -> None:
        """Append an output, given this rank's part of its sum; one that joins the next is launched with that."""
        self._launched += 1
        if self._joining is not None:
            partial = self._joining + partial
        self._joining = partial if joins_next else None
        if joins_next:
            self._latest = partial
            return
        number = self._launched - 1
        self._sums[number] = partial
        if self._all_reduces is not None:
            self._parts[number] = partial
            self._sums[number] = self._latest = torch.ops.ladder.start(partial, self._latest, self._all_reduces.name)
            self._launched_last = True

    def hold(self, reading: Tensor) -> None:
        """Let what a sub-block computes from its normed stream come after the latest launch in a compiled graph."""
        if self._launched_last and torch.compiler.is_compiling():
            torch.ops.ladder.hold(reading, self._latest)

    def add_own_parts(self, stream: Tensor) -> Tensor:
        """Return the sum of the stream and this rank's parts of all outputs."""
        assert self._parts.keys() == self._sums.keys(), "a sum from another stage has no parts"
        for partial in self._parts.values():
            stream = stream + partial
        return stream

    def pop(self, number: int) -> Tensor:
        """Wait for an output and remove it."""
        buffer = self._sums.pop(number)
        partial = self._parts.pop(number, None)
        if partial is not None:
            torch.ops.ladder.wait(buffer, partial, self._latest, self._all_reduces.name)
            self._latest = buffer
            self._launched_last = False
        return buffer

    def add_and_norm(self, number: int, norm: Norm, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for an output and remove it; return the normed sum with the stream, and that sum.

        One kernel adds and norms. It may overwrite both tensors, so nothing may read them afterwards.
        """
        output = self.pop(number)
        is_latest = output is self._latest
        normed, stream = norm(output, stream)
        if is_latest:
            self._latest = stream
        return normed, stream
