"""Token mixers in vLLM's layers, whose outputs are parts of sums over the tensor-parallel ranks.

Tensors are [tokens, width]; weights, heads and caches are shards of the ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import yarn_get_mscale
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig
from megatron_ladder_vllm.deployment import check_attention
from megatron_ladder_vllm.in_flight import Norm

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents, independent of `rms_norm_eps`."""
LATENT_PROJECTIONS = ("q_a_proj", "kv_a_proj_with_mqa")
"""Names of two matrices that are computed as one."""


def new_norm(config: MegatronLadderConfig, size: int) -> Norm:
    """Return a norm, which may multiply by 1 + its weight."""
    return (GemmaRMSNorm if config.zero_centered_gamma else RMSNorm)(size, eps=config.rms_norm_eps)


class LadderAttention(nn.Module):
    """Attention of this rank's heads, whose output is a part of a sum, with the window of its layer."""

    def __init__(self, config: MegatronLadderConfig, vllm_config: VllmConfig, window: int | None, prefix: str) -> None:
        super().__init__()
        hidden, all_heads = config.hidden_size, config.num_attention_heads
        width = all_heads * config.head_dim

        def named(name: str) -> dict[str, Any]:
            return {"quant_config": vllm_config.quant_config, "prefix": f"{prefix}.{name}"}

        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden, self.head_dim, all_heads, config.num_key_value_heads, config.attention_bias, **named("qkv_proj")
        )
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.sizes = [count * self.head_dim for count in (heads, kv_heads, kv_heads)]
        self.o_proj = RowParallelLinear(width, hidden, config.attention_output_bias, **named("o_proj"))
        leave_unreduced(self.o_proj)
        self.rotary_emb = get_rope(
            self.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        sinks: dict[str, Tensor] = {}
        if config.has_sinks:
            self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
            set_weight_attrs(self.sinks, {"weight_loader": sharded_weight_loader(0)})
            sinks["sinks"] = self.sinks
        self.attn = Attention(
            heads,
            self.head_dim,
            self.head_dim**-0.5,
            kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=window,
            **named("attn"),
            **sinks,
        )
        check_attention(vllm_config, self.attn)
        self.gate_proj = output_gate(config, vllm_config, width, prefix)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = new_norm(config, self.head_dim)
            self.k_norm = new_norm(config, self.head_dim)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> this rank's part of the sum [tokens, hidden_size]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.sizes, dim=-1)
        if self.qk_norm:
            q = self.q_norm(q.reshape(*q.shape[:-1], -1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(*k.shape[:-1], -1, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(gated(self.gate_proj, self.attn(q, k, v), hidden_states))
        return output


class LatentAttention(nn.Module):
    """Multi-head latent attention of this rank's heads, whose output is a part of a sum.

    The cache holds a latent and a rotary key for all heads or, where vLLM has no kernel for these, each head's key and
    value.
    """

    def __init__(self, config: MegatronLadderConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        rope = config.rope_parameters or {}
        nope, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        cache = vllm_config.cache_config

        def named(name: str) -> dict[str, Any]:
            return {"quant_config": vllm_config.quant_config, "prefix": f"{prefix}.{name}"}

        self.heads = heads // get_tensor_model_parallel_world_size()
        self.nope, self.value = nope, value
        q_ranks = [q_rank] if q_rank else []
        self.latents = [*q_ranks, kv_rank, rotary]
        self.fused_qkv_a_proj = MergedColumnParallelLinear(
            hidden, [*q_ranks, kv_rank + rotary], config.attention_bias, disable_tp=True, **named("fused_qkv_a_proj")
        )
        if q_rank:
            self.q_a_layernorm = RMSNorm(q_rank, eps=LATENT_NORM_EPSILON)
            self.q_b_proj = ColumnParallelLinear(q_rank, heads * (nope + rotary), bias=False, **named("q_b_proj"))
        else:
            self.q_proj = ColumnParallelLinear(hidden, heads * (nope + rotary), bias=False, **named("q_proj"))
        self.kv_a_layernorm = RMSNorm(kv_rank, eps=LATENT_NORM_EPSILON)
        self.kv_b_proj = ColumnParallelLinear(kv_rank, heads * (nope + value), bias=False, **named("kv_b_proj"))
        self.rotary_emb = get_rope(rotary, config.max_position_embeddings, is_neox_style=False, rope_parameters=rope)
        # The kernel for CPUs would treat the rotated part of each head as a whole head.
        self.rotate = self.rotary_emb.forward_native if current_platform.is_cpu() else self.rotary_emb
        scale = (nope + rotary) ** -0.5 * yarn_get_mscale(rope.get("factor", 1), rope.get("mscale_all_dim") or 0) ** 2
        self.caches_latents = vllm_config.model_config.use_mla
        if self.caches_latents:
            sizes = (nope, rotary, value, q_rank, kv_rank)
            self.attn = MLAAttention(self.heads, scale, *sizes, self.kv_b_proj, cache_config=cache, **named("attn"))
        else:
            width = vllm_config.model_config.get_head_size()
            self.attn = Attention(self.heads, width, scale, cache_config=cache, **named("attn"))
        check_attention(vllm_config, self.attn)
        self.gate_proj = output_gate(config, vllm_config, heads * value, prefix)
        self.o_proj = RowParallelLinear(heads * value, hidden, config.attention_output_bias, **named("o_proj"))
        leave_unreduced(self.o_proj)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> this rank's part of the sum [tokens, hidden_size]."""
        *q_latent, latent, k_rotary = self.fused_qkv_a_proj(hidden_states)[0].split(self.latents, dim=-1)
        q, _ = self.q_b_proj(self.q_a_layernorm(*q_latent)) if q_latent else self.q_proj(hidden_states)
        q = q.unflatten(-1, (self.heads, -1))
        latent = self.kv_a_layernorm(latent)
        k_rotary = k_rotary.unsqueeze(1)
        q[..., self.nope :], k_rotary = self.rotate(positions, q[..., self.nope :], k_rotary)
        if self.caches_latents:
            attended = self.attn(q, latent, k_rotary, output_shape=(len(q), self.heads * self.value))
        else:
            width = self.attn.head_size
            kv = self.kv_b_proj(latent)[0].unflatten(-1, (self.heads, -1))
            k = torch.cat([kv[..., : self.nope], k_rotary.expand(-1, self.heads, -1)], dim=-1)
            padded = (nn.functional.pad(x, (0, width - x.shape[-1])).flatten(1) for x in (q, k, kv[..., self.nope :]))
            attended = self.attn(*padded).unflatten(-1, (self.heads, width))[..., : self.value].flatten(1)
        return self.o_proj(gated(self.gate_proj, attended, hidden_states))[0]


class GatedDelta(QwenGatedDeltaNetAttention):
    """Gated DeltaNet of this rank's heads, whose output is a part of a sum."""

    def __init__(self, config: MegatronLadderConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix, reduce_results=False)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> this rank's part of the sum [tokens, hidden_size]."""
        return super().forward(hidden_states)


def softmax_attention(config: MegatronLadderConfig, vllm_config: VllmConfig, number: int, prefix: str) -> nn.Module:
    """Return the attention with this number, which has no window if it is latent."""
    if config.kv_lora_rank:
        return LatentAttention(config, vllm_config, prefix)
    return LadderAttention(config, vllm_config, config.window_of(number), prefix)


class MixerKind(NamedTuple):
    """How a layer mixes tokens."""

    module: str
    """Name in an exported directory."""
    build: Callable[[MegatronLadderConfig, VllmConfig, int, str], nn.Module]
    """Returns the module, given the number of the mixer and the prefix of its parameters."""


MIXERS = {
    "full_attention": MixerKind("self_attn", softmax_attention),
    "sliding_attention": MixerKind("self_attn", softmax_attention),
    "linear_attention": MixerKind("linear_attn", lambda config, vllm, _, prefix: GatedDelta(config, vllm, prefix)),
}
"""By the types in `layer_types`."""


def output_gate(config: MegatronLadderConfig, vllm_config: VllmConfig, width: int, prefix: str) -> nn.Module | None:
    """Return the projection whose sigmoid multiplies the output of attention, if the model has one."""
    if not config.gated_attention:
        return None
    name = f"{prefix}.gate_proj"
    return ColumnParallelLinear(
        config.hidden_size, width, bias=False, quant_config=vllm_config.quant_config, prefix=name
    )


def gated(gate: nn.Module | None, output: Tensor, reading: Tensor) -> Tensor:
    """Return an output, multiplied by the gate of what it was computed from."""
    return output if gate is None else output * gate(reading)[0].sigmoid()


def leave_unreduced(linear: RowParallelLinear) -> None:
    """Make the outputs of a layer parts of sums; the first rank adds the bias."""
    # The constructor rejects a bias without a reduce, although only the first rank adds it.
    linear.reduce_results = False
