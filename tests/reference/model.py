"""The model in one process and plain arithmetic, for comparison with the package. Shares no code with it.

Layouts: token ids [b, s], stream [b, s, h], heads [b, s, heads, d], logits [b, s, V]. Everything is computed in
the dtype of the weights, float32 or float64; only rotary angles, cosines and sines are always computed in
float64 and then rounded to that dtype.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference.attention import (
    grouped_attention,
    inverse_frequencies,
    latent_attention,
    latent_shapes,
    linear,
    model_norm,
    rotary_magnitude,
)
from tests.reference.delta import delta_shapes, gated_delta
from tests.reference.desync import desync_stream, is_reduced, rank_weights
from tests.reference.experts import RECURRENCES, Layer, Routed, SubBlock, gated_units, layer_kinds, routed_experts

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class ReferenceConfig:
    """The sizes and options of a model, with the names of the package's model configuration."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rope_scaling: str = "none"
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 8192
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_mscale: float = 1.0
    rope_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True
    tie_embeddings: bool = False
    add_qkv_bias: bool = False
    add_attention_output_bias: bool = False
    add_mlp_bias: bool = False
    add_moe_bias: bool = False
    """Whether routed experts and their router have biases."""
    quick_geglu: bool = False
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    qk_layernorm: bool = False
    apply_layernorm_1p: bool = False
    """Whether norms of the stream, of queries and of keys multiply by 1 + weight."""
    attention_output_gate: bool = False
    kv_lora_rank: int = 0
    """Width of the latent of keys and values; 0 without latent attention."""
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    window_size: int = 0
    """Newest positions that a query sees in `window_layers`; 0: all."""
    window_layers: tuple[int, ...] = ()
    softmax_type: str = "vanilla"
    """`learnable`: one more term in the denominator of each head."""
    linear_attention_layers: tuple[int, ...] = ()
    """Layers with gated DeltaNet."""
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    logit_soft_cap: float | None = None
    residual_mode: str = "standard"
    ladder_layers: tuple[int, ...] = ()
    """Layers that read the stream late."""
    residual_staleness: int = 1
    """How many sub-blocks late."""
    lanes: int = 0
    """Number of lanes that read their own parts of the outputs in flight; 0 without own partials."""
    desync_interval: int = 0
    """Sub-blocks between two sums of the ranks' streams; 0 without desync."""
    desync_tp: int | None = None
    """Number of ranks with separate streams."""
    rotary_percent: float = 1.0
    """Rotated part of every head: its first dimensions."""
    num_experts: int = 0
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    """Whether one number for each token multiplies the shared expert's output."""
    moe_layers: tuple[int, ...] = ()
    moe_router_score_function: str = "softmax"
    moe_router_unnormalized: bool = False
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int = 1
    moe_router_group_topk: int = 1
    moe_aux_loss_coeff: float = 0.0
    moe_router_load_balancing_type: str = "seq_aux_loss"
    moe_z_loss_coeff: float = 0.0
    moe_router_bias_update_rate: float = 0.0
    z_loss_coeff: float = 0.0
    """Coefficient of the squared log normalisers of the logits."""
    mtp_num_layers: int = 0
    """Whether there is a drafting head; see `mtp.py`."""
    mtp_before_final_norm: bool = False
    mtp_loss_scaling_factor: float = 0.1
    mtp_detach_heads: bool = False
    mtp_depths: int = 1
    missing: tuple[tuple[int, ...], ...] = ()
    """For each sub-block, the outputs that it misses, counted back from the newest; by default, by `staleness`."""

    @classmethod
    def like(cls, *configs: Any) -> "ReferenceConfig":
        """Copy the fields of other objects with attributes of these names."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for config in configs for name, value in vars(config).items() if name in names})

    @property
    def one_norm(self) -> bool:
        """Whether attention and MLP of a layer share one norm of one stream."""
        return self.residual_mode in ("parallel", "ladder-parallel")

    def staleness(self, layer: int, place: int) -> int:
        """Return how late a sub-block of a layer reads the stream: attention is at place 0, the MLP at 1."""
        if layer not in self.ladder_layers or (self.residual_mode == "ladder-attention" and place == 1):
            return 0
        return self.residual_staleness

    @property
    def rotary_width(self) -> int:
        """The width of a query's rotated part."""
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_dim * self.rotary_percent)

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    def norm_shape(self, sub_block: int) -> tuple[int, ...]:
        """Return the shape of a norm's weight: one row per rank where the ranks have separate streams."""
        if self.residual_mode != "desync" or is_reduced(self, sub_block - 1):
            return (self.hidden_size,)
        assert self.desync_tp is not None
        return self.desync_tp, self.hidden_size


