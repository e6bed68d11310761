"""Small random models with latent attention by transformers, and their weights under canonical names."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from megatron_ladder.blueprint.model import ModelConfig
from tests.unit.generate.tiny_model import LATENT, tiny_config

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-3,
    "routed_scaling_factor": 1.5,
}
"""Values are narrower than queries, and the epsilon of the latents' norms is another one than that of the stream's."""
KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "deepseek_v2": (DeepseekV2Config, {"q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek_v3": (DeepseekV3Config, {"q_lora_rank": 14, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {"q_lora_rank": 14, "n_group": 1, "topk_group": 1}),
}
EXPERTS = {"num_experts": 6, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 12, "moe_layers": (1, 2)}
ROUTERS = {
    "deepseek_v2": {"moe_router_unnormalized": True},
    "deepseek_v3": {"moe_router_num_groups": 3, "moe_router_group_topk": 2},
    "glm4_moe_lite": {},
}
NAMES = {
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attention",
    "_a_proj_with_mqa": "_a_proj",
    "_a_layernorm": "_a_norm",
    "mlp.gate.weight": "router.weight",
    "mlp.gate.e_score_correction_bias": "router.expert_bias",
    "mlp.shared_experts": "shared_expert",
    "mlp.experts": "experts",
}
"""Parts of transformers' names -> ours."""


def random_latent_model(kind: str) -> tuple[Any, ModelConfig, dict[str, Tensor]]:
    """Return a model of transformers, its configuration here, and its weights by canonical names."""
    config_class, own = KINDS[kind]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config_class(**SIZES | own)).eval()
    # The grouped products of transformers need rows of a multiple of 16 bytes.
    module.config._experts_implementation = "eager"
    # Large matrices make other tokens after other prompts.
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(torch.randn_like(tensor) * 0.4 + name.endswith("norm.weight"))
    config = tiny_config(
        **LATENT,
        **EXPERTS,
        **ROUTERS[kind],
        q_lora_rank=own["q_lora_rank"] or 0,
        norm_epsilon=SIZES["rms_norm_eps"],
        moe_router_topk_scaling_factor=SIZES["routed_scaling_factor"],
    )
    if kind != "deepseek_v2":
        changes = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        config = ModelConfig(**vars(config) | changes)
    return module, config, _canonical(module.state_dict())


def _canonical(state: dict[str, Tensor]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            base = name.removesuffix("gate_up_proj")
            weights |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            weights[f"{name}.weight"] = tensor
        else:
            weights[name] = tensor
    return weights
