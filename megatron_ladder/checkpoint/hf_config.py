"""The `config.json` of a Hugging Face directory, read and written from one table of model types.

A model with the ordinary wiring is written as the plain type that expresses it exactly, so that every program that
reads Llama can open it. Any other model gets the project's own type, whose code is part of the directory: programs that
do not run that code reject the directory, whereas they would silently compute wrong results for a type such as llama.

`TYPES` lists the keys of each type. Reading copies their values to the fields of `ModelConfig`, and writing copies the
fields to the keys. What a type cannot express is not written, so the model that is read differs: `hf_type` compares the
two to find the type of a model.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.checkpoint.hf_keys import FIELDS, ROPE_FIELDS, UNUSUAL_KEYS, HFKeys, KeyErrors
from megatron_ladder.checkpoint.hf_rope import read_rope, rope_keys
from megatron_ladder.checkpoint.hf_types import (
    AUTHORS_TYPE,
    GROUPS,
    HYBRID,
    INSTELLA_TYPE,
    LATENT,
    LINEAR,
    OWN_TYPE,
    SIZES,
    TEXT_TYPES,
    TRAITS,
    TYPES,
    UNREADABLE,
    WINDOWS,
    type_of,
)
from megatron_ladder.checkpoint.quantization import check_quantization
from megatron_ladder.errors import Problem, UserError, Vocabulary, raise_user_errors
from megatron_ladder.typed import typed

_TRANSFORMERS = "5.23.0"
"""The version with which exported directories are tested."""


def model_config_from_hf(
    config: Mapping[str, Any], source: str = "config.json", tensors: int | None = None
) -> ModelConfig:
    """Read the `config.json` of one of `TYPES`, except for a drafting head; raise UserError for other models and
    contradictions.

    `tensors` is the number of stored tensors, if known, which no number of layers can exceed.
    """
    config = text_config(config, source)
    model_type = type_of(config)
    errors = KeyErrors()
    if model_type not in TYPES:
        raise UserError(f"{source}: {_type_error(config.get('model_type'))}")
    row = TYPES[model_type]
    check_quantization(config, source, row.quant_method)
    if row.rope and not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": row.rope, "rope_scaling": row.rope}
    try:
        read = typed({**row.defaults, **config}, HFKeys)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    attentions = read.num_hidden_layers
    if tensors is not None and attentions > tensors:
        expected = f"at most {tensors}, the number of stored tensors"
        raise UserError(f"{source}: num_hidden_layers: found {attentions}, expected {expected}")
    mode = read.residual_mode if model_type == OWN_TYPE else None
    per_layer = _attentions_per_layer(mode)
    layers, rest = divmod(attentions, per_layer)
    if rest:
        errors.append(("num_hidden_layers", attentions, f"two attentions for each layer of {mode}"))
    given = {key: value for key, value in msgspec.structs.asdict(read).items() if value is not None}
    errors += [(key, None, "a value") for key in row.required if key not in given]
    if read.experts_per_token not in (None, read.num_experts_per_tok):
        both = f"{read.experts_per_token} and {read.num_experts_per_tok}"
        errors.append(("experts_per_token and num_experts_per_tok", both, "one number"))
    errors += _unsupported(model_type, given)
    heads = read.num_attention_heads
    values: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": max(read.hidden_size // heads, 1)}
    values |= _copied(given, (*SIZES, *TRAITS, *row.keys))
    if "kv_lora_rank" in values:
        # Null stands for queries without a latent. The default of the key differs between programs.
        known = given.keys() | ({"q_lora_rank"} & config.keys())
        errors += [(key, None, "a value, as in all models with kv_lora_rank") for key in LATENT if key not in known]
        # Programs disagree on the values of these keys.
        width = given.get("qk_nope_head_dim", 0) + given.get("qk_rope_head_dim", 0)
        values |= {"num_key_value_heads": 1, "head_dim": width}
    if row.has_output_bias:
        values["add_attention_output_bias"] = values.get("add_qkv_bias", False)
    values |= {
        **row.fixed,
        "num_layers": layers,
        **_linear_layers(model_type, read, per_layer, errors),
        **_windows(model_type, config.get("sliding_window", row.sliding_window), read, per_layer, errors),
        **read_rope(config, read, model_type, errors),
        **_experts(model_type, given, layers, errors),
        **_wiring(model_type, read, layers, errors),
    }
    raise_user_errors(
        f"{source}: {key}: found {'nothing' if value is None else f'{value!r:.500}'}, expected {expected}"
        for key, value, expected in errors
    )
    model = ModelConfig(**values)
    with Vocabulary(str, _spellings(given)).in_messages():
        raise_user_errors(error.noted(f"{source}: ") for error in model_errors(model))
    return model.canonical()


def text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the `config.json` of the language model of a model with a vision tower, and any other one as it is."""
    model_type, inner = type_of(config), config.get("text_config")
    if model_type not in TEXT_TYPES:
        return config
    if not isinstance(inner, dict):
        raise UserError(
            f"{source}: text_config: found {inner!r:.100}, expected an object with the keys of the text model"
        )
    tied = {bool(keys["tie_word_embeddings"]) for keys in (config, inner) if "tie_word_embeddings" in keys}
    if len(tied) > 1:
        raise UserError(f"{source}: tie_word_embeddings and text_config.tie_word_embeddings differ: expected one value")
    written = TEXT_TYPES[model_type]
    outer = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    return {**outer, **inner, "model_type": written, "architectures": [TYPES[written].architecture]}


