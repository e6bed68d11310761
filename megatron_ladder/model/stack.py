"""Ranges of the decoder's layers as lists of sub-blocks around one residual stream; `sub_block.py` has the rule.

A pipeline can cut a model of any wiring at any layer. The stream, and the outputs that the first sub-block behind the
cut misses, cross it as one tensor. These outputs cross unreduced: the next range starts their reduce, which runs under
its first sub-block. Those of experts that expert-parallel ranks divide are no partial sums, and cross complete
(`cut.py`). Outside the rule is desync, which has a separate walk (`desync.py`).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.expert_parallel import divide_experts
from megatron_ladder.blueprint.model import head_replicas, local_lanes
from megatron_ladder.blueprint.tensors import layer_tensors
from megatron_ladder.blueprint.wiring import SubBlockKind, WiredSubBlock, plan_reads
from megatron_ladder.comm.inflight import start_all_reduce
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.model.backward import ForwardRecord, MirrorPlan, walk_mirrored
from megatron_ladder.model.bodies import MLP, MixerBody, MixerMLP
from megatron_ladder.model.cut import StateMessages, slots_of_messages
from megatron_ladder.model.desync import walk_desync
from megatron_ladder.model.experts import DividedExperts, Experts
from megatron_ladder.model.mixers.mixer import Heads
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext, Operations
from megatron_ladder.model.own_partials import LaneBodies, LaneNorm, OwnPartialsRecord, walk_own_partials
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import AutogradPass, Body, SequenceContext, StreamBorder, SubBlock, walk

BODIES: dict[SubBlockKind, type[Body]] = {
    SubBlockKind.MIXER: MixerBody,
    SubBlockKind.MLP: MLP,
    SubBlockKind.MIXER_MLP: MixerMLP,
    SubBlockKind.EXPERTS: Experts,
    SubBlockKind.MIXER_EXPERTS: Experts,
    SubBlockKind.ROUTED_EXPERTS: Experts,
    SubBlockKind.SHARED_EXPERT: MLP,
    SubBlockKind.MIXER_SHARED: MixerMLP,
    SubBlockKind.SECOND_MIXER: MixerBody,
    SubBlockKind.SECOND_MLP: MLP,
}


@dataclass(frozen=True)
class StackOptions:
    """How a stack computes; none of the options changes what it computes."""

    tp_overlap: bool = True
    """Leave all-reduces, and all-to-alls of experts, in flight under later sub-blocks where the wiring allows it; False
    waits at once."""
    recompute_layers: int = 0
    """Number of layers, from the first of this rank, whose sub-blocks keep only their input for backward."""
    operations: Operations = Operations()
    """The operations between the collectives."""
    mirrored_backward: bool = True
    """With overlap, walk backward by the mirrored rule; False leaves it to autograd, which waits at once."""
    late_weight_gradients: bool = True
    """In the mirrored backward, keep products for gradients of weights, with their operands, for up to one more
    sub-block, until they hide something in flight."""
    span: Span = no_span
    """Names sub-blocks for a profiler."""


class _TransformerLayer(nn.Module):
    def __init__(self, build: BuildContext, layer: int, divides_experts: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleDict()
        self.bodies = nn.ModuleDict()
        number = sum(kind.has_mixer for kinds in build.config.layer_kinds[:layer] for kind in kinds)
        has_lanes = build.config.lanes > 0
        for tensors in layer_tensors(build.config, divides_experts)[layer]:
            kind = tensors.wired.kind
            if not tensors.shares_norm:
                self.norms[kind.norm] = (LaneNorm if has_lanes else RMSNorm)(build, tensors.norm)
            body = DividedExperts if tensors.wired.moves_tokens else BODIES[kind]
            new_body = functools.partial(LaneBodies, body) if has_lanes else body
            self.bodies[kind.value] = new_body(build, number, tensors)
            number += kind.has_mixer

    def sub_blocks(
        self, wired_sub_blocks: Sequence[WiredSubBlock], mesh: ProcessMesh, recompute: bool, name: str, span: Span
    ) -> Iterator[SubBlock]:
        for wired in wired_sub_blocks:
            kind = wired.kind
            norm: Any = self.norms[kind.norm]
            body: Any = self.bodies[kind.value]
            border = body if wired.moves_tokens else StreamBorder(mesh.stream)
            yield SubBlock(wired, norm, body, mesh.tensor, border, recompute, f"{name}.{kind.value}", span)


class TransformerStack(nn.Module):
    """One or more contiguous ranges of layers, the chunks of a pipeline stage.

    Attributes:
        loss_names: names of the losses that bodies of the whole model return.
        messages: those of the pass that runs.
        mirrors: whether backward follows the mirrored rule, and so waits for messages where it reads them.
    """

    def __init__(self, build: BuildContext, chunks: Sequence[range], options: StackOptions) -> None:
        """Raise ValueError for a desync model of another tensor-parallel size, other replicas of heads, or experts that
        the mesh cannot divide."""
        super().__init__()
        config, mesh = build.config, build.mesh
        if config.desync_tp not in (None, mesh.tensor.size):
            raise ValueError(f"a desync model of {config.desync_tp} tensor-parallel ranks on {mesh.tensor.size}")
        if (replicas := head_replicas(config, mesh.tensor.size)) != tuple(mesh.head_replicas):
            heads = f"{config.num_key_value_heads} key and value heads on {mesh.tensor.size} tensor-parallel ranks"
            raise ValueError(f"{heads} have head_replicas={replicas}, and the mesh has {(*mesh.head_replicas,)}")
        self.divides_experts = mesh.experts.size > 1 and bool(config.moe_layers)
        if self.divides_experts and (config.num_experts % mesh.experts.size or not config.shares_stream):
            raise ValueError(
                f"{config.num_experts} experts of a {config.residual_mode} model on {mesh.experts.size} ranks"
            )
        if self.divides_experts and mesh.stream.shards < mesh.tensor.size:
            raise ValueError("tensor-parallel ranks that route the same tokens cannot divide the experts with others")
        kinds = dict.fromkeys(kind for of_layer in config.layer_kinds for kind in of_layer)
        names = [name for kind in kinds for name in BODIES[kind].loss_names]
        self.loss_names = tuple(dict.fromkeys([*names, *(build.experts.loss_names if config.moe_layers else ())]))
        if self.loss_names and not config.shares_stream:
            raise ValueError(f"{', '.join(self.loss_names)}: ranks that read different streams have different losses")
        self.config = config
        self.options = options
        self.mesh = mesh
        self.layout = mesh.stream
        self.messages = StateMessages()
        self.side_queue: CudaSideQueue | None = None
        self.desync = config.wiring.stream == "per rank"
        communicates = mesh.tensor.size > 1 or self.divides_experts
        self.mirrors = options.tp_overlap and options.mirrored_backward and communicates and not self.desync
        self._marks_norms = self.mirrors and mesh.tensor.size > 1 and mesh.stream.shards == 1
        """Whether only some norms have partial gradients: those of sub-blocks whose gradients cross cuts unreduced."""
        self._late = build.gradient_sink if options.late_weight_gradients else None
        self._slots_per_output = mesh.stream.shards
        self._walk = walk
        self._record = ForwardRecord
        if config.lanes:
            self.mirrors, self._marks_norms = True, False
            self._slots_per_output = local_lanes(config, mesh.tensor.size)
            self._walk = walk_own_partials
            self._record = OwnPartialsRecord
        self._chunks = chunks
        self.layers = nn.ModuleDict(
            {str(n): _TransformerLayer(build, n, self.divides_experts) for layers in chunks for n in layers}
        )
        self._all_heads = [module for module in self.modules() if isinstance(module, Heads)]
        self.rewire(config.wired_layers)

    def rewire(self, wired_layers: Sequence[Sequence[WiredSubBlock]]) -> None:
        """Change what the sub-blocks miss and which of their outputs travel together, for all layers of the model."""
        if self.divides_experts:
            wired_layers = divide_experts(wired_layers, self.config.moe_shared_expert_intermediate_size > 0)
        self.plan = plan_reads(wired_layers)
        self._wired = wired_layers
        self._firsts = [sum(map(len, wired_layers[: layers.start])) for layers in self._chunks]
        """The first sub-block of each chunk."""
        self._steps = [[*self._steps_of(layers)] for layers in self._chunks]
        self._crossing_norms: list[set[RMSNorm]] = [set() for _ in self._chunks]
        """For each chunk the norms with partial gradients, if only some norms have them."""
        if not self._marks_norms:
            return
        for chunk, (steps, first) in enumerate(zip(self._steps, self._firsts, strict=True)):
            crossing = MirrorPlan.of(self.plan, first, first + len(steps), sharded=False).crossing_norms(steps, first)
            self._crossing_norms[chunk] = crossing
            for norm in {step.norm for step in steps}:
                (section,) = norm.sections["weight"]
                norm.sections["weight"] = (replace(section, is_partial=norm in crossing),)

    def prepare(self, context: SequenceContext) -> SequenceContext:
        """Add what the mixers of this rank share between layers."""
        first = {heads.mixer.name: heads for heads in reversed(self._all_heads)}
        return context._replace(prepared={name: heads.prepare(context) for name, heads in first.items()})

    def slots_in(self, chunk: int) -> list[int]:
        """Number of slots of each message of the state that enters a chunk: the stream, and the missing outputs."""
        return self._slots_before(self._firsts[chunk])

    def slots_out(self, chunk: int) -> list[int]:
        """Number of slots of each message of the state that leaves a chunk."""
        return self._slots_before(self._firsts[chunk] + len(self._steps[chunk]))

    def _slots_before(self, sub_block: int) -> list[int]:
        return slots_of_messages(self.plan.missing(sub_block), self.plan, self._slots_per_output)

    def forward(self, state: Tensor, context: SequenceContext, chunk: int = 0) -> tuple[Tensor, PassStats]:
        """Map the state that enters a chunk to the one that leaves it, and to the sums of what its bodies return."""
        steps, first, overlap = self.sub_blocks(chunk), self._firsts[chunk], self.options.tp_overlap
        if self.side_queue is None and self.layout.shards > 1 and overlap and state.is_cuda:
            # Not earlier: ZeRO-3 builds the stack on another device.
            self.side_queue = CudaSideQueue(state.device)
        if self.desync:
            return walk_desync(state[0], steps, context).unsqueeze(0), PassStats()
        queue = self.side_queue if overlap else None
        trains = torch.is_grad_enabled() and (state.requires_grad or any(step.trains for step in steps))
        if trains and self.mirrors:
            norms = self._crossing_norms[chunk]
            of_range = steps, context, self.plan, first, self.layout
            record = self._record(*of_range, queue, state.requires_grad, norms, overlap, self.messages, self._late)
            state, stats = walk_mirrored(state, record)
        else:
            forward = AutogradPass(steps, context)
            with torch.set_grad_enabled(trains):
                options = queue, overlap, self.messages
                state, stats = self._walk(state, forward, self.plan, first, self.layout, *options)
        return state, self._sum_over_sequence(stats)

    def _sum_over_sequence(self, stats: PassStats) -> PassStats:
        """Sum losses of which each rank has those of its positions."""
        if not (stats.losses and self.divides_experts and self.layout.shards > 1):
            return stats
        sums = start_all_reduce(torch.stack([*stats.losses.values()]), self.mesh.tensor).wait()
        return stats._replace(losses=dict(zip(stats.losses, sums.unbind(), strict=True)))

    def sub_blocks(self, chunk: int = 0) -> Sequence[SubBlock]:
        """Return the steps of all layers of a chunk."""
        return self._steps[chunk]

    def _steps_of(self, layers: range) -> Iterator[SubBlock]:
        recomputed = [*self.layers][: self.options.recompute_layers]
        for number in layers:
            layer: Any = self.layers[str(number)]
            wired, recompute = self._wired[number], str(number) in recomputed
            yield from layer.sub_blocks(wired, self.mesh, recompute, f"layers.{number}", self.options.span)
