"""The types of Hugging Face models that are read and written: one table of their keys in `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta, Struct

from megatron_ladder.blueprint.model import ModelConfig

OWN_TYPE = "megatron_ladder"
"""`model_type` of models that no plain type expresses; as in `hf_module/configuration_megatron_ladder.py`."""
AUTHORS_TYPE = "llamaLadder"
"""`model_type` of the paper's authors: Llama, with `ladder_layers`. It is only read."""
INSTELLA_TYPE = "instella_moe"
"""AMD's Instella-MoE, a DeepSeek-V3 (its `model_type`) with gated attention and the farskip wiring. It is only read."""
_INSTELLA_ARCHITECTURES = ["InstellaMoEForCausalLM"]
UNREADABLE = {
    "longcat_flash": "experts that compute nothing",
    "gpt_oss": "attention with sinks and sliding windows, and experts with biases and clamped activations",
    "qwen2_moe": "a shared expert behind a gate",
    "qwen3_next": "linear attention, and a shared expert behind a gate",
    "llama4": "chunked attention, and experts whose inputs are weighted instead of their outputs",
}
"""Other well-known `model_type` with experts -> what they have that this package cannot compute."""

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
    attention_output_bias: Annotated[bool | None, "add_attention_output_bias"] = None
    mlp_bias: Annotated[bool | None, "add_mlp_bias"] = None
    qk_norm: Annotated[bool | None, "qk_layernorm"] = None
    final_logit_softcapping: Annotated[float | None, "logit_soft_cap"] = None
    sliding_window: _Size | None = None
    use_sliding_window: bool | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_parameters: HFRope | None = None
    rope_scaling: HFRope | None = None
    original_max_position_embeddings: _Size | None = None
    num_experts: _Count | None = None
    num_local_experts: Annotated[_Size | None, "num_experts"] = None
    n_routed_experts: Annotated[_Size | None, "num_experts"] = None
    num_experts_per_tok: Annotated[_Size | None, "moe_router_topk"] = None
    moe_intermediate_size: Annotated[_Count | None, "moe_ffn_hidden_size"] = None
    shared_expert_intermediate_size: Annotated[_Count | None, "moe_shared_expert_intermediate_size"] = None
    n_shared_experts: _Count | None = None
    scoring_func: Annotated[Literal["softmax", "sigmoid"] | None, "moe_router_score_function"] = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Annotated[float | None, "moe_router_topk_scaling_factor"] = None
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
    },
}
"""`rope_type` -> its keys, and their fields. It is also the value of `--rope-scaling`, where "default" is "none"."""
OPTIONAL_ROPE_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
SIZES: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim")
TRAITS = ("max_position_embeddings", "initializer_range", "rms_norm_eps", "tie_word_embeddings")
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_SCORES = ("shared_expert_intermediate_size", "scoring_func", "routed_scaling_factor", "use_expert_bias")
GROUPS = ("n_group", "topk_group")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT = (*_LATENT_SIZES, "q_lora_rank")
_WIRING = ("residual_mode", "residual_staleness", "lanes", "ladder_layers", "desync_interval", "desync_tp")
_NO_WINDOW = {"sliding_window": None}
_UNUSED_WINDOW = {"use_sliding_window": False, **_NO_WINDOW}


