"""The `config.json` of a Hugging Face directory, read without trust."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import LARGEST_SIZE, ModelConfig, model_errors
from megatron_ladder.blueprint.wiring import PER_RANK_MODES, RESIDUAL_MODES, WIRINGS
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


class _Keys:
    """The keys of one `config.json`. An invalid key is recorded, and a harmless value replaces it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config = config
        self._source = source
        self.errors: list[str] = []

    def error(self, key: str, found: object, expected: str) -> None:
        """Record an error."""
        self.errors.append(f"{self._source}: {key}: found {found!s:.500}, expected {expected}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a size, or `default` if the key is missing or null, which is an error without a default."""
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is int and least <= value <= LARGEST_SIZE:
            return value
        self.error(key, self._found(key), f"an integer from {least} to {LARGEST_SIZE}")
        return 1

    def number(self, key: str, default: float | None = None, holder: str | None = None) -> float:
        """Return a number, or `default` if the key is missing or null, which is an error without a default.

        Args:
            holder: key of the object that has the key; None if it is the whole file.
        """
        values = self._config if holder is None else self._config[holder]
        value = values.get(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return float(value)
        found = repr(value) if key in values else "no such key"
        self.error(key if holder is None else f"{holder}.{key}", found, "a number")
        return 1.0

    def truth(self, key: str, default: bool) -> bool:
        """Return true or false, or `default` if the key is missing or null."""
        value = self._config.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.error(key, repr(value), "true or false")
        return default

    def expect(self, key: str, possible: Sequence[object], default: object = None) -> object:
        """Return a value that must be one of `possible`, or `default` if the key is missing."""
        value = self._config.get(key, default)
        if value in possible:
            return value
        self.error(key, self._found(key), " or ".join(repr(one) for one in possible if one is not None))
        return possible[0]

    def layers(self, key: str, num_layers: int) -> tuple[int, ...]:
        """Return the sorted indices of a list of layers, an integer N (the upper N), or null (none)."""
        value = self._config.get(key)
        if type(value) is int:
            if 0 <= value <= num_layers:
                return tuple(range(num_layers - value, num_layers))
            self.error(key, value, f"at most the {num_layers} layers of num_hidden_layers")
            return ()
        listed = [] if value is None else value
        indices = isinstance(listed, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in listed)
        if not indices or len(set(listed)) != len(listed):
            self.error(key, repr(value), f"null, an integer, or different layers of 0-{num_layers - 1}")
            return ()
        return tuple(sorted(listed))

    def check_full_attention(self, model_type: str) -> None:
        """Require that every query sees all earlier positions: no sliding windows."""
        window = self._config.get("sliding_window", 4096 if model_type == "mistral" else None)
        if model_type == "mistral" and window is not None:
            found = window if "sliding_window" in self._config else "no such key, which means 4096"
            self.error("sliding_window", found, "null: sliding-window attention is not supported")
        if model_type in ("qwen2", "qwen3") and self._config.get("use_sliding_window"):
            self.error("use_sliding_window", True, "false: sliding-window attention is not supported")
        kinds = self._config.get("layer_types") or []
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else [kinds]
        if unknown:
            self.error("layer_types", ", ".join(map(str, unknown)), "full_attention in every layer")

    def rope(self) -> dict[str, Any]:
        """Return the rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`, or both.

        If a file has both spellings, they must agree, since programs differ in which one they read.
        """
        spellings = {key: self._config[key] for key in ("rope_parameters", "rope_scaling") if key in self._config}
        thetas = {"rope_theta": self.number("rope_theta")} if self._config.get("rope_theta") is not None else {}
        read: dict[str, dict[str, Any]] = {}
        for key, value in spellings.items():
            if value is not None and not isinstance(value, dict):
                self.error(key, repr(value), "an object or null")
                continue
            rope = value or {}
            if rope.get("rope_theta") is not None:
                thetas[f"{key}.rope_theta"] = self.number("rope_theta", holder=key)
            scaling = self._scaling(key, rope)
            if scaling is not None:
                read[key] = scaling
        for what, values in (("rope_theta", thetas), ("rotary embedding", read)):
            if len({str(value) for value in values.values()}) > 1:
                found = " and ".join(f"{key} {value}" for key, value in values.items())
                self.error(" and ".join(values), found, f"one {what}")
        fields = next(iter(read.values()), {})
        return {"rotary_base": next(iter(thetas.values()), 10000.0), **fields}

    def _scaling(self, key: str, rope: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the fields of one spelling without the base, or None for an unsupported kind."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != rope.get("type", kind):
            self.error(f"{key}.type", repr(rope["type"]), f"the same as rope_type, {kind!r}")
        if any(isinstance(value, dict) for value in rope.values()):
            kind = "one for each kind of layer"
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            self.error(f"{key}.rope_type", repr(kind), " or ".join(ROPE_TYPES))
            return None
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            self.error(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        fields: dict[str, Any] = {"rope_scaling": ROPE_TYPES[kind]}
        if kind == "default":
            return fields
        fields["rope_scaling_factor"] = self.number("factor", holder=key)
        if kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor"):
                fields[f"rope_{name}"] = self.number(name, holder=key)
            name = "original_max_position_embeddings"
            outer = self._config.get(name)
            original = self.number(name, outer or self._config.get("max_position_embeddings"), holder=key)
            if outer is not None and outer != original:
                self.error(f"{name} and {key}.{name}", f"{outer} and {original}", "one number")
            if not original.is_integer() or original > LARGEST_SIZE:
                self.error(f"{key}.{name}", original, f"an integer from 1 to {LARGEST_SIZE}")
            fields[f"rope_{name}"] = int(original)
        return fields

    def _found(self, key: str) -> str:
        return repr(self._config[key]) if key in self._config else "no such key"


def model_config_from_hf(
    config: Mapping[str, Any], source: str = "config.json", tensors: int | None = None
) -> ModelConfig:
    """Read the `config.json` of a Llama, Mistral, Qwen2, Qwen3, of the paper's authors' or of the project's own type.

    Sizes must be present: the defaults of other programs are not assumed.

    Args:
        tensors: number of stored tensors, if known, which no number of layers can exceed.

    Raises:
        UserError: the model is not supported, or the file contradicts itself; each line names `source`, the key, what
            was found and what was expected.
    """
    keys = _Keys(config, source)
    model_type = config.get("model_type")
    if model_type not in READABLE_TYPES:
        raise UserError(f"{source}: model_type {model_type!r}: only {', '.join(READABLE_TYPES)} can be converted")
    if config.get("quantization_config") is not None:
        keys.error("quantization_config", "a quantised checkpoint", "weights in float32, float16 or bfloat16")
    keys.expect("hidden_act", ("silu", "swish"), default="silu")
    keys.expect("partial_rotary_factor", (1.0, None))
    keys.check_full_attention(model_type)
    layers = keys.integer("num_hidden_layers")
    if tensors is not None and layers > tensors:
        keys.error("num_hidden_layers", layers, f"at most {tensors}, the number of stored tensors")
        raise_user_errors(keys.errors)
    heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    usual_head_dim = max(hidden_size // heads, 1) if model_type != "qwen3" else None
    default_heads = heads if model_type in ("llama", AUTHORS_TYPE) else None
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden_size,
        "ffn_hidden_size": keys.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("num_key_value_heads", default_heads),
        "head_dim": keys.integer("head_dim", usual_head_dim),
        "vocab_size": keys.integer("vocab_size"),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "norm_epsilon": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.truth("tie_word_embeddings", False),
        "init_method_std": keys.number("initializer_range", 0.02),
        "logit_soft_cap": _soft_cap(keys, config, model_type),
        **keys.rope(),
        **_biases(keys, model_type),
        **_wiring(keys, model_type, layers),
    }
    raise_user_errors(keys.errors)
    model = ModelConfig(**values)
    raise_user_errors(f"{source}: {error}" for error in model_errors(model))
    return model.canonical()


def _soft_cap(keys: _Keys, config: Mapping[str, Any], model_type: str) -> float | None:
    cap = config.get("final_logit_softcapping")
    if cap is None:
        return None
    if model_type != OWN_TYPE:
        keys.error("final_logit_softcapping", cap, f"null in a {model_type} model, whose logits are not bounded")
    return keys.number("final_logit_softcapping")


def _biases(keys: _Keys, model_type: str) -> dict[str, bool]:
    """Return which projections have biases, and whether queries and keys have norms."""
    if model_type == OWN_TYPE:
        return {
            "add_qkv_bias": keys.truth("attention_bias", False),
            "add_attention_output_bias": keys.truth("attention_output_bias", False),
            "add_mlp_bias": keys.truth("mlp_bias", False),
            "qk_layernorm": keys.truth("qk_norm", False),
        }
    attention = model_type in ("llama", AUTHORS_TYPE, "qwen3") and keys.truth("attention_bias", False)
    return {
        "add_qkv_bias": attention or model_type == "qwen2",
        "add_attention_output_bias": attention,
        "add_mlp_bias": model_type in ("llama", AUTHORS_TYPE) and keys.truth("mlp_bias", False),
        "qk_layernorm": model_type == "qwen3",
    }


def _wiring(keys: _Keys, model_type: str, num_layers: int) -> dict[str, Any]:
    """Return the fields of the wiring."""
    layers = keys.layers("ladder_layers", num_layers)
    if model_type == AUTHORS_TYPE:
        return {"residual_mode": "ladder" if layers else "standard", "ladder_layers": layers}
    if model_type != OWN_TYPE:
        if layers:
            keys.error("ladder_layers", list(layers), f"none in a {model_type} model, which has no ladder layers")
        return {}
    mode = str(keys.expect("residual_mode", RESIDUAL_MODES))
    if layers and not WIRINGS[mode].late:
        keys.error("ladder_layers", list(layers), f"none with residual_mode {mode!r}")
    lanes = keys.integer("lanes", 0, least=0)
    if lanes and not WIRINGS[mode].late:
        keys.error("lanes", lanes, f"0 with residual_mode {mode!r}")
    desync: dict[str, int] = {}
    for key in ("desync_interval", "desync_tp"):
        if mode in PER_RANK_MODES:
            desync[key] = keys.integer(key)
        else:
            keys.expect(key, (None, 0))
    return {
        "residual_mode": mode,
        "ladder_layers": layers,
        "residual_staleness": keys.integer("residual_staleness", 1),
        "lanes": lanes,
        **desync,
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
