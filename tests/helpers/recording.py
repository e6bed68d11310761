"""Records of launches and waits of collectives, and of operators."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from tests.helpers.sharded import mesh_of

T = TypeVar("T")
LADDER = {"residual_mode": "ladder", "ladder_layers": (0, 1, 2)}
HYBRID = {"residual_mode": "ladder", "ladder_layers": (1,)}
PARALLEL = {"residual_mode": "parallel"}


class RecordingGroup(CommGroup):
    """A group that records launch (`L3`: of sub-block 3) and wait (`W3`) of each reduce or reduce-scatter, those of
    all-gathers (`G3`, `H3`), all-to-alls (`D3`, `d3`), and blocking sums (`S`)."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self.events: list[str] = []
        self.started = 0
        self.gathers = 0
        self.exchanges = Counter[str]()
        self.width = 0
        """Features of tokens, to tell rows with and without weights apart."""

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        return self._note("L", "W", self._next_reduce(), super().start_all_reduce(tensor))

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        rows, work = super().start_reduce_scatter(tensor, into)
        return rows, self._note("L", "W", self._next_reduce(), work)

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        whole, work = super().start_all_gather(tensor, into)
        self.gathers += 1
        return whole, self._note("G", "H", self.gathers - 1, work)

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Names: numbers of rows (`K`), rows with weights of choices (`D`: a dispatch, or a gradient), others (`C`)."""
        arriving, work = super().start_all_to_all(rows, sent, received)
        kind = "C" if rows.shape[-1] == self.width else "D"
        if not rows.is_floating_point():
            kind = "K"
        self.exchanges[kind] += 1
        return arriving, self._note(kind, kind.lower(), self.exchanges[kind] - 1, work)

    def _next_reduce(self) -> int:
        self.started += 1
        return self.started - 1

    def _note(self, launch: str, wait: str, number: int, work: Work | None) -> "RecordedWork":
        assert work is not None
        self.events.append(f"{launch}{number}")
        return RecordedWork(work, lambda: self.events.append(f"{wait}{number}"))

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.events.append("S")
        return super().all_reduce(tensor, *args, **kwargs)


@dataclass
class RecordedWork:
    work: Work
    note: Callable[[], None]

    def wait(self) -> None:
        self.note()
        self.work.wait()


def recorded_model(
    config: ModelConfig, options: StackOptions, sequence_parallel: bool = False, layers: range | None = None
) -> tuple[LanguageModel, RecordingGroup]:
    mesh = mesh_of(2, head_replicas(config, 2))
    group = RecordingGroup(mesh.tensor)
    mesh = replace(mesh, tensor=group, sequence_parallel=sequence_parallel)
    chunks = None if layers is None else [layers]
    return LanguageModel(config, mesh, options, seed=1, chunks=chunks), group


class Calls(TorchDispatchMode):
    """Lists the operators that run inside of it, except views, with their named arguments; or passes them on."""

    def __init__(self, note: Callable[[Any, dict[str, Any]], object] | None = None) -> None:
        super().__init__()
        self.found: list[tuple[Any, dict[str, Any]]] = []
        self._note = note or (lambda *call: self.found.append(call))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self._note(function, kwargs or {})
        return function(*args, **(kwargs or {}))


class InlineQueue:
    """A side queue that runs a chain when the CUDA queue would launch it."""

    def run(self, chain: Callable[[], T], uses: object) -> T:
        return chain()

    def join(self) -> None:
        pass
