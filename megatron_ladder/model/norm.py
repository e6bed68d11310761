"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x^2) + epsilon) * weight           (mean in fp32 at least)

The weight [n] is the same on every tensor-parallel rank, and its gradient is whole on every rank when the output enters
a tensor-parallel region behind it. A norm of what each rank has for its own has a weight for each rank: the canonical
weight is [ranks, n], and a rank holds its row, [1, n].
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.errors import UserError
from megatron_ladder.parallel.apex import find_in_apex
from megatron_ladder.parallel.layout import ParallelModule, Section, replicated

NormFunction = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., n], weight [n], epsilon) -> [..., n]."""
AddNormFunction = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(stream [..., n], output [..., n], weight [n], epsilon) -> their sum, and its norm."""


def torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm by torch's own operator."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def add_rms_norm(stream: Tensor, output: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum, and its RMSNorm by torch's own operator; compiled, one kernel that reads each input once."""
    total = stream + output
    return total, torch_rms_norm(total, weight, epsilon)


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
    ) -> None:
        """
        Args:
            name: canonical, without `.weight`.
            rank: the tensor-parallel rank.
            per_rank: how many ranks have a weight of their own; None means that all have the same one.
        """
        super().__init__()
        self.epsilon = epsilon
        self.function = function
        self.add_function: AddNormFunction | None = None
        if per_rank is None:
            share = replicated(f"{name}.weight", (size,), rank, mean=1.0)
            self.add_parameter("weight", (size,), (share,), dtype, device, sharded=False)
        else:
            share = Section(f"{name}.weight", (per_rank, size), global_start=rank, length=1, mean=1.0)
            self.add_parameter("weight", (1, size), (share,), dtype, device, sharded=True)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, output: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., size] -> [..., size].

        Args:
            weight: stands in for the norm's own.
            output: of a sub-block, to be added to x before; the sum is then returned with its norm.
        """
        weight = self.weight if weight is None else weight
        if output is None:
            return self.function(x, weight.flatten(), self.epsilon)
        if self.add_function is not None:
            return self.add_function(x, output, weight.flatten(), self.epsilon)
        total = x + output
        return total, self.function(total, weight.flatten(), self.epsilon)
