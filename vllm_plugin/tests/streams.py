"""Plays CUDA streams on a CPU, and finds accesses to memory that nothing orders.

Operators run at once. Each counts as one of the current stream, and events and streams order them as on a GPU:

    main                side
    partial = ...   1
    fork  ----------->  knows main up to 1
                        reads partial, writes sum    1
    ...             2   <- not ordered against side's 1: a write of partial or a read of sum would be a hazard
    wait  <-----------  event
    reads sum       3   knows side up to 1

Memory returns to the stream that allocated it, as in torch's caching allocator, and its next allocation may reuse it.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from megatron_ladder_vllm import in_flight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Clock = Counter[str]
"""Stream -> the number of its operators that are known to be complete."""

TRANSPARENT: dict[str, Callable[..., Any]] = {"ladder::start": in_flight._start, "ladder::wait": in_flight._wait}
"""Operators whose own operators are played."""


@dataclass
class Memory:
    """What happened to a storage."""

    allocated_on: str | None
    """The stream; None for memory from before the play."""
    reads: Clock = field(default_factory=Counter)
    writes: Clock = field(default_factory=Counter)


class PlayedStreams(TorchDispatchMode):
    """The streams of a device; `hazards` collects what is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.current = "main"
        self.clocks: dict[str, Clock] = defaultdict(Counter)
        self.operators = 0
        self.hazards: list[str] = []
        self._memory: dict[int, Memory] = {}
        self._freed: dict[str | None, list[Memory]] = defaultdict(list)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.name().partition(".")[0]
        if name in TRANSPARENT:
            with self:
                return TRANSPARENT[name](*args, **kwargs)
        self.operators += 1
        stream = self.current
        self.clocks[stream][stream] += 1
        arguments = function._schema.arguments
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        read_or_written = [
            (self._memory_of(tensor), argument.alias_info is not None and argument.alias_info.is_write)
            for argument in arguments
            for tensor in tensors_in(values.get(argument.name))
        ]
        results = function(*args, **kwargs)
        fresh = [tensor for tensor in tensors_in(results) if key_of(tensor) not in self._memory]
        is_view = not fresh and bool(tensors_in(results)) and not function._schema.is_mutable
        if not is_view:
            for memory, is_written in read_or_written:
                self._access(memory, is_written, name)
        for tensor in fresh:
            self._allocate(tensor, name)
        return results

    def _memory_of(self, tensor: Tensor) -> Memory:
        """Return the memory of an argument."""
        key = key_of(tensor)
        if key not in self._memory:
            self._memory[key] = Memory(None)
            weakref.finalize(tensor.untyped_storage(), self._free, key)
        return self._memory[key]

    def _allocate(self, tensor: Tensor, name: str) -> None:
        stream = self.current
        for freed in self._freed.pop(stream, ()):
            if not (self._knows(freed.reads) and self._knows(freed.writes)):
                self.hazards.append(f"{name} on {stream} may reuse memory that is in use")
        self._memory[key_of(tensor)] = memory = Memory(stream)
        memory.writes[stream] = self.clocks[stream][stream]
        weakref.finalize(tensor.untyped_storage(), self._free, key_of(tensor))

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        self._freed[memory.allocated_on].append(memory)

    def _access(self, memory: Memory, is_written: bool, name: str) -> None:
        stream = self.current
        if not self._knows(memory.writes):
            self.hazards.append(f"{name} on {stream} does not wait for a write")
        if is_written and not self._knows(memory.reads):
            self.hazards.append(f"{name} on {stream} does not wait for a read")
        (memory.writes if is_written else memory.reads)[stream] = self.clocks[stream][stream]

    def _knows(self, accesses: Clock) -> bool:
        """Whether the current stream is ordered after these accesses."""
        return accesses <= self.clocks[self.current]

    def check_joined(self) -> None:
        """Check that the main stream waits for all others."""
        for name, clock in self.clocks.items():
            if clock[name] > self.clocks["main"][name]:
                self.hazards.append(f"the main stream does not wait for {name}")

    @contextlib.contextmanager
    def as_cuda(self, fault: str) -> Iterator[None]:
        """Let `torch.cuda` be these streams, without forks or joins if these are the fault."""
        played = self

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0, name: str = "side") -> None:
                self.name = name

        class Event:
            def record(self, stream: Stream | None = None) -> None:
                self.clock = played.clocks[stream.name if stream else played.current].copy()

            def wait(self, stream: Stream | None = None) -> None:
                name = stream.name if stream else played.current
                if fault != ("no join" if name == "main" else "no fork"):
                    played.clocks[name] |= self.clock

        @contextlib.contextmanager
        def use(stream: Stream) -> Iterator[None]:
            before, played.current = played.current, stream.name
            yield
            played.current = before

        with patch.multiple(torch.cuda, Stream=Stream, Event=Event, stream=use):
            yield


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or result, which may be a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, Tensor)]


def key_of(tensor: Tensor) -> int:
    """Return a number that only this storage has while it exists."""
    return tensor.untyped_storage()._cdata
