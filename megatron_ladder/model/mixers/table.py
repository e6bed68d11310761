"""What computes each token mixer."""

from collections.abc import Mapping

from megatron_ladder.blueprint.mixers.attention import Attention
from megatron_ladder.blueprint.mixers.gated_delta import GatedDelta
from megatron_ladder.blueprint.mixers.latent import LatentAttention
from megatron_ladder.blueprint.mixers.mixer import Mixer
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.model.mixers.attention import AttentionHeads
from megatron_ladder.model.mixers.gated_delta import GatedDeltaHeads
from megatron_ladder.model.mixers.latent import LatentHeads
from megatron_ladder.model.mixers.mixer import Heads
from megatron_ladder.model.operations import BuildContext

HEADS: Mapping[type[Mixer], type[Heads]] = {
    Attention: AttentionHeads,
    LatentAttention: LatentHeads,
    GatedDelta: GatedDeltaHeads,
}
"""The module of each mixer."""


def new_heads(build: BuildContext, number: int, branch: Branch) -> Heads:
    """Build the heads of a branch; see `Heads`."""
    assert branch.mixer is not None
    return HEADS[type(branch.mixer)](build, number, branch)
