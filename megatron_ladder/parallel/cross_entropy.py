"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks.

With logits z and target y, `loss = log(sum exp(z - m)) - (z_y - m)`, m being the maximum over all ranks. Only
three numbers a token cross the ranks; no rank ever holds the logits of the whole vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_shard_v: Tensor, labels: Tensor, start: int, valid: int, group: CommGroup
    ) -> Tensor:
        logits = logits_shard_v[..., :valid]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        maximum = (
            logits.amax(-1) if valid else torch.full_like(labels, torch.finfo(logits.dtype).min, dtype=logits.dtype)
        )
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
        return torch.log(total) - target

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        result = probabilities * gradient.unsqueeze(-1)
        if result.shape[-1]:
            at_target = gradient.masked_fill(elsewhere, 0.0).neg().unsqueeze(-1)
            result.scatter_add_(-1, local.unsqueeze(-1), at_target)
        result = result.to(ctx.dtype)
        return torch.nn.functional.pad(result, (0, ctx.padding)), None, None, None, None


def vocab_parallel_cross_entropy(
    logits_shard_v: Tensor, labels: Tensor, start: int, valid: int, group: CommGroup
) -> Tensor:
    """The loss of each token, not averaged.

    Args:
        logits_shard_v: [s, b, padded V / t], any floating dtype; computed in fp32 at least.
        labels: [s, b] int64, ids of the whole vocabulary, equal on every rank.
        start: the first word of this rank.
        valid: the number of words that this rank holds; columns beyond are padding and get no gradient.

    Returns:
        [s, b] in fp32 (fp64 for fp64 logits), equal on every rank.
    """
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits_shard_v, labels, start, valid, group)
    return losses
