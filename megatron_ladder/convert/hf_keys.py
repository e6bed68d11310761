"""Reading the keys of a Hugging Face `config.json`, and collecting what is wrong with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ladder.errors import UserError

ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}
"""`rope_type` -> `--rope-scaling`."""


class HFKeys:
    """The keys of one file. A key that cannot be read is noted, and a harmless value stands in for it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config = config
        self._source = source
        self._mistakes: list[str] = []

    def mistake(self, key: str, found: object, expected: str) -> None:
        """Notes a mistake, once."""
        line = f"{self._source}: {key}: found {found}, expected {expected}"
        if line not in self._mistakes:
            self._mistakes.append(line)

    def raise_mistakes(self) -> None:
        """
        Raises:
            UserError: all mistakes that were noted.
        """
        if self._mistakes:
            raise UserError(*self._mistakes)

    def integer(self, key: str, default: int | None = None) -> int:
        """A size; `default` if the key is missing or null, which is a mistake if there is none."""
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.mistake(key, self._found(key), "an integer above zero")
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        """A number; `default` if the key is missing or null, which is a mistake if there is none."""
        return self._number(self._config, key, key, default)

    def truth(self, key: str, default: bool) -> bool:
        """true or false; `default` if the key is missing or null."""
        value = self._config.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.mistake(key, repr(value), "true or false")
        return default

    def expect(self, key: str, possible: Sequence[object], default: object = None) -> object:
        """A value that must be one of `possible`; `default` if the key is missing."""
        value = self._config.get(key, default)
        if value in possible:
            return value
        self.mistake(key, self._found(key), " or ".join(repr(one) for one in possible if one is not None))
        return possible[0]

    def layers(self, key: str, num_layers: int) -> tuple[int, ...]:
        """A list of layers, an integer N for the upper N, or null for none -> sorted indices."""
        value = self._config.get(key)
        if isinstance(value, bool):
            value = [value]
        if isinstance(value, int):
            if 0 <= value <= num_layers:
                return tuple(range(num_layers - value, num_layers))
            self.mistake(key, value, f"at most the {num_layers} layers of num_hidden_layers")
            return ()
        listed = [] if value is None else value
        indices = isinstance(listed, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in listed)
        if not indices or len(set(listed)) != len(listed):
            self.mistake(key, repr(value), f"null, an integer, or different layers of 0-{num_layers - 1}")
            return ()
        return tuple(sorted(listed))

    def check_full_attention(self, model_type: str) -> None:
        """Every query must see all positions before it: no sliding windows."""
        window = self._config.get("sliding_window", 4096 if model_type == "mistral" else None)
        if model_type == "mistral" and window is not None:
            found = window if "sliding_window" in self._config else "no such key, which means 4096"
            self.mistake("sliding_window", found, "null: attention within a window cannot be computed")
        if model_type in ("qwen2", "qwen3") and self._config.get("use_sliding_window"):
            self.mistake("use_sliding_window", True, "false: attention within a window cannot be computed")
        kinds = self._config.get("layer_types") or []
        strange = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else [kinds]
        if strange:
            self.mistake("layer_types", ", ".join(map(str, strange)), "full_attention in every layer")

    def rope(self) -> dict[str, Any]:
        """The fields of the rotary embedding, from `rope_parameters`, or `rope_theta` and `rope_scaling`, or both.

        With both, they must say the same, since readers differ in which of them they follow.
        """
        spellings = {key: self._config[key] for key in ("rope_parameters", "rope_scaling") if key in self._config}
        thetas = {"rope_theta": self.number("rope_theta")} if self._config.get("rope_theta") is not None else {}
        read: dict[str, dict[str, Any]] = {}
        for key, value in spellings.items():
            if value is not None and not isinstance(value, dict):
                self.mistake(key, repr(value), "an object or null")
                continue
            rope = value or {}
            if rope.get("rope_theta") is not None:
                thetas[f"{key}.rope_theta"] = self._number(rope, "rope_theta", f"{key}.rope_theta")
            read[key] = self._scaling(key, rope)
        for what, values in (("rope_theta", thetas), ("rotary embedding", read)):
            if len({str(value) for value in values.values()}) > 1:
                found = " and ".join(f"{key} {value}" for key, value in values.items())
                self.mistake(" and ".join(values), found, f"one {what}")
        scaling = next(iter(read.values()), {"rope_scaling": "none"})
        return {"rotary_base": next(iter(thetas.values()), 10000.0), **scaling}

    def _scaling(self, key: str, rope: Mapping[str, Any]) -> dict[str, Any]:
        """The fields but the base, of one spelling."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != rope.get("type", kind):
            self.mistake(f"{key}.type", repr(rope["type"]), f"the same as rope_type, {kind!r}")
        if kind not in ROPE_TYPES:
            nested = any(isinstance(value, dict) for value in rope.values())
            found = "one for each kind of layer" if nested else repr(kind)
            self.mistake(f"{key}.rope_type", found, " or ".join(ROPE_TYPES))
            return {"rope_scaling": "none"}
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            self.mistake(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        fields: dict[str, Any] = {"rope_scaling": ROPE_TYPES[kind]}
        if kind == "default":
            return fields
        fields["rope_scaling_factor"] = self._number(rope, "factor", f"{key}.factor")
        if kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor"):
                fields[f"rope_{name}"] = self._number(rope, name, f"{key}.{name}")
            name = "original_max_position_embeddings"
            outer = self._config.get(name)
            original = self._number(rope, name, f"{key}.{name}", outer or self._config.get("max_position_embeddings"))
            if outer is not None and outer != original:
                self.mistake(f"{name} and {key}.{name}", f"{outer} and {original}", "one number")
            fields[f"rope_{name}"] = int(original)
        return fields

    def _number(self, holder: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
        value = holder.get(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self.mistake(name, repr(value) if key in holder else "no such key", "a number")
        return 1.0

    def _found(self, key: str) -> str:
        return repr(self._config[key]) if key in self._config else "no such key"
