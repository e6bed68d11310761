"""The flags of a model, the notation of lists of layers in them, and what they must not be together."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ladder.blueprint.mixers.table import MIXERS
from megatron_ladder.blueprint.wiring import DESYNC_INTERVALS, WIRING_FIELDS, WIRINGS, ResidualMode
from megatron_ladder.errors import Problem
from megatron_ladder.flags import Check, flag, rule


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """Values that are the same on the command line and in a checkpoint."""

    norm_epsilon: float = flag(1e-5, aliases=("--layernorm-epsilon",), above=0)
    """Term added to the mean square in RMSNorm."""
    apply_layernorm_1p: bool = False
    """Multiply in RMSNorm by 1 + weight, which starts at 0, as in Qwen3-Next; norms of latents multiply by weight."""
    rotary_base: float = flag(10000.0, aliases=("--rope-theta",), above=0)
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Method that scales rotary frequencies for longer contexts."""
    rope_scaling_factor: float = flag(1.0, aliases=("--rotary-scaling-factor",), above=0, requires="rope_scaling")
    """Factor by which the context grows."""
    rope_low_freq_factor: float = flag(1.0, above=0, requires="rope_scaling llama3")
    """Wavelengths above original positions / this factor are scaled in full."""
    rope_high_freq_factor: float = flag(4.0, above=0, requires="rope_scaling llama3")
    """Wavelengths below original positions / this factor are not scaled."""
    rope_original_max_position_embeddings: int = flag(
        8192,
        aliases=("--yarn-original-max-position-embeddings",),
        minimum=1,
        requires="rope_scaling llama3 or yarn",
    )
    """Maximum positions of the model before scaling."""
    rope_beta_fast: float = flag(32.0, aliases=("--yarn-beta-fast",), above=0, requires="rope_scaling yarn")
    """Frequencies with more turns than this within the original positions are not scaled."""
    rope_beta_slow: float = flag(1.0, aliases=("--yarn-beta-slow",), above=0, requires="rope_scaling yarn")
    """Frequencies with fewer turns than this are scaled in full."""
    yarn_correction_range_round_to_int: bool = flag(True, requires="rope_scaling yarn")
    """Round the indices of these two frequencies outwards; gpt-oss does not."""
    rope_mscale: float = flag(1.0, aliases=("--mscale",), minimum=0, requires="rope_scaling yarn")
    """Cosines and sines are multiplied by m(this) / m(--rope-mscale-all-dim), where m(s) = 0.1 s ln(factor) + 1."""
    rope_mscale_all_dim: float = flag(0.0, aliases=("--mscale-all-dim",), minimum=0, requires="rope_scaling yarn")
    """See --rope-mscale; latent attention multiplies its scores by m(this)^2."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    add_attention_output_bias: bool = False
    """A bias on the attention's output projection."""
    add_mlp_bias: bool = False
    """Biases on the three projections of the MLP."""
    add_moe_bias: bool = flag(False, requires="num_experts")
    """Biases on the three projections of each routed expert and on the router's matrix, as in gpt-oss."""
    quick_geglu: bool = False
    """Gate MLPs and experts with x sigmoid(1.702 x), which approximates GELU, instead of SiLU."""
    activation_func_clamp_value: float | None = flag(None, above=0)
    """Bound of the inputs of gated activations: from above of gates, on both sides of what they multiply. No bound by
    default."""
    glu_linear_offset: float = 0.0
    """Number that is added to what gates multiply, after its bound."""
    qk_layernorm: bool = False
    """RMSNorm over each query and key head before the rotary embedding."""
    attention_output_gate: bool = False
    """Multiply the attention's output, before its projection, by the sigmoid of another projection of its input."""
    kv_lora_rank: int = flag(0, minimum=0)
    """Width of the latent from which keys and values are computed (multi-head latent attention); 0: there is none."""
    q_lora_rank: int = flag(0, minimum=0, requires="kv_lora_rank")
    """Width of the latent from which queries are computed; 0: they are projected from the hidden state."""
    qk_nope_head_dim: int = flag(128, aliases=("--qk-head-dim",), minimum=1, requires="kv_lora_rank")
    """Latent attention: width of the part of each query and key that is not rotated."""
    qk_rope_head_dim: int = flag(64, aliases=("--qk-pos-emb-head-dim",), minimum=2, requires="kv_lora_rank")
    """Latent attention: width of the rotated part, whose key all heads share."""
    v_head_dim: int = flag(128, minimum=1, requires="kv_lora_rank")
    """Latent attention: width of each value."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """Denominator of attention's softmax: learnable adds one trained term for each query head, the sink (gpt-oss)."""
    experimental_attention_variant: Literal["none", "gated_delta_net"] = "none"
    """Token mixer of the layers without softmax attention: gated_delta_net (arXiv 2412.06464) has a state of fixed size
    for each head, and no rotary embedding."""
    linear_conv_kernel_dim: int = flag(4, minimum=2, requires="experimental_attention_variant")
    """Gated DeltaNet: newest tokens whose queries, keys and values the convolution mixes."""
    linear_key_head_dim: int = flag(128, minimum=1, requires="experimental_attention_variant")
    """Gated DeltaNet: width of each query and key."""
    linear_value_head_dim: int = flag(128, minimum=1, requires="experimental_attention_variant")
    """Gated DeltaNet: width of each value."""
    linear_num_key_heads: int = flag(16, minimum=1, requires="experimental_attention_variant")
    """Gated DeltaNet: query and key heads, each of which serves as many value heads."""
    linear_num_value_heads: int = flag(32, minimum=1, requires="experimental_attention_variant")
    """Gated DeltaNet: value heads, each with a state."""
    logit_soft_cap: float | None = flag(None, above=0)
    """Bound of the logits: cap x tanh(logits / cap), as in Gemma 2, where it is 30. No bound by default."""
    rotary_percent: float = flag(1.0, above=0, maximum=1)
    """Part of each head that the rotary embedding rotates, from its first dimension on."""
    num_experts: int = flag(0, minimum=0, maximum=4096)
    """Routed experts of a layer (mixture of experts); 0: every layer is dense."""
    moe_router_topk: int = flag(2, minimum=1, requires="num_experts")
    """Experts of each token; to train with 1, add --moe-router-unnormalized."""
    moe_shared_expert_intermediate_size: int = flag(0, minimum=0, requires="num_experts")
    """Width of the expert that every token uses; 0: there is none."""
    moe_shared_expert_gate: bool = flag(False, requires="moe_shared_expert_intermediate_size")
    """Multiply that expert's output by the sigmoid of one number, a projection of its input."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax", requires="num_experts")
    """Function that maps the router's logits to scores: over all experts, or for each expert."""
    moe_router_unnormalized: bool = flag(False, requires="num_experts")
    """Weight the chosen experts by their scores, without dividing by the sum."""
    moe_router_topk_scaling_factor: float = flag(1.0, above=0, requires="num_experts")
    """Factor on the weights of the chosen experts."""
    moe_router_enable_expert_bias: bool = flag(False, requires="num_experts")
    """Choose experts by scores plus a bias that follows the experts' loads, without a loss (DeepSeek-V3)."""
    moe_router_num_groups: int = flag(1, minimum=1, requires="num_experts")
    """Groups of experts, of which each token first chooses --moe-router-group-topk, by the highest score in each, or
    with --moe-router-enable-expert-bias by the sum of the two highest, as in DeepSeek-V2 and V3. (Megatron sums the
    --moe-router-topk / --moe-router-group-topk highest, which is the same for DeepSeek-V3.)"""
    moe_router_group_topk: int = flag(1, minimum=1, requires="moe_router_num_groups")
    """Groups from which a token chooses its experts."""
    mtp_num_layers: int = flag(0, minimum=0, maximum=1)
    """Layers of a drafting head (multi-token prediction): from the stream at a token and from the next token, the head
    predicts the one after. 0: there is no head. The layer is a standard one with softmax attention, in any wiring."""
    mtp_before_final_norm: bool = flag(False, requires="mtp_num_layers")
    """The drafting head reads the stream before the final norm, instead of after it."""
    init_method_std: float = flag(0.02, minimum=0)
    """Standard deviation of the initial weights; that of output projections is divided by sqrt(2 x layers)."""
    residual_mode: ResidualMode = flag(
        "standard", details=" ".join(f"{wiring.name}: {wiring.description}" for wiring in WIRINGS.values())
    )
    """Wiring of the layers."""
    residual_staleness: int = flag(1, minimum=1)
    """How many sub-blocks late a ladder layer reads the stream, and so how many all-reduces are in flight."""
    lanes: int = flag(0, aliases=("--own-partials",), minimum=0)
    """Lanes into which heads and neurons are divided, a multiple of the tensor-parallel size. A lane also reads its own
    part of the outputs in flight (own partials). The number is part of the model. 0: no own partials; 1: the same as
    the standard wiring."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ModelTraits):
    """Model. Sizes and wiring of the decoder; defaults are Llama's."""

    num_layers: int = flag(12, minimum=1, maximum=100_000)
    """Transformer layers."""
    hidden_size: int = flag(768, minimum=1)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = flag(None, minimum=1)
    """Width of the MLP; by default 8/3 of the hidden size, rounded up to a multiple of 256."""
    num_attention_heads: int = flag(12, minimum=1)
    """Query heads."""
    num_key_value_heads: int | None = flag(None, aliases=("--num-query-groups",), minimum=1)
    """Key and value heads (grouped-query attention); by default as many as query heads."""
    head_dim: int | None = flag(None, aliases=("--kv-channels",), minimum=1)
    """Width of one head; by default the hidden size divided by the query heads."""
    vocab_size: int | None = flag(None, minimum=1)
    """Number of token ids; by default that of the tokenizer. It is padded to 128 x tensor-parallel size."""
    max_position_embeddings: int | None = flag(None, minimum=1)
    """Longest sequence that the model accepts; by default the training sequence length."""
    moe_ffn_hidden_size: int | None = flag(None, minimum=1, requires="num_experts")
    """Width of one expert; by default --ffn-hidden-size."""
    moe_layers: str | None = flag(None, requires="num_experts")
    """Layers with experts, in the notation of --ladder-layers; by default all. The others are dense."""
    window_size: str | None = None
    """Positions that a query sees in layers with a window, its own included; by default all. Megatron's pair L,0 is
    understood, which shows L + 1 of them."""
    window_layers: str | None = flag(None, requires="window_size", excludes="window_attn_skip_freq")
    """Layers with a window, in the notation of --ladder-layers; by default all."""
    window_attn_skip_freq: int | None = flag(None, minimum=2, requires="window_size", excludes="window_layers")
    """Leave every N-th layer without a window, as in Megatron: layers N - 1, 2N - 1 and so on."""
    linear_attention_layers: str | None = flag(
        None, requires="experimental_attention_variant", excludes="linear_attention_freq"
    )
    """Layers with --experimental-attention-variant, in the notation of --ladder-layers; by default all."""
    linear_attention_freq: int | None = flag(
        None,
        minimum=2,
        requires="experimental_attention_variant",
        excludes="linear_attention_layers",
    )
    """Give every N-th layer softmax attention, as in Megatron: layers N - 1, 2N - 1 and so on."""
    ladder_layers: str | None = None
    """Layers that read the stream late: all (the default), none, N (the upper N layers), or indices from 0 as in
    16-31, 3,7,9-12 or [16] (one layer)."""
    desync_interval: int = 2
    """Sub-blocks between two all-reduces with --residual-mode desync: 2 or 4."""


