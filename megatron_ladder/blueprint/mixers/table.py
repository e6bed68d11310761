"""The table of token mixers."""

from megatron_ladder.blueprint.mixers.attention import Attention
from megatron_ladder.blueprint.mixers.gated_delta import GatedDelta
from megatron_ladder.blueprint.mixers.latent import LatentAttention
from megatron_ladder.blueprint.mixers.mixer import Mixer

MIXERS: tuple[type[Mixer], ...] = (GatedDelta, LatentAttention, Attention)
"""The mixers; a layer has the first one that is `of` it."""