@dataclass(frozen=True, kw_only=True)
class _Type:
    """What a `model_type` has besides the keys of all types, `SIZES` and `TRAITS`."""

    architecture: str = ""
    """The class of a language model; "" for a type that is only read."""
    required: tuple[str, ...] = ("num_key_value_heads",)
    """Keys that must be present, besides those that every type requires."""
    experts: tuple[str, ...] = ()
    """Keys of the experts, beginning with their number. The lists of dense layers and of kinds can be missing."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written with the same values for all models."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written with the same values for all models, and cannot have others."""
    keys: tuple[str, ...] = ()
    """Other keys. Those of latent attention and of gates are written only for models that have them."""
    has_output_bias: bool = False
    """Whether `attention_bias` includes the output projection."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields in all models of the type."""
    fixed_with_experts: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields in all models of the type that have experts."""
    sliding_window: int | None = 4096
    """The default of the key."""
    rope_theta: float = 1e4
    """The default of the key."""
    partial_rotary_factor: float | None = None
    """The default of the key; None for a type that rotates whole heads."""


_LLAMA = _Type(architecture="LlamaForCausalLM", required=(), keys=("attention_bias", "mlp_bias"), has_output_bias=True)
_QWEN3 = _Type(
    architecture="Qwen3ForCausalLM",
    required=("num_key_value_heads", "head_dim"),
    constants=_UNUSED_WINDOW,
    keys=("attention_bias",),
    has_output_bias=True,
    fixed={"qk_layernorm": True},
)
_GLM_EXPERTS: tuple[str, ...] = ("n_routed_experts", *_EXPERTS, "norm_topk_prob", "routed_scaling_factor", *GROUPS)
_GLM_EXPERTS += ("n_shared_experts", "first_k_dense_replace")
_DEEPSEEK_V3 = _Type(
    architecture="DeepseekV3ForCausalLM",
    required=_LATENT_SIZES,
    experts=_GLM_EXPERTS,
    constants={"num_nextn_predict_layers": 0},
    same={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    keys=(*LATENT, "attention_bias"),
    has_output_bias=True,
    fixed_with_experts={"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
)
TYPES = {
    "llama": _LLAMA,
    "mistral": _Type(architecture="MistralForCausalLM", constants=_NO_WINDOW),
    "qwen2": _Type(architecture="Qwen2ForCausalLM", constants=_UNUSED_WINDOW, fixed={"add_qkv_bias": True}),
    "qwen3": _QWEN3,
    "mixtral": _Type(
        architecture="MixtralForCausalLM",
        experts=("num_local_experts", "num_experts_per_tok"),
        constants=_NO_WINDOW,
        sliding_window=None,
        rope_theta=1e6,
    ),
    "qwen3_moe": replace(
        _QWEN3,
        architecture="Qwen3MoeForCausalLM",
        required=("num_key_value_heads",),
        experts=("num_experts", *_EXPERTS, "norm_topk_prob", "mlp_only_layers"),
    ),
    "glm4_moe": _Type(
        architecture="Glm4MoeForCausalLM",
        experts=_GLM_EXPERTS,
        constants={"num_nextn_predict_layers": 0},
        keys=("attention_bias", "use_qk_norm"),
        fixed_with_experts={"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        partial_rotary_factor=0.5,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        experts=(*_GLM_EXPERTS, "topk_method"),
        constants={},
        # transformers ignores norm_topk_prob.
        same={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "rope_interleave": True},
        keys=(*_DEEPSEEK_V3.keys, "mlp_bias"),
        fixed_with_experts={},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, architecture="Glm4MoeLiteForCausalLM", experts=(*_GLM_EXPERTS, "mlp_layer_types")
    ),
    OWN_TYPE: _Type(
        architecture="MegatronLadderForCausalLM",
        experts=("num_experts", *_EXPERTS, *_SCORES, *GROUPS, "norm_topk_prob", "expert_layers"),
        constants={
            "auto_map": {
                "AutoConfig": f"configuration_{OWN_TYPE}.MegatronLadderConfig",
                "AutoModel": f"modeling_{OWN_TYPE}.MegatronLadderModel",
                "AutoModelForCausalLM": f"modeling_{OWN_TYPE}.MegatronLadderForCausalLM",
                "AutoModelForSequenceClassification": f"modeling_{OWN_TYPE}.MegatronLadderForSequenceClassification",
            }
        },
        keys=(
            *("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm", "final_logit_softcapping", *_WIRING),
            *(*LATENT, "gated_attention"),
        ),
        partial_rotary_factor=1.0,
    ),
    AUTHORS_TYPE: replace(_LLAMA, architecture=""),
    INSTELLA_TYPE: replace(
        _DEEPSEEK_V3,
        architecture="",
        required=(*_LATENT_SIZES, "farskip"),
        keys=(*_DEEPSEEK_V3.keys, "gated_attention", "farskip"),
    ),
}
"""`model_type` -> its keys. A model is written as the first type that expresses it."""


def plain_architecture(model_type: str) -> str:
    """Return the class of transformers that computes models of a type; "" if there is none."""
    return TYPES[model_type].architecture if model_type in TYPES and model_type != OWN_TYPE else ""


def type_of(config: Mapping[str, Any]) -> str:
    """Return the key of `TYPES`: the `model_type`, unless the class is that of Instella, which has DeepSeek-V3's."""
    is_instella = config.get("architectures") == _INSTELLA_ARCHITECTURES
    return INSTELLA_TYPE if is_instella else str(config.get("model_type"))
