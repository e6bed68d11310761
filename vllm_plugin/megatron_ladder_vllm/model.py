"""A Llama-family decoder of any wiring in vLLM's layers.

The one rule:

    r = embedding(tokens); pending = {}                     outputs whose all-reduce is in flight
    for each sub-block h_i:
        for each y_j in pending that h_i does not miss:  r = r + wait(pending.pop(y_j))
        pending[y_i] = start_all_reduce(h_i(norm_i(r)))     runs while the sub-blocks that miss y_i compute
    for each y_j in pending:                             r = r + wait(pending.pop(y_j))

With own partials, every rank is a lane, and h_i(norm_i(r + this rank's parts of the pending outputs)) is launched. An
output that joins the next one is added to it before the launch.

Tensors are [tokens, width]; weights, heads and key-value caches are shards of the tensor-parallel ranks.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, FusedMoERouter, GateLinear, RoutingMethodType
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import yarn_get_mscale
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.glm4_moe import Glm4MoeModel
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaMLP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig, WiredSubBlock, norm_name
from megatron_ladder_vllm.deployment import check_attention
from megatron_ladder_vllm.in_flight import AllReduces, Norm, PendingOutputs

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


def attention_of(config: MegatronLadderConfig, vllm_config: VllmConfig, window: int | None, prefix: str) -> nn.Module:
    """Return the attention of a layer, which has no window if it is latent."""
    if config.kv_lora_rank:
        return LatentAttention(config, vllm_config, prefix)
    return LadderAttention(config, vllm_config, window, prefix)


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


def unreduced_mlp(config: MegatronLadderConfig, vllm_config: VllmConfig, width: int, prefix: str) -> LlamaMLP:
    """Return a SwiGLU MLP whose outputs are this rank's parts of sums."""
    mlp = LlamaMLP(config.hidden_size, width, config.hidden_act, vllm_config.quant_config, config.mlp_bias, prefix)
    if not config.has_swiglu:
        mlp.act_fn = GatedActivation(config)
    leave_unreduced(mlp.down_proj)
    return mlp


class GatedActivation(nn.Module):
    """The activation of MLPs with another one than SwiGLU."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        super().__init__()
        self.slope = 1.702 if config.quick_geglu else 1.0
        self.limit, self.offset = config.swiglu_limit, config.glu_linear_offset

    def forward(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * width] -> [tokens, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.slope * gate) * (up + self.offset)


class LocalRouter(FusedMoERouter):
    """The choice of another router, with this rank's numbers of its experts, and the weight 0 for those of others.

    vLLM's kernels for CPUs ignore the map of experts, and would read beyond those of the rank.
    """

    def __init__(self, router: FusedMoERouter, expert_map: Tensor) -> None:
        super().__init__(router.eplb_state)
        self._router = router
        self._expert_map = expert_map

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None] | None) -> None:
        """Record the choice among all experts."""
        self._router.set_capture_fn(capture_fn)

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """What the choice is computed from."""
        return self._router.routing_method_type

    def _select_experts(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = self._router.select_experts(*args, **kwargs)
        local = self._expert_map[chosen]
        return weights.masked_fill(local < 0, 0.0), local.clamp(min=0)


def add_experts(config: MegatronLadderConfig, vllm_config: VllmConfig, module: nn.Module, prefix: str) -> None:
    """Give a layer's module vLLM's experts, whose outputs are this rank's parts of sums, and their router.

    The router computes in float32, as in training.
    """
    module.gate = gate = GateLinear(
        config.hidden_size,
        config.num_experts,
        bias=config.moe_bias,
        out_dtype=torch.float32,
        params_dtype=torch.float32,
        prefix=f"{prefix}.gate",
    )
    bias = torch.zeros(config.num_experts, dtype=torch.float32)
    if config.use_expert_bias:
        gate.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
    else:
        gate.register_buffer("e_score_correction_bias", bias, persistent=False)
    with_groups = config.scoring_func != "softmax" or config.use_expert_bias or config.n_group > 1
    # With a bias, vLLM ranks groups by two scores, as the training does.
    with_bias = config.use_expert_bias or (with_groups and config.n_group == 1)
    module.experts = experts = FusedMoEFactory(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        renormalize=config.norm_topk_prob,
        use_grouped_topk=with_groups,
        num_expert_group=config.n_group,
        topk_group=config.topk_group,
        scoring_func=config.scoring_func,
        e_score_correction_bias=gate.e_score_correction_bias if with_bias else None,
        # The router for softmax alone would ignore a factor of weights.
        routed_scaling_factor=config.routed_scaling_factor,
        apply_routed_scale_to_output=True,
        router_logits_dtype=torch.float32,
        has_bias=config.moe_bias,
        activation="silu" if config.has_swiglu else "swigluoai",
        quant_config=vllm_config.quant_config,
        reduce_results=False,
        prefix=f"{prefix}.experts",
    )
    if not experts.moe_config.skip_final_all_reduce:
        raise ValueError(f"{prefix}.experts: vLLM sums the outputs of these experts itself, so they cannot be hidden")
    if current_platform.is_cpu() and experts.expert_map is not None:
        experts.router = LocalRouter(experts.router, experts.expert_map)


def arrange_experts(config: MegatronLadderConfig, experts: RoutedExperts) -> None:
    """Arrange loaded experts as vLLM's kernels expect them.

    The first of the ranks that divide the widths adds the biases of down projections. The activation of gpt-oss reads
    gates and ups alternately.
    """
    if config.moe_bias and experts.moe_config.tp_rank > 0:
        experts.w2_bias.data.zero_()
    if not config.has_swiglu:
        for rows in [experts.w13_weight.data] + [experts.w13_bias.data] * config.moe_bias:
            rows.copy_(rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def read_stream(
    norm: Norm, stream: Tensor, pending: PendingOutputs, missing: tuple[int, ...], with_own_parts: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the normed stream, from which the `missing` outputs are missing, and that stream.

    `with_own_parts`: this rank's parts of the missing outputs are normed with it.
    """
    arriving = pending.arriving(missing)
    newest = arriving.pop() if arriving and not with_own_parts else None
    for number in arriving:
        stream = stream + pending.pop(number)
    if newest is not None:
        return pending.add_and_norm(newest, norm, stream)
    return norm(pending.add_own_parts(stream) if with_own_parts else stream), stream


class LadderDecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, vllm_config: VllmConfig, sub_blocks: tuple[WiredSubBlock, ...], prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.sub_blocks = sub_blocks
        self.reads_own_parts = config.lanes > 0
        self.absent = () if config.shared_expert_intermediate_size else ("shared_expert",)
        branches = {name for sub_block in sub_blocks for name in self.branches(sub_block)}
        window = config.window_of(int(prefix.rsplit(".", 1)[1]) * config.attentions_per_layer)
        self.self_attn = attention_of(config, vllm_config, window, f"{prefix}.self_attn")
        dense = config.intermediate_size
        shared = config.shared_expert_intermediate_size
        # The MLP of a layer, its experts, or both, under the names of an exported directory.
        self.mlp = unreduced_mlp(config, vllm_config, dense, f"{prefix}.mlp") if "mlp" in branches else nn.Module()
        if "experts" in branches:
            add_experts(config, vllm_config, self.mlp, f"{prefix}.mlp")
        if "shared_expert" in branches:
            self.mlp.shared_experts = unreduced_mlp(config, vllm_config, shared, f"{prefix}.mlp.shared_experts")
            self.mlp.shared_expert_gate = None
            if config.gated_shared_expert:
                self.mlp.shared_expert_gate = ReplicatedLinear(
                    config.hidden_size, 1, bias=False, prefix=f"{prefix}.mlp.shared_expert_gate"
                )
        if "attention_2" in branches:
            self.self_attn_2 = attention_of(config, vllm_config, window, f"{prefix}.self_attn_2")
            self.mlp_2 = unreduced_mlp(config, vllm_config, dense, f"{prefix}.mlp_2")
        for name in {norm_name(sub_block.kind) for sub_block in sub_blocks}:
            setattr(self, name, new_norm(config, config.hidden_size))

    def branches(self, sub_block: WiredSubBlock) -> list[str]:
        """Return the names of what a sub-block adds up, last the experts, which may overwrite what they read."""
        names = (name for name in sub_block.kind.branches if name not in self.absent)
        return sorted(names, key="experts".__eq__)

    def shares_input(self, index: int) -> bool:
        """Return whether a sub-block takes the normed stream of the one before, which no experts have overwritten."""
        return self.sub_blocks[index].shares_input and "experts" not in self.sub_blocks[index - 1].kind.branches

    def branch(self, name: str, positions: Tensor, normed: Tensor) -> Tensor:
        """Return this rank's part of one output [tokens, hidden_size]."""
        match name:
            case "experts":
                logits, _ = self.mlp.gate(normed)
                return self.mlp.experts(normed, logits)
            case "shared_expert":
                return gated(self.mlp.shared_expert_gate, self.mlp.shared_experts(normed), normed)
            case "mlp" | "mlp_2":
                return getattr(self, name)(normed)
        return getattr(self, name.replace("attention", "self_attn"))(positions, normed)

    def forward(self, positions: Tensor, stream: Tensor, pending: PendingOutputs) -> Tensor:
        """Compute the sub-blocks, which change `pending`; return the stream [tokens, hidden_size]."""
        normed = stream
        for index, sub_block in enumerate(self.sub_blocks):
            if not self.shares_input(index):
                norm = getattr(self, norm_name(sub_block.kind))
                missing = sub_block.missing
                normed, stream = read_stream(norm, stream, pending, missing, self.reads_own_parts and missing != ())
            pending.hold(normed)
            parts = [self.branch(name, positions, normed) for name in self.branches(sub_block)]
            partial = sum(parts[1:], parts[0])
            pending.launch(partial, sub_block.joins_next)
        return stream


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "tokens"},
        "positions": {0: "tokens"},
        "intermediate_tensors": {0: "tokens"},
        "inputs_embeds": {0: "tokens"},
    }
)
class MegatronLadderModel(nn.Module):
    """The layers of a pipeline stage, with the embedding on the first and the final norm on the last."""

    hf_to_vllm_mapper = Glm4MoeModel.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_stacked={
            ".mlp_2.gate_proj": (".mlp_2.gate_up_proj", 0),
            ".mlp_2.up_proj": (".mlp_2.gate_up_proj", 1),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        stages = get_pp_group()
        overlap = getattr(config, "overlap_all_reduces", True)
        self.all_reduces = AllReduces(get_tp_group(), overlap) if get_tensor_model_parallel_world_size() > 1 else None
        if stages.is_first_rank or (config.tie_word_embeddings and stages.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                parallel_group=self.all_reduces,
            )
        else:
            self.embed_tokens = PPMissingLayer()
        wired = config.wired_layers()
        self.start_layer, self.end_layer, self.layers = make_layers(
            len(wired),
            lambda prefix: LadderDecoderLayer(vllm_config, wired[int(prefix.rsplit(".", 1)[1])], prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = new_norm(config, config.hidden_size) if stages.is_last_rank else PPMissingLayer()
        # Pending outputs cross between stages as sums: vLLM sends one slice of each tensor from each tensor-parallel
        # rank and joins the slices in the next stage.
        self.received, self.sent = (
            {back: f"pending_{back}" for back in reversed(config.missing_before(layer))}
            for layer in (self.start_layer, self.end_layer)
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["stream", *self.received.values()], config.hidden_size
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Ids [tokens] -> embeddings [tokens, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Ids [tokens] or the previous stage's tensors -> normed states [tokens, hidden_size] or this stage's."""
        if intermediate_tensors is None:
            stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            pending = PendingOutputs(self.all_reduces)
        else:
            stream = intermediate_tensors["stream"]
            summed = {back: intermediate_tensors[name] for back, name in self.received.items()}
            pending = PendingOutputs(self.all_reduces, summed)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            stream = layer(positions, stream, pending)
        if get_pp_group().is_last_rank:
            return read_stream(self.norm, stream, pending, ())[0]
        for number in pending.arriving(self.sent):
            stream = stream + pending.pop(number)
        sent = zip(self.sent.values(), pending.arriving(()), strict=True)
        return IntermediateTensors({"stream": stream, **{name: pending.pop(number) for name, number in sent}})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors with the names of a Hugging Face directory; return the parameters that were loaded."""
        stacked = dict(self.hf_to_vllm_mapper.orig_to_new_stacked)
        if self.config.kv_lora_rank:
            del stacked[".q_proj"]
            names = LATENT_PROJECTIONS if self.config.q_lora_rank else LATENT_PROJECTIONS[1:]
            stacked |= {f".{name}": (".fused_qkv_a_proj", index) for index, name in enumerate(names)}
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=WeightsMapper(orig_to_new_stacked=stacked))
        for module in self.modules():
            if isinstance(module, RoutedExperts):
                arrange_experts(self.config, module)
        return loaded


class MegatronLadderForCausalLM(LlamaForCausalLM):
    """The decoder with its head."""

    hf_to_vllm_mapper = MegatronLadderModel.hf_to_vllm_mapper
    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping | {"fused_qkv_a_proj": list(LATENT_PROJECTIONS)}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if get_pp_group().is_last_rank:
            self.logits_processor.soft_cap = self.config.final_logit_softcapping

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", **_: Any) -> MegatronLadderModel:
        return MegatronLadderModel(vllm_config=vllm_config, prefix=prefix)
