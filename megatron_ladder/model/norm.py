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

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.regions import copy_to_tensor_parallel_region
from megatron_ladder.errors import UserError
from megatron_ladder.parallel.apex import find_in_apex
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.partial_gradients import PartialGradients

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
    fused, reason = find_in_apex(
        "apex.normalization.fused_layer_norm", "fused_rms_norm_affine", "fused_layer_norm_cuda", device
    )
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
        tensor: TensorSpec,
        epsilon: float,
        function: NormFunction,
        *,
        group: CommGroup,
        dtype: torch.dtype,
        device: torch.device,
        partial_over: CommGroup | None = None,
    ) -> None:
        """
        Args:
            tensor: the weight, one for all ranks of the group or one row per rank.
            partial_over: ranks that each normalise a part of one tensor.
        """
        super().__init__()
        self.partial_over = partial_over
        self.epsilon = epsilon
        self.function = function
        self.add_function: AddNormFunction | None = None
        self.add_parameter("weight", [tensor], group, dtype, device)

    def weight_in_use(self, partial_gradients: PartialGradients | None = None) -> Tensor:
        """The weight [n], its gradient summed over the ranks if each of them gets only a part.

        Args:
            partial_gradients: sums it later; without, it is summed where it arises.
        """
        if self.partial_over is None or not torch.is_grad_enabled():
            return self.weight
        if partial_gradients is None:
            return copy_to_tensor_parallel_region(self.weight, self.partial_over)
        return partial_gradients.defer(self.weight)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        partial_gradients: PartialGradients | None = None,
        output: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., size] -> [..., size].

        Args:
            weight: stands in for the norm's own.
            partial_gradients: see `weight_in_use`.
            output: of a sub-block, to be added to x before; the sum is then returned with its norm.
        """
        weight = (self.weight_in_use(partial_gradients) if weight is None else weight).flatten()
        if output is None:
            return self.function(x, weight, self.epsilon)
        if self.add_function is not None:
            return self.add_function(x, output, weight, self.epsilon)
        total = x + output
        return total, self.function(total, weight, self.epsilon)
