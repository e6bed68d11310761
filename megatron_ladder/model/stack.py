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
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, start_all_reduce
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.model import ModelConfig, synchronised_after
from megatron_ladder.model.attention import Attention, SequenceContext
from megatron_ladder.model.attention_mlp import AttentionMLP
from megatron_ladder.model.backward import CrossingNorms, run_overlapped
from megatron_ladder.model.desync import walk_desync
from megatron_ladder.model.mlp import MLP
from megatron_ladder.model.norm import NormFunction, RMSNorm, torch_rms_norm
from megatron_ladder.model.sub_block import SubBlock, drain, walk
from megatron_ladder.model.wiring import LayerWiring, SubBlockKind, layer_wirings, pending_before


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


class TransformerLayer(nn.Module):
    """The modules of one layer, in the order of its wiring."""

    def __init__(
        self, config: ModelConfig, layer: int, wiring: LayerWiring, mesh: ProcessMesh, norm: NormFunction,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wiring = wiring
        self.norms = nn.ModuleDict()
        self.bodies = nn.ModuleDict()
        for place, kind in enumerate(wiring.sub_blocks):
            name = f"layers.{layer}.{'mlp' if kind is SubBlockKind.MLP else 'attention'}_norm"
            reads_own_stream = not synchronised_after(config, len(wiring.sub_blocks) * layer + place - 1)
            self.norms[kind.value] = RMSNorm(
                name, config.hidden_size, config.norm_epsilon, norm, rank=mesh.tensor.rank, dtype=dtype, device=device,
                per_rank=mesh.tensor.size if reads_own_stream else None,
            )  # fmt: skip
            self.bodies[kind.value] = self._body(kind, config, layer, mesh, norm, dtype, device)

    @staticmethod
    def _body(
        kind: SubBlockKind, config: ModelConfig, layer: int, mesh: ProcessMesh, norm: NormFunction,
        dtype: torch.dtype, device: torch.device,
    ) -> nn.Module:  # fmt: skip
        if kind is SubBlockKind.ATTENTION:
            return Attention(config, layer, norm, mesh, dtype, device)
        if kind is SubBlockKind.MLP:
            return MLP(config, layer, mesh, dtype, device)
        return AttentionMLP(config, layer, norm, mesh, dtype, device)

    def sub_blocks(self, group: CommGroup, recompute: bool) -> list[SubBlock]:
        """The steps of this layer."""
        steps = []
        for kind in self.wiring.sub_blocks:
            norm, body = self.norms[kind.value], self.bodies[kind.value]
            assert isinstance(norm, RMSNorm)
            steps.append(SubBlock(norm, body, self.wiring.staleness, group, recompute))
        return steps


class TransformerStack(nn.Module):
    """A contiguous range of layers.

    Attributes:
        pending_in: outputs that are missing from the stream when it enters.
        pending_out: outputs that are missing when it leaves.
        crossing_norms: gradients of norms whose sum over the ranks may wait for the last of several backward passes.
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
        wirings = layer_wirings(config)
        self.options = options
        self.group = mesh.tensor
        self.desync = config.residual_mode == "desync"
        self.synchronised = [synchronised_after(config, i) for i in range(2 * layers.start - 1, 2 * layers.stop)]
        self.pending_in = pending_before(wirings, layers.start)
        self.pending_out = pending_before(wirings, layers.stop)
        self.crossing_norms = CrossingNorms(mesh.tensor)
        self.layers = nn.ModuleDict(
            {
                str(layer): TransformerLayer(config, layer, wirings[layer], mesh, options.norm, dtype, device)
                for layer in layers
            }
        )

    def forward(self, state: Tensor, context: SequenceContext) -> Tensor:
        """[1 + pending_in, s, b, h] -> [1 + pending_out, s, b, h]."""
        if self.desync:
            return walk_desync(state[0], self.sub_blocks(), self.synchronised, context).unsqueeze(0)
        mirrored = self.options.tp_overlap and self.options.mirrored_backward
        if mirrored and self.group.size > 1 and torch.is_grad_enabled():
            return run_overlapped(state, self.sub_blocks(), context, self.pending_out, self.crossing_norms)
        stream, *missing = state.unbind(0)
        steps = self.sub_blocks()
        reduced_here = len(missing) + len(steps) - self.pending_out
        pending = deque(
            self._keep_or_wait(start_all_reduce(partial.clone(), self.group))
            if place < reduced_here
            else InFlight(partial, None)
            for place, partial in enumerate(missing)
        )
        launched = max(0, len(steps) - self.pending_out)
        stream = walk(
            stream, pending, steps[:launched], lambda step, stream: self._keep_or_wait(step.start(stream, context))
        )
        stream = walk(
            stream, pending, steps[launched:], lambda step, stream: InFlight(step.unreduced(stream, context), None)
        )
        stream = drain(stream, pending, self.pending_out)
        return torch.stack([stream, *(in_flight.partial for in_flight in pending)])

    def sub_blocks(self) -> list[SubBlock]:
        """The steps of all layers of this range."""
        steps: list[SubBlock] = []
        for index, layer in enumerate(self.layers.values()):
            assert isinstance(layer, TransformerLayer)
            steps += layer.sub_blocks(self.group, recompute=index < self.options.recompute_layers)
        return steps

    def _keep_or_wait(self, in_flight: InFlight) -> InFlight:
        return in_flight if self.options.tp_overlap else InFlight(in_flight.wait(), None)