def _spellings(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the key of the file for each field of a model; keys that are given take precedence over synonyms."""
    keys = {**FIELDS, **{key: field for fields in ROPE_FIELDS.values() for key, field in fields.items()}}
    keys |= {"rope_theta": "rotary_base", "partial_rotary_factor": "rotary_percent", "layer_types": "window_layers"}
    return {field: key for key, field in sorted(keys.items(), key=lambda item: item[0] in given)}


def _type_error(model_type: object) -> str:
    if isinstance(model_type, str) and model_type in UNREADABLE:
        *others, last = UNREADABLE[model_type]
        lacking = f"{', '.join(others)} and {last}" if others else last
        return f"model_type {model_type} needs {lacking}, which are not supported"
    found = "nothing" if model_type is None else repr(model_type)
    return f"model_type: found {found}, expected one of {', '.join((*TYPES, *TEXT_TYPES))}"


def _linear_layers(model_type: str, read: HFKeys, attentions_per_layer: int, errors: KeyErrors) -> dict[str, Any]:
    """Return the fields of linear attention; without `layer_types`, all but every fourth layer of a hybrid has it."""
    row, count = TYPES[model_type], read.num_hidden_layers
    kinds: Sequence[str] | None = read.layer_types
    if not row.linear_tensors:
        if kinds is not None and "linear_attention" in kinds:
            index = kinds.index("linear_attention")
            errors.append((f"layer_types[{index}]", kinds[index], f"another kind in a {model_type} model"))
        return {}
    if kinds is None and row.is_hybrid:
        every = read.full_attention_interval or 4
        kinds = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(count)]
    if row.is_hybrid and (len(kinds or ()) != count or "sliding_attention" in (kinds or ())):
        errors.append(("layer_types", kinds, f"linear_attention or full_attention for each of {count} layers"))
    of_layers = (kinds or ())[::attentions_per_layer]
    layers = tuple(layer for layer, kind in enumerate(of_layers) if kind == "linear_attention")
    if not layers:
        return {key: getattr(ModelConfig, key) for key in LINEAR}
    missing = [key for key in LINEAR if getattr(read, key) is None and key not in row.required]
    errors += [(key, None, "a value, since layer_types has linear_attention") for key in missing]
    return {"experimental_attention_variant": "gated_delta_net", "linear_attention_layers": layers}


def _windows(
    model_type: str, stored_window: int | None, read: HFKeys, attentions_per_layer: int, errors: KeyErrors
) -> dict[str, Any]:
    """Return the fields of windows; without `layer_types`, every second layer of gpt-oss has one, from the first on."""
    row, count, window = TYPES[model_type], read.num_hidden_layers, stored_window or None
    kinds: Sequence[str] = read.layer_types or []
    if row.is_hybrid:
        return {}
    if row.windows:
        kinds = _plain_windows(model_type, window, read, errors)
    elif "layer_types" not in row.keys:
        if window is not None and (model_type == "mixtral" or read.use_sliding_window):
            errors.append(("sliding_window", window, "null: sliding-window attention is not supported"))
        if "sliding_attention" in kinds:
            errors.append((f"layer_types[{kinds.index('sliding_attention')}]", "sliding_attention", "'full_attention'"))
        return {}
    elif read.layer_types is None and row.sliding_window is not None:
        kinds = [("sliding_attention", "full_attention")[index % 2] for index in range(count)]
    if len(kinds) != count and (kinds or window):
        errors.append(("layer_types", read.layer_types, f"one for each of {count} layers"))
    if "sliding_attention" in kinds and window is None:
        errors.append(
            ("sliding_window", stored_window, "a number of positions, since layer_types has sliding_attention")
        )
    of_layers = [kinds[first : first + attentions_per_layer] for first in range(0, len(kinds), attentions_per_layer)]
    if any(len({*of_layer}) > 1 for of_layer in of_layers):
        errors.append(("layer_types", kinds, f"the same for both attentions of a layer of {read.residual_mode}"))
    layers = tuple(layer for layer, of_layer in enumerate(of_layers) if "sliding_attention" in of_layer)
    return {"window_size": window if layers else 0, "window_layers": layers}


def _plain_windows(model_type: str, window: int | None, read: HFKeys, errors: KeyErrors) -> Sequence[str]:
    """Return the kinds of the layers of a type with `windows`, as transformers completes them."""
    row, count, listed = TYPES[model_type], read.num_hidden_layers, read.layer_types
    if "use_sliding_window" in row.constants and not read.use_sliding_window:
        window = None
        if "sliding_attention" in (listed or ()):
            errors.append(("use_sliding_window", False, "true, since layer_types has sliding_attention"))
            listed = None
    if row.windows == "upper" and listed is not None:
        return listed
    first = read.max_window_layers if row.windows == "upper" else 0
    unwindowed = count if window is None or first is None else min(first, count)
    kinds = ["full_attention"] * unwindowed + ["sliding_attention"] * (count - unwindowed)
    if listed not in (None, kinds):
        errors.append(("layer_types", listed, f"{kinds[0]} in all layers of a {model_type} model with this window"))
    return kinds


def _unsupported(model_type: str, given: Mapping[str, Any]) -> KeyErrors:
    """Return the keys with values that no model of the type has, or that mean a computation that the type lacks."""
    row = TYPES[model_type]
    errors = KeyErrors()
    for key, value in {**row.same, **(HYBRID if row.is_hybrid else {})}.items():
        if given.get(key, value) not in (value, row.synonyms.get(key, value)):
            errors.append((key, given[key], f"{value!r}: other {model_type} models are not supported"))
    for key in ("final_logit_softcapping", "farskip", *UNUSUAL_KEYS):
        if given.get(key, False) is not False and key not in (*row.keys, *row.experts):
            errors.append((key, given[key], f"null in a {model_type} model, which has none"))
    return errors


def _copied(given: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the fields that have the values of `keys`, without keys that are not given."""
    return {FIELDS[key]: given[key] for key in keys if key in given and key in FIELDS}


def _attentions_per_layer(residual_mode: str | None) -> int:
    """Return how many layers of transformers, each of which has keys and values, a layer of a wiring is."""
    kinds = WIRINGS[residual_mode].sub_blocks if residual_mode in WIRINGS else ()
    return max(1, sum(kind.has_mixer for kind in kinds))


def _experts(model_type: str, given: Mapping[str, Any], count: int, errors: KeyErrors) -> dict[str, Any]:
    """Return the fields of the experts; `count` is the number of layers."""
    row = TYPES[model_type]
    numbers = {given[key] for key in given if FIELDS.get(key) == "num_experts"} - {0}
    if not row.experts or (model_type == OWN_TYPE and not numbers):
        return {}
    if len(numbers) != 1:
        errors.append(("num_experts, num_local_experts or n_routed_experts", sorted(numbers) or None, "one number"))
    # Keys of other types have no meaning in this one.
    known = {key: given[key] for key in row.experts if key in given}
    # A greedy choice ignores the groups.
    if known.get("topk_method") == "greedy":
        known |= dict.fromkeys(GROUPS, 1)
    elif known.get("topk_method") == "noaux_tc":
        errors.append(("topk_method", "noaux_tc", f"greedy or group_limited_greedy in a {model_type} model"))
    optional = {"mlp_only_layers", "mlp_layer_types", *UNUSUAL_KEYS, *row.optional}
    if "mlp_layer_types" in known:
        optional.add("first_k_dense_replace")
    errors += [(key, None, "a value") for key in row.experts[1:] if key not in {*known, *optional}]
    layers = _expert_layers(model_type, given, count, errors)
    if not layers:
        return {}
    # Mixtral has no dense layers, and another key for the width of its experts.
    values = {"moe_ffn_hidden_size": given["intermediate_size"], **_copied(known, known), **row.fixed_with_experts}
    if (width := known.get("moe_intermediate_size")) != known.get("expert_hidden_dim", width):
        both = f"{width} and {known['expert_hidden_dim']}"
        errors.append(("moe_intermediate_size and expert_hidden_dim", both, "one number"))
    for key in known.keys() & {"n_shared_experts", "num_shared_experts"}:
        values["moe_shared_expert_intermediate_size"] = known[key] * values["moe_ffn_hidden_size"]
    return values | {
        "num_experts": max(numbers, default=1),
        "moe_layers": tuple(sorted(set(layers))),
        "moe_router_unnormalized": not known.get("norm_topk_prob", True),
    }


def _expert_layers(model_type: str, given: Mapping[str, Any], count: int, errors: KeyErrors) -> Sequence[int]:
    """Return the layers with experts, of `count`, by the keys of the type."""
    keys = TYPES[model_type].experts
    if "mlp_only_layers" in keys:
        step, dense = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers", ())
        return [layer for layer in range(step - 1, count, step) if layer not in dense]
    assumed = TYPES[model_type].assumed_dense
    first = given.get("first_k_dense_replace", assumed or 0) if "first_k_dense_replace" in keys else 0
    upper = range(first, count)
    kinds = given.get("mlp_layer_types") if "mlp_layer_types" in keys else None
    if kinds is None:
        if assumed is not None and first != assumed:
            expected = f"{assumed} without mlp_layer_types: transformers ignores the key, which other programs read"
            errors.append(("first_k_dense_replace", first, expected))
        layers: Sequence[int] = given.get("expert_layers", upper) if "expert_layers" in keys else upper
        return layers
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    if len(kinds) != count or ("first_k_dense_replace" in given and sparse != [*upper]):
        errors.append(("mlp_layer_types", kinds, f"one for each of {count} layers, as in first_k_dense_replace"))
    return sparse


def _wiring(model_type: str, read: HFKeys, count: int, errors: KeyErrors) -> dict[str, Any]:
    """Return fields of the wiring. Layers are a list, an integer N (the upper N), or null (none)."""
    mode = read.residual_mode
    late = read.ladder_layers
    if isinstance(late, int):
        layers = tuple(range(max(count - late, 0), count))
        is_valid = late <= count
    else:
        layers = tuple(sorted(late or ()))
        is_valid = len(set(layers)) == len(layers) and all(layer < count for layer in layers)
    if not is_valid:
        errors.append(("ladder_layers", late, f"at most the {count} layers, or different indices of them"))
        return {}
    if model_type == AUTHORS_TYPE:
        return {"residual_mode": "ladder" if layers else "standard", "ladder_layers": layers}
    if model_type == INSTELLA_TYPE:
        layers = _instella_layers(read, count, errors)
        return {"residual_mode": "farskip" if layers else "standard", "ladder_layers": layers}
    if model_type != OWN_TYPE:
        if layers:
            errors.append(("ladder_layers", list(layers), f"none in a {model_type} model, which has no ladder layers"))
        return {}
    if mode not in WIRINGS:
        errors.append(("residual_mode", mode, " or ".join(map(repr, WIRINGS))))
        return {}
    if layers and not WIRINGS[mode].late:
        errors.append(("ladder_layers", list(layers), f"none with residual_mode {mode!r}"))
    is_desync = WIRINGS[mode].stream == "per rank"
    for key, number in (("desync_interval", read.desync_interval or 0), ("desync_tp", read.desync_tp or 0)):
        if bool(number) != is_desync:
            errors.append((key, number, f"{'a number' if not number else '0'} with residual_mode {mode!r}"))
    return {"ladder_layers": layers, **({} if is_desync else {"desync_interval": 0, "desync_tp": None})}


def _instella_layers(read: HFKeys, count: int, errors: KeyErrors) -> tuple[int, ...]:
    """Return the late layers of Instella, if they are those of our farskip.

    After a standard layer with experts, the first late attention of Instella misses their output, and ours does not.
    """
    start, dense = read.farskip_start_idx or 0, read.first_k_dense_replace or 0
    end = count - 1 if read.farskip_end_idx is None else int(min(read.farskip_end_idx, count - 1))
    if not read.farskip or start > end:
        return ()
    for key in ("attn_only_farskip", "mlp_only_farskip"):
        if getattr(read, key):
            errors.append((key, True, "false: a part of farskip is not supported"))
    if start > dense:
        errors.append(("farskip_start_idx", start, f"at most first_k_dense_replace, {dense}: only dense layers before"))
    return tuple(range(start, end + 1))


def hf_type(model: ModelConfig, imported_type: str = "") -> str:
    """Return the `model_type` of the Hugging Face model that computes exactly what `model` does.

    `imported_type` is that of the directory from which the model was imported, or "".

    Raises:
        UserError: no type expresses the model, the exported code lacks a mixer or a part of its attention, lanes, or
            ranks of desync, that read different streams share key and value heads, or all attention is linear.
    """
    if len(model.linear_attention_layers) == model.num_layers:
        reason = "{linear_attention_layers}: the cache of transformers counts positions in the other layers"
        fix = "generate from the checkpoint instead"
        raise UserError(Problem({"linear_attention_layers": model.linear_attention_layers}, reason, fix))
    if model.softmax_type == "learnable":
        raise_user_errors(
            Problem(
                {"softmax_type": model.softmax_type, name: getattr(model, name)},
                f"{{softmax_type}} with {{{name}}}: transformers has no such attention",
                "generate from the checkpoint instead",
            )
            for name in ("qk_layernorm", "rotary_percent")
            if getattr(model, name) != getattr(ModelConfig, name)
        )
    lanes = model.lanes or model.desync_tp or 1
    name = f"a model of {lanes} lanes" if model.lanes else f"a {model.residual_mode} model of {lanes} ranks"
    raise_user_errors(
        f"{name} with {count} {kind}: with a shared head, each lane computes different keys and values from it, for "
        "which the cache of transformers has no space: generate from the checkpoint instead"
        for kind, count in model.key_heads.items()
        if count % lanes
    )
    divides = model.hidden_size % model.num_attention_heads == 0
    usual_heads = divides and model.head_dim == model.hidden_size // model.num_attention_heads
    # transformers rejects a Llama or DeepSeek-V2 whose heads do not divide the hidden size; Mistral is the same without
    # biases.
    possible = {"llama": divides, "qwen2": usual_heads, "deepseek_v2": divides}
    written = [name for name, row in TYPES.items() if row.architecture and not row.needs_source]
    if imported_type in TYPES and TYPES[imported_type].needs_source:
        written.insert(0, imported_type)
    if model.kv_lora_rank and not model.yarn_correction_range_round_to_int:
        # vLLM's DeepSeek rounds the indices of YaRN.
        written = [OWN_TYPE]
    mixers = [model.mixer_of(layer) for layer in range(model.num_layers)]
    lacking = sorted({mixer.name for mixer in mixers if not mixer.is_exported})
    for name in written:
        if possible.get(name, True) and not (lacking and name == OWN_TYPE) and _expresses(name, model):
            return name
    if lacking:
        reason = f"{' and '.join(lacking)} with {{residual_mode}} cannot be exported"
        fix = "generate from the checkpoint instead"
        raise UserError(Problem({"residual_mode": model.residual_mode}, reason, fix))
    lost = _lost_fields(OWN_TYPE, model)
    names = " and ".join(f"{{{name}}}" for name in lost)
    raise UserError(
        Problem(lost, f"no type of Hugging Face models has {names}", "generate from the checkpoint instead")
    )


def _expresses(model_type: str, model: ModelConfig) -> bool:
    """Return whether a model that is written as this type is read as the same model."""
    with contextlib.suppress(UserError):
        return not _lost_fields(model_type, model)
    return False


def _lost_fields(model_type: str, model: ModelConfig) -> dict[str, Any]:
    """Return the fields, with their values, that differ in the model that is read from this type of the model.

    Raises UserError if it cannot be read.
    """
    reread = model_config_from_hf(hf_config(model, dtype="float32", model_type=model_type))
    # Only layers of a kind use its widths and choices.
    unused: dict[str, Any] = {}
    if len(model.moe_layers) == model.num_layers:
        unused = {"ffn_hidden_size": model.ffn_hidden_size}
    elif not model.moe_layers:
        unused = {name: value for name, value in vars(model).items() if name == "num_experts" or "moe_" in name}
    if TYPES[model_type].mtp is not None:
        # Files are read without their drafting head at first. Only our type says which stream it reads.
        unused["mtp_num_layers"] = model.mtp_num_layers
        unused["mtp_before_final_norm"] = model_type == OWN_TYPE and model.mtp_before_final_norm
    read = vars(reread) | unused
    return {name: value for name, value in vars(model.canonical()).items() if value != read[name]}


def hf_config(
    model: ModelConfig,
    *,
    dtype: str,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    model_type: str | None = None,
) -> dict[str, Any]:
    """Return the content of `config.json` for weights of a dtype in torch's spelling; raise UserError as `hf_type`."""
    model_type = model_type or hf_type(model)
    row, values = TYPES[model_type], _key_values(model)
    absent = {key for key in UNUSUAL_KEYS if getattr(model, FIELDS[key]) == getattr(ModelConfig, FIELDS[key])}
    if not model.kv_lora_rank:
        absent.update(LATENT)
    # transformers' types with windows need a size even if no layer has one.
    values["sliding_window"] = model.window_size or row.sliding_window
    has_linear = row.is_hybrid or bool(model.linear_attention_layers)
    if values["sliding_window"] is None:
        absent.update({"sliding_window"} if has_linear else WINDOWS)
    if not has_linear:
        absent.update((*LINEAR, "mamba_ssm_dtype"))
    windows = {}
    if row.windows and model.window_size:
        values |= {"use_sliding_window": True, "max_window_layers": model.window_layers[0]}
        keys = ("max_window_layers", "layer_types") if row.windows == "upper" else ()
        windows = {key: values[key] for key in (*row.constants, *keys)}
    if row.experts and "moe_intermediate_size" not in row.experts:
        values["intermediate_size"] = model.moe_ffn_hidden_size
    return {
        "architectures": [row.architecture],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformers_version": _TRANSFORMERS,
        **{key: values[key] for key in SIZES},
        "hidden_act": "silu",
        **{key: values[key] for key in TRAITS},
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id if eos_token_id is None or isinstance(eos_token_id, int) else list(eos_token_id),
        "pad_token_id": pad_token_id,
        **rope_keys(model, with_part={model.rotary_percent, row.partial_rotary_factor or 1.0} != {1.0}),
        **{key: value for key, value in row.same.items() if key not in absent},
        **{key: values[key] for key in row.experts if model.moe_layers and key not in absent},
        **row.constants,
        **windows,
        **{key: values[key] for key in row.keys if key not in absent},
        **({row.mtp.key: 1} if row.mtp is not None and model.mtp_num_layers else {}),
        **({"mtp_before_final_norm": True} if model.mtp_before_final_norm and model_type == OWN_TYPE else {}),
    }


def _key_values(model: ModelConfig) -> dict[str, Any]:
    """Return the values of the keys of all types."""
    experts, layers = list(model.moe_layers), model.num_layers
    attentions = layers * _attentions_per_layer(model.residual_mode)
    shared_experts = model.moe_shared_expert_intermediate_size // max(model.moe_ffn_hidden_size, 1)
    values = {key: getattr(model, name) for key, name in FIELDS.items()}
    kinds = dict.fromkeys(model.window_layers, "sliding_attention")
    kinds |= dict.fromkeys(model.linear_attention_layers, "linear_attention")
    if model.kv_lora_rank:
        # As in transformers, whose rotary embedding and cache read them.
        values |= {"num_key_value_heads": model.num_attention_heads, "head_dim": model.qk_rope_head_dim}
    return values | {
        "q_lora_rank": model.q_lora_rank or None,
        "num_hidden_layers": attentions,
        "layer_types": [kinds.get(index * layers // attentions, "full_attention") for index in range(attentions)],
        "norm_topk_prob": not model.moe_router_unnormalized,
        "n_shared_experts": shared_experts,
        "num_shared_experts": shared_experts,
        "first_k_dense_replace": layers - len(experts),
        "topk_method": "greedy" if model.moe_router_num_groups == 1 else "group_limited_greedy",
        "mlp_layer_types": ["sparse" if layer in experts else "dense" for layer in range(layers)],
        "expert_layers": experts,
        "mlp_only_layers": sorted({*range(layers)} - {*experts}),
        "ladder_layers": list(model.ladder_layers),
    }