_MOST_POSITIONS = 2**31 - 1
"""The largest window that programs of other projects read."""


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the sorted layer indices that `--ladder-layers` names.

    The text is `all`, `none`, `N` (the upper N), or a list such as `[16]`, `16-31` or `3,7,9-12`, with or without
    brackets. Other texts, and layers that do not exist, raise ValueError.
    """
    words = {"all": str(num_layers), "none": "0"}.get(text.strip(), text.strip())
    if words.isdecimal():
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
            raise ValueError(f"{part!r} is not within layers 0-{num_layers - 1}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def parse_window(text: str) -> int:
    """Return the positions that `--window-size` shows, or raise ValueError."""
    match = re.fullmatch(r"[(\[]?\s*(\d+)\s*(,\s*0\s*)?[)\]]?", text)
    size = int(match[1]) + bool(match[2]) if match else 0
    if not size:
        raise ValueError(f"{text!r} is not a number of positions such as 128, nor a pair such as 127,0")
    if size > _MOST_POSITIONS:
        raise ValueError(f"expected at most {_MOST_POSITIONS} positions")
    return size


def _is_of_other_wirings(name: str, residual_mode: str, value: Any) -> bool:
    return name not in WIRINGS[residual_mode].takes and value != getattr(ModelFlags, name)


def _invalid_layers(name: str, text: str | None, num_layers: int) -> Iterator[Problem]:
    try:
        parse_layers("all" if text is None else text, num_layers)
    except ValueError as error:
        yield Problem({name: text, "num_layers": num_layers}, "{}: {error} ({num_layers})", error=error)


def _invalid_window(window_size: str | None) -> Iterator[Problem]:
    try:
        parse_window("1" if window_size is None else window_size)
    except ValueError as error:
        yield Problem({"window_size": window_size}, "{}: {error}", error=error)


FLAG_CHECKS = (
    Check(_invalid_window, ("window_size",)),
    rule(
        lambda hidden_size, num_attention_heads, head_dim, kv_lora_rank: (
            head_dim is None and not kv_lora_rank and hidden_size % num_attention_heads
        ),
        "{hidden_size} is not divisible by {num_attention_heads}",
        "change one of them, or give {head_dim}",
    ),
    *(
        rule(
            functools.partial(_is_of_other_wirings, name),
            f"{{{name}}} has no meaning with {{residual_mode}}",
            f"give {{residual_mode}} {' or '.join(modes)}, or leave it out",
            reads=("residual_mode", name),
        )
        for name in WIRING_FIELDS
        for modes in [[mode for mode, row in WIRINGS.items() if name in row.takes]]
    ),
    *(
        Check(functools.partial(_invalid_layers, name), (name, "num_layers"))
        for name in ("ladder_layers", "moe_layers", "window_layers", "linear_attention_layers")
    ),
)
"""Checks of values as flags have them, some of them open."""


def _is_per_rank(residual_mode: str) -> bool:
    return WIRINGS[residual_mode].stream == "per rank"


def _divided_by(divisor: str) -> tuple[Check, ...]:
    """Return the checks that the sizes of a model can be divided into so many parts."""
    cannot = f"is not divisible by {{{divisor}}}"
    return (
        rule(
            lambda parts, heads: parts and heads % parts,
            f"{{num_attention_heads}} {cannot}",
            reads=(divisor, "num_attention_heads"),
        ),
        rule(
            lambda parts, width, layers, moe_layers, mode: (
                parts and (len(moe_layers) < layers or mode == "longcat") and width % parts
            ),
            f"{{ffn_hidden_size}} {cannot}",
            reads=(divisor, "ffn_hidden_size", "num_layers", "moe_layers", "residual_mode"),
        ),
        rule(
            lambda parts, width: parts and width % parts,
            f"{{moe_shared_expert_intermediate_size}} {cannot}",
            reads=(divisor, "moe_shared_expert_intermediate_size"),
        ),
        rule(
            # With as many of them as query heads, the error above is the cause.
            lambda parts, key_heads, heads: parts and key_heads != heads and key_heads % parts and parts % key_heads,
            f"{{num_key_value_heads}} and {{{divisor}}}: one must divide the other (heads are sharded or replicated)",
            reads=(divisor, "num_key_value_heads", "num_attention_heads"),
        ),
        rule(
            lambda parts, layers, value_heads: parts and layers and value_heads % parts,
            f"{{linear_num_value_heads}} {cannot}",
            reads=(divisor, "linear_attention_layers", "linear_num_value_heads"),
        ),
        rule(
            lambda parts, layers, key_heads, value_heads: (
                parts and layers and key_heads != value_heads and key_heads % parts and parts % key_heads
            ),
            f"{{linear_num_key_heads}} and {{{divisor}}}: one must divide the other (heads are sharded or replicated)",
            reads=(divisor, "linear_attention_layers", "linear_num_key_heads", "linear_num_value_heads"),
        ),
    )


def _has_groups(experts: int, groups: int) -> bool:
    return not experts % groups and (groups == 1 or experts // groups > 1)


MODEL_CHECKS = (
    *(check for mixer in reversed(MIXERS) for check in mixer.checks),
    # The rotary embedding.
    rule(
        lambda rope_scaling, rope_low_freq_factor, rope_high_freq_factor: (
            rope_scaling == "llama3" and rope_high_freq_factor <= rope_low_freq_factor
        ),
        "{rope_high_freq_factor} must be above {rope_low_freq_factor}",
    ),
    rule(
        lambda rope_scaling, rope_beta_fast, rope_beta_slow: rope_scaling == "yarn" and rope_beta_fast < rope_beta_slow,
        "{rope_beta_fast} must not be below {rope_beta_slow}",
    ),
    rule(
        lambda rope_scaling, rotary_base: rope_scaling == "yarn" and rotary_base <= 1,
        "{rotary_base} with {rope_scaling}: expected more than 1",
    ),
    # Wirings.
    *(
        rule(
            lambda layers, num_layers: list(layers) != sorted({*layers} & {*range(num_layers)}),
            f"{{{name}}} are not ascending layers of {{num_layers}}",
            reads=(name, "num_layers"),
        )
        for name in ("ladder_layers", "moe_layers", "window_layers", "linear_attention_layers")
    ),
    rule(
        lambda residual_mode, desync_interval: _is_per_rank(residual_mode) and desync_interval not in DESYNC_INTERVALS,
        f"{{desync_interval}} is not {' or '.join(map(str, DESYNC_INTERVALS))}",
    ),
    rule(
        lambda residual_mode, desync_tp: _is_per_rank(residual_mode) and (desync_tp or 0) < 2,
        "{residual_mode} with {tensor_model_parallel_size} {desync_tp!v}: there is nothing to desynchronise",
        "use at least 2 ranks, or {residual_mode} standard",
    ),
    rule(
        lambda lanes, residual_mode: lanes and not WIRINGS[residual_mode].late,
        "{lanes} has no meaning with {residual_mode}",
    ),
    *_divided_by("lanes"),
    rule(
        lambda lanes, moe_ffn_hidden_size: lanes and moe_ffn_hidden_size % lanes,
        "{moe_ffn_hidden_size} is not divisible by {lanes}",
    ),
    # Experts.
    rule(
        lambda residual_mode, moe_layers: WIRINGS[residual_mode].needs_experts and not moe_layers,
        "{residual_mode} needs layers with experts",
        "give {num_experts}",
    ),
    rule(
        lambda num_experts, moe_ffn_hidden_size: num_experts and not moe_ffn_hidden_size,
        "{moe_ffn_hidden_size}: expected the width of one expert",
    ),
    rule(
        lambda num_experts, lanes: num_experts and lanes,
        "{num_experts} with {lanes}: the ranks read different streams and would route apart",
    ),
    rule(
        lambda num_experts, residual_mode: num_experts and _is_per_rank(residual_mode),
        "{num_experts} with {residual_mode}: the ranks read different streams and would route apart",
    ),
    rule(
        lambda residual_mode, num_experts, moe_shared_expert_intermediate_size: (
            residual_mode == "shortcut" and num_experts and not moe_shared_expert_intermediate_size
        ),
        "{residual_mode} needs a shared expert, which runs while the sum of the routed ones is in flight",
        "give {moe_shared_expert_intermediate_size}",
    ),
    rule(
        lambda residual_mode, num_experts, moe_shared_expert_intermediate_size: (
            residual_mode == "longcat" and num_experts and moe_shared_expert_intermediate_size
        ),
        "{moe_shared_expert_intermediate_size} with {residual_mode}, whose layers have dense MLPs instead",
        "leave it out",
    ),
    rule(
        lambda num_experts, moe_router_num_groups: num_experts and not _has_groups(num_experts, moe_router_num_groups),
        "{moe_router_num_groups}: {num_experts} has no groups of 2 or more equal",
    ),
    rule(
        lambda num_experts, moe_router_num_groups, moe_router_group_topk: (
            num_experts
            and _has_groups(num_experts, moe_router_num_groups)
            and moe_router_group_topk > moe_router_num_groups
        ),
        "{moe_router_group_topk} of {moe_router_num_groups!v} groups",
    ),
    rule(
        lambda chosen_from, moe_router_topk: moe_router_topk > chosen_from,
        "{moe_router_topk}: a token chooses among {chosen_from!v} experts",
    ),
)
"""Checks of the values of a model, as checkpoints store them."""
CHOICES: Mapping[str, Callable[..., Any]] = {
    "chosen_from": lambda num_experts, moe_router_num_groups, moe_router_group_topk: (
        num_experts // moe_router_num_groups * moe_router_group_topk
        if num_experts
        and moe_router_group_topk <= moe_router_num_groups
        and _has_groups(num_experts, moe_router_num_groups)
        else None
    ),
}
"""The number of experts among which a token chooses, of a model that has some in such groups."""

LEARNING_CHECKS = (
    rule(
        lambda moe_layers, moe_router_topk, moe_router_unnormalized: (
            moe_layers and moe_router_topk == 1 and not moe_router_unnormalized
        ),
        "{moe_router_topk} without {moe_router_unnormalized}: the weight of the only expert is divided by itself, so "
        "the router learns nothing from the loss",
        "add {moe_router_unnormalized}, or choose 2 experts or more",
    ),
)
"""Checks of values with which a model can be computed, but not trained."""

_SHARED_BY_LANES = "with {lanes} on {tensor_model_parallel_size}: the lanes share these weights, so each needs a rank"
TENSOR_PARALLEL_CHECKS = (
    *_divided_by("tensor_model_parallel_size"),
    rule(
        lambda tensor_model_parallel_size, moe_ffn_hidden_size, expert_sharding, expert_model_parallel_size: (
            expert_sharding == "width"
            and expert_model_parallel_size == 1
            and moe_ffn_hidden_size % tensor_model_parallel_size
        ),
        "{moe_ffn_hidden_size} is not divisible by {tensor_model_parallel_size}",
    ),
    rule(
        lambda tensor_model_parallel_size, num_experts, expert_sharding: (
            expert_sharding == "experts" and num_experts % tensor_model_parallel_size
        ),
        "{num_experts} is not divisible by {tensor_model_parallel_size}",
    ),
    rule(
        lambda expert_model_parallel_size, num_experts: num_experts % expert_model_parallel_size,
        "{num_experts} is not divisible by {expert_model_parallel_size}",
    ),
    rule(
        lambda tensor_model_parallel_size, lanes: lanes % tensor_model_parallel_size,
        "{lanes} is not a multiple of {tensor_model_parallel_size}: a rank computes one or several whole lanes",
    ),
    rule(
        lambda tensor_model_parallel_size, desync_tp: desync_tp and desync_tp != tensor_model_parallel_size,
        "{tensor_model_parallel_size}: this desync model has per-rank norms for {desync_tp!v} tensor-parallel ranks",
        "use {desync_tp!v}",
    ),
    *(
        rule(
            lambda ranks, lanes, has_weight: lanes > ranks and has_weight,
            f"{{{name}}} {_SHARED_BY_LANES}",
            "use {tensor_model_parallel_size} {lanes!v}",
            reads=("tensor_model_parallel_size", "lanes", name),
        )
        for name in (
            "add_attention_output_bias",
            "add_mlp_bias",
            "qk_layernorm",
            "kv_lora_rank",
            "linear_attention_layers",
        )
    ),
    rule(
        lambda tensor_model_parallel_size, lanes, num_key_value_heads, kv_lora_rank: (
            lanes > tensor_model_parallel_size and not kv_lora_rank and num_key_value_heads % lanes
        ),
        f"{{num_key_value_heads}} {_SHARED_BY_LANES}",
        "use {tensor_model_parallel_size} {lanes!v}",
    ),
)
"""Checks that a rank can compute its part of a model."""
