"""The types of Hugging Face models that are read and written: one table of their keys in `config.json`.

This module needs only the standard library, because `--help` lists the types.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

OWN_TYPE = "megatron_ladder"
"""`model_type` of models that no plain type expresses; as in `hf_module/configuration_megatron_ladder.py`."""
AUTHORS_TYPE = "llamaLadder"
"""`model_type` of the paper's authors: Llama, with `ladder_layers`. It is only read."""
INSTELLA_TYPE = "instella_moe"
"""AMD's Instella-MoE, a DeepSeek-V3 (its `model_type`) with gated attention and the farskip wiring. It is only read."""
_INSTELLA_ARCHITECTURES = ["InstellaMoEForCausalLM"]
_LAYER_NORM = "LayerNorm"
_PLAIN_MLP = "an MLP without gates"
_MULTIPLIERS = "multipliers of embeddings, residuals and logits"
_SCALED = "scaled embeddings"
_AFTER = "norms after sub-blocks"
_WINDOWS = "sliding windows"
_ALL_HEADS = "one norm over all query heads"
_PAIRS = "rotary embeddings of neighbouring pairs"
_FUSED = "gates and ups in one tensor"
_MAMBA = "Mamba layers"
_LINEAR = "linear attention"
_INDEXER = "sparse attention with an indexer"
_SINKS = "attention sinks"
_CHUNKED = "chunked attention"
_POSITIONS = "learned positions"
_SQUARED = "squared ReLU"
_IMAGES = "images"
UNREADABLE: dict[str, tuple[str, ...]] = {
    "apertus": ("xIELU",),
    "arcee": (_SQUARED,),
    "bamba": (_MAMBA,),
    "bitnet": ("norms inside sub-blocks", _SQUARED),
    "bloom": (_LAYER_NORM, "ALiBi", _PLAIN_MLP),
    "cohere": (_LAYER_NORM, "scaled logits"),
    "cohere2": (_LAYER_NORM, "scaled logits", _WINDOWS),
    "dbrx": (_LAYER_NORM, "clipped queries, keys and values"),
    "deepseek_v32": (_INDEXER,),
    "deepseek_v4": (_INDEXER, _SINKS, _WINDOWS),
    "ernie4_5": (_PAIRS,),
    "ernie4_5_moe": (_PAIRS,),
    "exaone4": (_AFTER, _WINDOWS),
    "falcon": (_LAYER_NORM, _PLAIN_MLP),
    "falcon_h1": (_MAMBA,),
    "falcon_mamba": (_MAMBA,),
    "gemma": ("GeGLU", _SCALED),
    "gemma2": ("GeGLU", _SCALED, _AFTER, _WINDOWS, "soft-capped attention"),
    "gemma3": ("GeGLU", _SCALED, _AFTER, _WINDOWS, _IMAGES),
    "gemma3_text": ("GeGLU", _SCALED, _AFTER, _WINDOWS),
    "gemma4": (_SCALED, _AFTER, _WINDOWS, _IMAGES),
    "gemma4_text": (_SCALED, _AFTER, _WINDOWS),
    "glm": (_PAIRS, _FUSED),
    "glm4": (_PAIRS, _FUSED, _AFTER),
    "glm_moe_dsa": (_INDEXER,),
    "gpt2": (_LAYER_NORM, _POSITIONS, _PLAIN_MLP),
    "gpt_bigcode": (_LAYER_NORM, _POSITIONS, _PLAIN_MLP),
    "gpt_neox": (_LAYER_NORM, _PLAIN_MLP),
    "gptj": (_LAYER_NORM, _PLAIN_MLP),
    "granite": (_MULTIPLIERS,),
    "granitemoe": (_MULTIPLIERS,),
    "granitemoehybrid": (_MULTIPLIERS, _MAMBA),
    "helium": (_PAIRS,),
    "hunyuan_v1_dense": ("norms of heads after rotary embeddings",),
    "jamba": (_MAMBA,),
    "kimi_linear": (_LINEAR,),
    "lfm2": ("short convolutions",),
    "llama4": (_CHUNKED, "experts whose inputs are weighted instead of their outputs", _IMAGES),
    "llama4_text": (_CHUNKED, "experts whose inputs are weighted instead of their outputs"),
    "longcat_flash": ("experts that compute nothing",),
    "mamba": (_MAMBA,),
    "mamba2": (_MAMBA,),
    "mimo_v2_flash": (_SINKS, _WINDOWS),
    "minicpm3": (_MULTIPLIERS,),
    "minimax": (_LINEAR,),
    "minimax_m2": (_ALL_HEADS,),
    "ministral": (_WINDOWS,),
    "ministral3": ("queries scaled by their position",),
    "mistral3": (_IMAGES,),
    "mllama": (_IMAGES,),
    "mpt": (_LAYER_NORM, "ALiBi", _PLAIN_MLP),
    "nanochat": ("norms without weights", _SQUARED),
    "nemotron": (_LAYER_NORM, _SQUARED),
    "nemotron_h": (_MAMBA,),
    "olmo": (_LAYER_NORM,),
    "olmo2": (_AFTER, _ALL_HEADS),
    "olmo3": (_AFTER, _ALL_HEADS, _WINDOWS),
    "olmoe": (_ALL_HEADS,),
    "opt": (_LAYER_NORM, _POSITIONS, _PLAIN_MLP),
    "phi": (_LAYER_NORM, _PLAIN_MLP),
    "phi3": ("queries, keys and values in one tensor", _FUSED),
    "phimoe": (_LAYER_NORM, "a sparse mixer of experts"),
    "qwen2_5_vl": (_IMAGES,),
    "qwen2_vl": (_IMAGES,),
    "qwen3_vl": (_IMAGES,),
    "qwen3_vl_moe": (_IMAGES,),
    "smollm3": ("layers without rotary embeddings",),
    "stablelm": (_LAYER_NORM,),
    "starcoder2": (_LAYER_NORM, _PLAIN_MLP),
}
"""Other well-known `model_type` -> features of it that this package cannot compute, or tensors that it cannot read."""

