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
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, FusedMoERouter, GateLinear, RoutingMethodType
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFunc,
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.glm4_moe import Glm4MoeModel
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaMLP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
)
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig, WiredSubBlock, norm_name
from megatron_ladder_vllm.in_flight import AllReduces, Norm, PendingOutputs
from megatron_ladder_vllm.mixers import LATENT_PROJECTIONS, MIXERS, gated, leave_unreduced, new_norm

MTP_PREFIX = "mtp."
"""Prefix of the names of a drafting head's tensors in a Hugging Face directory."""


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

    def __init__(
        self, config: MegatronLadderConfig, vllm_config: VllmConfig, sub_blocks: tuple[WiredSubBlock, ...], prefix: str
    ) -> None:
        super().__init__()
        self.sub_blocks = sub_blocks
        self.reads_own_parts = config.lanes > 0
        self.absent = () if config.shared_expert_intermediate_size else ("shared_expert",)
        branches = {name for sub_block in sub_blocks for name in self.branches(sub_block)}
        first = int(prefix.rsplit(".", 1)[1]) * config.attentions_per_layer
        self.mixers: dict[str, str] = {}
        for number, branch in enumerate(sorted(branches & {"attention", "attention_2"}), first):
            mixer = MIXERS[config.layer_type_of(number)]
            name = self.mixers[branch] = branch.replace("attention", mixer.module)
            setattr(self, name, mixer.build(config, vllm_config, number, f"{prefix}.{name}"))
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
        if "mlp_2" in branches:
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
        return getattr(self, self.mixers[name])(positions, normed)

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
            ".in_proj_qkv": (".in_proj_qkvz", (0, 1, 2)),
            ".in_proj_z": (".in_proj_qkvz", 3),
            ".in_proj_b": (".in_proj_ba", 0),
            ".in_proj_a": (".in_proj_ba", 1),
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
            lambda prefix: LadderDecoderLayer(config, vllm_config, wired[int(prefix.rsplit(".", 1)[1])], prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = new_norm(config, config.hidden_size) if stages.is_last_rank else PPMissingLayer()
        speculative = vllm_config.speculative_config
        drafts = speculative is not None and speculative.method == "mtp"
        self.is_normed_by_head = drafts and getattr(config, "mtp_before_final_norm", False)
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
        """Ids [tokens] or the previous stage's tensors -> normed states [tokens, hidden_size] or this stage's.

        For a drafting head that reads the stream before the final norm, the states are not normed.
        """
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
            normed, stream = read_stream(self.norm, stream, pending, ())
            return stream if self.is_normed_by_head else normed
        for number in pending.arriving(self.sent):
            stream = stream + pending.pop(number)
        sent = zip(self.sent.values(), pending.arriving(()), strict=True)
        return IntermediateTensors({"stream": stream, **{name: pending.pop(number) for name, number in sent}})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors with the names of a Hugging Face directory; return the parameters that were loaded."""
        return load_layers(self, self.config, weights)


def load_layers(model: nn.Module, config: MegatronLadderConfig, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Load the tensors of a model with layers, under their names in it; return the parameters that were loaded."""
    stacked = dict(MegatronLadderModel.hf_to_vllm_mapper.orig_to_new_stacked)
    if config.kv_lora_rank:
        del stacked[".q_proj"]
        names = LATENT_PROJECTIONS if config.q_lora_rank else LATENT_PROJECTIONS[1:]
        stacked |= {f".{name}": (".fused_qkv_a_proj", index) for index, name in enumerate(names)}
    loaded: set[str] = AutoWeightsLoader(model).load_weights(weights, mapper=WeightsMapper(orig_to_new_stacked=stacked))
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            arrange_experts(config, module)
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

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits [tokens, vocabulary] of states, on the ranks that sample."""
        logits: Tensor | None = super().compute_logits(self._normed(hidden_states))
        return logits

    def compute_logits_local(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's logits [tokens, part of the vocabulary] of states."""
        logits: Tensor = super().compute_logits_local(self._normed(hidden_states))
        return logits

    def _normed(self, hidden_states: Tensor) -> Tensor:
        return self.model.norm(hidden_states) if self.model.is_normed_by_head else hidden_states

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all tensors but those of a drafting head, which is a separate model in vLLM."""
        model_weights = ((name, weight) for name, weight in weights if not name.startswith(MTP_PREFIX))
        loaded: set[str] = super().load_weights(model_weights)
        return loaded


class MegatronLadderHybridForCausalLM(MegatronLadderForCausalLM, HasInnerState, IsHybrid):
    """The decoder of a model with gated DeltaNet, for which vLLM keeps states of sequences."""

    packed_modules_mapping = MegatronLadderForCausalLM.packed_modules_mapping | {
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
    }

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
        """Return the types of the convolution's inputs and of the matrices."""
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the shapes of this rank's inputs of the convolution and of its matrices, for one sequence."""
        config = vllm_config.model_config.hf_config
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            vllm_config.num_speculative_tokens,
        )

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """Return how the states at the end of a cached prefix are copied."""
        return MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func()
