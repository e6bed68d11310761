"""Scores of continuations: their requests, and the log-probabilities of tokens from vocabulary-parallel logits.

A rank shares four numbers per token; no rank holds the logits of the whole vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup

Request = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, and of its continuation."""


def cut_requests(requests: Sequence[Request], vocab_size: int, longest: int) -> list[Request]:
    """Return the requests, of which contexts that are too long lose their beginnings.

    A model that reads `longest` ids at once can then score them. Raises ValueError if a context or a continuation is
    empty, a continuation is longer than that, or an id is outside of the vocabulary.
    """
    cut = []
    for number, (context, continuation) in enumerate(requests):
        wrong = [token for token in (*context, *continuation) if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"request {number}: id {wrong[0]} is outside of the vocabulary, 0 to {vocab_size - 1}")
        if not context or not 0 < len(continuation) <= longest:
            raise ValueError(
                f"request {number}: the context has {len(context)} ids and the continuation {len(continuation)}: "
                f"expected 1 or more, and 1 to {longest}, the longest sequence"
            )
        cut.append((context[len(continuation) - longest - 1 :], continuation))
    return cut


class Score(NamedTuple):
    """How likely a continuation is after its context, without penalties and temperature; equal on every rank."""

    logprobs: tuple[float, ...]
    """The log-probability of each token, in nats."""
    is_greedy: bool
    """Whether each token is the most likely one."""

    @staticmethod
    def of(predictions: Tensor, continuation: Sequence[int]) -> "Score":
        """Return the score from the losses of the tokens and the most likely tokens, [2, n]."""
        losses, most_likely = predictions.tolist()
        return Score(tuple(-loss for loss in losses), most_likely == list(continuation))

    @property
    def logprob(self) -> float:
        """The log-likelihood of the continuation."""
        return sum(self.logprobs, 0.0)


def gather_scores(logits: Tensor, tokens: Tensor, start: int, group: CommGroup) -> Tensor:
    """Score `tokens` [n] under logits [n, padded V / t], lowest for padding; a collective.

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


def read_scores(gathered: Tensor) -> Tensor:
    """Map the numbers of `gather_scores` to the log-probabilities, and the most likely tokens: [2, n] float64."""
    log_masses, own, highest, ids = gathered.unbind(-1)
    logprobs = own.amax(1) - log_masses.logsumexp(1)
    return torch.stack((logprobs, ids.gather(1, highest.argmax(1, keepdim=True)).squeeze(1)))
