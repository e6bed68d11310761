"""The wirings: how the sub-blocks of a layer read the residual stream.

A sub-block names the outputs that are missing from the stream it reads, counted back from the newest:

    sub-block            0    1    2    3    4               reads of sub-block 4
    ()                   y0 + y1 + y2 + y3      standard     everything
    (1,)                 y0 + y1 + y2           ladder       all but its predecessor's output
    (1, 2)               y0 + y1                staleness 2  all but the last two
    (2,)                 y0 + y1 + y3                        the newest, but not the one before it

Ladder is the paper's x_i = x_{i-1} + AllReduce(h_i(x_{i-2})) (arXiv 2501.06589). An output that a sub-block has seen
stays in the stream, so what a sub-block misses is its predecessor's output, or missed by its predecessor as well.
`model/sub_block.py` computes every wiring but one by this rule. The exception is desync: no output is missing, but each
tensor-parallel rank has its own stream (`model/desync.py`).

A new wiring is a new row of `WIRINGS`. The command line, the model, the names of its tensors, all counts, conversion,
the exported Hugging Face module, the planner, the benchmarks and the studies derive from that table.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple


class BranchKind(Enum):
    """What a branch computes."""

    MIXER = "mixer"
    MLP = "mlp"
    EXPERTS = "experts"
    """A router and the experts that it chooses from."""


BRANCH_KINDS = {
    "attention": BranchKind.MIXER,
    "attention_2": BranchKind.MIXER,
    "mlp": BranchKind.MLP,
    "mlp_2": BranchKind.MLP,
    "shared_expert": BranchKind.MLP,
    "experts": BranchKind.EXPERTS,
}
"""The kind of every branch, by its name in checkpoints."""


class SubBlockKind(Enum):
    """The computation between two all-reduces: its name in checkpoints, its branches and its norm."""

    MIXER = "attention", ("attention",), "attention_norm"
    """The token mixer; checkpoints name all of them after attention."""
    MLP = "mlp", ("mlp",), "mlp_norm"
    MIXER_MLP = "attention_mlp", ("attention", "mlp"), "attention_norm"
    """Mixer and MLP side by side: one norm, one all-reduce (PaLM)."""
    EXPERTS = "experts", ("experts", "shared_expert"), "mlp_norm"
    """Routed experts and, if the model has one, the shared expert."""
    MIXER_EXPERTS = "attention_experts", ("attention", "experts", "shared_expert"), "attention_norm"
    """Mixer and all experts side by side."""
    ROUTED_EXPERTS = "routed_experts", ("experts",), "mlp_norm"
    SHARED_EXPERT = "shared_expert", ("shared_expert",), "mlp_norm"
    MIXER_SHARED = "attention_shared_expert", ("attention", "shared_expert"), "attention_norm"
    """What remains of `MIXER_EXPERTS` on every rank where expert-parallel ranks divide the routed experts."""
    PARALLEL_ROUTED_EXPERTS = "parallel_routed_experts", ("experts",), "attention_norm"
    """The rest of `MIXER_EXPERTS`."""
    SECOND_MIXER = "attention_2", ("attention_2",), "attention_norm_2"
    SECOND_MLP = "mlp_2", ("mlp_2",), "mlp_norm_2"

    branches: tuple[str, ...]
    """Names of what it adds up, as checkpoints have them."""
    norm: str
    """Name of the norm in front of it, as checkpoints have it; experts and MLP of a layer share one."""

    def __new__(cls, name: str, branches: tuple[str, ...], norm: str) -> "SubBlockKind":
        kind = object.__new__(cls)
        kind._value_ = name
        kind.branches = branches
        kind.norm = norm
        return kind

    @property
    def has_mixer(self) -> bool:
        """Whether it contains a token mixer, which keeps states in generation."""
        return any(BRANCH_KINDS[name] is BranchKind.MIXER for name in self.branches)


class WiredSubBlock(NamedTuple):
    """A sub-block of one layer."""

    kind: SubBlockKind
    missing: tuple[int, ...]
    """Outputs that the stream which it reads lacks, counted back from the newest: 1 is that of its predecessor."""
    reads_shared: bool = True
    """Whether that stream is the same on all tensor-parallel ranks."""
    leaves_shared: bool = True
    """Whether the stream is the same on all tensor-parallel ranks once the output is added."""
    joins_next: bool = False
    """Whether its output travels in the sum of the next sub-block's, together with which it is seen."""
    shares_input: bool = False
    """Whether it takes the normed stream of the sub-block before it, which has the same norm and reads the same."""
    moves_tokens: bool = False
    """Whether tokens move to the ranks of their experts and back, so that its output is no partial sum."""


