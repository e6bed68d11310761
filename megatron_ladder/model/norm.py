"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x^2) + epsilon) * weight           (mean in fp32 at least)

The weight [n] is the same on every tensor-parallel rank. Its gradient is complete on every rank if all ranks normalise
the same tensor and the output enters a tensor-parallel region. If each rank normalises its own heads or positions, or
the streams of its own lanes, the gradient is summed over the ranks (`partial_over`). A norm that reads a per-rank
residual stream has one weight per rank: the canonical weight is [ranks, n], and a rank holds its row, [1, n].
"""

from torch import Tensor, nn

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.partial_gradients import PartialGradients, sum_gradient


class RMSNorm(ParallelModule):
    """The norm's weight and the operations that apply it."""

    weight: nn.Parameter

    def __init__(
        self, build: BuildContext, tensor: TensorSpec, *, own_input: bool = False, epsilon: float | None = None
    ) -> None:
        """`tensor` is one weight or has a row per rank. `epsilon` is by default that of the model.

        With `own_input` each rank normalises its own heads, or its own stream with a weight that all ranks share.
        """
        super().__init__(build)
        self.operations = build.operations
        self.epsilon = build.config.norm_epsilon if epsilon is None else epsilon
        self.partial_over = self.group if own_input or build.mesh.stream.shards > 1 else None
        self.add_parameter("weight", [tensor], build)

    def weight_in_use(self, partial_gradients: PartialGradients | None = None) -> Tensor:
        """Return the weight [n]; if each rank gets only a part of its gradient, the parts are summed over the ranks.

        `partial_gradients` sums the parts later; without it, each sum is waited for where the gradient arises.
        """
        return sum_gradient(self.weight, self.partial_over, partial_gradients)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        partial_gradients: PartialGradients | None = None,
        output: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., size] -> [..., size], with `weight` instead of the norm's weight if it is given.

        `output`, of a sub-block, is added to x first; the sum is then returned together with its norm.
        """
        weight = (self.weight_in_use(partial_gradients) if weight is None else weight).flatten()
        if output is None:
            return self.operations.norm(x, weight, self.epsilon)
        return self.operations.add_norm(x, output, weight, self.epsilon)
