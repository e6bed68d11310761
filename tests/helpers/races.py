"""Checks on a CPU that the work of CUDA streams is ordered where it shares memory, and that it can be captured.

One process plays one rank. Its kernels are the operators that torch dispatches; its streams only count. The clock of a
stream holds, for each stream, the number of kernels there that have run before the next kernel here. A race is a kernel
that reads or writes bytes that a kernel of another stream has written, or writes bytes that it has read, without that
kernel in its clock. Freed memory returns to the stream on which it was allocated, which may reuse it at once: that is a
race too if another stream may still use it. Autograd runs a node on the stream of its forward, where its inputs wait
for the streams that produced them, as in torch's `input_buffer.cpp`.

The checker does not see memory inside an operator, the order of ranks, or what DeepSpeed does on other streams.
"""

import bisect
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.engine import graph
from megatron_ladder.model import backward as mirrored

READERS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero")
"""Operators whose result, or whose result's shape, the host needs."""


class _Event(NamedTuple):
    clock: dict[int, int]
    capture: "Capture | None"


@dataclass(eq=False)
class Stream:
    """A stand-in for `torch.cuda.Stream`."""

    checker: "Checker"
    number: int
    clock: dict[int, int] = field(default_factory=dict)
    capture: "Capture | None" = None

    def record_event(self) -> _Event:
        return _Event(dict(self.clock), self.capture)

    def wait_event(self, event: _Event) -> None:
        # Any stream but the default one joins the capture whose work it waits for.
        if self.capture is None and event.capture is self.checker.capture and self is not self.checker.compute:
            self.capture = event.capture
        if self.capture is not event.capture:
            self.checker.note("wait across the border of a capture")
        for number, tick in event.clock.items():
            self.clock[number] = max(tick, self.clock.get(number, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.checker._take_part("synchronize")


@dataclass(eq=False)
class _Block:
    storage: StorageWeakRef
    size: int
    pool: tuple[int, bool]
    """The stream that allocated it, and whether inside a capture: who gets it when it is freed."""
    place: str
    uses: dict[tuple[int, int], tuple[dict[int, int], dict[int, int]]] = field(default_factory=dict)
    """The last write and the last read of each span of bytes, by stream."""
    awaited: set[int] = field(default_factory=set)
    """Streams for which the allocator waits."""


class Checker(TorchDispatchMode):
    """A CUDA device that lists the `faults` of the work inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.kernels = 0
        self.streams: list[Stream] = []
        self.compute = self.current = self.new_stream()
        self.capture: Capture | None = None
        self._switches = [(-1, self.compute)]
        self._blocks: dict[int, _Block] = {}
        self._freed: dict[tuple[int, bool], list[tuple[_Block, dict[int, int]]]] = {}
        self._ready: dict[Any, list[_Event]] = {}
        self._autograd = torch.autograd.backward

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Play the device, on which all tensors are."""
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.autograd, "backward", self._backward)
        monkeypatch.setattr(mirrored, "run_backward", self._backward)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(Capture, self))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream, **_: graph.capturing(stream))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capture is not None)
        monkeypatch.setattr(graph, "PeakMemory", EnoughMemory)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        monkeypatch.setattr(Tensor, "is_cuda", True)
        for name in ("cpu", "numpy", "tolist"):
            monkeypatch.setattr(Tensor, name, self._reading(name, getattr(Tensor, name)))

    def _reading(self, name: str, method: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        def read(tensor: Tensor) -> object:
            self._take_part(name)
            return method(tensor)

        return read

    def _take_part(self, name: str) -> None:
        if self.capture is not None:
            self.note(f"the host takes part in a capture: {name}")

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def note(self, fault: str, block: _Block | None = None) -> None:
        """Add a fault, with the lines of the package that led to it, and those that allocated the memory."""
        self.faults.append(f"{fault} at {_place()}" + (f", allocated at {block.place}" if block else ""))

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._switch(stream)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, stream: Stream) -> None:
        self.current = stream
        self._switches.append((torch._C._autograd._get_sequence_nr(), stream))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        name = schema.name.removeprefix("aten::")
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        reads, writes = list[Tensor](), list[Tensor]()
        for argument, value in given:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_write else reads).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        selects = name == "index" and any(one.dtype == torch.bool for one in reads[1:])
        if name in (*READERS, "lift_fresh") or selects:
            self._take_part(name)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        is_view = func.is_view or name in ("detach", "_unsafe_view")
        # In inference mode, `to` arrives whole, and is a view or a copy.
        storages = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        if not is_view or any(tensor.untyped_storage()._cdata not in storages for tensor in results):
            self.run_kernel(name, reads, writes, self.current)
            for tensor in results:
                self._block(tensor, made=True)
        return result

    def run_kernel(self, name: str, reads: list[Tensor], writes: list[Tensor], stream: Stream) -> None:
        """Put a kernel on a stream."""
        self.kernels += 1
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        if self.capture is not stream.capture:
            self.note(f"{name} runs outside of the capture")
        for tensor in reads:
            self._use(tensor, stream, False, f"{name} reads")
        for tensor in writes:
            self._use(tensor, stream, True, f"{name} writes")

    def _block(self, tensor: Tensor, made: bool = False) -> _Block:
        storage, stream = tensor.untyped_storage(), self.current if made else self.compute
        block = self._blocks.get(storage._cdata)
        if block is None or block.storage.expired():
            pool = stream.number, stream.capture is not None
            block = _Block(StorageWeakRef(storage), storage.nbytes(), pool, _place())
            if made:
                self._allocate(block, stream)
                block.uses[0, block.size] = {stream.number: stream.clock[stream.number]}, {}
            self._blocks[storage._cdata] = block
        if self.capture is not None and not block.pool[1]:
            self.capture.used.append(block)
        return block

    def _use(self, tensor: Tensor, stream: Stream, is_write: bool, what: str) -> None:
        block, (first, end) = self._block(tensor), _span(tensor)
        for (low, high), (writes, reads) in block.uses.items():
            for number, tick in [*writes.items(), *(reads.items() if is_write else ())]:
                if low < end and first < high and stream.clock.get(number, 0) < tick:
                    self.note(f"{what} before stream {number} has finished", block)
        block.uses.setdefault((first, end), ({}, {}))[not is_write][stream.number] = stream.clock[stream.number]

    def _allocate(self, new: _Block, stream: Stream) -> None:
        for key in [key for key, block in self._blocks.items() if block.storage.expired()]:
            block, last = self._blocks.pop(key), dict[int, int]()
            for number, tick in (use for span in block.uses.values() for kind in span for use in kind.items()):
                if number != block.pool[0] and number not in block.awaited:
                    last[number] = max(tick, last.get(number, 0))
            self._freed.setdefault(block.pool, []).append((block, last))
        waiting = []
        for freed, last in self._freed.pop(new.pool, ()):
            if any(stream.clock.get(number, 0) < tick for number, tick in last.items()):
                if new.size <= freed.size:
                    self.note(f"reuse of memory that streams {list(last)} may still use", freed)
                else:
                    waiting.append((freed, last))
        self._freed[new.pool] = waiting

    def _backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        ends = [tensors] if isinstance(tensors, Tensor | GradientEdge) else tensors
        roots = [end.grad_fn if isinstance(end, Tensor) else end.node for end in ends]
        caller, leaves, handles = self.current, set[Stream](), []
        for root in roots:
            self._ready.setdefault(root, []).append(caller.record_event())
        nodes = self._streams_of_nodes(roots)
        for node, stream in nodes.items():
            handles.append(node.register_prehook(partial(self._before_node, node, stream)))
            handles.append(node.register_hook(partial(self._after_node, node, stream, leaves)))
        try:
            self._autograd(tensors, grad_tensors, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            for node in nodes:
                self._ready.pop(node, None)
            self._switch(caller)
        for stream in leaves:
            caller.wait_stream(stream)

    def _streams_of_nodes(self, roots: list[Any]) -> dict[Any, Stream]:
        """Return the streams of all nodes behind the roots."""
        numbers, stack = dict.fromkeys(roots, sys.maxsize), list(roots)
        while stack:
            node = stack.pop()
            if node.next_functions:
                numbers[node] = node._sequence_nr()
            for following, _ in node.next_functions:
                if following is not None:
                    if following not in numbers:
                        stack.append(following)
                    numbers[following] = min(numbers[node], numbers.get(following, sys.maxsize))
        streams, firsts = dict[Any, Stream](), [number for number, _ in self._switches]
        for node, number in numbers.items():
            _, stream = self._switches[bisect.bisect_right(firsts, number) - 1]
            # A parameter's node has the stream of its first use for as long as anything holds the node.
            streams[node] = node.metadata.setdefault("stream", stream)
        return streams

    def _before_node(self, node: Any, stream: Stream, gradients: tuple[Tensor | None, ...]) -> None:
        for event in self._ready.pop(node, ()):
            stream.wait_event(event)
        for gradient in gradients:
            if gradient is not None:
                self._block(gradient).awaited.add(stream.number)
        self._switch(stream)

    def _after_node(self, node: Any, stream: Stream, leaves: set[Stream], *_: Any) -> None:
        for following, _number in node.next_functions:
            if following is not None:
                self._ready.setdefault(following, []).append(stream.record_event())
        if not node.next_functions:
            leaves.add(stream)


class EnoughMemory:
    """A stand-in for `PeakMemory`."""

    def __init__(self, device: torch.device) -> None:
        pass

    def measuring(self, key: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture_problem(self, pool_of: object) -> str:
        return ""


class Capture:
    """A stand-in for `torch.cuda.CUDAGraph`; its work runs where the current stream is at the capture."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.used: list[_Block] = []
        """Memory that it uses and did not allocate."""

    @contextlib.contextmanager
    def capturing(self, origin: Stream) -> Iterator[None]:
        checker = self.checker
        origin.wait_stream(checker.compute)
        checker.capture = origin.capture = self
        yield
        for stream in checker.streams:
            if stream.capture is self and stream.clock.get(stream.number, 0) > origin.clock.get(stream.number, 0):
                checker.note(f"stream {stream.number} is not joined at the end of a capture")
            stream.capture = None
        checker.capture = None
        checker.compute.wait_stream(origin)

    def replay(self) -> None:
        for block in self.used:
            if block.storage.expired():
                self.checker.note("a graph uses memory that was freed", block)

    def reset(self) -> None:
        self.used.clear()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of the storage that a tensor uses, and the one after the last."""
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * tensor.element_size()
    return first, first + (reach + 1) * tensor.element_size() * (tensor.numel() > 0)


def _place() -> str:
    frame, found = sys._getframe(2), list[str]()
    while frame.f_back is not None and len(found) < 3:
        if "/megatron_ladder/" in frame.f_code.co_filename:
            found.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


@dataclass
class _Work:
    checker: Checker
    end: _Event
    kept: list[Tensor]

    def wait(self) -> None:
        self.checker.current.wait_event(self.end)
        self.kept.clear()


class PlayedNccl(CommGroup):
    """A group whose other ranks hold the same values, and which keeps tensors until they are waited for.

    It has a stream for collectives, one for the messages to each peer and one for those from it, as each pair has a
    communicator in the group of each direction.
    """

    def __init__(self, size: int, checker: Checker) -> None:
        super().__init__(range(size), 0, None)
        self.checker = checker
        self._stream = checker.new_stream()
        self._message_streams: dict[tuple[str, int], Stream] = {}

    def _start(self, name: str, reads: list[Tensor], writes: list[Tensor], peer: int | None = None) -> _Work:
        stream = self._stream
        if peer is not None:
            if (name, peer) not in self._message_streams:
                self._message_streams[name, peer] = self.checker.new_stream()
            stream = self._message_streams[name, peer]
        stream.wait_stream(self.checker.current)
        self.checker.run_kernel(name, reads, writes, stream)
        return _Work(self.checker, stream.record_event(), [*reads, *writes])

    def start_all_reduce(self, tensor: Tensor) -> _Work:
        return self._start("all_reduce", [], [tensor])

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, _Work]:
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:]) if into is None else into
        with _disable_current_modes():
            rows.data.copy_(tensor.data[: len(rows)])
        return rows, self._start("reduce_scatter", [tensor], [rows])

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, _Work]:
        whole = tensor.new_empty(tensor.shape[0] * self.size, *tensor.shape[1:]) if into is None else into
        with _disable_current_modes():
            whole.data.unflatten(0, (self.size, -1)).copy_(tensor.data.clone())
        return whole, self._start("all_gather", [tensor], [whole])

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, _Work]:
        """Every rank sends this rank what it sends itself, or what it has received from it."""
        into = rows.new_empty(sum(received), *rows.shape[1:])
        with _disable_current_modes():
            own = rows.data[: sent[0]]
            into.data.copy_(own.repeat(self.size, *[1] * (rows.dim() - 1)) if len(set(received)) == 1 else 0.01)
        return into, self._start("all_to_all", [rows], [into])

    def start_send(self, tensor: Tensor, target: int) -> _Work:
        return self._start("send", [tensor], [], target)

    def start_receive(self, into: Tensor, source: int) -> _Work:
        """Receive small numbers, which another process would have sent."""
        with _disable_current_modes():
            into.data.fill_(0.01)
        return self._start("recv", [], [into], source)

    def all_reduce(self, tensor: Tensor, *_: Any) -> Tensor:
        self.checker.run_kernel("all_reduce", [], [tensor], self.checker.current)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self.all_reduce(tensor)
