"""A model: the sizes, rotary embedding, biases, experts and wiring of a Llama-family decoder, and its checks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_ladder.blueprint.mixers.mixer import Mixer, StateSpec
from megatron_ladder.blueprint.mixers.table import MIXERS
from megatron_ladder.blueprint.model_flags import (
    CHOICES,
    FLAG_CHECKS,
    MODEL_CHECKS,
    TENSOR_PARALLEL_CHECKS,
    ModelFlags,
    ModelTraits,
    parse_layers,
    parse_window,
)
from megatron_ladder.blueprint.wiring import WIRINGS, SubBlockKind, WiredSubBlock, Wiring, layers_text
from megatron_ladder.errors import Problem, UserError, raise_user_errors
from megatron_ladder.flags import (
    check_values,
    derive,
    find_problems,
    flag,
    flag_name,
    section_flags,
    to_plain,
)

FFN_MULTIPLE = 256
"""The default MLP width, 8/3 of the hidden size, is rounded up to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelTraits):
    """A resolved model, as checkpoints store it.

    The attributes are those of `ModelFlags` after `resolve_model`. `moe_layers`, `window_layers` and `ladder_layers`
    are sorted, as are `linear_attention_layers`; `ladder_layers` is empty in a wiring without late sub-blocks. Widths,
    sizes and intervals of what the model lacks are 0.
    """

    num_layers: int = flag(minimum=1)
    hidden_size: int = flag(minimum=1)
    ffn_hidden_size: int = flag(minimum=1)
    num_attention_heads: int = flag(minimum=1)
    num_key_value_heads: int = flag(minimum=1)
    """1 with latent attention, whose latent and rotated key all heads share."""
    head_dim: int = flag(minimum=1)
    """Width of a query."""
    vocab_size: int = flag(minimum=1)
    """Number of token ids, without padding."""
    max_position_embeddings: int = flag(minimum=1)
    moe_ffn_hidden_size: int = 0
    moe_layers: tuple[int, ...] = ()
    window_size: int = flag(0, minimum=0)
    window_layers: tuple[int, ...] = ()
    linear_attention_layers: tuple[int, ...] = ()
    ladder_layers: tuple[int, ...] = ()
    desync_interval: int = 0
    desync_tp: int | None = None
    """The tensor-parallel size of a desync model, which cannot change; None without desync."""

    @property
    def wiring(self) -> Wiring:
        """The row of the table of wirings."""
        return WIRINGS[self.residual_mode]

    @property
    def shares_stream(self) -> bool:
        """Whether all tensor-parallel ranks read the same stream: not with desync, nor with own partials."""
        return self.wiring.stream == "shared" and not self.lanes

    @property
    def layer_kinds(self) -> Sequence[tuple[SubBlockKind, ...]]:
        """The kinds of the sub-blocks of every layer."""
        has_shared = self.moe_shared_expert_intermediate_size > 0
        return [self.wiring.kinds(layer in self.moe_layers, has_shared) for layer in range(self.num_layers)]

    @property
    def key_heads(self) -> Mapping[str, int]:
        """The numbers of key heads of the layers' mixers, with their names in messages."""
        heads = {"key-value heads": self.num_key_value_heads}
        if self.linear_attention_layers:
            heads["key heads of gated DeltaNet"] = self.linear_num_key_heads
        return heads

    def mixer_of(self, layer: int) -> Mixer:
        """Return the token mixer of a layer."""
        return next(mixer for kind in MIXERS if (mixer := kind.of(self, layer)) is not None)

    @property
    def wired_layers(self) -> list[tuple[WiredSubBlock, ...]]:
        """The sub-blocks of every layer."""
        return self.wiring.layers(self.layer_kinds, self.ladder_layers, self.residual_staleness, self.desync_interval)

    @property
    def mtp_config(self) -> "ModelConfig":
        """The model with the drafting head's layer as one more layer; all layers are standard. Itself without a head.

        The layer has the experts of the model, and a window if all others have it.
        """
        if not self.mtp_num_layers:
            return self
        layer = (self.num_layers,)
        return replace(
            self.without_mtp,
            num_layers=self.num_layers + 1,
            moe_layers=self.moe_layers + layer if self.moe_layers else (),
            window_layers=self.window_layers + layer
            if len(self.window_layers) == self.num_layers
            else self.window_layers,
            residual_mode="standard",
            residual_staleness=1,
            ladder_layers=(),
            lanes=0,
            desync_interval=0,
            desync_tp=None,
        )

    @property
    def without_mtp(self) -> "ModelConfig":
        """The model without its drafting head."""
        return replace(self, mtp_num_layers=0, mtp_before_final_norm=False)

    def canonical(self) -> "ModelConfig":
        """Return the model itself, or if its reads miss nothing, the same computation in its plain wiring."""
        # A single lane reads every output in flight.
        if not self.wiring.late or (self.ladder_layers and self.lanes != 1):
            return self
        same = (self.wiring.sub_blocks, self.wiring.stream)
        plain = (name for name, row in WIRINGS.items() if not row.late and (row.sub_blocks, row.stream) == same)
        mode = next(plain, self.residual_mode)
        return replace(self, residual_mode=mode, ladder_layers=(), residual_staleness=1, lanes=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON values; the inverse of `from_dict`."""
        return to_plain(self)

    def to_flags(self) -> "ModelFlags":
        """Return flags that `resolve_model` resolves to this model."""
        values: dict[str, Any] = {field.name: getattr(self, field.name, field.default) for field in fields(ModelFlags)}
        lists = {
            "ladder_layers": bool(self.wiring.late),
            "moe_layers": self.num_experts > 0,
            "window_layers": self.window_size > 0,
            "linear_attention_layers": self.experimental_attention_variant != "none",
        }
        for name, is_used in lists.items():
            layers: tuple[int, ...] = getattr(self, name)
            if not is_used or len(layers) == self.num_layers:
                values[name] = None
            else:
                values[name] = f"[{','.join(map(str, layers))}]" if layers else "none"
        values["window_size"] = str(self.window_size) if self.window_size else None
        values["moe_ffn_hidden_size"] = self.moe_ffn_hidden_size or None
        values["desync_interval"] = self.desync_interval or ModelFlags.desync_interval
        return ModelFlags(**values)

    def to_words(self) -> list[str]:
        """Return the flags and values of `ModelFlags` that describe the model, without those that are defaults."""
        words = []
        for name, value in vars(self.to_flags()).items():
            if value != getattr(ModelFlags, name):
                words += [flag_name(name)] if value is True else [flag_name(name), str(value)]
        return words

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str) -> "ModelConfig":
        """Read a stored model, or raise a UserError that names the file `source`."""
        # A program answers --help before it loads packages.
        from megatron_ladder.typed import typed

        if unknown := sorted(values.keys() - {field.name for field in fields(ModelConfig)}):
            raise UserError(f"{source}: not a model of this version: unknown keys {unknown}")
        try:
            config = typed(values, ModelConfig)
        except ValueError as error:
            raise UserError(f"{source}: the model's description cannot be read: {error}") from None
        raise_user_errors(f"{source}: {error}" for error in model_errors(config))
        return config.canonical()


def resolve_model(flags: ModelFlags, vocab_size: int, seq_length: int, tensor_parallel: int) -> ModelConfig:
    """Derive the values that the flags leave open; raises UserError with one problem for each invalid one."""
    sizes = {"vocab_size": vocab_size, "seq_length": seq_length, "tensor_model_parallel_size": tensor_parallel}
    values, invalid = check_values(section_flags(ModelFlags), vars(flags))
    values, impossible = examine_model(values | sizes)
    raise_user_errors([*invalid, *impossible])
    return model_of(values)


def examine_model(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return values, by field, with those that they leave open of a model, and what makes the model impossible."""
    resolved = derive(_DERIVED, values)
    return resolved, [*find_problems(FLAG_CHECKS, values), *find_problems(MODEL_CHECKS, derive(CHOICES, resolved))]


def model_of(values: Mapping[str, Any]) -> ModelConfig:
    """Return the model of values, by field, that `examine_model` completed."""
    model = {field.name: values[field.name] for field in fields(ModelConfig)}
    return ModelConfig(**model | {"desync_tp": model["desync_tp"] or None}).canonical()


def model_errors(config: ModelConfig) -> list[Problem]:
    """Return one problem for each value or combination that no model can have."""
    values, invalid = check_values(section_flags(ModelConfig), vars(config))
    return invalid or find_problems(MODEL_CHECKS, derive(CHOICES, values))


def tensor_parallel_errors(config: ModelConfig, tensor_parallel: int, expert_parallel: int = 1) -> list[Problem]:
    """Return one problem for each reason why this many tensor-parallel ranks cannot compute the model.

    A rank has a part of the width of each expert, or whole experts if expert-parallel ranks divide them.
    """
    layout = {
        "tensor_model_parallel_size": tensor_parallel,
        "expert_sharding": "width",
        "expert_model_parallel_size": expert_parallel,
    }
    return find_problems(TENSOR_PARALLEL_CHECKS, vars(config) | layout)


def _head_dim(head_dim: int | None, hidden_size: int, heads: int, latent_width: int) -> int | None:
    if head_dim is None and not latent_width:
        return None if hidden_size % heads else hidden_size // heads
    return head_dim or latent_width


def _layers(text: str | None, num_layers: int) -> tuple[int, ...] | None:
    with suppress(ValueError):
        return parse_layers("all" if text is None else text, num_layers)
    return None


def _window(text: str | None) -> int | None:
    with suppress(ValueError):
        return 0 if text is None else parse_window(text)
    return None


def _layers_or_all_but(text: str | None, every: int | None, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers of a list, or all but every n-th one."""
    if every is None:
        return _layers(text, num_layers)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % every)


_DERIVED: Mapping[str, Callable[..., Any]] = {
    "head_dim": lambda head_dim, hidden_size, num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim: (
        _head_dim(head_dim, hidden_size, num_attention_heads, kv_lora_rank and qk_nope_head_dim + qk_rope_head_dim)
    ),
    "ffn_hidden_size": lambda ffn_hidden_size, hidden_size: (
        ffn_hidden_size or -(-8 * hidden_size // 3 // FFN_MULTIPLE) * FFN_MULTIPLE
    ),
    "num_key_value_heads": lambda num_key_value_heads, num_attention_heads, kv_lora_rank: (
        num_key_value_heads or (1 if kv_lora_rank else num_attention_heads)
    ),
    "max_position_embeddings": lambda max_position_embeddings, seq_length: max_position_embeddings or seq_length,
    "moe_ffn_hidden_size": lambda moe_ffn_hidden_size, ffn_hidden_size, num_experts: (
        (moe_ffn_hidden_size or ffn_hidden_size) if num_experts else 0
    ),
    "moe_layers": lambda moe_layers, num_layers, num_experts: _layers(moe_layers, num_layers) if num_experts else (),
    "window_size": lambda window_size: _window(window_size),
    "window_layers": lambda window_layers, window_attn_skip_freq, window_size, num_layers: (
        _layers_or_all_but(window_layers, window_attn_skip_freq, num_layers) if window_size else ()
    ),
    "linear_attention_layers": (
        lambda experimental_attention_variant, linear_attention_layers, linear_attention_freq, num_layers: (
            _layers_or_all_but(linear_attention_layers, linear_attention_freq, num_layers)
            if experimental_attention_variant != "none"
            else ()
        )
    ),
    "ladder_layers": lambda ladder_layers, num_layers, residual_mode: (
        _layers(ladder_layers, num_layers) if WIRINGS[residual_mode].late else ()
    ),
    "lanes": lambda lanes, residual_mode: lanes if WIRINGS[residual_mode].late else 0,
    "desync_interval": lambda desync_interval, residual_mode: (
        desync_interval if WIRINGS[residual_mode].stream == "per rank" else 0
    ),
    "desync_tp": lambda residual_mode, tensor_model_parallel_size: (
        tensor_model_parallel_size if WIRINGS[residual_mode].stream == "per rank" else 0
    ),
}
"""What flags leave open, by field: defaults that depend on other values, and zeros for parts that the model lacks."""


def local_lanes(config: ModelConfig, tensor_parallel: int) -> int:
    """Return how many lanes a tensor-parallel rank computes: 1 without own partials."""
    return max(1, config.lanes // tensor_parallel)


def mixer_states(config: ModelConfig, tensor_parallel: int) -> list[Sequence[StateSpec]]:
    """Return what a tensor-parallel rank keeps in generation, for each mixer of each layer and lane."""
    lanes = local_lanes(config, tensor_parallel)
    return [
        config.mixer_of(layer).states(tensor_parallel * lanes)
        for layer, kinds in enumerate(config.layer_kinds)
        for kind in kinds
        if kind.has_mixer
        for _ in range(lanes)
    ]


def mtp_states(config: ModelConfig, tensor_parallel: int) -> list[Sequence[StateSpec]]:
    """Return what a rank keeps for the mixer of the drafting head, numbered after those of the layers before it."""
    *others, of_head = mixer_states(config.mtp_config, tensor_parallel)
    return [() for _ in others] + [of_head]


def state_bytes(config: ModelConfig, tensor_parallel: int, positions: float, element_size: int) -> int:
    """Return the bytes that a tensor-parallel rank keeps in generation, for a sequence of up to so many positions."""
    of_mixers = mixer_states(config, tensor_parallel)
    return int(sum(spec.bytes(positions, element_size) for specs in of_mixers for spec in specs))


def mixers_text(config: ModelConfig) -> str:
    """Describe the token mixers: `attention in all layers`, or those of some layers, separated by semicolons."""
    layers_of: dict[str, list[int]] = {}
    for layer in range(config.num_layers):
        layers_of.setdefault(config.mixer_of(layer).name, []).append(layer)
    return "; ".join(f"{name} in {layers_text(layers, config.num_layers)}" for name, layers in layers_of.items())


def head_replicas(config: ModelConfig, tensor_parallel: int) -> tuple[int, ...]:
    """Return the numbers of tensor-parallel ranks, fewer than all, that hold the same key heads of some mixer."""
    heads = {*config.key_heads.values()}
    return tuple(sorted(tensor_parallel // count for count in heads if 1 < count < tensor_parallel))
