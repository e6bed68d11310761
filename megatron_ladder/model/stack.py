"""The decoder's layers as one list of sub-blocks around one residual stream, and the rule that walks it.

    r = embedding(tokens); pending = []                     # outputs whose all-reduce is in flight
    for each sub-block h_i with staleness s_i:
        while len(pending) > s_i:  r = r + pending.pop_first().wait()
        pending.append(start_all_reduce(h_i(r)))            # flies under the next s_i sub-blocks
    while pending:                 r = r + pending.pop_first().wait()

With s = 0 everywhere this is the ordinary transformer; with s = 1 it is Ladder Residual. The one wiring outside of the
rule has a walk of its own, `desync.py`.

A stack is a range of layers. Its state, the stream and the outputs still missing from it, enters and leaves as
one tensor [1 + pending, s, b, h], so that a pipeline can cut a model of any wiring at any layer. The missing
outputs cross unreduced: the next range starts their reduce, which runs under its first sub-block.

With sequence parallelism a rank's stream is its own positions, a reduce is a reduce-scatter, and an all-gather comes
before each sub-block (`comm/stream.py`); the state is [1 + pending x t, s/t, b, h] with t ranks.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import SubBlockTensors, layer_tensors
from megatron_ladder.blueprint.wiring import SubBlockKind, pending_before
from megatron_ladder.comm.aside import beside
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.model.attention import Attention, Midway, SequenceContext
from megatron_ladder.model.attention_mlp import AttentionMLP
from megatron_ladder.model.backward import run_overlapped
from megatron_ladder.model.desync import walk_desync
from megatron_ladder.model.mlp import MLP
from megatron_ladder.model.norm import NormFunction, RMSNorm, positions_over, torch_rms_norm
from megatron_ladder.model.sub_block import NormedStream, SubBlock, drain, join_state, split_state, walk
from megatron_ladder.parallel.partial_gradients import PartialSums


@dataclass(frozen=True)
class StackOptions:
    """How a stack computes; none of it changes what it computes."""

    tp_overlap: bool = True
    """Leave all-reduces in flight under later sub-blocks where the wiring allows it; False waits at once."""
    recompute_layers: int = 0
    """Of this range, the first layers whose sub-blocks keep only their input for backward."""
    norm: NormFunction = torch_rms_norm
    """The function that computes RMSNorm."""
    mirrored_backward: bool = True
    """With overlap, walk backward by the mirrored rule; False leaves it to autograd, which waits at once."""
    span: Span = no_span
    """Names sub-blocks for a profiler."""


class TransformerLayer(nn.Module):
    """The modules of one layer, in the order of its wiring."""

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ProcessMesh, norm: NormFunction,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wired = config.wired_layers[layer]
        self.norms = nn.ModuleDict()
        self.bodies = nn.ModuleDict()
        for tensors in layer_tensors(config)[layer]:
            kind = tensors.wired.kind
            self.norms[kind.value] = RMSNorm(
                tensors.norm, config.norm_epsilon, norm, group=mesh.tensor, dtype=dtype, device=device,
                partial_over=positions_over(mesh),
            )  # fmt: skip
            self.bodies[kind.value] = self._body(tensors, config, layer, mesh, norm, dtype, device)

    @staticmethod
    def _body(
        tensors: SubBlockTensors, config: ModelConfig, layer: int, mesh: ProcessMesh, norm: NormFunction,
        dtype: torch.dtype, device: torch.device,
    ) -> nn.Module:  # fmt: skip
        if tensors.wired.kind is SubBlockKind.ATTENTION:
            return Attention(config, layer, tensors, norm, mesh, dtype, device)
        if tensors.wired.kind is SubBlockKind.MLP:
            return MLP(config, tensors, mesh, dtype, device)
        return AttentionMLP(config, layer, tensors, norm, mesh, dtype, device)

    def sub_blocks(self, mesh: ProcessMesh, recompute: bool, name: str, span: Span) -> list[SubBlock]:
        """The steps of this layer, which is called `name`."""
        steps = []
        for kind, staleness, *_ in self.wired:
            norm, body = self.norms[kind.value], self.bodies[kind.value]
            assert isinstance(norm, RMSNorm)
            steps.append(
                SubBlock(norm, body, staleness, mesh.tensor, mesh.stream, recompute, f"{name}.{kind.value}", span)
            )
        return steps


class TransformerStack(nn.Module):
    """A contiguous range of layers.

    Attributes:
        pending_in: outputs that are missing from the stream when it enters.
        pending_out: outputs that are missing when it leaves.
        partial_sums: gradients whose sum over the ranks may wait for the last of several backward passes.
    """

    def __init__(
        self, config: ModelConfig, layers: range, mesh: ProcessMesh, options: StackOptions,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """
        Raises:
            ValueError: a desync model of another tensor-parallel size.
        """
        super().__init__()
        if config.desync_tp not in (None, mesh.tensor.size):
            raise ValueError(f"a desync model of {config.desync_tp} tensor-parallel ranks on {mesh.tensor.size}")
        wired = config.wired_layers
        self.options = options
        self.mesh = mesh
        self.layout = mesh.stream
        self.aside = beside(device) if self.layout.shards > 1 and options.tp_overlap else None
        self.desync = config.wiring.stream == "per rank"
        steps = [sub_block for layer in layers for sub_block in wired[layer]]
        self.synchronised = [steps[0].reads_shared, *(step.leaves_shared for step in steps)]
        self.pending_in = pending_before(wired, layers.start)
        self.pending_out = pending_before(wired, layers.stop)
        self.partial_sums = PartialSums(mesh.tensor)
        self.layers = nn.ModuleDict(
            {
                str(layer): TransformerLayer(config, layer, mesh, options.norm, dtype, device)
                for layer in layers
            }
        )

    def forward(self, state: Tensor, context: SequenceContext) -> Tensor:
        """The state with `pending_in` outputs missing -> the state with `pending_out` missing."""
        if self.desync:
            return walk_desync(state[0], self.sub_blocks(), self.synchronised, context).unsqueeze(0)
        mirrored = self.options.tp_overlap and self.options.mirrored_backward
        if mirrored and self.mesh.tensor.size > 1 and torch.is_grad_enabled():
            return run_overlapped(
                state, self.sub_blocks(), context, self.pending_out, self.partial_sums, self.aside
            )
        stream, missing = split_state(state, self.layout)
        steps = self.sub_blocks()
        # A range shorter than its staleness hands outputs on that it neither made nor read.
        reduced_here = len(missing) + len(steps) - self.pending_out
        pending = deque(
            self._keep_or_wait(self.layout.start_write(partial.clone()))
            if place < reduced_here
            else InFlight(partial, None)
            for place, partial in enumerate(missing)
        )
        launched = max(0, len(steps) - self.pending_out)

        def start(step: SubBlock, reading: NormedStream, midway: Midway | None) -> InFlight:
            return self._keep_or_wait(step.start(reading, context, midway))

        def read_stream(_: SubBlock, stream: Tensor, output: Tensor | None) -> tuple[Tensor, Tensor]:
            stream = stream if output is None else stream + output
            return stream, stream

        def leave_unreduced(step: SubBlock, stream: Tensor, _: Midway | None) -> InFlight:
            return InFlight(step.unreduced(stream, context), None)

        stream = walk(stream, pending, steps[:launched], SubBlock.read, start, self.aside)
        stream = walk(stream, pending, steps[launched:], read_stream, leave_unreduced)
        stream = drain(stream, pending, self.pending_out)
        return join_state(stream, (in_flight.partial for in_flight in pending))

    def sub_blocks(self) -> list[SubBlock]:
        """The steps of all layers of this range."""
        steps: list[SubBlock] = []
        for index, (number, layer) in enumerate(self.layers.items()):
            assert isinstance(layer, TransformerLayer)
            recompute = index < self.options.recompute_layers
            steps += layer.sub_blocks(self.mesh, recompute, f"layers.{number}", self.options.span)
        return steps

    def _keep_or_wait(self, in_flight: InFlight) -> InFlight:
        return in_flight if self.options.tp_overlap else InFlight(in_flight.wait(), None)
