"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x^2) + epsilon) * weight           (mean in fp32 at least)

The weight [n] is the same on every tensor-parallel rank, and its gradient is whole on every rank when all of them
normalise the same and the output enters a tensor-parallel region behind it. Where each normalises heads or positions of
its own, the gradient is summed over them (`partial_over`). Of a stream that is each rank's own, the norm has a weight
for each rank: the canonical weight is [ranks, n], and a rank holds its row, [1, n].
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.regions import copy_to_tensor_parallel_region
from megatron_ladder.errors import UserError
from megatron_ladder.parallel.apex import find_in_apex
from megatron_ladder.parallel.layout import ParallelModule, Section, replicated
from megatron_ladder.parallel.partial_gradients import PartialGradients

NormFunction = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., n], weight [n], epsilon) -> [..., n]."""


def torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm by torch's own operator."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def positions_over(mesh: ProcessMesh) -> CommGroup | None:
    """Ranks that each normalise some of the positions of the residual stream; None if all normalise all of them."""
    return mesh.tensor if mesh.stream.shards > 1 else None


def select_norm(
    implementation: Literal["auto", "torch", "apex"], device: torch.device
) -> tuple[NormFunction, str]:
    """The function that computes RMSNorm, and a sentence that says which and why.

    Raises:
        UserError: apex was asked for and is not NVIDIA's, is missing, or there is no CUDA device.
    """
    if implementation == "torch" or (implementation == "auto" and device.type != "cuda"):
        return torch_rms_norm, "torch"
    fused, reason = find_in_apex("apex.normalization.fused_layer_norm", "fused_rms_norm_affine", device)
    if fused is None:
        if implementation == "apex":
            raise UserError(f"--norm-implementation apex: {reason}; use --norm-implementation torch")
        return torch_rms_norm, f"torch ({reason})"

    def apex_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed: Tensor = fused(x, weight, weight.shape, epsilon)
        return normed

    return apex_rms_norm, "apex FusedRMSNorm"


class RMSNorm(ParallelModule):
    """The norm's weight, and the function that applies it."""

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        size: int,
        epsilon: float,
        function: NormFunction,
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        per_rank: int | None = None,
        partial_over: CommGroup | None = None,
    ) -> None:
        """
        Args:
            name: canonical, without `.weight`.
            rank: the tensor-parallel rank.
            per_rank: how many ranks have a weight of their own; None means that all have the same one.
            partial_over: ranks that each normalise a part of one tensor.
        """
        super().__init__()
        self.partial_over = partial_over
        self.epsilon = epsilon
        self.function = function
        if per_rank is None:
            share = replicated(f"{name}.weight", (size,), rank, mean=1.0)
            self.add_parameter("weight", (size,), (share,), dtype, device, sharded=False)
        else:
            share = Section(f"{name}.weight", (per_rank, size), global_start=rank, length=1, mean=1.0)
            self.add_parameter("weight", (1, size), (share,), dtype, device, sharded=True)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, partial_gradients: PartialGradients | None = None
    ) -> Tensor:
        """[..., size] -> [..., size].

        Args:
            weight: stands in for the norm's own.
            partial_gradients: sums the weight's gradient later, if it is partial; without, it is summed where it
                arises.
        """
        if weight is None:
            weight = self.weight
            if self.partial_over is not None and torch.is_grad_enabled():
                if partial_gradients is None:
                    weight = copy_to_tensor_parallel_region(weight, self.partial_over)
                else:
                    weight = partial_gradients.defer(weight)
        return self.function(x, weight.flatten(), self.epsilon)
