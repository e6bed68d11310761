"""The keys of `config.json` that are read, with their types and the fields of `ModelConfig` that have their values."""

from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta, Struct

from megatron_ladder.blueprint.model import ModelConfig

KeyErrors = list[tuple[str, object, str]]
"""Key, what was found (None for a key that is missing or null), and what was expected."""
_Size = Annotated[int, Meta(ge=1, lt=2**31)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]


class HFRope(Struct):
    """One of the two spellings of a rotary embedding."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: _Size | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None


class HFKeys(Struct):
    """The keys that are read, with the fields of `ModelConfig` that have the same values, if their names differ.

    Sizes must be present: the defaults of other programs are not assumed.
    """

    num_hidden_layers: _Size
    hidden_size: _Size
    intermediate_size: Annotated[_Size, "ffn_hidden_size"]
    num_attention_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: Annotated[float, "norm_epsilon"]
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    initializer_range: Annotated[float | None, "init_method_std"] = None
    hidden_act: Literal["silu", "swish"] = "silu"
    tie_word_embeddings: Annotated[bool | None, "tie_embeddings"] = None
    attention_bias: Annotated[bool | None, "add_qkv_bias"] = None
    qkv_bias: bool | None = None
    attention_output_bias: Annotated[bool | None, "add_attention_output_bias"] = None
    mlp_bias: Annotated[bool | None, "add_mlp_bias"] = None
    moe_bias: Annotated[bool | None, "add_moe_bias"] = None
    quick_geglu: bool | None = None
    swiglu_limit: Annotated[float | None, "activation_func_clamp_value"] = None
    swiglu_alpha: float | None = None
    glu_linear_offset: float | None = None
    qk_norm: Annotated[bool | None, "qk_layernorm"] = None
    zero_centered_gamma: Annotated[bool | None, "apply_layernorm_1p"] = None
    final_logit_softcapping: Annotated[float | None, "logit_soft_cap"] = None
    sliding_window: Annotated[_Count | None, "window_size"] = None
    use_sliding_window: bool | None = None
    max_window_layers: _Count | None = None
    layer_types: list[Literal["full_attention", "sliding_attention", "linear_attention"]] | None = None
    full_attention_interval: _Size | None = None
    linear_conv_kernel_dim: _Size | None = None
    linear_key_head_dim: _Size | None = None
    linear_value_head_dim: _Size | None = None
    linear_num_key_heads: _Size | None = None
    linear_num_value_heads: _Size | None = None
    attn_output_gate: bool | None = None
    output_gate_type: str | None = None
    mamba_ssm_dtype: str | None = None
    softmax_type: Literal["vanilla", "learnable"] | None = None
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_parameters: HFRope | None = None
    rope_scaling: HFRope | None = None
    original_max_position_embeddings: _Size | None = None
    num_experts: _Count | None = None
    num_local_experts: Annotated[_Size | None, "num_experts"] = None
    n_routed_experts: Annotated[_Size | None, "num_experts"] = None
    experts_per_token: _Size | None = None
    num_experts_per_tok: Annotated[_Size | None, "moe_router_topk"] = None
    expert_hidden_dim: Annotated[_Size | None, "moe_ffn_hidden_size"] = None
    moe_intermediate_size: Annotated[_Count | None, "moe_ffn_hidden_size"] = None
    shared_expert_intermediate_size: Annotated[_Count | None, "moe_shared_expert_intermediate_size"] = None
    gated_shared_expert: Annotated[bool | None, "moe_shared_expert_gate"] = None
    n_shared_experts: _Count | None = None
    num_shared_experts: _Size | None = None
    scoring_func: Annotated[Literal["softmax", "sigmoid", "noaux_tc"] | None, "moe_router_score_function"] = None
    norm_topk_prob: bool | None = None
    route_norm: bool | None = None
    router_scaling_factor: Annotated[float | None, "moe_router_topk_scaling_factor"] = None
    routed_scaling_factor: Annotated[float | None, "moe_router_topk_scaling_factor"] = None
    moe_router_use_sigmoid: bool | None = None
    moe_router_enable_expert_bias: bool | None = None
    use_expert_bias: Annotated[bool | None, "moe_router_enable_expert_bias"] = None
    n_group: Annotated[_Size | None, "moe_router_num_groups"] = None
    topk_group: Annotated[_Size | None, "moe_router_group_topk"] = None
    expert_layers: list[_Count] | None = None
    decoder_sparse_step: _Size | None = None
    mlp_only_layers: list[_Count] | None = None
    first_k_dense_replace: _Count | None = None
    moe_layer_freq: Any = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] | None = None
    num_nextn_predict_layers: _Count | None = None
    mtp_num_hidden_layers: _Count | None = None
    mtp_before_final_norm: bool | None = None
    use_qk_norm: Annotated[bool | None, "qk_layernorm"] = None
    kv_lora_rank: _Size | None = None
    q_lora_rank: _Size | None = None
    qk_nope_head_dim: _Size | None = None
    qk_rope_head_dim: _Size | None = None
    v_head_dim: _Size | None = None
    rope_interleave: bool | None = None
    gated_attention: Annotated[bool | None, "attention_output_gate"] = None
    farskip: bool | None = None
    farskip_start_idx: _Count | None = None
    farskip_end_idx: float | None = None
    attn_only_farskip: bool | None = None
    mlp_only_farskip: bool | None = None
    ladder_layers: _Count | list[_Count] | None = None
    residual_mode: str | None = None
    residual_staleness: _Size | None = None
    lanes: _Count | None = None
    desync_interval: _Count | None = None
    desync_tp: _Count | None = None


def _fields_of_keys() -> dict[str, str]:
    """Return the field of the model for each key of `HFKeys` that has its value: the annotated name, or the key's."""
    model_fields = {known.name for known in fields(ModelConfig)}
    by_key: dict[str, str] = {}
    for key, hint in get_type_hints(HFKeys, include_extras=True).items():
        annotated = [name for name in getattr(hint, "__metadata__", ()) if isinstance(name, str)]
        name = annotated[0] if annotated else key
        if name in model_fields:
            by_key[key] = name
    return by_key


FIELDS = _fields_of_keys()
"""Key -> field of the model with the same value."""
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_max_position_embeddings",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "rope_original_max_position_embeddings",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all_dim",
        "truncate": "yarn_correction_range_round_to_int",
    },
}
"""`rope_type` -> its keys, and their fields. It is also the value of `--rope-scaling`, where "default" is "none"."""
OPTIONAL_ROPE_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
UNUSUAL_KEYS: tuple[str, ...] = ("moe_bias", "gated_attention", "quick_geglu", "swiglu_limit", "glu_linear_offset")
UNUSUAL_KEYS += ("zero_centered_gamma", "gated_shared_expert", "softmax_type")
"""Keys that are written only for values that are not the defaults of their fields."""
