"""A wiring says which sub-blocks a layer has, and how late each may read the residual stream.

One rule serves all (it is written out in `stack.py`): sub-block i reads the stream when at most
`staleness` outputs of sub-blocks before it are still missing. For ladder that is the paper's

    x_i = x_{i-1} + AllReduce(h_i(x_{i-2}))          (arXiv 2501.06589)

since the output of h_{i-1} is the one that is missing. A new wiring is a new row of `SUB_BLOCKS`. One is outside of
the rule: desync misses nothing, but its ranks have streams of their own (`desync.py`).
"""

from dataclasses import dataclass
from enum import Enum

from megatron_ladder.blueprint.model import ModelConfig


class SubBlockKind(Enum):
    """What stands between two all-reduces."""

    ATTENTION = "attention"
    MLP = "mlp"
    ATTENTION_MLP = "attention_mlp"
    """Attention and MLP of one norm, side by side, with one all-reduce (PaLM)."""


@dataclass(frozen=True)
class LayerWiring:
    """The sub-blocks of one layer."""

    sub_blocks: tuple[SubBlockKind, ...]
    """In order."""
    staleness: int
    """Outputs of earlier sub-blocks that may be missing from the stream when a sub-block reads it."""


SUB_BLOCKS: dict[str, tuple[SubBlockKind, ...]] = {
    "standard": (SubBlockKind.ATTENTION, SubBlockKind.MLP),
    "ladder": (SubBlockKind.ATTENTION, SubBlockKind.MLP),
    "parallel": (SubBlockKind.ATTENTION_MLP,),
    "ladder-parallel": (SubBlockKind.ATTENTION_MLP,),
    "desync": (SubBlockKind.ATTENTION, SubBlockKind.MLP),
}
"""`--residual-mode` -> the sub-blocks of every layer."""


def layer_wirings(config: ModelConfig) -> list[LayerWiring]:
    """The wiring of every layer: those in `ladder_layers` read the stream late, the others miss nothing."""
    late = set(config.ladder_layers)
    return [
        LayerWiring(SUB_BLOCKS[config.residual_mode], config.residual_staleness if layer in late else 0)
        for layer in range(config.num_layers)
    ]


def pending_before(wirings: list[LayerWiring], layer: int) -> int:
    """Outputs still missing from the stream that enters `layer`, which cross there with it.

    The layer before drains down to what the first sub-block of `layer` allows; after the last layer everything is
    drained.
    """
    pending = 0
    for wiring in wirings[:layer]:
        for _ in wiring.sub_blocks:
            pending = min(pending, wiring.staleness) + 1
    return min(pending, wirings[layer].staleness) if layer < len(wirings) else 0
