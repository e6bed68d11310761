"""The wirings: which sub-blocks a layer has, and how late each of them may read the residual stream.

One rule computes every wiring but one (`model/stack.py` writes it out): sub-block i reads the stream when at most
`staleness` outputs of earlier sub-blocks are missing from it. For ladder that is the paper's

    x_i = x_{i-1} + AllReduce(h_i(x_{i-2}))          (arXiv 2501.06589)

since the output of h_{i-1} is the missing one. The exception is desync: no output is missing, but each tensor-parallel
rank has its own stream (`model/desync.py`).

A new wiring is a new row of `WIRINGS`. The command line, the model, the names of its tensors, all counts, conversion,
the exported Hugging Face module, the planner, the benchmarks and the studies derive from that table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple


class SubBlockKind(Enum):
    """The computation between two all-reduces."""

    ATTENTION = "attention"
    MLP = "mlp"
    ATTENTION_MLP = "attention_mlp"
    """Attention and MLP side by side: one norm, one all-reduce (PaLM)."""

    @property
    def norm(self) -> str:
        """Name of the norm in front of it, as checkpoints have it."""
        return "mlp_norm" if self is SubBlockKind.MLP else "attention_norm"


class WiredSubBlock(NamedTuple):
    """A sub-block of one layer."""

    kind: SubBlockKind
    staleness: int
    """Outputs of earlier sub-blocks that may be missing from the stream that it reads."""
    reads_shared: bool = True
    """Whether that stream is the same on all tensor-parallel ranks."""
    leaves_shared: bool = True
    """Whether the stream is the same on all tensor-parallel ranks once the output is added."""


@dataclass(frozen=True)
class Wiring:
    """One value of `--residual-mode`."""

    name: str
    description: str
    """For `--help`."""
    sub_blocks: tuple[SubBlockKind, ...]
    """Sub-blocks of every layer, in order; each has a norm."""
    late: tuple[SubBlockKind, ...] = ()
    """Sub-blocks that read the stream `--residual-staleness` sub-blocks late in the layers of `--ladder-layers`."""
    stream: Literal["shared", "per rank"] = "shared"
    """Whether the tensor-parallel ranks share one stream, or each has its own (desync)."""

    @property
    def one_norm(self) -> bool:
        """Whether attention and MLP of a layer share a norm, so that it has one norm instead of two."""
        return len(self.sub_blocks) == 1

    @property
    def takes(self) -> tuple[str, ...]:
        """Fields of `ModelFlags` that only some wirings have, and this one does."""
        if self.stream == "per rank":
            return ("desync_interval",)
        return ("ladder_layers", "residual_staleness", "lanes") if self.late else ()

    def layers(
        self, num_layers: int, ladder_layers: Sequence[int], staleness: int, interval: int
    ) -> list[tuple[WiredSubBlock, ...]]:
        """Return the sub-blocks of every layer.

        Args:
            ladder_layers: layers whose late sub-blocks read late; no sub-block of the others does.
            interval: sub-blocks between two sums of per-rank streams. The last sub-block always ends in a sum.
        """
        width, last = len(self.sub_blocks), len(self.sub_blocks) * num_layers - 1
        late_layers = set(ladder_layers)

        def shared_after(index: int) -> bool:
            return self.stream == "shared" or (index + 1) % interval == 0 or index == last

        return [
            tuple(
                WiredSubBlock(
                    kind,
                    staleness if layer in late_layers and kind in self.late else 0,
                    reads_shared=shared_after(width * layer + place - 1),
                    leaves_shared=shared_after(width * layer + place),
                )
                for place, kind in enumerate(self.sub_blocks)
            )
            for layer in range(num_layers)
        ]


def pending_before(layers: Sequence[Sequence[WiredSubBlock]], layer: int) -> int:
    """Return how many outputs are missing from the stream that enters `layer`; they cross a pipeline cut with it.

    The previous layer drains down to what the first sub-block of `layer` allows. After the last layer, nothing is
    missing.
    """
    pending = 0
    for sub_blocks in layers[:layer]:
        for sub_block in sub_blocks:
            pending = min(pending, sub_block.staleness) + 1
    return min(pending, layers[layer][0].staleness) if layer < len(layers) else 0


_ATTENTION, _MLP, _BOTH = SubBlockKind.ATTENTION, SubBlockKind.MLP, SubBlockKind.ATTENTION_MLP
WIRINGS: dict[str, Wiring] = {
    wiring.name: wiring
    for wiring in (
        Wiring("standard", "no sub-block reads the stream late.", (_ATTENTION, _MLP)),
        Wiring(
            "ladder",
            "in --ladder-layers each sub-block reads the residual stream one sub-block late, so that the all-reduce "
            "of its predecessor overlaps with it; the other layers are standard.",
            (_ATTENTION, _MLP),
            late=(_ATTENTION, _MLP),
        ),
        Wiring("parallel", "attention and MLP of a layer share one norm and one all-reduce.", (_BOTH,)),
        Wiring(
            "ladder-parallel",
            "parallel layers, of which those in --ladder-layers read the stream late.",
            (_BOTH,),
            late=(_BOTH,),
        ),
        Wiring(
            "ladder-attention",
            "standard layers, of which those in --ladder-layers have attention that reads the stream late; their MLP "
            "does not.",
            (_ATTENTION, _MLP),
            late=(_ATTENTION,),
        ),
        Wiring(
            "desync",
            "each tensor-parallel rank has its own stream, and the streams are summed after every --desync-interval "
            "sub-blocks; the tensor-parallel size is part of the model.",
            (_ATTENTION, _MLP),
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
DESYNC_INTERVALS = (2, 4)
"""Values of `--desync-interval`."""
LATE_MODES = tuple(name for name, wiring in WIRINGS.items() if wiring.late)
"""Wirings in which some sub-blocks read late."""
SHARED_STREAM_MODES = tuple(name for name, wiring in WIRINGS.items() if wiring.stream == "shared")
"""Wirings by the rule. One process computes the same with them as several."""

PER_RANK_MODES = tuple(name for name, wiring in WIRINGS.items() if wiring.stream == "per rank")
"""The other wirings: the tensor-parallel size is part of the model."""

SUB_BLOCK_TABLE = {
    name: tuple((kind.value, kind in wiring.late) for kind in wiring.sub_blocks) for name, wiring in WIRINGS.items()
}
"""Sub-blocks of each wiring, and whether each reads late in ladder layers: for the exported Hugging Face module."""
