"""Log-probabilities of given tokens under the model, from vocabulary-parallel logits.

A rank shares two numbers per token, and its most likely tokens if they are requested; no rank holds the logits of the
whole vocabulary. The logits of a long text are computed and dropped in parts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.model.language_model import LanguageModel

_LOGITS_AT_ONCE = 1 << 24
"""Logits of a rank that `score_text` computes at a time: 64 MiB in fp32."""
Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens with their log-probabilities under the model, in descending order."""


class TokenScores(NamedTuple):
    """Log-probabilities of tokens under the model, without penalties and temperature; equal on every rank."""

    logprobs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...]
    """As many per token as requested."""


def vocabulary_logits(logits_shard_v: Tensor, start: int, vocab_size: int) -> Tensor:
    """Return logits [n, padded V / t] in fp32 at least, with -inf for padding; `start` is the rank's first token."""
    logits = logits_shard_v.to(torch.promote_types(logits_shard_v.dtype, torch.float32))
    valid = max(0, min(logits.shape[1], vocab_size - start))
    return F.pad(logits[:, :valid], (0, logits.shape[1] - valid), value=-math.inf)


def gather_scores(logits: Tensor, tokens: Tensor, most: int, start: int, group: CommGroup) -> Tensor:
    """Score `tokens` [n] under `vocabulary_logits` [n, padded V / t], with `most` alternatives each; a collective.

    Return the numbers of all ranks for `read_scores`, [n, t, 2 + 2 m] float64, on the device.
    """
    log_mass = logits.logsumexp(1, keepdim=True).double()
    local = (tokens.to(logits.device) - start).unsqueeze(1)
    elsewhere = (local < 0) | (local >= logits.shape[1])
    own = logits.gather(1, local.masked_fill(elsewhere, 0)).double().masked_fill(elsewhere, -math.inf)
    values, ids = logits.topk(min(most, logits.shape[1]), dim=-1)
    # Doubles represent all ids exactly.
    shared = torch.cat((log_mass, own, values.double(), (ids + start).double()), 1)
    return group.all_gather(shared.unsqueeze(1), dim=1)


def read_scores(gathered: Tensor, most: int, vocab_size: int, ranks: int) -> TokenScores:
    """Return the scores from the numbers of `gather_scores`, flat or not, that were copied to the host."""
    gathered = gathered.reshape(len(gathered), ranks, -1)
    count = gathered.shape[2] // 2 - 1
    numbers, values, ids = gathered.split((2, count, count), dim=-1)
    log_total = numbers[..., 0].logsumexp(1, keepdim=True)
    logprobs = numbers[..., 1].amax(1) - log_total.squeeze(1)
    values, order = (values.flatten(1) - log_total).sort(dim=1, descending=True, stable=True)
    rows = zip(ids.flatten(1).gather(1, order).long().tolist(), values.tolist(), strict=True)
    # A rank whose part of the vocabulary is smaller than requested contributes padding.
    alternatives = (tuple(pair for pair in zip(*row, strict=True) if pair[0] < vocab_size)[:most] for row in rows)
    return TokenScores(tuple(logprobs.tolist()), tuple(alternatives))


def score_text(
    model: LanguageModel, group: CommGroup, hidden_states: Tensor, following: Sequence[int], most: int = 0
) -> TokenScores:
    """Score the token that follows each position, given the stream after the last layer [s, 1, h]; a collective."""
    start, vocab_size = model.head.start, model.config.vocab_size
    logprobs, alternatives = list[float](), list[Alternatives]()
    positions = max(1, _LOGITS_AT_ONCE * group.size // vocab_size)
    parts, targets = hidden_states.split(positions), torch.tensor(following, dtype=torch.int64).split(positions)
    for part, tokens in zip(parts, targets, strict=True):
        logits = vocabulary_logits(model.logits_shard(part)[:, 0], start, vocab_size)
        gathered = gather_scores(logits, tokens, most, start, group).cpu()
        scores = read_scores(gathered, most, vocab_size, group.size)
        logprobs += scores.logprobs
        alternatives += scores.alternatives
    return TokenScores(tuple(logprobs), tuple(alternatives))