@dataclass(frozen=True)
class Wiring:
    """One value of `--residual-mode`."""

    name: str
    description: str
    """For `--help`."""
    sub_blocks: tuple[SubBlockKind, ...]
    """Sub-blocks of every dense layer, in order."""
    expert_sub_blocks: tuple[SubBlockKind, ...]
    """Sub-blocks of every layer with experts; those without weights, as a shared expert of width 0, are left out."""
    late: Mapping[SubBlockKind, tuple[SubBlockKind, ...]] = field(default_factory=dict)
    """Sub-blocks that read late in the layers of `--ladder-layers`, and the kinds of the outputs that they miss;
    without kinds, the newest `--residual-staleness` outputs."""
    joined: SubBlockKind | None = None
    """The kind whose output travels in the next sub-block's sum in these layers where both are first seen together."""
    stream: Literal["shared", "per rank"] = "shared"
    """Whether the tensor-parallel ranks share one stream, or each has its own (desync)."""

    @property
    def takes(self) -> tuple[str, ...]:
        """Fields of `ModelFlags` that only some wirings have, and this one does."""
        if self.stream == "per rank":
            return ("desync_interval",)
        with_staleness = ("residual_staleness", "lanes") if _ANY in self.late.values() else ()
        return ("ladder_layers", *with_staleness) if self.late else ()

    @property
    def needs_experts(self) -> bool:
        """Whether the wiring is one of experts."""
        return bool(self.late) and _ANY not in self.late.values()

    def kinds(self, has_experts: bool, shared_expert: bool) -> tuple[SubBlockKind, ...]:
        """Return the kinds of a layer's sub-blocks."""
        layer_kinds = self.expert_sub_blocks if has_experts else self.sub_blocks
        return tuple(kind for kind in layer_kinds if shared_expert or kind is not SubBlockKind.SHARED_EXPERT)

    def layers(
        self, kinds: Sequence[Sequence[SubBlockKind]], ladder_layers: Sequence[int], staleness: int, interval: int
    ) -> list[tuple[WiredSubBlock, ...]]:
        """Return the sub-blocks of every layer.

        Args:
            kinds: those of every layer.
            ladder_layers: layers whose late sub-blocks read late; no sub-block of the others does.
            staleness: outputs that a late sub-block misses, unless an earlier sub-block has seen them.
            interval: sub-blocks between two sums of per-rank streams. The last sub-block always ends in a sum.
        """
        late_layers = set(ladder_layers)
        sub_blocks = [(layer, kind) for layer, of_layer in enumerate(kinds) for kind in of_layer]

        def may_miss(index: int) -> Iterable[int]:
            layer, kind = sub_blocks[index]
            is_late = layer in late_layers
            missed = (self.late if is_late else _TOGETHER).get(kind)
            if missed is None:
                return ()
            if missed == _ANY:
                return range(1, staleness + 1)
            may_be_missed: list[int] = []
            for back in range(1, min(index, len(kinds[layer])) + 1):
                earlier_layer, earlier_kind = sub_blocks[index - back]
                # What enters the first of several late layers is complete.
                if earlier_kind in missed and (earlier_layer in late_layers) is is_late:
                    may_be_missed.append(back)
            return may_be_missed

        missing = list(_limit_to_unseen(map(may_miss, range(len(sub_blocks)))))
        plan = ReadPlan.of(missing)

        def joins(index: int) -> bool:
            layer, kind = sub_blocks[index]
            joined = (self.joined,) if layer in late_layers else _TOGETHER
            if kind not in joined or index + 1 == len(sub_blocks):
                return False
            following = sub_blocks[index + 1]
            # Under the routed experts, attention's sum runs alone.
            if kind is _MIXER and following == (layer, _ROUTED):
                return False
            return following[0] == layer and plan.arrivals[index] == plan.arrivals[index + 1]

        def shares(index: int) -> bool:
            (before, earlier), (layer, kind) = sub_blocks[index - 1], sub_blocks[index]
            return before == layer and earlier.norm == kind.norm and not plan.arriving(index)

        def is_shared_before(index: int) -> bool:
            return self.stream == "shared" or index % interval == 0 or index == len(sub_blocks)

        wired = (
            WiredSubBlock(
                kind,
                missing[index],
                is_shared_before(index),
                is_shared_before(index + 1),
                joins(index),
                index > 0 and shares(index),
            )
            for index, (_, kind) in enumerate(sub_blocks)
        )
        return [tuple(itertools.islice(wired, len(of_layer))) for of_layer in kinds]