def with_head_layer(config: ReferenceConfig) -> ReferenceConfig:
    """Return a standard model that has the layer of the drafting head after its own ones."""
    layer = config.num_layers
    return replace(
        config,
        num_layers=layer + 1,
        mtp_num_layers=0,
        moe_layers=(*config.moe_layers, layer) if config.moe_layers else (),
        window_layers=(*range(layer + 1),) if len(config.window_layers) == layer else config.window_layers,
        residual_mode="standard",
        ladder_layers=(),
        lanes=0,
    )


def weight_shapes(config: ReferenceConfig) -> dict[str, tuple[int, ...]]:
    """Return canonical name and full shape of every weight, in the order of the model, and of a drafting head."""
    h, ffn, d = config.hidden_size, config.ffn_hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, h)}

    def add_linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if bias:
            shapes[f"{name}.bias"] = (out_features,)

    def add_mixer(name: str, layer: int) -> None:
        if layer in config.linear_attention_layers:
            shapes.update(delta_shapes(config, name))
            add_linear(f"{name}.o_proj", h, config.linear_num_value_heads * config.linear_value_head_dim, False)
        else:
            add_attention(name)

    def add_attention(name: str) -> None:
        values = config.num_attention_heads * config.value_width
        if config.kv_lora_rank:
            shapes.update(latent_shapes(config, name))
        else:
            for projection, size in (("q", query), ("k", key_value), ("v", key_value)):
                add_linear(f"{name}.{projection}_proj", size, h, config.add_qkv_bias)
        if config.attention_output_gate:
            add_linear(f"{name}.gate_proj", values, h, False)
        if config.qk_layernorm:
            shapes[f"{name}.q_norm.weight"] = (d,)
            shapes[f"{name}.k_norm.weight"] = (d,)
        if config.softmax_type == "learnable":
            shapes[f"{name}.sinks"] = (config.num_attention_heads,)
        add_linear(f"{name}.o_proj", h, values, config.add_attention_output_bias)

    def add_mlp(name: str, width: int) -> None:
        add_linear(f"{name}.gate_proj", width, h, config.add_mlp_bias)
        add_linear(f"{name}.up_proj", width, h, config.add_mlp_bias)
        add_linear(f"{name}.down_proj", h, width, config.add_mlp_bias)

    def add_experts(prefix: str) -> None:
        experts, width = config.num_experts, config.moe_ffn_hidden_size
        shapes[f"{prefix}.router.weight"] = (experts, h)
        if config.add_moe_bias:
            shapes[f"{prefix}.router.bias"] = (experts,)
        if config.moe_router_enable_expert_bias:
            shapes[f"{prefix}.router.expert_bias"] = (experts,)
        for name, matrix in (("gate", (width, h)), ("up", (width, h)), ("down", (h, width))):
            shapes[f"{prefix}.experts.{name}_proj.weight"] = (experts, *matrix)
            if config.add_moe_bias:
                shapes[f"{prefix}.experts.{name}_proj.bias"] = (experts, matrix[0])
        if config.moe_shared_expert_intermediate_size:
            add_mlp(f"{prefix}.shared_expert", config.moe_shared_expert_intermediate_size)
        if config.moe_shared_expert_gate:
            shapes[f"{prefix}.shared_expert_gate.weight"] = (1, h)

    for layer in range(config.num_layers):
        prefix, kinds = f"layers.{layer}", layer_kinds(config, layer)
        shapes[f"{prefix}.attention_norm.weight"] = config.norm_shape(2 * layer)
        add_mixer(f"{prefix}.attention", layer)
        if not config.one_norm:
            shapes[f"{prefix}.mlp_norm.weight"] = config.norm_shape(2 * layer + 1)
        if layer in config.moe_layers:
            add_experts(prefix)
        if {"mlp", "attention_mlp"} & set(kinds):
            add_mlp(f"{prefix}.mlp", ffn)
        if "mlp_2" in kinds:
            shapes[f"{prefix}.attention_norm_2.weight"] = shapes[f"{prefix}.mlp_norm_2.weight"] = (h,)
            add_mixer(f"{prefix}.attention_2", layer)
            add_mlp(f"{prefix}.mlp_2", ffn)
    shapes["final_norm.weight"] = (h,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    if config.mtp_num_layers:
        prefix = f"layers.{config.num_layers}."
        of_layer = weight_shapes(with_head_layer(config)).items()
        shapes |= {name: shape for name, shape in of_layer if name.startswith(prefix)}
        shapes |= {f"{prefix}{name}.weight": (h,) for name in ("enorm", "hnorm", "head_norm")}
        shapes[f"{prefix}eh_proj.weight"] = (h, 2 * h)
    return shapes


def make_weights(config: ReferenceConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random full weights; norms are not one, biases not zero. A seed yields equal values in both dtypes."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            is_zero_centered = config.apply_layernorm_1p and not name.endswith("_a_norm.weight")
            values = 0.2 * values + (0 if is_zero_centered else 1)
        elif name.endswith("bias"):
            # The package stores that of the experts in float32, where a sum with a power of two is exact.
            values = (0.2 * values).bfloat16()
        elif name != "embedding.weight" or config.tie_embeddings:
            values = values / math.sqrt(shape[-1])
        weights[name] = values.to(dtype)
    return weights


@dataclass(frozen=True)
class Sight:
    """Positions, visible tokens and padding, where a token does not see all earlier ones of its row."""

    positions: Tensor
    """[b, s], the position of each token"""
    visible: Tensor
    """[b, s, s] bool: whether the query (second axis) sees the key (third)"""
    token_mask: Tensor | None = None
    """[b, s] bool, False for padding"""


def token_count(tokens: Tensor, sight: Sight | None = None) -> int:
    """Return the number of tokens without padding."""
    return tokens.numel() if sight is None or sight.token_mask is None else int(sight.token_mask.sum())


def reference_logits(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    sight: Sight | None = None,
    record: list[Routed] | None = None,
) -> Tensor:
    """Return the logits [b, s, V] of token ids [b, s].

    Appends balancing losses and loads of the layers with experts to `record`.

    Raises:
        ValueError: names, shapes or dtypes of the weights are not this model's.
    """
    _check(weights, config)
    stream = last_stream(weights, config, weights["embedding.weight"][tokens], sight, record)
    normed = model_norm(stream, weights["final_norm.weight"], config)
    return logits_of(normed, weights["embedding.weight" if config.tie_embeddings else "lm_head.weight"], config)


def logits_of(normed: Tensor, head: Tensor, config: ReferenceConfig) -> Tensor:
    """The normed stream -> logits [b, s, V]."""
    logits = normed @ head.T
    cap = config.logit_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def last_stream(
    weights: Weights, config: ReferenceConfig, stream: Tensor, sight: Sight | None, record: list[Routed] | None
) -> Tensor:
    """The stream after the last layer."""
    if config.residual_mode == "desync":
        return desync_stream(config, stream, _sub_blocks_of_ranks(weights, config, sight))
    layers = [
        Layer(layer in config.ladder_layers, sub_blocks_of(weights, layer, config, sight, record))
        for layer in range(config.num_layers)
    ]
    if config.residual_mode in RECURRENCES and not config.missing:
        return RECURRENCES[config.residual_mode](stream, layers)
    # x_i^k = stream + all of what sub-block i sees + the k-th parts of what it misses; without lanes no part of that.
    lanes = [[one for _, sub_blocks in layers for one in sub_blocks.values()]]
    if config.lanes:
        lanes = _sub_blocks_of_ranks(weights, replace(config, desync_tp=config.lanes), sight)
    outputs: list[list[Tensor]] = []
    for index, missing in enumerate(_missing(config)):
        inputs = [stream for _ in lanes]
        for output, parts in enumerate(outputs):
            for lane, part in enumerate(parts):
                if output not in missing:
                    inputs[lane] = inputs[lane] + sum(parts[1:], parts[0])
                elif config.lanes:
                    inputs[lane] = inputs[lane] + part
        outputs.append([sub_blocks[index](x) for sub_blocks, x in zip(lanes, inputs, strict=True)])
    return sum((part for parts in outputs for part in parts), stream)


def _missing(config: ReferenceConfig) -> list[Collection[int]]:
    """The outputs that each sub-block misses, by number."""
    if config.missing:
        return [{index - back for back in backs} for index, backs in enumerate(config.missing)]
    places = [(layer, place) for layer in range(config.num_layers) for place in range(2 - config.one_norm)]
    found, read = list[Collection[int]](), 0
    for index, where in enumerate(places):
        # What was read once is not unread.
        read = max(read, index - config.staleness(*where))
        found.append(range(read, index))
    return found


def _sub_blocks_of_ranks(weights: Weights, config: ReferenceConfig, sight: Sight | None) -> list[list[SubBlock]]:
    """Return the sub-blocks of all layers with the slices of each of `desync_tp` ranks."""
    ranks = config.desync_tp
    assert ranks is not None
    heads, kv_heads = config.num_attention_heads // ranks, max(1, config.num_key_value_heads // ranks)
    share = replace(
        config,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=config.linear_num_value_heads // ranks,
        linear_num_key_heads=max(1, config.linear_num_key_heads // ranks),
    )
    sub_blocks = []
    for rank in range(ranks):
        own = rank_weights(weights, config, rank)
        layers = [sub_blocks_of(own, layer, share, sight, None) for layer in range(config.num_layers)]
        sub_blocks.append([sub_block for layer in layers for sub_block in layer.values()])
    return sub_blocks


def reference_loss(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None = None,
    total_targets: float | None = None,
    total_tokens: float | None = None,
    sight: Sight | None = None,
) -> Tensor:
    """Return the mean of cross entropy and z-loss over unmasked targets, plus that of the routers' losses over tokens.

    Args:
        tokens, labels: ids [b, s]; `labels[b, t]` is the target at position t (shifted by the caller).
        loss_mask: [b, s], 1 where a target counts; all if None.
        total_targets: unmasked targets of the whole global batch; those of this call if None.
        total_tokens: tokens of the whole global batch without padding; those of this call if None.
    """
    record: list[Routed] = []
    logits = reference_logits(weights, config, tokens, sight, record)
    of_target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    normalizers = torch.logsumexp(logits, dim=-1)
    losses = normalizers - of_target + config.z_loss_coeff * normalizers.square()
    mask = torch.ones_like(losses) if loss_mask is None else loss_mask.to(losses.dtype)
    balancing = sum(routed.auxiliary_loss + routed.z_loss for routed in record)
    mean_loss = (losses * mask).sum() / (mask.sum() if total_targets is None else total_targets)
    return mean_loss + balancing / (token_count(tokens, sight) if total_tokens is None else total_tokens)


def reference_gradients(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None = None,
    total_targets: float | None = None,
    total_tokens: float | None = None,
    sight: Sight | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `reference_loss` and its gradient for every trained weight, by autograd over the arithmetic above."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    loss = reference_loss(leaves, config, tokens, labels, loss_mask, total_targets, total_tokens, sight)
    trained = [name for name in leaves if not name.endswith(".expert_bias")]
    gradients = torch.autograd.grad(loss, [leaves[name] for name in trained])
    return loss.detach(), dict(zip(trained, gradients, strict=True))


def greedy_continuation(weights: Weights, config: ReferenceConfig, prompt_ids: Sequence[int], n: int) -> list[int]:
    """Return the n most likely next ids, one after another, without a cache."""
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(reference_logits(weights, config, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def sub_blocks_of(
    weights: Weights, layer: int, config: ReferenceConfig, sight: Sight | None, record: list[Routed] | None
) -> dict[str, SubBlock]:
    """Return the sub-blocks h_i of a layer by kind, in order: norm, then the sum of its parts, without the residual."""
    prefix = f"layers.{layer}"

    def attention(name: str) -> SubBlock:
        return lambda normed: _attention(weights, f"{prefix}.{name}", config, normed, sight)

    def mlp(name: str) -> SubBlock:
        return lambda normed: _mlp(weights, f"{prefix}.{name}", config, normed)

    def routed(normed: Tensor) -> Tensor:
        token_mask = None if sight is None else sight.token_mask
        return routed_experts(weights, prefix, config, normed, record, token_mask)

    def shared_expert(normed: Tensor) -> Tensor:
        output = _mlp(weights, f"{prefix}.shared_expert", config, normed)
        if config.moe_shared_expert_gate:
            output = output / (1 + torch.exp(-linear(weights, f"{prefix}.shared_expert_gate", normed)))
        return output

    experts = [routed, *[shared_expert] * (config.moe_shared_expert_intermediate_size > 0)]
    parts: dict[str, tuple[str, list[SubBlock]]] = {
        "attention": ("attention_norm", [attention("attention")]),
        "mlp": ("mlp_norm", [mlp("mlp")]),
        "attention_mlp": ("attention_norm", [attention("attention"), mlp("mlp")]),
        "experts": ("mlp_norm", experts),
        "attention_experts": ("attention_norm", [attention("attention"), *experts]),
        "routed_experts": ("mlp_norm", [routed]),
        "shared_expert": ("mlp_norm", [shared_expert]),
        "attention_2": ("attention_norm_2", [attention("attention_2")]),
        "mlp_2": ("mlp_norm_2", [mlp("mlp_2")]),
    }

    def sub_block(norm: str, of_kind: Sequence[SubBlock]) -> SubBlock:
        def compute(stream: Tensor) -> Tensor:
            normed = model_norm(stream, weights[f"{prefix}.{norm}.weight"], config)
            return functools.reduce(Tensor.add, (part(normed) for part in of_kind))

        return compute

    return {kind: sub_block(*parts[kind]) for kind in layer_kinds(config, layer)}


def _mlp(weights: Weights, prefix: str, config: ReferenceConfig, x: Tensor) -> Tensor:
    gate, up = linear(weights, f"{prefix}.gate_proj", x), linear(weights, f"{prefix}.up_proj", x)
    return linear(weights, f"{prefix}.down_proj", gated_units(gate, up, config))


def _attention(weights: Weights, prefix: str, config: ReferenceConfig, x: Tensor, sight: Sight | None) -> Tensor:
    position = torch.arange(x.shape[1])
    rotary_positions = position if sight is None else sight.positions
    visible = position[None, :] <= position[:, None] if sight is None else sight.visible[:, None]
    layer = int(prefix.split(".")[1])
    if layer in config.linear_attention_layers:
        of_rows = visible.expand(len(x), 1, -1, -1)[:, 0]
        return linear(weights, f"{prefix}.o_proj", gated_delta(weights, prefix, config, x, of_rows))
    if layer in config.window_layers:
        visible = visible & (position[:, None] - position[None, :] < config.window_size)
    if config.kv_lora_rank:
        frequencies = torch.tensor(inverse_frequencies(config), dtype=torch.float64)
        angles = rotary_positions.double()[..., None] * frequencies
        turns = torch.polar(torch.full_like(angles, rotary_magnitude(config)), angles)
        mixed = latent_attention(weights, prefix, config, x, turns, visible)
    else:
        mixed = grouped_attention(weights, prefix, config, x, rotary_positions, visible)
    mixed = mixed.flatten(2)
    if config.attention_output_gate:
        mixed = mixed * torch.sigmoid(linear(weights, f"{prefix}.gate_proj", x))
    return linear(weights, f"{prefix}.o_proj", mixed)


def _check(weights: Weights, config: ReferenceConfig) -> None:
    expected = weight_shapes(config)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        difference = sorted({item[0] for item in found.items() ^ expected.items()})
        raise ValueError(f"weights missing, unknown or of another shape: {', '.join(difference)}")
    dtypes = {weight.dtype for weight in weights.values()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise ValueError(f"weights are all float32 or all float64, not {dtypes}")
