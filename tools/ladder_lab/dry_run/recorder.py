"""Records what one rank does on the meta device: collectives, waits of the host for the device, and allocations.

Tensors of the meta device have shapes and no data. A `Recorder` sees every operator, so the records hold DeepSpeed's
operations as well. Collectives do nothing, and each number that the host reads from the device, such as the number of
target tokens, is 1, apart from the numbers of tokens that travel to experts.
"""

import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_ladder
from ladder_lab.dry_run.replay import Collective, Communicator, RankProgram

_SOURCES = ("root_rank", "dst", "src")
"""Arguments that are a rank of the group."""
_PACKAGE = Path(megatron_ladder.__file__).parent


class ExpertRows(NamedTuple):
    """The rows that each expert-parallel rank sends and receives in an all-to-all, as no router chooses experts."""

    ranks: int
    sent: int
    imbalance: float
    """Received rows, relative to those that are sent."""

    def are_read_from(self, tensor: Tensor) -> bool:
        """Whether the host reads the numbers from this tensor: those for and from each rank."""
        return tensor.shape == (2, self.ranks) and tensor.dtype is torch.int64

    def numbers(self) -> Tensor:
        """Return the numbers, [2, ranks]."""
        sent = torch.arange(1, self.ranks + 1) * self.sent // self.ranks
        received = (torch.arange(1, self.ranks + 1) * self.sent * self.imbalance / self.ranks).long()
        return torch.stack([sent, received]).diff(dim=1, prepend=torch.zeros(2, 1, dtype=torch.int64))


