"""The decoder's layers as one list of sub-blocks around one residual stream, and the rule that walks it.

    r = embedding(tokens); pending = []                     # outputs whose all-reduce is in flight
    for each sub-block h_i with staleness s_i:
        while len(pending) > s_i:  r = r + pending.pop_first().wait()
        pending.append(start_all_reduce(h_i(r)))            # in flight under the next s_i sub-blocks
    while pending:                 r = r + pending.pop_first().wait()

With s = 0 everywhere this is the ordinary transformer; with s = 1 it is Ladder Residual. With own partials, h_i also
reads this rank's parts of what is pending (`own_partials.py`). Outside the rule is desync, which has a separate walk
(`desync.py`).

A stack is a range of layers. Its state, the stream and the outputs still missing from it, enters and leaves as
one tensor [1 + pending, s, b, h], so that a pipeline can cut a model of any wiring at any layer. The missing
outputs cross the cut unreduced: the next range starts their reduce, which runs under its first sub-block.

With sequence parallelism a rank's stream holds its own positions, a reduce is a reduce-scatter, and an all-gather
precedes each sub-block (`comm/stream.py`); the state is [1 + pending x t, s/t, b, h] with t ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import key_value_replicas, local_lanes
from megatron_ladder.blueprint.tensors import layer_tensors
from megatron_ladder.blueprint.wiring import SubBlockKind, WiredSubBlock, pending_before
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue, SideQueue
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.model.backward import ForwardRecord, walk_mirrored
from megatron_ladder.model.bodies import MLP, Attention, AttentionMLP
from megatron_ladder.model.desync import walk_desync
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext, Operations
from megatron_ladder.model.own_partials import LaneRange, walk_lanes
from megatron_ladder.model.sub_block import AutogradPass, SequenceContext, SubBlock, walk
from megatron_ladder.parallel.partial_gradients import PartialSums

_BODIES = {SubBlockKind.ATTENTION: Attention, SubBlockKind.MLP: MLP, SubBlockKind.ATTENTION_MLP: AttentionMLP}


@dataclass(frozen=True)
class StackOptions:
    """How a stack computes; none of the options changes what it computes."""

    tp_overlap: bool = True
    """Leave all-reduces in flight under later sub-blocks where the wiring allows it; False waits at once."""
    recompute_layers: int = 0
    """Number of layers, from the first of this range, whose sub-blocks keep only their input for backward."""
    operations: Operations = Operations()
    """The operations between the collectives."""
    mirrored_backward: bool = True
    """With overlap, walk backward by the mirrored rule; False leaves it to autograd, which waits at once."""
    span: Span = no_span
    """Names sub-blocks for a profiler."""


def _body_name(kind: SubBlockKind, lane: int) -> str:
    return f"{kind.value}_{lane}" if lane else kind.value


class _TransformerLayer(nn.Module):
    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        self.wired: Sequence[WiredSubBlock] = build.config.wired_layers[layer]
        self.norms = nn.ModuleDict()
        self.bodies = nn.ModuleDict()
        self._lanes = range(local_lanes(build.config, build.mesh.tensor.size))
        for tensors in layer_tensors(build.config)[layer]:
            kind = tensors.wired.kind
            self.norms[kind.value] = RMSNorm(build, tensors.norm, own_input=build.config.lanes > 0)
            for lane in self._lanes:
                lane_build = build
                if len(self._lanes) > 1:
                    lane_build = replace(build, mesh=build.mesh.of_lane(lane, build.config.lanes))
                body = _BODIES[kind](lane_build, layer * len(self._lanes) + lane, tensors)
                self.bodies[_body_name(kind, lane)] = body

    def sub_blocks(self, mesh: ProcessMesh, recompute: bool, name: str, span: Span) -> list[SubBlock]:
        steps = []
        for kind, staleness, *_ in self.wired:
            norm, lanes = self.norms[kind.value], [self.bodies[_body_name(kind, lane)] for lane in self._lanes]
            assert isinstance(norm, RMSNorm)
            steps.append(
                SubBlock(norm, lanes, staleness, mesh.tensor, mesh.stream, recompute, f"{name}.{kind.value}", span)
            )
        return steps


class TransformerStack(nn.Module):
    """A contiguous range of layers.

    Attributes:
        pending_in: number of outputs that are missing from the stream when it enters.
        pending_out: number of outputs that are missing when it leaves.
        partial_sums: gradients whose sum over the ranks may wait for the last of several backward passes.
    """

    def __init__(self, build: BuildContext, layers: range, options: StackOptions) -> None:
        """Raise ValueError for a desync model of another tensor-parallel size, or other key-value replicas."""
        super().__init__()
        config, mesh = build.config, build.mesh
        if config.desync_tp not in (None, mesh.tensor.size):
            raise ValueError(f"a desync model of {config.desync_tp} tensor-parallel ranks on {mesh.tensor.size}")
        if (replicas := key_value_replicas(config, mesh.tensor.size)) != mesh.kv_replica.size:
            heads = f"{config.num_key_value_heads} key and value heads on {mesh.tensor.size} tensor-parallel ranks"
            raise ValueError(f"{heads} have kv_replicas={replicas}, and the mesh has {mesh.kv_replica.size}")
        wired = config.wired_layers
        self._range = layers
        self.options = options
        self.mesh = mesh
        self.layout = mesh.stream
        self.side_queue: SideQueue | None = None
        self._lanes = local_lanes(config, mesh.tensor.size) if config.lanes else 0
        self.desync = config.wiring.stream == "per rank"
        sub_blocks = [sub_block for layer in layers for sub_block in wired[layer]]
        self.synchronised = [sub_blocks[0].reads_shared, *(sub_block.leaves_shared for sub_block in sub_blocks)]
        self.partial_sums = PartialSums(mesh.tensor)
        self._steps: Sequence[SubBlock] | None = None
        self.layers = nn.ModuleDict({str(layer): _TransformerLayer(build, layer) for layer in layers})
        self.rewire(wired)

    def rewire(self, wired_layers: Sequence[Sequence[WiredSubBlock]]) -> None:
        """Change how late the sub-blocks read; `wired_layers` are those of all layers of the model."""
        self.pending_in = pending_before(wired_layers, self._range.start)
        self.pending_out = pending_before(wired_layers, self._range.stop)
        for number, layer in self.layers.items():
            assert isinstance(layer, _TransformerLayer)
            layer.wired = wired_layers[int(number)]
        self._steps = None

    @property
    def slots_in(self) -> int:
        """Number of slots of the state that enters: the stream, and the parts of the missing outputs."""
        return 1 + self.pending_in * (self._lanes or self.layout.shards)

    def forward(self, state: Tensor, context: SequenceContext) -> Tensor:
        """Map the state with `pending_in` missing outputs to the state with `pending_out` missing outputs."""
        steps = self.sub_blocks()
        overlap = self.options.tp_overlap
        if self.side_queue is None and self.layout.shards > 1 and overlap and state.is_cuda:
            # Not earlier: ZeRO-3 builds the stack on another device.
            self.side_queue = CudaSideQueue(state.device)
        if self.desync:
            return walk_desync(state[0], steps, self.synchronised, context).unsqueeze(0)
        if self._lanes:
            launch = self.layout.start_write if overlap else self._write_blocking
            pending = self.pending_in, self.pending_out
            return walk_lanes(state, LaneRange(steps, context, pending, launch, self.partial_sums))
        mirrored = overlap and self.options.mirrored_backward
        if mirrored and self.mesh.tensor.size > 1 and torch.is_grad_enabled():
            pending = self.pending_in, self.pending_out
            return walk_mirrored(
                state, ForwardRecord(steps, context, self.layout, pending, self.partial_sums, self.side_queue)
            )
        launch, side_queue = (self.layout.start_write, self.side_queue) if overlap else (self._write_blocking, None)
        return walk(state, AutogradPass(steps, context), self.pending_out, self.layout, launch, side_queue)

    def sub_blocks(self) -> Sequence[SubBlock]:
        """Return the steps of all layers of this range."""
        if self._steps is None:
            steps: list[SubBlock] = []
            for index, (number, layer) in enumerate(self.layers.items()):
                assert isinstance(layer, _TransformerLayer)
                recompute = index < self.options.recompute_layers
                steps += layer.sub_blocks(self.mesh, recompute, f"layers.{number}", self.options.span)
            self._steps = steps
        return self._steps

    def _write_blocking(self, partial: Tensor) -> InFlight:
        return InFlight(self.layout.start_write(partial).wait(), None)
