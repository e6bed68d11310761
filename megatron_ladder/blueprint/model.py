"""A model: the sizes, rotary embedding, biases, experts and wiring of a Llama-family decoder, and its checks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_ladder.blueprint.model_flags import ModelFlags, ModelTraits, parse_layers
from megatron_ladder.blueprint.wiring import (
    DESYNC_INTERVALS,
    WIRING_FIELDS,
    WIRINGS,
    SubBlockKind,
    WiredSubBlock,
    Wiring,
)
from megatron_ladder.errors import Problem, UserError, raise_user_errors
from megatron_ladder.flags import flag, flag_name, to_plain, value_errors

FFN_MULTIPLE = 256
"""The default MLP width, 8/3 of the hidden size, is rounded up to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelTraits):
    """A resolved model, as checkpoints store it.

    The attributes are those of `ModelFlags` after `resolve_model`. `moe_layers` and `ladder_layers` are sorted; the
    latter is empty in a wiring without late sub-blocks. Widths and intervals of what the model lacks are 0.
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
    def separating_field(self) -> str:
        """The field that makes the tensor-parallel ranks read different streams, if they do."""
        return "lanes" if self.lanes else "residual_mode"

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are computed from a latent."""
        return self.kv_lora_rank > 0

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a query."""
        return self.qk_rope_head_dim if self.is_latent else int(self.head_dim * self.rotary_percent)

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.v_head_dim if self.is_latent else self.head_dim

    @property
    def attention_factor(self) -> float:
        """The factor on cosines and sines: 1 except with YaRN (arXiv 2309.00071)."""
        if self.rope_scaling != "yarn":
            return 1.0
        factor = self.rope_scaling_factor
        return yarn_mscale(factor, self.rope_mscale) / yarn_mscale(factor, self.rope_mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores of attention; that of latent attention includes YaRN's m(mscale_all_dim)^2."""
        mscale = yarn_mscale(self.rope_scaling_factor, self.rope_mscale_all_dim) if self.is_latent else 1.0
        return mscale**2 / math.sqrt(self.head_dim)

    @property
    def cached_widths(self) -> tuple[int, ...]:
        """Widths of what generation caches per token and key-value head: key and value, or latent and rotated key."""
        if self.is_latent:
            return (self.kv_lora_rank + self.qk_rope_head_dim,)
        return self.head_dim, self.head_dim

    @property
    def layer_kinds(self) -> Sequence[tuple[SubBlockKind, ...]]:
        """The kinds of the sub-blocks of every layer."""
        has_shared = self.moe_shared_expert_intermediate_size > 0
        return [self.wiring.kinds(layer in self.moe_layers, has_shared) for layer in range(self.num_layers)]

    @property
    def attention_sub_blocks(self) -> int:
        """The number of sub-blocks that keep keys and values."""
        return sum(kind.attends for kinds in self.layer_kinds for kind in kinds)

    @property
    def wired_layers(self) -> list[tuple[WiredSubBlock, ...]]:
        """The sub-blocks of every layer."""
        return self.wiring.layers(self.layer_kinds, self.ladder_layers, self.residual_staleness, self.desync_interval)

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
        values = {field.name: getattr(self, field.name) for field in fields(ModelFlags)}
        for name, is_used in (("ladder_layers", bool(self.wiring.late)), ("moe_layers", self.num_experts > 0)):
            layers: tuple[int, ...] = getattr(self, name)
            if not is_used or len(layers) == self.num_layers:
                values[name] = None
            else:
                values[name] = f"[{','.join(map(str, layers))}]" if layers else "none"
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


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's m(mscale) = 0.1 mscale ln(factor) + 1, where the context grows by a factor."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


_LISTS_OF_LAYERS = ("ladder_layers", "moe_layers")


