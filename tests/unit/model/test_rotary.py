"""The rotary embedding compared with transformers'."""

import math
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from megatron_ladder.blueprint.mixers.attention import attention_factor
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.model.rotary import rotary_table
from tests.helpers.sharded import small_model

RANGES: list[dict[str, Any]] = [
    {"head_dim": 64},
    {"head_dim": 128, "rotary_percent": 0.5, "rotary_base": 1e6},
    {"head_dim": 64, "rope_original_max_position_embeddings": 4096, "rope_scaling_factor": 40.0},
    # Both ends at index 0, beyond the last index, before the first one, and the upper end at the last dimension.
    {"head_dim": 8, "rope_beta_fast": 1.5, "rope_original_max_position_embeddings": 6, "rotary_base": 5e5},
    {"head_dim": 6, "rope_original_max_position_embeddings": 10**9, "rotary_base": 10.0},
    {"head_dim": 16, "rope_original_max_position_embeddings": 2},
    {"head_dim": 16, "rope_beta_fast": 100.0, "rope_original_max_position_embeddings": 2000, "rotary_base": 10.0},
    {"head_dim": 32, "rope_beta_fast": 4.0, "rope_beta_slow": 0.25, "rope_scaling_factor": 1.5},
    {"head_dim": 32, "rope_scaling_factor": 0.5},
    # As in Kimi-K2.
    {"head_dim": 64, "rope_beta_fast": 1.0, "rope_scaling_factor": 32.0, "rotary_base": 5e4},
]


def of_transformers(config: ModelConfig, **more: Any) -> tuple[torch.Tensor, float]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": config.rotary_base,
        "partial_rotary_factor": config.rotary_percent,
        "factor": config.rope_scaling_factor,
        "original_max_position_embeddings": config.rope_original_max_position_embeddings,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "truncate": config.yarn_correction_range_round_to_int,
        **more,
    }
    theirs = LlamaConfig(head_dim=config.head_dim, max_position_embeddings=16384, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("changes", RANGES)
def test_frequencies_of_yarn(changes: dict[str, Any], rounded: bool) -> None:
    values = {"rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 4096, **changes}
    config = small_model(rope_scaling="yarn", yarn_correction_range_round_to_int=rounded, **values)
    frequencies, magnitude = of_transformers(config)
    # Of position 1, in fp64, so that the angle follows from its sine and cosine.
    table = rotary_table(config.mixer_of(0), torch.ones(1, 1), torch.float64)
    cos, sin = table.cos[0, 0, 0], table.sin[0, 0, 0]
    assert torch.hypot(cos, sin).allclose(torch.tensor(magnitude, dtype=torch.float64), rtol=1e-12)
    angles = torch.atan2(sin, cos)[config.mixer_of(0).rotary_dim // 2 :]
    assert angles.allclose(frequencies.double(), rtol=1e-6, atol=0)


def test_the_rotary_embedding_of_gpt_oss() -> None:
    yarn = {"rope_scaling": "yarn", "rope_scaling_factor": 32.0, "rope_original_max_position_embeddings": 4096}
    config = small_model(head_dim=64, rotary_base=150000.0, yarn_correction_range_round_to_int=False, **yarn)
    positions = torch.tensor([[0, 1, 100, 5000, 131071]])
    found = rotary_table(config.mixer_of(0), positions.t(), torch.float32)
    cos, sin = GptOssRotaryEmbedding(GptOssConfig())(torch.empty(0), positions)
    for table, theirs in ((found.cos, cos), (found.sin, sin)):
        # A far position multiplies the last bit of a frequency.
        assert table[:, 0, 0, 32:].allclose(theirs[0], rtol=0, atol=131071 * 2**-23)
        assert table[:-1, 0, 0, 32:].allclose(theirs[0, :-1], rtol=0, atol=5000 * 2**-23)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (0.707, 0.707), (0.5, 1.0), (1.3, 0.2)])
def test_magnitudes_of_yarn(mscale: float, mscale_all_dim: float) -> None:
    values = {"rope_scaling_factor": 40.0, "rope_mscale": mscale, "rope_mscale_all_dim": mscale_all_dim}
    config = small_model(rope_scaling="yarn", **values)
    _, magnitude = of_transformers(config, mscale=mscale, mscale_all_dim=mscale_all_dim)
    assert attention_factor(config) == magnitude


def test_the_scores_of_latent_attention_are_scaled() -> None:
    """By the published factor of Instella-MoE; those of other attention are not."""
    yarn = {"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "rope_mscale_all_dim": 1.0, "head_dim": 128}
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "num_key_value_heads": 1}
    assert small_model(**yarn, **latent).mixer_of(0).softmax_scale == pytest.approx(0.16563, rel=1e-4)
    assert small_model(**yarn).mixer_of(0).softmax_scale == 1 / math.sqrt(128)
