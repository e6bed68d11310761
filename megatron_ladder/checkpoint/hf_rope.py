"""The rotary embedding of a `config.json`: two spellings, and YaRN as transformers computes it."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_ladder.blueprint.mixers.attention import attention_factor, yarn_mscale
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.hf_keys import OPTIONAL_ROPE_KEYS, ROPE_FIELDS, HFKeys, HFRope, KeyErrors
from megatron_ladder.checkpoint.hf_types import TYPES


def read_rope(config: Mapping[str, Any], read: HFKeys, model_type: str, errors: KeyErrors) -> dict[str, Any]:
    """Return the rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`, or both.

    If a file has both spellings, they must agree, since programs differ in which one they read.
    """
    row = TYPES[model_type]
    thetas = {"rope_theta": read.rope_theta}
    parts = {"partial_rotary_factor": read.partial_rotary_factor}
    embeddings: dict[str, dict[str, Any]] = {}
    for key, rope in (("rope_parameters", read.rope_parameters), ("rope_scaling", read.rope_scaling)):
        if key not in config:
            continue
        rope = rope or HFRope()
        kind = rope.rope_type or rope.type or "default"
        if kind != (rope.type or kind):
            errors.append((f"{key}.type", rope.type, f"the same as rope_type, {kind!r}"))
        if any(isinstance(value, dict) for value in (config[key] or {}).values()):
            kind = "one for each kind of layer"
        if kind not in ROPE_FIELDS:
            errors.append((f"{key}.rope_type", kind, " or ".join(ROPE_FIELDS)))
            continue
        thetas[f"{key}.rope_theta"] = rope.rope_theta
        parts[f"{key}.partial_rotary_factor"] = rope.partial_rotary_factor
        outer, name = read.original_max_position_embeddings, "original_max_position_embeddings"
        original = rope.original_max_position_embeddings or outer or read.max_position_embeddings
        if kind in ("llama3", "yarn") and outer not in (None, original):
            errors.append((f"{name} and {key}.{name}", f"{outer} and {original}", "one number"))
        numbers = msgspec.structs.asdict(rope) | {name: original}
        required = ROPE_FIELDS[kind].keys() - OPTIONAL_ROPE_KEYS
        errors += [(f"{key}.{number}", None, "a number") for number in sorted(required) if numbers[number] is None]
        scaling = {
            name: getattr(ModelConfig, name) if numbers[number] is None else numbers[number]
            for number, name in ROPE_FIELDS[kind].items()
        }
        if kind == "yarn" and rope.factor is not None:
            errors += _yarn_errors(key, rope, rope.factor, scaling)
        embeddings[key] = {"rope_scaling": "none" if kind == "default" else kind, **scaling}
    thetas = {key: theta for key, theta in thetas.items() if theta is not None}
    parts = {key: part for key, part in parts.items() if part is not None}
    part = next(iter(parts.values()), row.partial_rotary_factor or 1.0)
    if part != 1 and row.partial_rotary_factor is None:
        errors.append((next(iter(parts)), part, f"1 in a {model_type} model, which rotates whole heads"))
    spellings: dict[str, Mapping[str, Any]]
    spellings = {"rope_theta": thetas, "rotary embedding": embeddings, "partial_rotary_factor": parts}
    for name, values in spellings.items():
        if len({str(value) for value in values.values()}) > 1:
            both = " and ".join(f"{key} {value}" for key, value in values.items())
            errors.append((" and ".join(values), both, f"one {name}"))
    base = next(iter(thetas.values()), row.rope_theta)
    return {"rotary_base": base, "rotary_percent": part, **next(iter(embeddings.values()), {})}


def _yarn_errors(key: str, rope: HFRope, factor: float, scaling: Mapping[str, Any]) -> KeyErrors:
    """Return what our YaRN, with the fields `scaling`, would compute differently from transformers'."""
    errors = KeyErrors()
    computed = yarn_mscale(factor, scaling["rope_mscale"]) / yarn_mscale(factor, scaling["rope_mscale_all_dim"])
    theirs = rope.attention_factor
    if theirs is None:
        # Neither scale has an effect without the other.
        theirs = computed if rope.mscale and rope.mscale_all_dim else yarn_mscale(factor, 1.0)
    if not math.isclose(theirs, computed, rel_tol=1e-6):
        expected = f"{computed:.9g}, which follows from factor, mscale and mscale_all_dim"
        errors.append((f"{key}.attention_factor", rope.attention_factor, expected))
    return errors


def rope_keys(model: ModelConfig, with_part: bool) -> dict[str, Any]:
    """Return the rotary embedding in both spellings: transformers 5 reads the first, older versions the others.

    `with_part` adds the rotated part of each head, which is all of it in most types.
    """
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    scaling = {"rope_type": kind} | {key: getattr(model, name) for key, name in ROPE_FIELDS[kind].items()}
    if scaling.get("truncate"):
        # The default of transformers.
        del scaling["truncate"]
    # Where it follows from both scales, vLLM's DeepSeek would ignore these for a factor of 1.
    if kind == "yarn" and not (model.rope_mscale and model.rope_mscale_all_dim):
        scaling["attention_factor"] = attention_factor(model)
    part = {"partial_rotary_factor": model.rotary_percent} if with_part else {}
    return {
        "rope_parameters": {**scaling, **part, "rope_theta": model.rotary_base},
        **part,
        "rope_theta": model.rotary_base,
        "rope_scaling": None if kind == "default" else scaling,
    }