def _limit_to_unseen(may_miss: Iterable[Iterable[int]]) -> Iterator[tuple[int, ...]]:
    """Yield what each sub-block misses of the outputs that it may miss: those that no earlier sub-block has seen."""
    before: tuple[int, ...] = ()
    for index, backs in enumerate(may_miss):
        # Outputs from before the model do not exist.
        before = tuple(back for back in sorted(backs) if back > index or back == 1 or back - 1 in before)
        yield before


@dataclass(frozen=True)
class ReadPlan:
    """When each output enters the stream: everything forward and backward need to know about a wiring.

    The position of a sub-block and of its output is its number in the model; position `count` is that of the head.
    """

    arrivals: tuple[int, ...]
    """For each output, the first position that sees it."""
    complete: frozenset[int] = frozenset()
    """Outputs that are no partial sums, and cross cuts complete."""

    @staticmethod
    def of(missing: Iterable[Sequence[int]], complete: Iterable[int] = ()) -> "ReadPlan":
        """Return the plan of sub-blocks that miss these outputs, or raise ValueError if one misses what was seen."""
        sets = [tuple(sorted(backs)) for backs in missing]
        for index, (backs, allowed) in enumerate(zip(sets, _limit_to_unseen(sets), strict=True)):
            if backs != allowed:
                wrong = ", ".join(str(back) for back in backs if back not in allowed)
                raise ValueError(f"sub-block {index} misses output {wrong} before it, which does not exist or was seen")
        return ReadPlan(
            tuple(
                next((later for later in range(output + 1, len(sets)) if later - output not in sets[later]), len(sets))
                for output in range(len(sets))
            ),
            frozenset(complete),
        )

    @cached_property
    def _arriving(self) -> dict[int, list[int]]:
        arriving: dict[int, list[int]] = {}
        for output, position in enumerate(self.arrivals):
            arriving.setdefault(position, []).append(output)
        return arriving

    def arriving(self, position: int) -> Sequence[int]:
        """Return the outputs that a sub-block is the first to see, oldest first."""
        return self._arriving.get(position, ())

    @cached_property
    def _missing(self) -> list[list[int]]:
        missing = list[list[int]]([[]])
        for position in range(1, len(self.arrivals) + 1):
            missing.append([output for output in (*missing[-1], position - 1) if self.arrivals[output] > position])
        return missing

    def missing(self, position: int) -> Sequence[int]:
        """Return the earlier outputs that a sub-block does not see, oldest first; they cross a cut before it."""
        return self._missing[position]

    @cached_property
    def in_order(self) -> bool:
        """Whether no output is seen before an older one."""
        return all(earlier <= later for earlier, later in itertools.pairwise(self.arrivals))


def plan_reads(layers: Iterable[Iterable[WiredSubBlock]]) -> ReadPlan:
    """Return the plan of the sub-blocks of all layers; raise ValueError as `ReadPlan.of`."""
    sub_blocks = list(itertools.chain.from_iterable(layers))
    moving = (position for position, sub_block in enumerate(sub_blocks) if sub_block.moves_tokens)
    return ReadPlan.of((sub_block.missing for sub_block in sub_blocks), moving)


