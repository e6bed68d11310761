"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x^2) + epsilon) * (offset + weight)           (mean in fp32 at least)

The offset is 0, or 1 in models whose weights start at 0 (`apply_layernorm_1p`).

The weight [n] is the same on every tensor-parallel rank. Its gradient is complete on every rank if all ranks normalise
the same tensor and the output enters a tensor-parallel region. If each rank normalises its own heads or positions, or
another input, the gradient is a partial sum (`Section.is_partial`). A norm of a per-rank residual stream has one weight
per rank: the canonical weight is [ranks, n], and a rank holds its row, [1, n].
"""

from collections.abc import Callable

from torch import Tensor, nn

from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.parallel.layout import ParallelModule


class RMSNorm(ParallelModule):
    """The norm's weight and the operations that apply it."""

    weight: nn.Parameter

    def __init__(
        self, build: BuildContext, tensor: TensorSpec, *, own_input: bool = False, epsilon: float | None = None
    ) -> None:
        """`tensor` is one weight or has a row per rank. `epsilon` is by default that of the model.

        With `own_input` each rank normalises its own heads, or another input with a weight that all ranks share.
        """
        super().__init__(build)
        self.operations = build.operations
        self.epsilon = build.config.norm_epsilon if epsilon is None else epsilon
        self.offset = tensor.offset
        self.add_parameter("weight", [tensor], build, own_input or build.mesh.stream.shards > 1)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        output: Tensor | None = None,
        stand_in: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., size] -> [..., size], with `weight` instead of the norm's weight if it is given.

        `output`, of a sub-block, is added to x first; the sum is then returned together with its norm. `stand_in`
        returns what replaces the norm's weight, which ZeRO-3 has gathered only here.
        """
        if weight is None:
            weight = self.weight if stand_in is None else stand_in(self.weight)
        weight = weight.flatten()
        if output is None:
            return self.operations.norm(x, weight, self.epsilon, self.offset)
        return self.operations.add_norm(x, output, weight, self.epsilon, self.offset)
