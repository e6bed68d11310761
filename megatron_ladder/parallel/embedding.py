"""The vocabulary sharded over the tensor-parallel ranks: embedding and output head.

With V words and t ranks, each rank holds `padded / t` rows, where `padded` is V rounded up to a multiple of 128 x t.
Rows beyond V are zero, no token looks them up, and the loss ignores them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.partitioned import LinearFunction, linear


class VocabParallelMatrix(ParallelModule):
    """This rank's rows of a `[V, h]` matrix.

    Attributes:
        start: the first word that this rank holds.
        valid: how many of its rows are words; the rest is padding.
    """

    weight: nn.Parameter

    def __init__(
        self,
        tensor: TensorSpec,
        group: CommGroup,
        layout: StreamLayout,
        dtype: torch.dtype,
        device: torch.device,
        embed: Callable[[Tensor, Tensor], Tensor] = F.embedding,
        linear: LinearFunction = linear,
    ) -> None:
        """
        Args:
            embed: (indices [...], weight) -> rows of the weight [..., h].
            linear: multiplies with the weight.
        """
        super().__init__()
        self.layout = layout
        self.embed = embed
        self.linear = linear
        self.start, self.valid = tensor.slice_of(group.rank, group.size)
        self.add_parameter("weight", [tensor], group, dtype, device)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map the stream to `x @ weight_shard^T`, [s, b, padded V / t]; columns from `valid` on are padding."""
        return self.linear(self.layout.enter(hidden_states), self.weight, None)


class VocabParallelEmbedding(VocabParallelMatrix):
    """Looks up tokens; a rank contributes zero for words that other ranks hold, and the ranks' rows are summed."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] -> the stream: [s, b, h], or this rank's positions of it."""
        local = tokens.t() - self.start
        elsewhere = (local < 0) | (local >= self.valid)
        rows = self.embed(local.masked_fill(elsewhere, 0), self.weight)
        return self.layout.start_write(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)).wait()


class VocabParallelHead(VocabParallelMatrix):
    """The output head."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See `logits`."""
        return self.logits(hidden_states)
