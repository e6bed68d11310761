"""Log-probabilities of given tokens under the model, from vocabulary-parallel logits.

A rank shares four numbers per token; no rank holds the logits of the whole vocabulary. The logits of a long text are
computed and dropped in parts.
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


class TokenScores(NamedTuple):
    """Log-probabilities of tokens under the model, without penalties and temperature; equal on every rank."""

    logprobs: tuple[float, ...]
    most_likely: tuple[int, ...]
    """The most likely token at each place."""


def vocabulary_logits(logits_shard_v: Tensor, start: int, vocab_size: int) -> Tensor:
    """Return logits [n, padded V / t] in fp32 at least, with -inf for padding; `start` is the rank's first token."""
    logits = logits_shard_v.to(torch.promote_types(logits_shard_v.dtype, torch.float32))
    valid = max(0, min(logits.shape[1], vocab_size - start))
    return F.pad(logits[:, :valid], (0, logits.shape[1] - valid), value=-math.inf)


def gather_scores(logits: Tensor, tokens: Tensor, start: int, group: CommGroup) -> Tensor:
    """Score `tokens` [n] under `vocabulary_logits` [n, padded V / t]; a collective.

    Return the numbers of all ranks for `read_scores`, [n, t, 4] float64, on the device.
    """
    log_mass = logits.logsumexp(1, keepdim=True).double()
    local = (tokens.to(logits.device) - start).unsqueeze(1)
    elsewhere = (local < 0) | (local >= logits.shape[1])
    own = logits.gather(1, local.masked_fill(elsewhere, 0)).double().masked_fill(elsewhere, -math.inf)
    highest, ids = logits.max(1, keepdim=True)
    # Doubles represent all ids exactly.
    shared = torch.cat((log_mass, own, highest.double(), (ids + start).double()), 1)
    return group.all_gather(shared.unsqueeze(1), dim=1)


def read_scores(gathered: Tensor) -> TokenScores:
    """Return the scores from the numbers of `gather_scores` that were copied to the host."""
    log_masses, own, highest, ids = gathered.unbind(-1)
    logprobs = own.amax(1) - log_masses.logsumexp(1)
    most_likely = ids.gather(1, highest.argmax(1, keepdim=True)).squeeze(1).long()
    return TokenScores(tuple(logprobs.tolist()), tuple(most_likely.tolist()))


def score_text(model: LanguageModel, group: CommGroup, hidden_states: Tensor, following: Sequence[int]) -> TokenScores:
    """Score the token that follows each position, given the stream after the last layer [s, 1, h]; a collective."""
    start, vocab_size = model.head.start, model.config.vocab_size
    logprobs, most_likely = list[float](), list[int]()
    positions = max(1, _LOGITS_AT_ONCE * group.size // vocab_size)
    parts, targets = hidden_states.split(positions), torch.tensor(following, dtype=torch.int64).split(positions)
    for part, tokens in zip(parts, targets, strict=True):
        logits = vocabulary_logits(model.logits_shard(part)[:, 0], start, vocab_size)
        scores = read_scores(gather_scores(logits, tokens, start, group).cpu())
        logprobs += scores.logprobs
        most_likely += scores.most_likely
    return TokenScores(tuple(logprobs), tuple(most_likely))
