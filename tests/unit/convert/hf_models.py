"""Tiny models, and the directories of their exports as transformers opens them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ladder.blueprint.model import ModelConfig
from tests.helpers.hugging_face import hf_name
from tests.helpers.sharded import small_model

VOCAB = 61
BIASES = {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True}
EXPERTS: dict[str, Any] = {"num_experts": 6, "moe_ffn_hidden_size": 20, "moe_layers": (1, 2)}
GLM = EXPERTS | {
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 3,
    "moe_router_group_topk": 2,
    "rotary_percent": 0.5,
    "qk_layernorm": True,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "norm_epsilon": 0.01,
}
GATED = {"attention_output_gate": True}
WINDOWS: dict[str, Any] = {"window_size": 3, "window_layers": (0, 2, 3)}
SINKS = {"softmax_type": "learnable"}
DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_layers": (0, 1, 3, 4),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "norm_epsilon": 0.01,
}
"""With a smaller epsilon, norms of small outputs would amplify the rounding of transformers' delta rule."""
QWEN3_5 = DELTA | GATED | {"qk_layernorm": True, "apply_layernorm_1p": True, "rotary_percent": 0.25, "head_dim": 16}


def tiny_config(**changes: Any) -> ModelConfig:
    """Return a model of six layers with two query heads per key head."""
    return small_model(**({"num_layers": 6, "vocab_size": VOCAB} | changes))


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return canonical weights by transformers' names, which has one tensor for each matrix of an expert."""
    found = {}
    for name, weight in weights.items():
        for expert, matrix in enumerate(weight if ".experts." in name else [weight]):
            found[hf_name(name).replace(".experts.", f".experts.{expert}.")] = matrix.clone()
    return found


def opened(folder: Path) -> Any:
    """Open a directory as a user does; every weight must be in it."""
    module, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return module.eval()


def some_tokens(*shape: int) -> Tensor:
    """Return tokens of which none is 0, the padding."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(1))
