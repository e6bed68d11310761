"""transformers' own models of our configurations, and its names of their tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV2ForCausalLM, LlamaForCausalLM, MixtralForCausalLM

from tests.reference import ReferenceConfig

Family = Any
"""A model class of transformers."""


def hf_name(name: str) -> str:
    """Return transformers' name of a canonical tensor."""
    for ours, theirs in (
        ("embedding.", "model.embed_tokens."),
        ("final_norm.", "model.norm."),
        ("layers.", "model.layers."),
        (".attention_norm.", ".input_layernorm."),
        (".mlp_norm.", ".post_attention_layernorm."),
        (".attention.", ".self_attn."),
        (".kv_a_proj.", ".kv_a_proj_with_mqa."),
        (".q_a_norm.", ".q_a_layernorm."),
        (".kv_a_norm.", ".kv_a_layernorm."),
        (".attention_norm_2.", ".input_layernorm_2."),
        (".mlp_norm_2.", ".post_attention_layernorm_2."),
        (".attention_2.", ".self_attn_2."),
        (".router.weight", ".mlp.gate.weight"),
        (".router.bias", ".mlp.gate.bias"),
        (".router.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".experts.", ".mlp.experts."),
        (".shared_expert.", ".mlp.shared_experts."),
        (".shared_expert_gate.", ".mlp.shared_expert_gate."),
    ):
        name = name.replace(ours, theirs)
    return name


_STACKED_DELTA = {"q_proj.weight": "in_proj_qkv.weight", "q_conv.weight": "conv1d.weight"}
_DELTA = {f"{ours}_proj.weight": f"in_proj_{theirs}.weight" for ours, theirs in (("gate", "z"), ("b", "b"), ("a", "a"))}
_DELTA |= {"A_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}


def module_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return canonical weights by the names of a module of transformers.

    It stacks gates on ups of experts, and in gated DeltaNet queries on keys on values.
    """
    found = {}
    linear = {name.removesuffix("A_log") for name in weights if name.endswith(".A_log")}
    for name, weight in weights.items():
        mixer, part = name.rpartition("attention.")[::2]
        if f"{mixer}attention." in linear:
            prefix = f"{hf_name(mixer)}linear_attn."
            if part in _STACKED_DELTA:
                stack = torch.cat([weights[name.replace("q_", f"{which}_")] for which in "qkv"])
                found[prefix + _STACKED_DELTA[part]] = stack.unsqueeze(1) if "conv" in part else stack
            elif part in _DELTA:
                found[prefix + _DELTA[part]] = weight
            continue
        if ".experts.gate_proj" in name:
            name, weight = name.replace("gate", "gate_up"), torch.cat([weight, weights[name.replace("gate", "up")]], 1)
        if ".experts.up_proj" not in name:
            found[hf_name(name).removesuffix(".weight" if ".experts." in name else "")] = weight
    return found


def transformers_model(
    model: object, weights: Mapping[str, Tensor] | None = None, family: Family = LlamaForCausalLM
) -> Any:
    """Return transformers' own model of a configuration of the package or the reference, with these weights."""
    config = ReferenceConfig.like(model)
    values: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.moe_ffn_hidden_size if family is MixtralForCausalLM else config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": {"none": "default"}.get(config.rope_scaling, config.rope_scaling),
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_percent,
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_position_embeddings,
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "mscale": config.rope_mscale,
            "mscale_all_dim": config.rope_mscale_all_dim,
        },
        "attention_bias": config.add_qkv_bias,
        "mlp_bias": config.add_mlp_bias,
        "use_qk_norm": config.qk_layernorm,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "norm_topk_prob": not config.moe_router_unnormalized,
        "mlp_only_layers": sorted({*range(config.num_layers)} - {*config.moe_layers}),
        "first_k_dense_replace": min(config.moe_layers, default=0),
        "n_shared_experts": config.moe_shared_expert_intermediate_size // max(1, config.moe_ffn_hidden_size),
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "n_group": config.moe_router_num_groups,
        "topk_group": config.moe_router_group_topk,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    if config.kv_lora_rank:
        values |= {
            "num_key_value_heads": config.num_attention_heads,
            "head_dim": config.qk_rope_head_dim,
            "kv_lora_rank": config.kv_lora_rank,
            "q_lora_rank": config.q_lora_rank or None,
            "qk_nope_head_dim": config.qk_nope_head_dim,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "topk_method": "group_limited_greedy" if config.moe_router_num_groups > 1 else "greedy",
            "mlp_layer_types": [
                "sparse" if layer in config.moe_layers else "dense" for layer in range(config.num_layers)
            ],
        }
    if family is DeepseekV2ForCausalLM:
        values["num_experts"] = values.pop("num_local_experts")
    built = family(family.config_class(**values)).eval()
    if weights is not None:
        tied = {"lm_head.weight": weights["embedding.weight"]} if config.tie_embeddings else {}
        built.load_state_dict(module_tensors(weights) | tied, strict=True)
    return built
