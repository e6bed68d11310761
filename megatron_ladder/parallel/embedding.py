"""The vocabulary cut over the tensor-parallel ranks: embedding and output head.

With V words and t ranks, each rank holds `padded / t` rows, where `padded` is V rounded up to 128 x t. Rows
beyond V are zero, are looked up by no token and have no part in the loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.panels import panel_rows
from megatron_ladder.parallel.partitioned import linear


class _VocabParallelMatrix(ParallelModule):
    """This rank's rows of a `[V, h]` matrix.

    Attributes:
        start: the first word that this rank holds.
        valid: how many of its rows are words, the rest being padding.
    """

    weight: nn.Parameter

    def __init__(
        self, tensor: TensorSpec, group: CommGroup, layout: StreamLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.layout = layout
        self.start, self.valid = tensor.slice_of(group.rank, group.size)
        self.add_parameter("weight", [tensor], group, dtype, device)


class VocabParallelEmbedding(_VocabParallelMatrix):
    """Looks up tokens; a rank contributes zero for words that others hold, and the ranks' rows are summed."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] -> the stream: [s, b, h], or this rank's positions of it."""
        local = tokens.t() - self.start
        elsewhere = (local < 0) | (local >= self.valid)
        held = local.masked_fill(elsewhere, 0)
        rows = panel_rows(held, self.weight) if self.weight.dim() == 3 else F.embedding(held, self.weight)
        partial = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self.layout.start_write(partial).wait()


class VocabParallelHead(_VocabParallelMatrix):
    """`logits_shard_v = x @ weight_shard^T`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The stream -> [s, b, padded V / t]; columns from `valid` on are padding."""
        return vocab_parallel_logits(hidden_states, self.weight, self.layout)


def vocab_parallel_logits(hidden_states: Tensor, weight_shard_v: Tensor, layout: StreamLayout) -> Tensor:
    """The stream and this rank's rows of a head (or of a tied embedding) -> [s, b, padded V / t]."""
    return linear(layout.enter(hidden_states), weight_shard_v)