class Recorder(TorchDispatchMode):
    """While it is active, records the calling process as one rank.

    Attributes:
        waits: where the host waited for the device.
        memory: the allocations on the meta device.
    """

    def __init__(self, rank: int, rows: ExpertRows | None = None) -> None:
        """Prepare to record a rank; `rows` are those that divided experts exchange."""
        super().__init__()
        self._rows = rows
        self.waits: list[str] = []
        self.memory = _MemoryLog()
        self._rank = rank
        self._collectives: list[Collective] = []
        self._communicators: list[Communicator] = []
        self._slots: dict[tuple[object, ...], int] = {}
        self._spans: list[str] = []

    @property
    def program(self) -> RankProgram:
        """The collectives so far."""
        return RankProgram(self._communicators, self._collectives)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name the place of collectives inside, as a `Span` of `comm/spans.py`."""
        self._spans.append(name)
        try:
            yield
        finally:
            self._spans.pop()

    def host_waits(self, *_: object) -> None:
        """Record that the host waits for the device."""
        self.waits.append(self._place())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled, and torch would call every operator through one more function.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._record(func, args)
        elif func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.host_waits()
            return 0.0 if args[0].is_floating_point() else False
        elif func is torch.ops.aten.copy_.default and args[0].is_cpu and args[1].is_meta:
            self.host_waits()
            return args[0]
        elif func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            device = kwargs["device"]
            leaves = args[0].is_meta and device.type == "cpu"
            crosses = leaves or (args[0].is_cpu and device.type == "meta")
            if crosses and args[0].numel() > 0 and not kwargs.get("non_blocking", False):
                self.host_waits()
            if leaves and self._rows is not None and self._rows.are_read_from(args[0]):
                return self._rows.numbers()
            if leaves:
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.memory.note(tensor)
        return result

    def _record(self, func: Any, args: Sequence[Any]) -> None:
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(named["process_group"])
        source = next((int(named[name]) for name in _SOURCES if name in named), -1)
        # `_allgather_base_` -> `all_gather`, `alltoall_base_` -> `all_to_all`
        kind = re.sub("^all(to)?", lambda found: "all_to_" if found[1] else "all_", func._opname.strip("_"))
        kind = kind.removesuffix("_base")
        parts = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in args]
        # The root of a gather has the parts of all ranks as well.
        size = min(sum(tensor.nbytes for tensor in part) for part in parts if part)
        dtype = next(str(tensor.dtype).removeprefix("torch.") for part in parts for tensor in part)
        if kind in ("send", "recv"):
            members = dist.get_process_group_ranks(group)
            pair = sorted((self._rank, members[source]))
            source = pair.index(self._rank if kind == "send" else members[source])
            slot = self._slot((group.group_name, *pair), f"{_name_of(group)} pair", pair)
        else:
            slot = self._slot((group.group_name,), _name_of(group), dist.get_process_group_ranks(group))
        self._collectives.append(Collective(slot, kind, size, dtype, source, self._place()))

    def _slot(self, key: tuple[object, ...], name: str, ranks: Sequence[int]) -> int:
        if key not in self._slots:
            of_ranks = [communicator for communicator in self._communicators if communicator.ranks == tuple(ranks)]
            same = sum(communicator.name.split(" #")[0] == name for communicator in of_ranks)
            self._slots[key] = len(self._communicators)
            self._communicators.append(Communicator(f"{name} #{same + 1}" if same else name, tuple(ranks)))
        return self._slots[key]

    def _place(self) -> str:
        """Return the name of the innermost span, or else the innermost function of `megatron_ladder`."""
        if self._spans:
            return self._spans[-1]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(str(_PACKAGE)) and not path.startswith(str(_PACKAGE / "comm")):
                return f"{Path(path).relative_to(_PACKAGE)}: {frame.f_code.co_name}"
            frame = frame.f_back
        return "unknown"


def _name_of(group: dist.ProcessGroup) -> str:
    return {"default_pg": "world", "undefined": "unnamed"}.get(group.group_desc, group.group_desc)


class _MemoryLog:
    """Allocations and releases of storages, in order, and the kinds of their contents."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._events: list[int] = []
        """The number of an allocation, or for its release the bitwise complement."""
        self._live: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._kinds: dict[int, str] = {}
        self._ignored: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        """Record the tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        number = len(self._sizes)
        self._live[address] = number
        self._sizes.append(storage.nbytes())
        self._events.append(number)

        def release(_: object) -> None:
            del self._live[address], self._references[number]
            self._events.append(~number)

        self._references[number] = weakref.ref(storage, release)

    def mark(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the kind of live storages that have none."""
        for tensor in tensors:
            if tensor is not None and (number := self._live.get(tensor.untyped_storage()._cdata)) is not None:
                self._kinds.setdefault(number, kind)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors."""
        self._ignored |= {self._live[tensor.untyped_storage()._cdata] for tensor in tensors}

    def mark_others(self, kind: str) -> None:
        """Set the kind of all live storages that have none."""
        for number in self._live.values():
            self._kinds.setdefault(number, kind)

    @contextmanager
    def ignoring_temporaries_of(self, optimizer_type: type[torch.optim.Optimizer]) -> Iterator[None]:
        """Leave out what steps of these optimizers allocate and release: on CUDA they are one kernel."""
        begin = 0

        def before(optimizer: object, *_: object) -> None:
            nonlocal begin
            begin = len(self._sizes)

        def after(optimizer: object, *_: object) -> None:
            if isinstance(optimizer, optimizer_type):
                self._ignored |= set(range(begin, len(self._sizes))) - set(self._live.values())

        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def position(self) -> int:
        """Return the number of events so far."""
        return len(self._events)

    def peak(self, start: int, other: str) -> dict[str, int]:
        """Return the bytes of each kind when most are allocated, after `start` events; `other` is without a kind."""
        live: Counter[str] = Counter()
        total = 0
        most = -1
        at_peak = dict(live)
        for index, event in enumerate(self._events):
            # A release is the complement of its allocation.
            number = max(event, ~event)
            if number in self._ignored:
                continue
            size = self._sizes[number] if event >= 0 else -self._sizes[number]
            live[self._kinds.get(number, other)] += size
            total += size
            if index >= start and total > most:
                most = total
                at_peak = dict(live)
        return at_peak
