"""Attention and MLP of one norm, side by side (PaLM): one product in, one all-reduce out."""

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import SubBlockTensors
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.attention import AttentionHeads, Midway, SequenceContext
from megatron_ladder.model.mlp import swiglu
from megatron_ladder.model.norm import NormFunction
from megatron_ladder.model.projections import input_projection, output_projection
from megatron_ladder.parallel.input_gradient import InputGradient


class AttentionMLP(nn.Module):
    """q, k, v, gate and up in one column-parallel product; the two output projections share one reduce."""

    def __init__(
        self, config: ModelConfig, layer: int, tensors: SubBlockTensors, norm: NormFunction, mesh: ProcessMesh,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.swiglu = swiglu
        self.layout = mesh.stream
        attention, mlp = tensors.branches
        self.in_proj = input_projection(config, tensors, mesh, dtype, device)
        widths = self.in_proj.widths[:3]
        self.heads = AttentionHeads(config, layer, attention, norm, mesh.tensor, widths, dtype, device)
        self.o_proj = output_projection(tensors, attention, mesh, dtype, device)
        self.down_proj = output_projection(tensors, mlp, mesh, dtype, device)

    def forward(
        self,
        normed: Tensor,
        context: SequenceContext,
        launch: bool = True,
        input_gradient: InputGradient | None = None,
        midway: Midway | None = None,
    ) -> InFlight:
        """[s, b, h] normed -> the sum of both outputs [s, b, h], in flight (unreduced if not `launch`)."""
        widths = self.in_proj.widths
        projected = self.in_proj(normed, input_gradient)
        heads, gate_up = torch.split(projected, [sum(widths[:3]), sum(widths[3:])], dim=-1)
        attended = self.heads(heads, context, input_gradient)
        if midway is not None:
            midway(attended)
        partial = self.o_proj(attended, launch=False).partial
        partial = partial + self.down_proj(self.swiglu(gate_up), launch=False).partial
        return self.layout.start_write(partial) if launch else InFlight(partial, None)
