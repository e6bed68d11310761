"""The `config.json` of a Hugging Face directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.errors import UserError, raise_user_errors

OWN_TYPE = "megatron_ladder"
"""`model_type` of models that no plain type expresses; as in `hf_module/configuration_megatron_ladder.py`."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    OWN_TYPE: "MegatronLadderForCausalLM",
}
"""`model_type` -> the class of a language model."""
AUTHORS_TYPE = "llamaLadder"
"""`model_type` of the paper's authors: Llama, with `ladder_layers`."""
READABLE_TYPES = (*CLASSES, AUTHORS_TYPE)
_LATENT = "latent attention, whose keys and values are compressed"
_UNREADABLE = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "longcat_flash": f"{_LATENT}, and experts that compute nothing",
    "gpt_oss": "attention with sinks and sliding windows, and experts with biases and clamped activations",
    "qwen2_moe": "a shared expert behind a gate",
    "qwen3_next": "linear attention, and a shared expert behind a gate",
    "llama4": "chunked attention, and experts whose inputs are weighted instead of their outputs",
}
"""Other well-known `model_type` with experts -> what they have that this package cannot compute."""
EXPERT_FIELDS = {
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "scoring_func": "moe_router_score_function",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "use_expert_bias": "moe_router_enable_expert_bias",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
}
"""Key of experts -> field of the model."""
_QWEN_KEYS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
_GLM_KEYS = (*_QWEN_KEYS, "routed_scaling_factor", "n_group", "topk_group")
EXPERT_KEYS: dict[str, tuple[str, ...]] = {
    "mixtral": ("num_experts_per_tok",),
    "qwen3_moe": (*_QWEN_KEYS, "mlp_only_layers"),
    "glm4_moe": (*_GLM_KEYS, "n_shared_experts", "first_k_dense_replace"),
    OWN_TYPE: (*EXPERT_FIELDS, "norm_topk_prob", "expert_layers"),
}
"""`model_type` -> keys of its experts besides their number. They must be present, except for Qwen's dense layers."""
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}
"""`rope_type` -> `--rope-scaling`."""


_Size = Annotated[int, Meta(ge=1, lt=2**31)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]