def resolve_model(
    flags: ModelFlags, vocab_size: int, seq_length: int, tensor_parallel: int, errors: list[str | Problem]
) -> ModelConfig:
    """Derive the values that the flags leave open, appending one line to `errors` for each error.

    A harmless value replaces one that cannot be derived.
    """
    hidden, heads = flags.hidden_size, max(flags.num_attention_heads, 1)
    head_dim = flags.qk_nope_head_dim + flags.qk_rope_head_dim if flags.kv_lora_rank else hidden // heads
    if flags.head_dim is None and not flags.kv_lora_rank and hidden % heads:
        head_dim = 2
        errors.append(
            Problem(
                "--hidden-size",
                f" {hidden} is not divisible by --num-attention-heads {heads}: change one of them, or give --head-dim",
            )
        )
    # Flags of other wirings.
    wiring = WIRINGS[flags.residual_mode]
    for name in WIRING_FIELDS:
        if name not in wiring.takes and getattr(flags, name) != getattr(ModelFlags, name):
            taking = " or ".join(mode for mode, other in WIRINGS.items() if name in other.takes)
            errors.append(
                Problem(
                    flag_name(name),
                    f" {getattr(flags, name)} has no meaning with --residual-mode {flags.residual_mode}: give "
                    f"--residual-mode {taking}, or leave it out",
                )
            )
    layers: dict[str, tuple[int, ...]] = {}
    for name in _LISTS_OF_LAYERS:
        text = getattr(flags, name)
        try:
            layers[name] = parse_layers("all" if text is None else text, flags.num_layers)
        except ValueError as error:
            errors.append(Problem(flag_name(name), f" {text}: {error} (--num-layers {flags.num_layers})"))
            layers[name] = ()
    # Defaults, and zeros for what the model lacks.
    desync = wiring.stream == "per rank"
    derived = {
        "ffn_hidden_size": -(-8 * hidden // 3 // FFN_MULTIPLE) * FFN_MULTIPLE,
        "num_key_value_heads": 1 if flags.kv_lora_rank else heads,
        "head_dim": head_dim,
        "max_position_embeddings": seq_length,
    }
    flag_values = {field.name: getattr(flags, field.name) for field in fields(ModelFlags)}
    values = flag_values | {name: value for name, value in derived.items() if flag_values[name] is None}
    width = flags.moe_ffn_hidden_size or values["ffn_hidden_size"]
    values.update(
        vocab_size=vocab_size,
        moe_ffn_hidden_size=width if flags.num_experts else 0,
        moe_layers=layers["moe_layers"] if flags.num_experts else (),
        ladder_layers=layers["ladder_layers"] if wiring.late else (),
        lanes=flags.lanes if wiring.late else 0,
        desync_interval=flags.desync_interval if desync else 0,
        desync_tp=tensor_parallel if desync else None,
    )
    config = ModelConfig(**values)
    errors += model_errors(config)
    return config.canonical()


def model_errors(config: ModelConfig) -> Iterator[Problem]:
    """Yield one line, with the names of the flags, for each value or combination that no model can have."""
    if problems := value_errors([config]):
        yield from problems
        return
    if config.num_attention_heads % config.num_key_value_heads:
        yield Problem(
            "--num-attention-heads",
            f" {config.num_attention_heads} is not divisible by "
            f"--num-key-value-heads {config.num_key_value_heads}: every key head serves as many query heads",
        )
    if config.is_latent:
        yield from _latent_errors(config)
    elif config.rotary_dim % 2 or config.rotary_dim < 2:
        part = f" x --rotary-percent {config.rotary_percent}" if config.rotary_percent < 1 else ""
        yield Problem("--head-dim", f" {config.head_dim}{part} is odd or below 2: the rotary embedding needs pairs")
    if config.rope_scaling == "llama3" and config.rope_high_freq_factor <= config.rope_low_freq_factor:
        yield Problem(
            "--rope-high-freq-factor",
            f" {config.rope_high_freq_factor} must be above --rope-low-freq-factor {config.rope_low_freq_factor}",
        )
    if config.rope_scaling == "yarn" and config.rope_beta_fast < config.rope_beta_slow:
        yield Problem(
            "--rope-beta-fast", f" {config.rope_beta_fast} must not be below --rope-beta-slow {config.rope_beta_slow}"
        )
    if config.rope_scaling == "yarn" and config.rotary_base <= 1:
        yield Problem("--rotary-base", f" {config.rotary_base} with --rope-scaling yarn: expected more than 1")
    for name in _LISTS_OF_LAYERS:
        layers: tuple[int, ...] = getattr(config, name)
        if list(layers) != sorted({*layers} & {*range(config.num_layers)}):
            yield Problem(flag_name(name), f" {list(layers)} are not ascending layers of 0-{config.num_layers - 1}")
    if config.wiring.stream == "per rank":
        if config.desync_interval not in DESYNC_INTERVALS:
            possible = " or ".join(map(str, DESYNC_INTERVALS))
            yield Problem("--desync-interval", f" {config.desync_interval} is not {possible}")
        if config.desync_tp is None or config.desync_tp < 2:
            yield Problem(
                "--residual-mode",
                f" desync with --tensor-model-parallel-size {config.desync_tp}: there is nothing to "
                "desynchronise; use at least 2 ranks, or --residual-mode standard",
            )
    yield from _expert_errors(config)
    if config.lanes and not config.wiring.late:
        yield Problem("--lanes", f" {config.lanes} has no meaning with --residual-mode {config.residual_mode}")
    elif config.lanes:
        yield from _division_errors(config, "lanes", config.lanes)


def _latent_errors(config: ModelConfig) -> Iterator[Problem]:
    """Yield one line for each value that no model with latent attention can have."""
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.qk_rope_head_dim % 2:
        yield Problem("--qk-rope-head-dim", f" {config.qk_rope_head_dim} is odd: the rotary embedding needs pairs")
    expected = {
        "num_key_value_heads": (1, "all heads share one latent"),
        "head_dim": (width, "the sum of --qk-nope-head-dim and --qk-rope-head-dim"),
        "rotary_percent": (1, "--qk-rope-head-dim is the rotated part"),
        "qk_layernorm": (False, "the latents are normed"),
    }
    for name, (value, reason) in expected.items():
        if getattr(config, name) != value:
            found = f"{flag_name(name)} {getattr(config, name)}"
            yield Problem("--kv-lora-rank", f" {config.kv_lora_rank} with {found}: {reason}: leave it out")


def _expert_errors(config: ModelConfig) -> Iterator[Problem]:
    """Yield one line for each value that no model with experts can have, or that needs experts."""
    experts, groups = config.num_experts, config.moe_router_num_groups
    wiring = config.wiring
    if wiring.needs_experts and not config.moe_layers:
        yield Problem("--residual-mode", f" {config.residual_mode} needs layers with experts: give --num-experts")
    if not experts:
        return
    if not config.moe_ffn_hidden_size:
        yield Problem("--moe-ffn-hidden-size", " 0: expected the width of one expert")
    if not config.shares_stream:
        what = f"{flag_name(config.separating_field)} {getattr(config, config.separating_field)}"
        yield Problem(
            "--num-experts", f" {experts} with {what}: the ranks read different streams and would route apart"
        )
    if config.residual_mode == "shortcut" and not config.moe_shared_expert_intermediate_size:
        fix = "give --moe-shared-expert-intermediate-size"
        text = f" shortcut needs a shared expert, which runs while the sum of the routed ones is in flight: {fix}"
        yield Problem("--residual-mode", text)
    if config.residual_mode == "longcat" and config.moe_shared_expert_intermediate_size:
        width = config.moe_shared_expert_intermediate_size
        text = f" {width} with --residual-mode longcat, whose layers have dense MLPs instead: leave it out"
        yield Problem("--moe-shared-expert-intermediate-size", text)
    if experts % groups or (groups > 1 and experts // groups < 2):
        yield Problem("--moe-router-num-groups", f" {groups}: --num-experts {experts} has no groups of 2 or more equal")
    elif config.moe_router_group_topk > groups:
        yield Problem("--moe-router-group-topk", f" {config.moe_router_group_topk} of {groups} groups")
    elif config.moe_router_topk > experts // groups * config.moe_router_group_topk:
        among = experts // groups * config.moe_router_group_topk
        yield Problem("--moe-router-topk", f" {config.moe_router_topk}: a token chooses among {among} experts")


def learning_errors(config: ModelConfig) -> Iterator[Problem]:
    """Yield one line for each value with which a model can be computed, but not trained."""
    if config.moe_layers and config.moe_router_topk == 1 and not config.moe_router_unnormalized:
        yield Problem(
            "--moe-router-topk",
            " 1 without --moe-router-unnormalized: the weight of the only expert is divided by itself, so the router "
            "learns nothing from the loss: add --moe-router-unnormalized, or choose 2 experts or more",
        )


def tensor_parallel_errors(config: ModelConfig, tensor_parallel: int, whole_experts: bool = False) -> list[Problem]:
    """Return one line for each reason why this many tensor-parallel ranks cannot compute the model.

    With `whole_experts` a rank holds some of the experts, otherwise a part of the width of each.
    """
    errors = [*_division_errors(config, "tensor_model_parallel_size", tensor_parallel, whole_experts)]
    if config.lanes % tensor_parallel:
        errors.append(
            Problem(
                "--lanes",
                f" {config.lanes} is not a multiple of --tensor-model-parallel-size {tensor_parallel}: a rank "
                "computes one or several whole lanes",
            )
        )
    if config.desync_tp not in (None, tensor_parallel):
        errors.append(
            Problem(
                "--tensor-model-parallel-size",
                f" {tensor_parallel}: this desync model has per-rank norms for "
                f"{config.desync_tp} tensor-parallel ranks: use {config.desync_tp}",
            )
        )
    return [*errors, *_lane_errors(config, tensor_parallel)]


def _lane_errors(config: ModelConfig, tensor_parallel: int) -> list[Problem]:
    """Return one line for each weight for which a rank cannot compute several lanes, because they share it."""
    if config.lanes <= tensor_parallel:
        return []
    key_heads = "kv_lora_rank" if config.is_latent else "num_key_value_heads"
    shared = {
        "add_attention_output_bias": config.add_attention_output_bias,
        "add_mlp_bias": config.add_mlp_bias,
        "qk_layernorm": config.qk_layernorm,
        key_heads: config.num_key_value_heads % config.lanes != 0,
    }
    return [
        Problem(
            {name: getattr(config, name), "lanes": config.lanes, "tensor_model_parallel_size": tensor_parallel},
            "{} with {lanes} on {tensor_model_parallel_size}: the lanes share these weights, so each needs a rank",
            f"use {{tensor_model_parallel_size}} {config.lanes}",
        )
        for name, is_shared in shared.items()
        if is_shared
    ]


def _division_errors(config: ModelConfig, divisor: str, parts: int, whole_experts: bool = False) -> Iterator[Problem]:
    """Yield one line for each size that cannot be divided into this many parts."""
    has_mlp = len(config.moe_layers) < config.num_layers or config.residual_mode == "longcat"
    names = ["num_attention_heads", *(["ffn_hidden_size"] if has_mlp else [])]
    names += ["num_experts" if whole_experts else "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
    for name in names:
        if getattr(config, name) % parts:
            yield Problem(flag_name(name), f" {getattr(config, name)} is not divisible by {flag_name(divisor)} {parts}")
    kv_heads = config.num_key_value_heads
    # With as many of them as query heads, the error above is the cause.
    if kv_heads != config.num_attention_heads and kv_heads % parts and parts % kv_heads:
        yield Problem(
            "--num-key-value-heads",
            f" {kv_heads} and {flag_name(divisor)} {parts}: one must divide the other (heads are "
            "sharded or replicated)",
        )


def local_lanes(config: ModelConfig, tensor_parallel: int) -> int:
    """Return how many lanes a tensor-parallel rank computes: 1 without own partials."""
    return max(1, config.lanes // tensor_parallel)


def cached_states(config: ModelConfig, tensor_parallel: int) -> tuple[int, int]:
    """Return how many states of attention a tensor-parallel rank caches, and the key and value heads of each."""
    lanes = local_lanes(config, tensor_parallel)
    heads = config.num_key_value_heads * key_value_replicas(config, tensor_parallel)
    return config.attention_sub_blocks * lanes, heads // (tensor_parallel * lanes)


def key_value_replicas(config: ModelConfig, tensor_parallel: int) -> int:
    """Return how many ranks hold the same key and value heads: 1 with at least as many heads as ranks."""
    return max(1, tensor_parallel // config.num_key_value_heads)
