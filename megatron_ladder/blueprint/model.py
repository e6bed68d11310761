"""What the model is: sizes, rotary embedding, biases and wiring of a Llama-family decoder."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from megatron_ladder.blueprint.wiring import (
    DESYNC_INTERVALS,
    RESIDUAL_MODES,
    WIRINGS,
    ResidualMode,
    WiredSubBlock,
    Wiring,
    describe_wirings,
    modes_taking,
)
from megatron_ladder.errors import UserError
from megatron_ladder.flags import ValueType, flag, flag_name, to_plain

FFN_MULTIPLE = 256
"""The default MLP width, 8/3 of the hidden size, is rounded up to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What needs no resolving: the same on the command line and in a checkpoint."""

    norm_epsilon: float = flag(1e-5, aliases=("--layernorm-epsilon",))
    """Added to the mean square in RMSNorm."""
    rotary_base: float = flag(10000.0, aliases=("--rope-theta",))
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How rotary frequencies are stretched for longer contexts."""
    rope_scaling_factor: float = 1.0
    """Factor by which the context is stretched (linear and llama3)."""
    rope_low_freq_factor: float = 1.0
    """Llama 3 scaling: wavelengths above original positions / this are stretched in full."""
    rope_high_freq_factor: float = 4.0
    """Llama 3 scaling: wavelengths below original positions / this are left as they are."""
    rope_original_max_position_embeddings: int = 8192
    """Llama 3 scaling: positions of the model before stretching."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    add_attention_output_bias: bool = False
    """A bias on the attention's output projection."""
    add_mlp_bias: bool = False
    """Biases on the three projections of the MLP."""
    qk_layernorm: bool = False
    """RMSNorm over each query and key head before the rotary embedding."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output projections get it over sqrt(2 x layers)."""
    residual_mode: ResidualMode = flag("standard", details=describe_wirings())
    """Wiring of the layers."""
    residual_staleness: int = 1
    """How many sub-blocks late a ladder layer reads the stream, and so how many all-reduces are in flight."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ModelTraits):
    """Model. Sizes and wiring of the decoder; defaults are Llama's."""

    num_layers: int = 12
    """Transformer layers."""
    hidden_size: int = 768
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; 8/3 of the hidden size rounded up to a multiple of 256 if not given."""
    num_attention_heads: int = 12
    """Query heads."""
    num_key_value_heads: int | None = flag(None, aliases=("--num-query-groups",))
    """Key and value heads (grouped-query attention); as many as query heads if not given."""
    head_dim: int | None = flag(None, aliases=("--kv-channels",))
    """Width of one head; hidden size over query heads if not given."""
    vocab_size: int | None = None
    """Number of token ids; taken from the tokenizer if not given. It is padded to 128 x tensor-parallel size."""
    max_position_embeddings: int | None = None
    """Longest sequence the model may see; the training sequence length if not given."""
    ladder_layers: str | None = None
    """Layers that read the stream late: all (if not given), none, N (the upper N layers), or indices from 0 as in
    16-31, 3,7,9-12 or [16] (one layer)."""
    desync_interval: int = 2
    """With --residual-mode desync, sub-blocks between two all-reduces: 2 or 4."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelTraits):
    """A model with nothing left open; the form in which a checkpoint keeps it.

    Attributes are those of `ModelFlags` after `resolve_model`. `ladder_layers` is the sorted tuple of indices of
    the layers that read the stream late; it is empty for standard and parallel.
    """

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of one head."""
    vocab_size: int
    """Number of token ids, without padding."""
    max_position_embeddings: int
    """Longest sequence the model may see."""
    ladder_layers: tuple[int, ...] = ()
    """Sorted indices of the layers that read the stream late."""
    desync_interval: int = 0
    """Sub-blocks between two all-reduces of a desynchronised stream; 0 without desync."""
    desync_tp: int | None = None
    """Tensor-parallel size that a desync model was made for, and the only one that it has; None without desync."""

    @property
    def wiring(self) -> Wiring:
        """The row of the table of wirings."""
        return WIRINGS[self.residual_mode]

    @property
    def wired_layers(self) -> list[tuple[WiredSubBlock, ...]]:
        """The sub-blocks of every layer."""
        layers, staleness = self.ladder_layers, self.residual_staleness
        return self.wiring.layers(self.num_layers, layers, staleness, self.desync_interval)

    def in_wiring(
        self, mode: ResidualMode, *, staleness: int = 1, desync_interval: int = 0, ranks: int = 1
    ) -> "ModelConfig":
        """Return the same model with all layers in another wiring.

        Args:
            ranks: tensor-parallel size, which is part of a desync model.
        """
        wiring = WIRINGS[mode]
        return replace(
            self,
            residual_mode=mode,
            residual_staleness=staleness,
            ladder_layers=tuple(range(self.num_layers)) if wiring.late else (),
            desync_interval=desync_interval,
            desync_tp=ranks if wiring.stream == "per rank" else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the inverse of `from_dict`."""
        return to_plain(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str) -> "ModelConfig":
        """Reads a stored model.

        `ladder_layers` may be a list, an int N (the upper N layers) or null (none).

        Raises:
            UserError: a key is missing, unknown or of the wrong kind; `source` (the file) is named.
        """
        known = {field.name: field for field in fields(ModelConfig)}
        strange = sorted(set(values) - set(known))
        absent = sorted(name for name, field in known.items() if field.default is MISSING and name not in values)
        if strange or absent:
            raise UserError(f"{source}: not a model of this version: unknown keys {strange}, missing keys {absent}")
        read = dict(values)
        layers = read.get("ladder_layers")
        try:
            if isinstance(layers, int):
                layers = range(read["num_layers"] - layers, read["num_layers"])
            read["ladder_layers"] = tuple(sorted(int(layer) for layer in layers or ()))
            for name, field in known.items():
                kind = ValueType.of(field.type)
                if name in read and name != "ladder_layers" and not (kind.optional and read[name] is None):
                    read[name] = kind.scalar(read[name])
        except (TypeError, ValueError) as error:
            raise UserError(f"{source}: the model's description cannot be read: {error}") from None
        config = ModelConfig(**read)
        mistakes = model_mistakes(config)
        if mistakes:
            raise UserError(*(f"{source}: {mistake}" for mistake in mistakes))
        return config


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The sorted layer indices that `--ladder-layers` names.

    Grammar: `all`, `none`, `N` (the upper N), `[16]`, `16-31`, `3,7,9-12`, brackets optional around a list.

    Raises:
        ValueError: the text does not follow the grammar, or names a layer that does not exist.
    """
    words = text.strip()
    if words == "all":
        return tuple(range(num_layers))
    if words == "none":
        return ()
    if words.isdigit():
        if int(words) > num_layers:
            raise ValueError(f"the upper {words} layers of {num_layers} do not exist")
        return tuple(range(num_layers - int(words), num_layers))
    if words.startswith("[") and words.endswith("]"):
        words = words[1:-1]
    layers: set[int] = set()
    for part in words.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is not all, none, N, a layer or a range such as 16-31")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= num_layers:
            raise ValueError(f"{part!r} does not lie in layers 0-{num_layers - 1}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def resolve_model(
    flags: ModelFlags, vocab_size: int, seq_length: int, tensor_parallel: int, mistakes: list[str]
) -> ModelConfig:
    """Fills in what the flags leave open. Mistakes are appended, and harmless values stand in for them."""
    hidden, heads = flags.hidden_size, max(flags.num_attention_heads, 1)
    if flags.head_dim is None and hidden % heads:
        mistakes.append(
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}: "
            "change one of them, or give --head-dim"
        )
    wiring = WIRINGS[flags.residual_mode]
    for name in ("ladder_layers", "residual_staleness", "desync_interval"):
        if name not in wiring.takes and getattr(flags, name) != getattr(ModelFlags, name):
            mistakes.append(
                f"{flag_name(name)} {getattr(flags, name)} has no meaning with --residual-mode "
                f"{flags.residual_mode}: give --residual-mode {' or '.join(modes_taking(name))}, or leave it out"
            )
    desync = wiring.stream == "per rank"
    try:
        layers = parse_layers("all" if flags.ladder_layers is None else flags.ladder_layers, flags.num_layers)
    except ValueError as error:
        mistakes.append(f"--ladder-layers {flags.ladder_layers}: {error}")
        layers = ()
    default_ffn = -(-8 * hidden // 3 // FFN_MULTIPLE) * FFN_MULTIPLE
    values = {field.name: getattr(flags, field.name) for field in fields(ModelFlags)}
    values.update(
        ffn_hidden_size=default_ffn if flags.ffn_hidden_size is None else flags.ffn_hidden_size,
        num_key_value_heads=heads if flags.num_key_value_heads is None else flags.num_key_value_heads,
        head_dim=hidden // heads if flags.head_dim is None else flags.head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=seq_length if flags.max_position_embeddings is None else flags.max_position_embeddings,
        ladder_layers=layers if wiring.late else (),
        desync_interval=flags.desync_interval if desync else 0,
        desync_tp=tensor_parallel if desync else None,
    )
    config = ModelConfig(**values)
    mistakes.extend(model_mistakes(config))
    return config


def model_mistakes(config: ModelConfig) -> list[str]:
    """One line for each value that no model can have, in the words of the command line."""
    mistakes = []
    positive = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "vocab_size", "max_position_embeddings", "norm_epsilon", "rotary_base", "rope_scaling_factor",
        "rope_original_max_position_embeddings", "residual_staleness",
    )  # fmt: skip
    for name in positive:
        if getattr(config, name) <= 0:
            mistakes.append(f"--{name.replace('_', '-')} {getattr(config, name)} must be above zero")
    if mistakes:
        return mistakes
    if config.num_attention_heads % config.num_key_value_heads:
        mistakes.append(
            f"--num-attention-heads {config.num_attention_heads} is not divisible by "
            f"--num-key-value-heads {config.num_key_value_heads}: every key head serves as many query heads"
        )
    if config.init_method_std < 0:
        mistakes.append(f"--init-method-std {config.init_method_std} must not be negative")
    if config.rope_scaling == "none" and config.rope_scaling_factor != 1.0:
        mistakes.append(
            f"--rope-scaling-factor {config.rope_scaling_factor} has no meaning with --rope-scaling none: "
            "give --rope-scaling linear or llama3"
        )
    if config.head_dim % 2:
        mistakes.append(f"--head-dim {config.head_dim} is odd: the rotary embedding turns pairs")
    if config.rope_scaling == "llama3" and config.rope_high_freq_factor <= config.rope_low_freq_factor:
        mistakes.append(
            f"--rope-high-freq-factor {config.rope_high_freq_factor} must be above "
            f"--rope-low-freq-factor {config.rope_low_freq_factor}"
        )
    if any(not 0 <= layer < config.num_layers for layer in config.ladder_layers):
        mistakes.append(f"--ladder-layers {list(config.ladder_layers)} has layers outside 0-{config.num_layers - 1}")
    if config.residual_mode not in RESIDUAL_MODES:
        mistakes.append(f"--residual-mode {config.residual_mode} is not one of {', '.join(RESIDUAL_MODES)}")
    elif config.wiring.stream == "per rank":
        if config.desync_interval not in DESYNC_INTERVALS:
            possible = " or ".join(map(str, DESYNC_INTERVALS))
            mistakes.append(f"--desync-interval {config.desync_interval} is not {possible}")
        if config.desync_tp is None or config.desync_tp < 2:
            mistakes.append(
                f"--residual-mode desync with --tensor-model-parallel-size {config.desync_tp}: there is nothing to "
                "desynchronise; use at least 2 ranks, or --residual-mode standard"
            )
    return mistakes


def tensor_parallel_mistakes(config: ModelConfig, tensor_parallel: int) -> list[str]:
    """One line for each size that this many tensor-parallel ranks cannot share."""
    mistakes = []
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(config, name) % tensor_parallel:
            mistakes.append(
                f"--{name.replace('_', '-')} {getattr(config, name)} is not divisible by "
                f"--tensor-model-parallel-size {tensor_parallel}"
            )
    kv_heads = config.num_key_value_heads
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        mistakes.append(
            f"--num-key-value-heads {kv_heads} and --tensor-model-parallel-size {tensor_parallel}: "
            "one must divide the other (heads are shared out, or replicated)"
        )
    if config.desync_tp not in (None, tensor_parallel):
        mistakes.append(
            f"--tensor-model-parallel-size {tensor_parallel}: this desync model is one of {config.desync_tp} "
            f"tensor-parallel ranks, each with norms of its own: use {config.desync_tp}"
        )
    return mistakes


def key_value_replicas(config: ModelConfig, tensor_parallel: int) -> int:
    """Return how many ranks hold the same key and value heads: 1 with at least as many heads as ranks."""
    return max(1, tensor_parallel // config.num_key_value_heads)