_MIXER, _MLP, _BOTH = SubBlockKind.MIXER, SubBlockKind.MLP, SubBlockKind.MIXER_MLP
_EXPERTS, _ALL = SubBlockKind.EXPERTS, SubBlockKind.MIXER_EXPERTS
_SHARED, _ROUTED = SubBlockKind.SHARED_EXPERT, SubBlockKind.ROUTED_EXPERTS
_MIXER_2, _MLP_2 = SubBlockKind.SECOND_MIXER, SubBlockKind.SECOND_MLP
_ANY: tuple[SubBlockKind, ...] = ()
_TOGETHER = {_ROUTED: (_SHARED,), _SHARED: (_ROUTED,)}
"""In layers that do not read late, two sub-blocks of experts read the same stream and travel in one sum."""
WIRINGS: dict[str, Wiring] = {
    wiring.name: wiring
    for wiring in (
        Wiring("standard", "no sub-block reads the stream late.", (_MIXER, _MLP), (_MIXER, _EXPERTS)),
        Wiring(
            "ladder",
            "in --ladder-layers each sub-block reads the stream one sub-block late, so that the all-reduce of its "
            "predecessor overlaps with it; the other layers are standard.",
            (_MIXER, _MLP),
            (_MIXER, _EXPERTS),
            late={_MIXER: _ANY, _MLP: _ANY, _EXPERTS: _ANY},
        ),
        Wiring("parallel", "attention and MLP of a layer share one norm and one all-reduce.", (_BOTH,), (_ALL,)),
        Wiring(
            "ladder-parallel",
            "parallel layers, of which those in --ladder-layers read late.",
            (_BOTH,),
            (_ALL,),
            late={_BOTH: _ANY, _ALL: _ANY},
        ),
        Wiring(
            "ladder-attention",
            "standard layers, of which those in --ladder-layers have attention that reads late.",
            (_MIXER, _MLP),
            (_MIXER, _EXPERTS),
            late={_MIXER: _ANY},
        ),
        Wiring(
            "farskip",
            "in --ladder-layers attention misses the routed experts before it, the shared expert attention, and the "
            "routed experts both; attention and the shared expert share an all-reduce.",
            (_MIXER, _MLP),
            (_MIXER, _SHARED, _ROUTED),
            late={_MIXER: (_ROUTED,), _SHARED: (_MIXER,), _ROUTED: (_MIXER, _SHARED), _MLP: (_MIXER,)},
            joined=_MIXER,
        ),
        Wiring(
            "shortcut",
            "in --ladder-layers the routed experts run after attention and miss it, and the shared expert misses them.",
            (_MIXER, _MLP),
            (_MIXER, _ROUTED, _SHARED),
            late={_ROUTED: (_MIXER,), _SHARED: (_ROUTED,)},
        ),
        Wiring(
            "longcat",
            "a layer has two attentions and two dense MLPs; in --ladder-layers all but the first attention miss the "
            "routed experts, which run after it.",
            (_MIXER, _MLP, _MIXER_2, _MLP_2),
            (_MIXER, _ROUTED, _MLP, _MIXER_2, _MLP_2),
            late={_MLP: (_ROUTED,), _MIXER_2: (_ROUTED,), _MLP_2: (_ROUTED,)},
        ),
        Wiring(
            "desync",
            "each tensor-parallel rank has its own stream, and the streams are summed after every --desync-interval "
            "sub-blocks; the tensor-parallel size is part of the model.",
            (_MIXER, _MLP),
            (_MIXER, _EXPERTS),
            stream="per rank",
        ),
    )
}
"""`--residual-mode` -> its wiring."""
RESIDUAL_MODES = tuple(WIRINGS)
if TYPE_CHECKING:
    ResidualMode = str
else:
    # The command line reads the choices from the type.
    ResidualMode = Literal[RESIDUAL_MODES]
WIRING_FIELDS = tuple(dict.fromkeys(name for wiring in WIRINGS.values() for name in wiring.takes))
"""Fields of `ModelFlags` whose meaning depends on `--residual-mode`."""
DESYNC_INTERVALS = (2, 4)
"""Values of `--desync-interval`."""
LATE_MODES = tuple(name for name, wiring in WIRINGS.items() if wiring.late)
"""Wirings in which some sub-blocks read late."""
EXPERT_MODES = tuple(name for name, wiring in WIRINGS.items() if wiring.needs_experts)
"""Wirings of models with experts only."""
SHARED_STREAM_MODES = tuple(
    name for name, wiring in WIRINGS.items() if wiring.stream == "shared" and not wiring.needs_experts
)
"""Wirings of all models by the rule. One process computes the same with them as several."""


def layers_text(layers: Sequence[int], num_layers: int) -> str:
    """Describe layers of a model, in order: `layer 1 (of 2)`, `layers 0,2-3 (of 8)`, or `all layers`."""
    if len(layers) in (0, num_layers):
        return "all layers" if layers else "no layer"
    # Layers minus their position in the list is constant over a run of neighbours.
    runs = [[*run] for _, run in itertools.groupby(enumerate(layers), lambda item: item[1] - item[0])]
    listed = ",".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)
    noun = "layer" if len(layers) == 1 else "layers"
    return f"{noun} {listed} (of {num_layers})"