class _Rope(Struct):
    """One of the two spellings of a rotary embedding."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: _Size | None = None
    partial_rotary_factor: float | None = None


class _Config(Struct):
    """The keys that are read. Sizes must be present: the defaults of other programs are not assumed."""

    num_hidden_layers: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: float
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    initializer_range: float | None = None
    hidden_act: Literal["silu", "swish"] = "silu"
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    attention_output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = None
    final_logit_softcapping: float | None = None
    sliding_window: _Size | None = None
    use_sliding_window: bool | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    original_max_position_embeddings: _Size | None = None
    num_experts: _Count | None = None
    num_local_experts: _Size | None = None
    n_routed_experts: _Size | None = None
    num_experts_per_tok: _Size | None = None
    moe_intermediate_size: _Count | None = None
    shared_expert_intermediate_size: _Count | None = None
    n_shared_experts: _Count | None = None
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float | None = None
    use_expert_bias: bool | None = None
    n_group: _Size | None = None
    topk_group: _Size | None = None
    expert_layers: list[_Count] | None = None
    decoder_sparse_step: _Size | None = None
    mlp_only_layers: list[_Count] | None = None
    first_k_dense_replace: _Count | None = None
    num_nextn_predict_layers: _Count | None = None
    use_qk_norm: bool | None = None
    ladder_layers: _Count | list[_Count] | None = None
    residual_mode: str | None = None
    residual_staleness: _Size | None = None
    lanes: _Count | None = None
    desync_interval: _Count | None = None
    desync_tp: _Count | None = None


_Errors = list[tuple[str, object, str]]
"""Key, what was found (None for a key that is missing or null), and what was expected."""


def model_config_from_hf(
    config: Mapping[str, Any], source: str = "config.json", tensors: int | None = None
) -> ModelConfig:
    """Read the `config.json` of a type of `READABLE_TYPES`; raise UserError for other models and contradictions.

    `tensors` is the number of stored tensors, if known, which no number of layers can exceed.
    """
    model_type, errors = config.get("model_type"), _Errors()
    if model_type not in READABLE_TYPES:
        lacking = _UNREADABLE.get(str(model_type))
        reason = f"has {lacking}: " if lacking else ""
        raise UserError(
            f"{source}: model_type {model_type!r}: {reason}only {', '.join(READABLE_TYPES)} can be converted"
        )
    if config.get("quantization_config") is not None:
        raise UserError(f"{source}: quantization_config: the weights are quantised, expected float32 or bfloat16")
    try:
        read = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise UserError(f"{source}: {error}") from None
    heads, found = read.num_attention_heads, read.num_hidden_layers
    if tensors is not None and found > tensors:
        expected = f"at most {tensors}, the number of stored tensors"
        raise UserError(f"{source}: num_hidden_layers: found {found}, expected {expected}")
    is_llama, is_own = model_type in ("llama", AUTHORS_TYPE), model_type == OWN_TYPE
    layers, rest = divmod(found, attentions_per_layer(read.residual_mode if is_own else None))
    if rest:
        errors.append(("num_hidden_layers", found, f"two attentions for each layer of {read.residual_mode}"))
    # Without the key, it is 4096, but for Mixtral. Qwen's does not count without use_sliding_window.
    window = config.get("sliding_window", None if model_type == "mixtral" else 4096)
    if window is not None and (model_type in ("mistral", "mixtral") or read.use_sliding_window):
        errors.append(("sliding_window", window, "null: sliding-window attention is not supported"))
    required = (() if is_llama else ("num_key_value_heads",)) + (("head_dim",) if model_type == "qwen3" else ())
    errors += [(key, None, "a number") for key in required if getattr(read, key) is None]
    if read.final_logit_softcapping is not None and not is_own:
        expected = f"null in a {model_type} model, whose logits are not bounded"
        errors.append(("final_logit_softcapping", read.final_logit_softcapping, expected))
    is_glm = model_type == "glm4_moe"
    has_bias_key = is_llama or is_own or is_glm or model_type in ("qwen3", "qwen3_moe")
    attention_bias = bool(read.attention_bias) and has_bias_key
    qk_norm = {OWN_TYPE: read.qk_norm, "glm4_moe": read.use_qk_norm}.get(model_type, model_type.startswith("qwen3"))
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": read.hidden_size,
        "ffn_hidden_size": read.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": read.num_key_value_heads or heads,
        "head_dim": read.head_dim or max(read.hidden_size // heads, 1),
        "vocab_size": read.vocab_size,
        "max_position_embeddings": read.max_position_embeddings,
        "norm_epsilon": read.rms_norm_eps,
        "tie_embeddings": bool(read.tie_word_embeddings),
        "init_method_std": 0.02 if read.initializer_range is None else read.initializer_range,
        "logit_soft_cap": read.final_logit_softcapping,
        "add_qkv_bias": attention_bias or model_type == "qwen2",
        "add_attention_output_bias": bool(read.attention_output_bias) if is_own else attention_bias and not is_glm,
        "add_mlp_bias": bool(read.mlp_bias) and (is_llama or is_own),
        "qk_layernorm": bool(qk_norm),
        **_rope(config, read, model_type, errors),
        **_experts(model_type, read, layers, errors),
        **_wiring(model_type, read, layers, errors),
    }
    raise_user_errors(
        f"{source}: {key}: found {'nothing' if found is None else f'{found!r:.500}'}, expected {expected}"
        for key, found, expected in errors
    )
    model = ModelConfig(**values)
    raise_user_errors(f"{source}: {error}" for error in model_errors(model))
    return model.canonical()


def attentions_per_layer(residual_mode: str | None) -> int:
    """Return how many layers of transformers, each of which has keys and values, a layer of a wiring is."""
    kinds = WIRINGS[residual_mode].sub_blocks if residual_mode in WIRINGS else ()
    return max(1, sum(kind.attends for kind in kinds))


def _experts(model_type: str, read: _Config, count: int, errors: _Errors) -> dict[str, Any]:
    """Return the fields of the experts; `count` is the number of layers."""
    numbers = {one for one in (read.num_experts, read.num_local_experts, read.n_routed_experts) if one}
    if model_type not in EXPERT_KEYS or (model_type == OWN_TYPE and not numbers):
        return {}
    if len(numbers) != 1:
        errors.append(("num_experts, num_local_experts or n_routed_experts", sorted(numbers) or None, "one number"))
    # Keys of other types have no meaning in this one.
    given = {key: getattr(read, key) for key in EXPERT_KEYS[model_type]}
    absent = [key for key, value in given.items() if value is None and key != "mlp_only_layers"]
    errors += [(key, None, "a value") for key in absent]
    given = {key: value for key, value in given.items() if value is not None}
    step = (read.decoder_sparse_step or 1) if model_type == "qwen3_moe" else 1
    sparse = [layer for layer in range(step - 1, count, step) if layer not in given.get("mlp_only_layers", ())]
    layers = given.get("expert_layers", sparse[given.get("first_k_dense_replace", 0) :])
    if not layers:
        return {}
    width = given.get("moe_intermediate_size", read.intermediate_size)
    of_glm = {
        "moe_shared_expert_intermediate_size": given.get("n_shared_experts", 0) * width,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    return {
        "num_experts": max(numbers, default=1),
        "moe_layers": tuple(sorted(set(layers))),
        "moe_ffn_hidden_size": width,
        "moe_router_unnormalized": not given.get("norm_topk_prob", True),
        **{EXPERT_FIELDS[key]: value for key, value in given.items() if key in EXPERT_FIELDS},
        **(of_glm if model_type == "glm4_moe" else {}),
    }


def _rope(config: Mapping[str, Any], read: _Config, model_type: str, errors: _Errors) -> dict[str, Any]:
    """Return the rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`, or both.

    If a file has both spellings, they must agree, since programs differ in which one they read.
    """
    thetas = {"rope_theta": read.rope_theta} if read.rope_theta is not None else {}
    found: dict[str, dict[str, Any]] = {}
    parts = {"partial_rotary_factor": read.partial_rotary_factor}
    for key, rope in (("rope_parameters", read.rope_parameters), ("rope_scaling", read.rope_scaling)):
        if key not in config:
            continue
        rope = rope or _Rope()
        kind = rope.rope_type or rope.type or "default"
        if kind != (rope.type or kind):
            errors.append((f"{key}.type", rope.type, f"the same as rope_type, {kind!r}"))
        if any(isinstance(value, dict) for value in (config[key] or {}).values()):
            kind = "one for each kind of layer"
        if kind not in ROPE_TYPES:
            errors.append((f"{key}.rope_type", kind, " or ".join(ROPE_TYPES)))
            continue
        if rope.rope_theta is not None:
            thetas[f"{key}.rope_theta"] = rope.rope_theta
        parts[f"{key}.partial_rotary_factor"] = rope.partial_rotary_factor
        outer, name = read.original_max_position_embeddings, "original_max_position_embeddings"
        original = rope.original_max_position_embeddings or outer or read.max_position_embeddings
        scaling = {"rope_scaling_factor": rope.factor} if kind != "default" else {}
        if kind == "llama3":
            scaling |= {
                "rope_low_freq_factor": rope.low_freq_factor,
                "rope_high_freq_factor": rope.high_freq_factor,
                f"rope_{name}": original,
            }
            if outer not in (None, original):
                errors.append((f"{name} and {key}.{name}", f"{outer} and {original}", "one number"))
        for field, value in scaling.items():
            if value is None:
                errors.append((f"{key}.{field.removeprefix('rope_').removeprefix('scaling_')}", None, "a number"))
        found[key] = {"rope_scaling": ROPE_TYPES[kind], **scaling}
    parts = {key: part for key, part in parts.items() if part is not None}
    part = next(iter(parts.values()), 0.5 if model_type == "glm4_moe" else 1.0)
    if part != 1 and model_type not in ("glm4_moe", OWN_TYPE):
        errors.append((next(iter(parts)), part, f"1 in a {model_type} model, which rotates whole heads"))
    for what, values in (("rope_theta", thetas), ("rotary embedding", found), ("partial_rotary_factor", parts)):
        if len({str(value) for value in values.values()}) > 1:
            both = " and ".join(f"{key} {value}" for key, value in values.items())
            errors.append((" and ".join(values), both, f"one {what}"))
    base = next(iter(thetas.values()), 1e6 if model_type == "mixtral" else 1e4)
    return {"rotary_base": base, "rotary_percent": part, **next(iter(found.values()), {})}


def _wiring(model_type: str, read: _Config, count: int, errors: _Errors) -> dict[str, Any]:
    """Return the fields of the wiring. Layers are a list, an integer N (the upper N), or null (none)."""
    given, mode = read.ladder_layers, read.residual_mode
    if isinstance(given, int):
        layers = tuple(range(max(count - given, 0), count))
        is_valid = given <= count
    else:
        layers = tuple(sorted(given or ()))
        is_valid = len(set(layers)) == len(layers) and all(layer < count for layer in layers)
    if not is_valid:
        errors.append(("ladder_layers", given, f"at most the {count} layers, or different indices of them"))
        return {}
    if model_type == AUTHORS_TYPE:
        return {"residual_mode": "ladder" if layers else "standard", "ladder_layers": layers}
    if model_type != OWN_TYPE:
        if layers:
            errors.append(("ladder_layers", list(layers), f"none in a {model_type} model, which has no ladder layers"))
        return {}
    if mode not in WIRINGS:
        errors.append(("residual_mode", mode, " or ".join(map(repr, WIRINGS))))
        return {}
    if layers and not WIRINGS[mode].late:
        errors.append(("ladder_layers", list(layers), f"none with residual_mode {mode!r}"))
    desync = {"desync_interval": read.desync_interval or 0, "desync_tp": read.desync_tp or 0}
    for key, number in desync.items():
        if bool(number) != (WIRINGS[mode].stream == "per rank"):
            errors.append((key, number, f"{'a number' if not number else '0'} with residual_mode {mode!r}"))
    return {
        "residual_mode": mode,
        "ladder_layers": layers,
        "residual_staleness": read.residual_staleness or 1,
        "lanes": read.lanes or 0,
        **(desync if WIRINGS[mode].stream == "per rank" else {}),
    }


def token_ids(values: Any, source: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the ids of special tokens in the JSON object of a file. Null, and -1 except for the end, mean none.

    Raises UserError if an id is not an integer, or not one of the vocabulary, if its size is given.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: found {values!r:.60}, expected an object with {', '.join(TOKEN_KEYS)}")
    ids, errors = {}, []
    for key in TOKEN_KEYS:
        value, is_end = values.get(key), key == "eos_token_id"
        if value is None or (value == -1 and not is_end):
            continue
        listed = value if is_end and isinstance(value, list) else [value]
        if all(type(one) is int and (vocab_size is None or 0 <= one < vocab_size) for one in listed):
            ids[key] = value
        else:
            bounds = "" if vocab_size is None else f" of 0-{vocab_size - 1}"
            errors.append(f"{source}: {key}: found {value!r:.60}, expected an id{bounds}, or null")
    raise_user_errors(errors)
    return ids


def end_ids(ids: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end texts, of which the result of `token_ids` may have none, one or a list."""
    found = ids.get("eos_token_id", [])
    return found if isinstance(found, list) else [found]
