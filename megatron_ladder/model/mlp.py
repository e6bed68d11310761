"""SwiGLU: `down(silu(gate(x)) * up(x))`, cut along its inner width.

Layouts: hidden_states [s, b, h]; inner [s, b, ffn/t].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.model import ModelConfig, synchronised_after
from megatron_ladder.model.attention import SequenceContext, output_std
from megatron_ladder.parallel.input_gradient import InputGradient
from megatron_ladder.parallel.linear import ColumnParallelLinear, ColumnShare, RowParallelLinear


def gate_up_shares(config: ModelConfig, layer: int) -> list[ColumnShare]:
    """The two projections that one column-parallel product computes side by side."""
    return [
        ColumnShare(f"layers.{layer}.mlp.{which}_proj", config.ffn_hidden_size, bias=config.add_mlp_bias)
        for which in ("gate", "up")
    ]


def mlp_output(
    config: ModelConfig, layer: int, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
) -> RowParallelLinear:
    """The projection back to the residual stream."""
    return RowParallelLinear(
        f"layers.{layer}.mlp.down_proj",
        config.ffn_hidden_size,
        config.hidden_size,
        bias=config.add_mlp_bias,
        std=output_std(config),
        group=mesh.tensor,
        dtype=dtype,
        device=device,
        equal_gradients=synchronised_after(config, 2 * layer + 1),
    )


class MLP(nn.Module):
    """Fused gate and up projection -> SwiGLU -> down projection in flight."""

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            gate_up_shares(config, layer),
            std=config.init_method_std,
            group=mesh.tensor,
            kv_replica_group=mesh.kv_replica,
            dtype=dtype,
            device=device,
            sum_input_gradient=config.residual_mode != "desync",
        )
        self.down_proj = mlp_output(config, layer, mesh, dtype, device)

    def forward(
        self,
        normed: Tensor,
        context: SequenceContext,
        launch: bool = True,
        input_gradient: InputGradient | None = None,
    ) -> InFlight:
        """[s, b, h] normed -> the MLP's output [s, b, h], in flight (unreduced if not `launch`)."""
        gate, up = self.gate_up_proj.split(self.gate_up_proj(normed, input_gradient))
        in_flight: InFlight = self.down_proj(F.silu(gate) * up, launch=launch)
        return in_flight
