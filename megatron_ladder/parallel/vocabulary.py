"""The vocabulary sharded over the tensor-parallel ranks: embedding, output head, and the cross entropy of its logits.

With V words and t ranks, each rank holds `padded / t` rows, where `padded` is V rounded up to a multiple of 128 x t.
Rows beyond V are zero, no token looks them up, and the loss ignores them.

With logits z and target y, `loss = log(sum exp(z - m)) - (z_y - m)`, where m is the maximum over all ranks. Only three
numbers per token cross the ranks; no rank ever holds the logits of the whole vocabulary. The z-loss of PaLM (arXiv
2204.02311) keeps `log sum exp z` near 0, which the cross entropy does not determine.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.linear import LinearFunction, linear


class VocabParallelMatrix(ParallelModule):
    """This rank's rows of a `[V, h]` matrix.

    Attributes:
        start: the first word that this rank holds.
        valid: how many of its rows are words; the rest is padding.
    """

    weight: nn.Parameter

    def __init__(
        self, tensor: TensorSpec, group: CommGroup, layout: StreamLayout, dtype: torch.dtype, device: torch.device,
        embed: Callable[[Tensor, Tensor], Tensor] = F.embedding, linear: LinearFunction = linear,
    ) -> None:  # fmt: skip
        """`embed` is (indices [...], weight) -> rows of the weight [..., h]; `linear` multiplies with the weight."""
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


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_shard_v: Tensor, labels: Tensor, start: int, valid: int, group: CommGroup
    ) -> tuple[Tensor, Tensor]:
        logits = logits_shard_v[..., :valid]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        # Contiguous on every rank, as the collective needs it.
        maximum = logits.amax(-1) if valid else logits.new_full(labels.shape, torch.finfo(logits.dtype).min)
        group.all_reduce(maximum, op=dist.ReduceOp.MAX)
        exponentials = torch.exp(logits - maximum.unsqueeze(-1))
        local = labels - start
        elsewhere = (local < 0) | (local >= valid)
        local = local.masked_fill(elsewhere, 0)
        if valid:
            target = (logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - maximum).masked_fill(elsewhere, 0.0)
        else:
            target = torch.zeros_like(maximum)
        total, target = group.all_reduce(torch.stack((exponentials.sum(-1), target)))
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, elsewhere)
        ctx.padding = logits_shard_v.shape[-1] - valid
        ctx.dtype = logits_shard_v.dtype
        ctx.set_materialize_grads(False)
        log_total = torch.log(total)
        return log_total - target, log_total + maximum

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, normalizer_gradient: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        of_both = gradient if normalizer_gradient is None else gradient + normalizer_gradient
        result = probabilities * of_both.unsqueeze(-1)
        if result.shape[-1]:
            at_target = gradient.masked_fill(elsewhere, 0.0).neg().unsqueeze(-1)
            result.scatter_add_(-1, local.unsqueeze(-1), at_target)
        result = result.to(ctx.dtype)
        return F.pad(result, (0, ctx.padding)), None, None, None, None


def vocab_parallel_cross_entropy(
    logits_shard_v: Tensor, labels: Tensor, start: int, valid: int, group: CommGroup
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log normalizer, log sum exp, of each token, not averaged.

    Args:
        logits_shard_v: [s, b, padded V / t], any floating dtype; computed in fp32 at least.
        labels: [s, b] int64, ids of the whole vocabulary, equal on every rank.
        start: the first word of this rank.
        valid: the number of words that this rank holds; columns beyond are padding and get no gradient.

    Returns:
        Two tensors [s, b] in fp32 (fp64 for fp64 logits), equal on every rank.
    """
    return _VocabParallelCrossEntropy.apply(logits_shard_v, labels, start, valid, group)


def vocab_parallel_argmax(logits_shard_v: Tensor, start: int, valid: int, group: CommGroup) -> Tensor:
    """Return the word with the largest logit, the first of equal ones: [s, b, padded V / t] -> [s, b] int64.

    `start` and `valid` are as in `vocab_parallel_cross_entropy`; the result is equal on every rank.
    """
    if valid:
        largest, words = logits_shard_v[..., :valid].max(-1)
        best = torch.stack((largest.double(), (words + start).double()))
    else:
        best = logits_shard_v.new_full((2, *logits_shard_v.shape[:-1]), -torch.inf, dtype=torch.float64)
    largest_of_ranks, words_of_ranks = group.all_gather(best.unsqueeze(0), 0).unbind(1)
    return words_of_ranks.gather(0, largest_of_ranks.argmax(0, keepdim=True))[0].long()
