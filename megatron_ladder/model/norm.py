"""RMSNorm over the last dimension, replicated on every tensor-parallel rank.

    y = x / sqrt(mean(x^2) + epsilon) * weight           (mean in fp32 at least)

Its gradient is whole on every rank when its output enters a tensor-parallel region behind it.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.errors import UserError
from megatron_ladder.parallel.apex import find_in_apex
from megatron_ladder.parallel.layout import ParallelModule, replicated

NormFunction = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., n], weight [n], epsilon) -> [..., n]."""


def torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm by torch's own operator."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


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
    ) -> None:
        """`name` is canonical, without `.weight`; `rank` is the tensor-parallel rank."""
        super().__init__()
        self.epsilon = epsilon
        self.function = function
        share = replicated(f"{name}.weight", (size,), rank, mean=1.0)
        self.add_parameter("weight", (size,), (share,), dtype, device, sharded=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self.function(x, self.weight, self.epsilon)