SIZES: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim")
TRAITS = ("max_position_embeddings", "initializer_range", "rms_norm_eps", "tie_word_embeddings")
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_SCORES = ("shared_expert_intermediate_size", "scoring_func", "routed_scaling_factor", "use_expert_bias")
GROUPS = ("n_group", "topk_group")
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
_WIRING = ("residual_mode", "residual_staleness", "lanes", "ladder_layers", "desync_interval", "desync_tp")
WINDOWS = ("sliding_window", "layer_types")
_NO_WINDOW = {"sliding_window": None}
_UNUSED_WINDOW = {"use_sliding_window": False, **_NO_WINDOW}


class JoinedTensor(NamedTuple):
    """A tensor of a layer in files that has the rows of several tensors of a mixer.

    The rows of each are divided into groups: the first groups of all tensors precede the second ones.
    """

    stored: str
    """The last part of its name."""
    parts: tuple[str, ...]
    """The last parts of our names of the tensors."""
    groups: str = ""
    """The field of the model with the number of groups; "" for one."""


class MTPNames(NamedTuple):
    """How a type stores a drafting head of one layer. `{}` in names stands for the number of layers of the model."""

    key: str
    """The number of its layers in `config.json`."""
    parts: tuple[str, str, str, str]
    """Names of the modules with our `enorm`, `hnorm`, `eh_proj` and `head_norm`."""
    layer: str
    """First part of the names of the layer's own tensors."""
    has_copies: bool = False
    """Whether embedding and output head are stored again, as `embed_tokens` and `shared_head.head` of the layer."""

    def is_of_head(self, name: str, beyond: range) -> bool:
        """Return whether a name is that of a tensor of a head; `beyond` are the numbers of its layers."""
        common = re.escape(os.path.commonprefix((self.layer, *self.parts)))
        match = re.match(common.replace(r"\{\}", r"(\d{1,9})"), name)
        return match is not None and all(int(number) in beyond for number in match.groups())

    def replacements(self, layers: int) -> tuple[tuple[str, str], ...]:
        """Return what to replace in names as those of a layer after the last one, one after another."""
        prefix = f"model.layers.{layers}."
        parts = zip(("enorm", "hnorm", "eh_proj", "head_norm"), self.parts, strict=True)
        of_parts = ((f"{prefix}{ours}.", f"{theirs.format(layers)}.") for ours, theirs in parts)
        return (*of_parts, (prefix, self.layer.format(layers)))


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
    synonyms: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `same` with another value that has the same meaning."""
    keys: tuple[str, ...] = ()
    """Other keys. Those of latent attention are written only for models that have it, as are those of linear attention
    in a type that is no hybrid."""
    has_output_bias: bool = False
    """Whether `attention_bias` includes the output projection."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields in all models of the type."""
    fixed_with_experts: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields in all models of the type that have experts."""
    sliding_window: int | None = 4096
    """The default of the key."""
    windows: Literal["all", "upper"] | None = None
    """Layers with the `sliding_window` in a type whose `constants` are keys of models without windows: all, or those
    from `max_window_layers` on, unless `layer_types` lists others. None for a type that has none, or lists them."""
    rope_theta: float = 1e4
    """The default of the key."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The rotary embedding of files without `rope_parameters` and `rope_scaling`, if it is not the usual one."""
    partial_rotary_factor: float | None = None
    """The default of the key; None for a type that rotates whole heads."""
    quant_method: str = "fp8"
    """The quantisation that is read."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that other types require, or for which they have other defaults."""
    optional: tuple[str, ...] = ()
    """Keys of the experts that can be missing."""
    assumed_dense: int | None = None
    """The number of dense layers that transformers assumes without `mlp_layer_types`, whatever `first_k_dense_replace`
    is; None if it reads that key."""
    names: tuple[tuple[str, str], ...] = ()
    """Part of a tensor's name in most types, and in files of this one."""
    module_names: tuple[tuple[str, str], ...] = ()
    """The same for files with the names of transformers' modules, which have the first part of `names`."""
    needs_source: bool = False
    """Whether only a model that was imported from this type is written as it, because more programs read another type
    that expresses the same models."""
    expert_stacks: Literal["in rows", "alternating"] | None = None
    """The stacks of all experts of a layer in files: gates before ups, or transposed matrices in which they alternate;
    None for one tensor for each matrix."""
    attention_tensors: tuple[JoinedTensor, ...] = ()
    """Tensors of softmax attention that have the rows of several."""
    linear_tensors: tuple[JoinedTensor, ...] = ()
    """All tensors of linear attention, also those that have the rows of one of ours."""
    mtp: MTPNames | None = None
    """The names of a drafting head; None for a type without heads."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """First part of the names of tensors that are never read -> what they belong to."""

    @property
    def is_hybrid(self) -> bool:
        """Whether every model of the type has the keys of linear attention, and none has windows."""
        return {*LINEAR} <= {*self.required}


_LLAMA = _Type(architecture="LlamaForCausalLM", required=(), keys=("attention_bias", "mlp_bias"), has_output_bias=True)
_QWEN3 = _Type(
    architecture="Qwen3ForCausalLM",
    required=("num_key_value_heads", "head_dim"),
    constants=_UNUSED_WINDOW,
    keys=("attention_bias",),
    has_output_bias=True,
    fixed={"qk_layernorm": True},
    windows="upper",
    defaults={"max_window_layers": 28},
)
_NEXT_LAYER = "model.layers.{}."
_NEXTN = MTPNames(
    "num_nextn_predict_layers",
    (f"{_NEXT_LAYER}enorm", f"{_NEXT_LAYER}hnorm", f"{_NEXT_LAYER}eh_proj", f"{_NEXT_LAYER}shared_head.norm"),
    _NEXT_LAYER,
    has_copies=True,
)
_MTP = MTPNames(
    "mtp_num_hidden_layers",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mtp.layers.0.",
)
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_MIXTRAL_NAMES = (
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.gate.", ".block_sparse_moe.gate."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)
_SHARED_EXPERT_NAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
_HY_NAMES = (
    (".mlp.gate.weight", ".mlp.router.gate.weight"),
    (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
)
_GLM_EXPERTS: tuple[str, ...] = ("n_routed_experts", *_EXPERTS, "norm_topk_prob", "routed_scaling_factor", *GROUPS)
_GLM_EXPERTS += ("n_shared_experts", "first_k_dense_replace")
_DEEPSEEK_V3 = _Type(
    architecture="DeepseekV3ForCausalLM",
    required=("kv_lora_rank",),
    experts=_GLM_EXPERTS,
    constants={"num_nextn_predict_layers": 0},
    mtp=_NEXTN,
    same={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    keys=(*LATENT, "attention_bias"),
    has_output_bias=True,
    fixed_with_experts=_SIGMOID,
)
LINEAR: tuple[str, ...] = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
)
LINEAR += ("linear_num_value_heads",)
"""Keys of models with linear attention, besides `mamba_ssm_dtype`."""
HYBRID: Mapping[str, Any] = {
    **{"attn_output_gate": True, "output_gate_type": "swish"},
    # vLLM reads the type of the states from it.
    "mamba_ssm_dtype": "float32",
}
"""Keys that cannot have other values in any hybrid type, even in one that is written without them."""
_LINEAR_INPUTS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_LINEAR_TENSORS = (
    JoinedTensor("conv1d.weight", ("q_conv.weight", "k_conv.weight", "v_conv.weight")),
    JoinedTensor("A_log", ("A_log",)),
    JoinedTensor("dt_bias", ("dt_bias",)),
    JoinedTensor("norm.weight", ("norm.weight",)),
    JoinedTensor("out_proj.weight", ("o_proj.weight",)),
)
_QWEN3_5 = _Type(
    architecture="Qwen3_5ForCausalLM",
    required=("num_key_value_heads", "head_dim", *LINEAR),
    same={"attention_bias": False, **HYBRID},
    keys=("layer_types", *LINEAR),
    fixed={"qk_layernorm": True, "apply_layernorm_1p": True, "attention_output_gate": True},
    sliding_window=None,
    partial_rotary_factor=0.25,
    attention_tensors=(JoinedTensor("q_proj.weight", ("q_proj.weight", "gate_proj.weight"), "num_attention_heads"),),
    linear_tensors=(
        JoinedTensor("in_proj_qkv.weight", _LINEAR_INPUTS),
        JoinedTensor("in_proj_z.weight", ("gate_proj.weight",)),
        JoinedTensor("in_proj_b.weight", ("b_proj.weight",)),
        JoinedTensor("in_proj_a.weight", ("a_proj.weight",)),
        *_LINEAR_TENSORS,
    ),
    mtp=_MTP,
    left_out={"model.visual.": "the vision tower (model.visual)"},
)
TYPES = {
    "llama": _LLAMA,
    "mistral": _Type(architecture="MistralForCausalLM", constants=_NO_WINDOW, windows="all"),
    "qwen2": _Type(
        architecture="Qwen2ForCausalLM",
        constants=_UNUSED_WINDOW,
        fixed={"add_qkv_bias": True},
        windows="upper",
        defaults={"max_window_layers": 28},
    ),
    "qwen3": _QWEN3,
    "mixtral": _Type(
        architecture="MixtralForCausalLM",
        experts=("num_local_experts", "num_experts_per_tok"),
        constants=_NO_WINDOW,
        sliding_window=None,
        rope_theta=1e6,
        names=_MIXTRAL_NAMES,
    ),
    "qwen3_moe": replace(
        _QWEN3,
        architecture="Qwen3MoeForCausalLM",
        required=("num_key_value_heads",),
        experts=("num_experts", *_EXPERTS, "norm_topk_prob", "mlp_only_layers"),
        windows=None,
    ),
    "qwen2_moe": _Type(
        architecture="Qwen2MoeForCausalLM",
        experts=("num_experts", *_EXPERTS, "norm_topk_prob", "mlp_only_layers", "shared_expert_intermediate_size"),
        constants=_UNUSED_WINDOW,
        same={"qkv_bias": True},
        fixed={"add_qkv_bias": True},
        fixed_with_experts={"moe_shared_expert_gate": True},
        names=_SHARED_EXPERT_NAMES,
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        experts=("num_experts", *_EXPERTS, "shared_expert_intermediate_size"),
        same={**_QWEN3_5.same, "mlp_only_layers": []},
        fixed_with_experts={"moe_shared_expert_gate": True},
        # No layer has this width.
        defaults={"intermediate_size": 512},
        names=_SHARED_EXPERT_NAMES,
        expert_stacks="in rows",
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        experts=("num_experts", *_EXPERTS, "norm_topk_prob", "mlp_only_layers", "shared_expert_intermediate_size"),
        same={"attention_bias": False},
        fixed_with_experts={"moe_shared_expert_gate": True},
        names=_SHARED_EXPERT_NAMES,
        mtp=_MTP._replace(key="num_nextn_predict_layers"),
        linear_tensors=(
            JoinedTensor("in_proj_qkvz.weight", (*_LINEAR_INPUTS, "gate_proj.weight"), "linear_num_key_heads"),
            JoinedTensor("in_proj_ba.weight", ("b_proj.weight", "a_proj.weight"), "linear_num_key_heads"),
            *_LINEAR_TENSORS,
        ),
        needs_source=True,
    ),
    "glm4_moe": _Type(
        architecture="Glm4MoeForCausalLM",
        experts=_GLM_EXPERTS,
        constants={"num_nextn_predict_layers": 0},
        mtp=_NEXTN,
        keys=("attention_bias", "use_qk_norm"),
        fixed_with_experts=_SIGMOID,
        partial_rotary_factor=0.5,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        experts=(*_GLM_EXPERTS, "topk_method"),
        constants={},
        mtp=None,
        # transformers ignores norm_topk_prob.
        same={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "rope_interleave": True},
        keys=(*_DEEPSEEK_V3.keys, "mlp_bias"),
        fixed_with_experts={},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    # Kimi-K2, whose class is DeepSeek-V3's.
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, architecture="Glm4MoeLiteForCausalLM", experts=(*_GLM_EXPERTS, "mlp_layer_types")
    ),
    "hy_v3": _Type(
        architecture="HYV3ForCausalLM",
        required=("num_key_value_heads", "head_dim"),
        # vLLM reads expert_hidden_dim and first_k_dense_replace instead of moe_intermediate_size and mlp_layer_types.
        experts=(
            *("num_experts", *_EXPERTS, "expert_hidden_dim", "num_shared_experts", "router_scaling_factor"),
            *("mlp_layer_types", "first_k_dense_replace"),
        ),
        constants={"num_nextn_predict_layers": 0},
        mtp=_NEXTN._replace(parts=(*_NEXTN.parts[:3], f"{_NEXT_LAYER}final_layernorm"), has_copies=False),
        # vLLM ignores biases.
        same={
            **{"attention_bias": False, "mlp_bias": False, "qk_norm": True, "route_norm": True},
            **{"moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True},
        },
        fixed={"qk_layernorm": True},
        fixed_with_experts=_SIGMOID,
        rope_theta=11_158_840.0,
        defaults={"initializer_range": 0.006},
        optional=("expert_hidden_dim", "first_k_dense_replace"),
        assumed_dense=1,
        names=_HY_NAMES,
        module_names=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
        needs_source=True,
    ),
    "dots1": _Type(
        architecture="Dots1ForCausalLM",
        experts=_GLM_EXPERTS,
        constants=_NO_WINDOW,
        same={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        synonyms={"scoring_func": "noaux_tc"},
        keys=("attention_bias",),
        has_output_bias=True,
        fixed={"qk_layernorm": True},
        fixed_with_experts=_SIGMOID,
        windows="upper",
        defaults={"max_window_layers": 62},
        optional=GROUPS,
        needs_source=True,
    ),
    "solar_open": _Type(
        architecture="SolarOpenForCausalLM",
        required=("num_key_value_heads", "head_dim"),
        experts=tuple(key for key in _GLM_EXPERTS if key != "first_k_dense_replace"),
        same={"first_k_dense_replace": 0, "use_qk_norm": False},
        keys=("attention_bias",),
        fixed_with_experts=_SIGMOID,
        rope_theta=1e6,
        # As published. No layer has this width.
        defaults={"intermediate_size": 10240},
        optional=GROUPS,
        needs_source=True,
    ),
    "youtu": replace(
        _DEEPSEEK_V3,
        architecture="YoutuForCausalLM",
        required=("kv_lora_rank", "initializer_range"),
        experts=(),
        constants={},
        mtp=None,
        same={"rope_interleave": True},
        fixed_with_experts={},
        defaults={"tie_word_embeddings": True},
        needs_source=True,
    ),
    "gpt_oss": _Type(
        architecture="GptOssForCausalLM",
        required=("num_key_value_heads", "head_dim", "attention_bias", "swiglu_limit"),
        experts=("num_local_experts", "num_experts_per_tok"),
        same={"swiglu_alpha": 1.702},
        keys=("attention_bias", "swiglu_limit", *WINDOWS),
        has_output_bias=True,
        fixed={"softmax_type": "learnable", "quick_geglu": True, "glu_linear_offset": 1.0},
        fixed_with_experts={"add_moe_bias": True},
        sliding_window=128,
        rope_theta=150_000.0,
        rope={
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        quant_method="mxfp4",
        defaults={"attention_bias": True, "swiglu_limit": 7.0},
        names=((".mlp.gate.", ".mlp.router."),),
        expert_stacks="alternating",
    ),
    OWN_TYPE: _Type(
        architecture="MegatronLadderForCausalLM",
        experts=(
            "num_experts",
            *_EXPERTS,
            *_SCORES,
            *GROUPS,
            "norm_topk_prob",
            "expert_layers",
            "moe_bias",
            "gated_shared_expert",
        ),
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
            *(*LATENT, "gated_attention", "quick_geglu", "swiglu_limit", "glu_linear_offset"),
            *(*WINDOWS, *LINEAR, "softmax_type", "zero_centered_gamma"),
        ),
        same={"mamba_ssm_dtype": HYBRID["mamba_ssm_dtype"]},
        sliding_window=None,
        partial_rotary_factor=1.0,
        linear_tensors=_QWEN3_5.linear_tensors,
        mtp=_MTP,
    ),
    AUTHORS_TYPE: replace(_LLAMA, architecture=""),
    INSTELLA_TYPE: replace(
        _DEEPSEEK_V3,
        architecture="",
        required=("kv_lora_rank", "farskip"),
        keys=(*_DEEPSEEK_V3.keys, "gated_attention", "farskip"),
    ),
}
"""`model_type` -> its keys. A model is written as the first type that expresses it; see also `needs_source`."""


TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types with a vision tower, whose language model is read, as another type."""
TEXT_PREFIX = "model.language_model."
"""How names of tensors of a language model begin in files with a vision tower, instead of `model.`."""


def plain_architecture(model_type: str) -> str:
    """Return the class of transformers that computes models of a type; "" if there is none."""
    return TYPES[model_type].architecture if model_type in TYPES and model_type != OWN_TYPE else ""


def type_of(config: Mapping[str, Any]) -> str:
    """Return the key of `TYPES`: the `model_type`, unless the class is that of Instella, which has DeepSeek-V3's."""
    is_instella = config.get("architectures") == _INSTELLA_ARCHITECTURES
    return INSTELLA_TYPE if is_instella else str(config.get("model_type"))
