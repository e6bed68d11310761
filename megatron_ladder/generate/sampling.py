"""From logits to the next token.

    logits / temperature  ->  the top_k most likely  ->  of those, the fewest that together have top_p  ->  draw

The draw inverts the cumulative distribution in the order of the vocabulary: one uniform number a token, so a seed
gives the same tokens wherever the logits agree up to rounding, at any tensor-parallel size and in any batch.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
"""Drawn where logits are not finite."""
GREEDY_BELOW = 1e-5
"""A lower temperature is 0: it would leave no probability to a second token, and overflow in fp32."""


@dataclass(frozen=True)
class SamplingParameters:
    """How one request chooses its tokens."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 0
    """Tokens that may be drawn, the most likely ones; 0 means all."""
    top_p: float = 1.0
    """Probability that the tokens which may be drawn have together, above 0."""
    seed: int = 1234
    """Of the request's own generator."""


def request_seed(seed: int, prompt_ids: Sequence[int]) -> int:
    """A seed for each prompt under one --seed, lest all draw the same numbers; the same one in every batch."""
    digest = hashlib.sha256(f"{seed}/{','.join(map(str, prompt_ids))}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Sampler:
    """Chooses the next token of each request of a batch; what one draws does not depend on the others."""

    def __init__(self, parameters: Sequence[SamplingParameters], device: torch.device) -> None:
        greedy = [p.temperature < GREEDY_BELOW for p in parameters]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device)
        self._temperature = torch.tensor([[max(p.temperature, GREEDY_BELOW)] for p in parameters], device=device)
        self._top_k = torch.tensor([[p.top_k or torch.iinfo(torch.int64).max] for p in parameters], device=device)
        # The cumulative probability of all tokens may round to 1 before the last one, which top_p = 1 must keep.
        self._top_p = torch.tensor([[p.top_p if p.top_p < 1 else math.inf] for p in parameters], device=device)
        self._filtered = any(p.top_k or p.top_p < 1 for p in parameters)
        # On the CPU, so that a seed means the same on every device.
        self._generators = [torch.Generator().manual_seed(p.seed) for p in parameters]

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [b, V] in fp32 or fp64 -> ids [b] int64, `NO_TOKEN` where a row is not finite."""
        chosen = logits.argmax(-1)
        if not self._all_greedy:
            scaled = logits / self._temperature
            if self._filtered:
                scaled = keep_most_likely(scaled, self._top_k, self._top_p)
            drawn = draw(scaled.double().softmax(-1), self._uniform_numbers().to(logits.device))
            chosen = torch.where(self._greedy, chosen, drawn)
        return chosen.masked_fill(~logits.isfinite().all(-1), NO_TOKEN)

    def _uniform_numbers(self) -> Tensor:
        """One number in [0, 1) for each request, [b, 1]."""
        return torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators])


def keep_most_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets the logits of all other tokens to -inf.

    Args:
        logits: [b, V].
        top_k: [b, 1]: how many are kept at most. Of equal ones the lower id comes first.
        top_p: [b, 1]: of those, the most likely ones are kept until they have this share of the probability.
    """
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(logits.shape[-1], device=logits.device) < top_k
    probabilities = descending.masked_fill(~kept, -math.inf).softmax(-1)
    more_likely = probabilities.cumsum(-1) - probabilities
    kept &= more_likely < top_p
    return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -math.inf)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds `uniform`.

    Args:
        probabilities: [b, V] float64, with any sum.
        uniform: [b, 1] float64 in [0, 1), as a share of that sum.

    Returns:
        [b] int64, never a token of probability zero.
    """
    cumulative = probabilities.cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(-1)
