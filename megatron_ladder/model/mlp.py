"""SwiGLU: `down(silu(gate(x)) * up(x))`, cut along its inner width.

Layouts: hidden_states [s, b, h]; inner [s, b, ffn/t].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import SubBlockTensors
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.attention import Midway, SequenceContext
from megatron_ladder.model.projections import input_projection, output_projection
from megatron_ladder.parallel.input_gradient import InputGradient


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate and up side by side [s, b, 2 ffn/t] -> silu(gate) * up [s, b, ffn/t]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """Fused gate and up projection -> SwiGLU -> down projection in flight."""

    def __init__(
        self, config: ModelConfig, tensors: SubBlockTensors, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.swiglu = swiglu
        (branch,) = tensors.branches
        self.gate_up_proj = input_projection(config, tensors, mesh, dtype, device)
        self.down_proj = output_projection(tensors, branch, mesh, dtype, device)

    def forward(
        self,
        normed: Tensor,
        context: SequenceContext,
        launch: bool = True,
        input_gradient: InputGradient | None = None,
        midway: Midway | None = None,
    ) -> InFlight:
        """[s, b, h] normed -> the MLP's output [s, b, h], in flight (unreduced if not `launch`)."""
        inner = self.swiglu(self.gate_up_proj(normed, input_gradient))
        if midway is not None:
            midway(inner)
        in_flight: InFlight = self.down_proj(inner, launch=launch)
        return in_flight
