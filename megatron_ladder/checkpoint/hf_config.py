"""The `config.json` of a Hugging Face directory, read without trust."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from megatron_ladder.blueprint.model import LARGEST_SIZE, ModelConfig, model_errors
from megatron_ladder.blueprint.wiring import PER_RANK_MODES, WIRINGS
from megatron_ladder.errors import UserError, raise_user_errors

OWN_TYPE = "megatron_ladder"
"""`model_type` of models that no plain type expresses; as in `hf_module/configuration_megatron_ladder.py`."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    OWN_TYPE: "MegatronLadderForCausalLM",
}
"""`model_type` -> the class of a language model."""
AUTHORS_TYPE = "llamaLadder"
"""`model_type` of the paper's authors: Llama, with `ladder_layers`."""
READABLE_TYPES = (*CLASSES, AUTHORS_TYPE)
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}
"""`rope_type` -> `--rope-scaling`."""


_Size = Annotated[int, Meta(ge=1, le=LARGEST_SIZE)]
_Count = Annotated[int, Meta(ge=0, le=LARGEST_SIZE)]
_One = Annotated[float, Meta(ge=1, le=1)]


class _Rope(Struct):
    """One of the two spellings of a rotary embedding."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: _Size | None = None
    partial_rotary_factor: _One | None = None


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
    partial_rotary_factor: _One | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    original_max_position_embeddings: _Size | None = None
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
    """Read the `config.json` of a Llama, Mistral, Qwen2, Qwen3, of the paper's authors' or of the project's own type.

    Args:
        tensors: number of stored tensors, if known, which no number of layers can exceed.

    Raises:
        UserError: the model is not supported, or the file contradicts itself; each line names `source` and the key.
    """
    model_type, errors = config.get("model_type"), _Errors()
    if model_type not in READABLE_TYPES:
        raise UserError(f"{source}: model_type {model_type!r}: only {', '.join(READABLE_TYPES)} can be converted")
    if config.get("quantization_config") is not None:
        raise UserError(f"{source}: quantization_config: the weights are quantised, expected float32 or bfloat16")
    try:
        read = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise UserError(f"{source}: {error}") from None
    layers, heads = read.num_hidden_layers, read.num_attention_heads
    if tensors is not None and layers > tensors:
        expected = f"at most {tensors}, the number of stored tensors"
        raise UserError(f"{source}: num_hidden_layers: found {layers}, expected {expected}")
    is_llama, is_own = model_type in ("llama", AUTHORS_TYPE), model_type == OWN_TYPE
    if model_type == "mistral" and config.get("sliding_window", 4096) is not None:
        expected = "null (without the key, it is 4096): sliding-window attention is not supported"
        errors.append(("sliding_window", read.sliding_window, expected))
    if model_type in ("qwen2", "qwen3") and read.use_sliding_window:
        errors.append(("use_sliding_window", True, "false: sliding-window attention is not supported"))
    if read.num_key_value_heads is None and not is_llama:
        errors.append(("num_key_value_heads", None, "a number"))
    if read.head_dim is None and model_type == "qwen3":
        errors.append(("head_dim", None, "a number"))
    if read.final_logit_softcapping is not None and not is_own:
        expected = f"null in a {model_type} model, whose logits are not bounded"
        errors.append(("final_logit_softcapping", read.final_logit_softcapping, expected))
    attention_bias = bool(read.attention_bias) and (is_llama or is_own or model_type == "qwen3")
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
        "add_attention_output_bias": bool(read.attention_output_bias) if is_own else attention_bias,
        "add_mlp_bias": bool(read.mlp_bias) and (is_llama or is_own),
        "qk_layernorm": bool(read.qk_norm) if is_own else model_type == "qwen3",
        **_rope(config, read, errors),
        **_wiring(model_type, read, errors),
    }
    raise_user_errors(
        f"{source}: {key}: found {'nothing' if found is None else f'{found!r:.500}'}, expected {expected}"
        for key, found, expected in errors
    )
    model = ModelConfig(**values)
    raise_user_errors(f"{source}: {error}" for error in model_errors(model))
    return model.canonical()


def _rope(config: Mapping[str, Any], read: _Config, errors: _Errors) -> dict[str, Any]:
    """Return the rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`, or both.

    If a file has both spellings, they must agree, since programs differ in which one they read.
    """
    thetas = {"rope_theta": read.rope_theta} if read.rope_theta is not None else {}
    found: dict[str, dict[str, Any]] = {}
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
    for what, values in (("rope_theta", thetas), ("rotary embedding", found)):
        if len({str(value) for value in values.values()}) > 1:
            both = " and ".join(f"{key} {value}" for key, value in values.items())
            errors.append((" and ".join(values), both, f"one {what}"))
    return {"rotary_base": next(iter(thetas.values()), 10000.0), **next(iter(found.values()), {})}


def _wiring(model_type: str, read: _Config, errors: _Errors) -> dict[str, Any]:
    """Return the fields of the wiring. Layers are a list, an integer N (the upper N), or null (none)."""
    given, count, mode = read.ladder_layers, read.num_hidden_layers, read.residual_mode
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
        if bool(number) != (mode in PER_RANK_MODES):
            errors.append((key, number, f"{'a number' if not number else '0'} with residual_mode {mode!r}"))
    return {
        "residual_mode": mode,
        "ladder_layers": layers,
        "residual_staleness": read.residual_staleness or 1,
        "lanes": read.lanes or 0,
        **(desync if mode in PER_RANK_MODES else {}),
    }


def token_ids(values: Any, source: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the ids of special tokens in the JSON object of a file. Null, and -1 except for the end, mean none.

    Raises:
        UserError: the values are not an object, or an id is not an integer, or not one of the vocabulary if its size is
            given; each line names `source`.
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
