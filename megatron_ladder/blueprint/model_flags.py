"""The flags of a model, and the notation of lists of layers in them."""

import re
from dataclasses import dataclass
from typing import Literal

from megatron_ladder.blueprint.wiring import WIRINGS, ResidualMode
from megatron_ladder.flags import flag


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """Values that are the same on the command line and in a checkpoint."""

    norm_epsilon: float = flag(1e-5, aliases=("--layernorm-epsilon",), above=0)
    """Term added to the mean square in RMSNorm."""
    rotary_base: float = flag(10000.0, aliases=("--rope-theta",), above=0)
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Method that scales rotary frequencies for longer contexts."""
    rope_scaling_factor: float = flag(1.0, aliases=("--rotary-scaling-factor",), above=0, requires="--rope-scaling")
    """Factor by which the context grows."""
    rope_low_freq_factor: float = flag(1.0, above=0, requires="--rope-scaling llama3")
    """Wavelengths above original positions / this factor are scaled in full."""
    rope_high_freq_factor: float = flag(4.0, above=0, requires="--rope-scaling llama3")
    """Wavelengths below original positions / this factor are not scaled."""
    rope_original_max_position_embeddings: int = flag(
        8192,
        aliases=("--yarn-original-max-position-embeddings",),
        minimum=1,
        requires="--rope-scaling llama3 or yarn",
    )
    """Maximum positions of the model before scaling."""
    rope_beta_fast: float = flag(32.0, aliases=("--yarn-beta-fast",), above=0, requires="--rope-scaling yarn")
    """Frequencies with more turns than this within the original positions are not scaled."""
    rope_beta_slow: float = flag(1.0, aliases=("--yarn-beta-slow",), above=0, requires="--rope-scaling yarn")
    """Frequencies with fewer turns than this are scaled in full."""
    rope_mscale: float = flag(1.0, aliases=("--mscale",), minimum=0, requires="--rope-scaling yarn")
    """Cosines and sines are multiplied by m(this) / m(--rope-mscale-all-dim), where m(s) = 0.1 s ln(factor) + 1."""
    rope_mscale_all_dim: float = flag(0.0, aliases=("--mscale-all-dim",), minimum=0, requires="--rope-scaling yarn")
    """See --rope-mscale; latent attention multiplies its scores by m(this)^2."""
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
    attention_output_gate: bool = False
    """Multiply the attention's output, before its projection, by the sigmoid of another projection of its input."""
    kv_lora_rank: int = flag(0, minimum=0)
    """Width of the latent from which keys and values are computed (multi-head latent attention); 0: there is none."""
    q_lora_rank: int = flag(0, minimum=0, requires="--kv-lora-rank")
    """Width of the latent from which queries are computed; 0: they are projected from the hidden state."""
    qk_nope_head_dim: int = flag(128, aliases=("--qk-head-dim",), minimum=1, requires="--kv-lora-rank")
    """Latent attention: width of the part of each query and key that is not rotated."""
    qk_rope_head_dim: int = flag(64, aliases=("--qk-pos-emb-head-dim",), minimum=2, requires="--kv-lora-rank")
    """Latent attention: width of the rotated part, whose key all heads share."""
    v_head_dim: int = flag(128, minimum=1, requires="--kv-lora-rank")
    """Latent attention: width of each value."""
    logit_soft_cap: float | None = flag(None, above=0)
    """Bound of the logits: cap x tanh(logits / cap), as in Gemma 2, where it is 30. No bound by default."""
    rotary_percent: float = flag(1.0, above=0, maximum=1)
    """Part of each head that the rotary embedding rotates, from its first dimension on."""
    num_experts: int = flag(0, minimum=0, maximum=4096)
    """Routed experts of a layer (mixture of experts); 0: every layer is dense."""
    moe_router_topk: int = flag(2, minimum=1, requires="--num-experts")
    """Experts of each token; to train with 1, add --moe-router-unnormalized."""
    moe_shared_expert_intermediate_size: int = flag(0, minimum=0, requires="--num-experts")
    """Width of the expert that every token uses; 0: there is none."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax", requires="--num-experts")
    """Function that maps the router's logits to scores: over all experts, or for each expert."""
    moe_router_unnormalized: bool = flag(False, requires="--num-experts")
    """Weight the chosen experts by their scores, without dividing by the sum."""
    moe_router_topk_scaling_factor: float = flag(1.0, above=0, requires="--num-experts")
    """Factor on the weights of the chosen experts."""
    moe_router_enable_expert_bias: bool = flag(False, requires="--num-experts")
    """Choose experts by scores plus a bias that follows the experts' loads, without a loss (DeepSeek-V3)."""
    moe_router_num_groups: int = flag(1, minimum=1, requires="--num-experts")
    """Groups of experts, of which each token first chooses --moe-router-group-topk, by the highest score in each, or
    with --moe-router-enable-expert-bias by the sum of the two highest, as in DeepSeek-V2 and V3. (Megatron sums the
    --moe-router-topk / --moe-router-group-topk highest, which is the same for DeepSeek-V3.)"""
    moe_router_group_topk: int = flag(1, minimum=1, requires="--moe-router-num-groups")
    """Groups from which a token chooses its experts."""
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
    moe_ffn_hidden_size: int | None = flag(None, minimum=1, requires="--num-experts")
    """Width of one expert; by default --ffn-hidden-size."""
    moe_layers: str | None = flag(None, requires="--num-experts")
    """Layers with experts, in the notation of --ladder-layers; by default all. The others are dense."""
    ladder_layers: str | None = None
    """Layers that read the stream late: all (the default), none, N (the upper N layers), or indices from 0 as in
    16-31, 3,7,9-12 or [16] (one layer)."""
    desync_interval: int = 2
    """Sub-blocks between two all-reduces with --residual-mode desync: 2 or 4."""


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the sorted layer indices that `--ladder-layers` names.

    The text is `all`, `none`, `N` (the upper N), or a list such as `[16]`, `16-31` or `3,7,9-12`, with or without
    brackets. Other texts, and layers that do not exist, raise ValueError.
    """
    words = {"all": str(num_layers), "none": "0"}.get(text.strip(), text.strip())
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
            raise ValueError(f"{part!r} is not within layers 0-{num_layers - 1}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))
