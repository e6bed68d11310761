"""Sampling: choose the next tokens from vocabulary-parallel logits.

    penalty for seen tokens  ->  logits / temperature  ->  top_k  ->  top_p  ->  min_p  ->  draw

The draw inverts the cumulative distribution in vocabulary order with one uniform number per token. A seed therefore
gives the same tokens at any tensor-parallel size and in any batch, wherever the logits agree up to rounding.

Each rank has the logits of its part of the vocabulary. If any sample needs a draw, all ranks gather those of the whole
vocabulary; otherwise they share only their most likely tokens. Every rank decides from the same numbers by the same
operators, so all choose the same tokens. This runs on the device, and can be captured in a CUDA graph: values of
parameters and random numbers are in fixed buffers, and a plan determines the operators. The host waits once per token,
to read the token and its scores.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, to_device
from megatron_ladder.parallel.scoring import gather_scores, read_scores

NO_TOKEN = -1
"""Chosen where logits are not finite."""
_REJECTED = -2
"""Fills a row after its last token, instead of rejected drafts."""
_GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0: they leave no probability to a second token, and overflow in fp32."""


@dataclass(frozen=True)
class SamplingParameters:
    """Sampling parameters of one request; see the flags of the same names in `options.SamplingOptions`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 1234
    logprobs: bool = False
    """Whether to return each token's log-probability under the model, without penalties and temperature."""

    @classmethod
    def like(cls, source: object, **changes: Any) -> "SamplingParameters":
        """Return the parameters of the same names in `source`, except for `changes`."""
        names = {entry.name for entry in fields(cls)} - changes.keys()
        return cls(**{name: getattr(source, name) for name in names}, **changes)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether some tokens can be excluded from the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


GREEDY = SamplingParameters(temperature=0.0)


def request_seed(seed: int, prompt_ids: Sequence[int], sample: int = 0) -> int:
    """Derive the seed of a sample from --seed and the prompt, so that samples differ in any batch."""
    words = f"{seed}/{','.join(map(str, prompt_ids))}" + (f"/{sample}" if sample else "")
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little")


class Chosen(NamedTuple):
    """The next tokens of each row, equal on every rank."""

    tokens: list[list[int]]
    """At least one for each row; the first is `NO_TOKEN` where logits are not finite."""
    logprobs: list[list[float]] | None
    """At least one for each token; None if no row requests them."""


class Drafts(NamedTuple):
    """Proposed tokens of each row, in their order."""

    tokens: Tensor
    """[b, n] int64."""
    probabilities: Tensor | None
    """[b, n, V], the distribution that each token was drawn from; None if all tokens are the most likely ones."""
    is_finite: Tensor
    """[b, n] bool, whether the logits were finite; otherwise the token is 0."""

    @classmethod
    def joined(cls, drafts: Sequence["Drafts"]) -> "Drafts":
        """Return successive drafts of the same rows as one."""
        tokens, probabilities, is_finite = zip(*drafts, strict=True)
        joined = None if drafts[0].probabilities is None else torch.cat(probabilities, 1)
        return cls(torch.cat(tokens, 1), joined, torch.cat(is_finite, 1))


class SamplingPlan(NamedTuple):
    """What determines the operators of a choice: what some row needs. A plan with more operators gives equal tokens."""

    drawn: bool
    """A draw."""
    filtered: bool
    """A draw from some tokens."""
    repetition: bool
    """A penalty for seen tokens."""
    scored: bool
    """The log-probability of the token."""

    @classmethod
    def of(cls, parameters: Sequence[SamplingParameters]) -> "SamplingPlan":
        """Return the plan of a batch."""
        return cls(
            drawn=any(not one.greedy for one in parameters),
            filtered=any(one.filtered and not one.greedy for one in parameters),
            repetition=any(one.repetition_penalty != 1 for one in parameters),
            scored=any(one.logprobs for one in parameters),
        )


class _Rows(NamedTuple):
    """The parameters of a batch's rows, as columns [b, 1] in float64, and whether each row is greedy, [b, 1]."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    greedy: Tensor

    @classmethod
    def of(cls, parameters: Sequence[SamplingParameters], device: torch.device) -> "_Rows":
        def numbers(one: SamplingParameters) -> list[float]:
            # The cumulative weight can round to the total before the last token, which top_p = 1 must keep.
            top_p = one.top_p if one.top_p < 1 else math.inf
            temperature = 1.0 if one.greedy else one.temperature
            return [temperature, one.top_k or math.inf, top_p, one.min_p, one.repetition_penalty, one.greedy]

        columns = to_device(torch.tensor([*map(numbers, parameters)], dtype=torch.float64), device).split(1, dim=1)
        return cls(*columns)._replace(greedy=columns[-1].bool())

    def first(self, count: int, times: int = 1) -> "_Rows":
        return _Rows(*(values[:count].repeat(times, 1) for values in self))


class Sampler:
    """Chooses the next tokens of batches of samples with one plan, independently of each other.

    Attributes:
        plan: that of the batches.
    """

    def __init__(
        self, plan: SamplingPlan, slots: int, vocab_size: int, start: int, group: CommGroup, device: torch.device
    ) -> None:
        """`start` is the first token of this rank's part of the vocabulary; `group` are the tensor-parallel ranks."""
        self.plan = plan
        self._group, self._device = group, device
        self._start, self._vocab_size, self._slots = start, vocab_size, slots
        self._parameters: list[SamplingParameters] = []
        self._generators: list[torch.Generator] = []
        self._rows = _Rows.of([GREEDY] * slots, device)
        self._seen = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device) if plan.repetition else None

    def begin(self, parameters: Sequence[SamplingParameters], prompts: Sequence[Sequence[int]]) -> None:
        """Begin a batch of samples, at most as many as slots, in the buffers of earlier ones."""
        self._parameters = list(parameters)
        # On the CPU, so that a seed draws the same numbers on every device.
        self._generators = [torch.Generator().manual_seed(one.seed) for one in parameters]
        padded = [*parameters, *[GREEDY] * (self._slots - len(parameters))]
        for buffer, values in zip(self._rows, _Rows.of(padded, self._device), strict=True):
            buffer.copy_(values)
        if self._seen is not None:
            self._seen.zero_()
            for row, ids in enumerate(prompts):
                self._seen[row, list(ids)] = True

    def draw(self, count: int, numbers: int = 1) -> list[list[float]]:
        """Return some random numbers in [0, 1) for the next tokens of each of the first samples."""
        return [
            [0.0] * numbers if one.greedy else torch.rand(numbers, generator=generator, dtype=torch.float64).tolist()
            for one, generator in zip(self._parameters[:count], self._generators[:count], strict=True)
        ]

    def count(self, tokens: Tensor) -> None:
        """Note the newest tokens [b, n] of the first samples for the penalty."""
        if self._seen is not None:
            self._seen[: len(tokens)].scatter_(1, tokens, True)

    def choose(self, logits_shard_v: Tensor, uniform: Tensor) -> Tensor:
        """Choose the next tokens of the first b samples, from logits [b, padded V / t]; padding is ignored.

        `uniform` [b, 1] are the numbers of `draw`, the same on all ranks. Return what `read` needs: [b, 1, 1 + n]
        float64 on the device, each row's token and its scores. The host waits for nothing.
        """
        rows = self._rows.first(len(logits_shard_v))
        model_logits = _vocabulary_logits(logits_shard_v, self._start, self._vocab_size)
        highest, tokens, _ = self._choose(model_logits, rows, uniform)
        return self._with_scores(tokens.masked_fill(~highest.isfinite(), NO_TOKEN), model_logits)

    def draft(self, logits_shard_v: Tensor, uniform: Tensor) -> Drafts:
        """Propose a token for each of the first b samples, from the logits of a drafting head; see `choose`."""
        rows = self._rows.first(len(logits_shard_v))
        logits = _vocabulary_logits(logits_shard_v, self._start, self._vocab_size)
        highest, tokens, weights = self._choose(logits, rows, uniform)
        is_finite = highest.isfinite()
        probabilities = None if weights is None else _normalized(weights).unsqueeze(1)
        return Drafts(tokens.masked_fill(~is_finite, 0), probabilities, is_finite)

    def verify(self, logits_shard_v: Tensor, drafts: Drafts, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the next tokens of the first b samples, from the logits after their newest tokens and each draft.

        Speculative sampling (arXiv 2211.17192): where the model has the distribution p and the head drew a draft d from
        q, the draft is accepted with the probability min(1, p(d) / q(d)). The first rejected draft is replaced by a
        token that is drawn in proportion to max(0, p - q), and later drafts are discarded. If all drafts are accepted,
        one more token is drawn from p. Every token then has the distribution p. A greedy row gives its most likely
        token the probability 1.

        Args:
            logits_shard_v: [n + 1, b, padded V / t].
            drafts: n for each row.
            uniform: [b, n + 1], numbers of `draw`.

        Return what `read` needs, as `choose`: [b, n + 1, 1 + m]; and the number of accepted drafts, [b].
        """
        count, batch, _ = logits_shard_v.shape
        rows = self._rows.first(batch, count)
        model_logits = _vocabulary_logits(logits_shard_v.flatten(0, 1), self._start, self._vocab_size)
        logits = self._penalized(model_logits, rows, drafts.tokens)
        if drafts.probabilities is None:
            highest, most_likely = self._most_likely(logits)
            tokens = most_likely.view(count, batch).t()
            accepted = _count_leading(tokens[:, :-1] == drafts.tokens)
        else:
            highest, weights = self._weights(logits, rows)
            p = _normalized(weights).unflatten(0, (count, batch)).transpose(0, 1)
            q = drafts.probabilities
            token_index = drafts.tokens.unsqueeze(2)
            p_of_drafts = p[:, :-1].gather(2, token_index).squeeze(2)
            q_of_drafts = q.gather(2, token_index).squeeze(2)
            accepted = _count_leading(uniform[:, :-1] * q_of_drafts < p_of_drafts)
            residuals = torch.cat(((p[:, :-1] - q).clamp(min=0), p[:, -1:]), 1)
            residual = residuals.gather(1, accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2]))[:, 0]
            cumulative = _equal_cumsum(residual)
            last = _draw_at(cumulative, uniform[:, -1:] * cumulative[:, -1:])
            tokens = torch.cat((drafts.tokens, last), 1).scatter(1, accepted.unsqueeze(1), last)
        numbers = torch.arange(count, device=tokens.device)
        tokens = tokens.masked_fill(numbers > accepted.unsqueeze(1), _REJECTED)
        is_finite = highest.isfinite().view(count, batch).all(0) & drafts.is_finite.all(1)
        tokens = tokens.masked_fill(~is_finite.unsqueeze(1), NO_TOKEN)
        return self._with_scores(tokens, model_logits), accepted

    def read(self, chosen: Tensor) -> Chosen:
        """Read the result of `choose` or `verify`."""
        # Without rows of unused slots.
        chosen = chosen.cpu()[: len(self._parameters)]
        tokens = [[token for token in row if token != _REJECTED] for row in chosen[..., 0].long().tolist()]
        if not self.plan.scored:
            return Chosen(tokens, None)
        logprobs = read_scores(chosen[..., 1:].flatten(0, 1).unflatten(1, (-1, 4)))[0]
        return Chosen(tokens, logprobs.view(chosen.shape[:2]).tolist())

    def _choose(self, logits: Tensor, rows: _Rows, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return each row's largest logit (NaN if any is) and next token, [b, 1] each, and the weights of a draw."""
        logits = self._penalized(logits, rows)
        if not self.plan.drawn:
            return *self._most_likely(logits), None
        highest, weights = self._weights(logits, rows)
        cumulative = _equal_cumsum(weights)
        return highest, _draw_at(cumulative, uniform * cumulative[:, -1:]), weights

    def _weights(self, logits: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit, [n, 1], and the weights to draw its token with, [n, V].

        In a greedy row, the weight of the most likely token is 1, and all others are 0.
        """
        exact = self._group.all_gather(logits, dim=1).double()
        highest, most_likely = exact.max(1, keepdim=True)
        weights = torch.exp((exact - highest) / rows.temperatures)
        if self.plan.filtered:
            weights = weights * _keep_most_likely(weights, rows)
        greedy_weights = torch.zeros_like(weights).scatter_(1, most_likely, 1.0)
        return highest, torch.where(rows.greedy, greedy_weights, weights)

    def _with_scores(self, tokens: Tensor, model_logits: Tensor) -> Tensor:
        """Return tokens [b, n] with their scores under logits [n b, padded V / t], if any: [b, n, 1 + m] float64."""
        without_scores = tokens.double().unsqueeze(2)
        if not self.plan.scored:
            return without_scores
        scores = gather_scores(model_logits, tokens.t().flatten(), self._start, self._group).flatten(1)
        return torch.cat((without_scores, scores.unflatten(0, (-1, len(tokens))).transpose(0, 1)), 2)

    def _penalized(self, logits: Tensor, rows: _Rows, drafts: Tensor | None = None) -> Tensor:
        """Apply the penalty for seen tokens.

        Args:
            logits: [b, padded V / t] after the counted tokens; with drafts [(n + 1) b, padded V / t], also after each.
            drafts: [b, n], tokens that follow the counted ones.
        """
        if self._seen is None:
            return logits
        seen = self._seen[: len(logits)] if drafts is None else self._seen_with(drafts)
        own = seen[:, self._start : self._start + logits.shape[1]]
        # The padding of the vocabulary has no columns.
        is_seen = F.pad(own, (0, logits.shape[1] - own.shape[1]))
        penalty = rows.repetition.to(logits.dtype)
        return torch.where(is_seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def _seen_with(self, drafts: Tensor) -> Tensor:
        """Return which tokens were seen before each of the drafts [b, n] and after the last one, [(n + 1) b, V]."""
        assert self._seen is not None
        batch, count = drafts.shape
        seen = self._seen[:batch].repeat(count + 1, 1, 1)
        for number, tokens in enumerate(drafts.unbind(1), start=1):
            seen[number:].scatter_(2, tokens.view(1, batch, 1).expand(count + 1 - number, -1, -1), True)
        return seen.flatten(0, 1)

    def _most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row as float64, and its token, [b, 1] each."""
        own = logits.max(1, keepdim=True)
        # Doubles represent all ids exactly.
        shared = torch.stack((own.values.double(), (own.indices + self._start).double()), 2)
        values, ids = self._group.all_gather(shared, dim=1).unbind(2)
        highest, leader = values.max(1, keepdim=True)
        return highest, ids.gather(1, leader).long()


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True)


def _count_leading(accepted: Tensor) -> Tensor:
    """Return the number of leading True values of each row: [b, n] bool -> [b]."""
    return accepted.long().cumprod(1).sum(1)


def _keep_most_likely(weights: Tensor, rows: _Rows) -> Tensor:
    """Return a mask of the tokens to draw from, given the weights of the vocabulary [b, V]."""
    descending, order = weights.sort(dim=1, descending=True, stable=True)
    kept = torch.arange(weights.shape[1], device=weights.device) < rows.top_k
    total = (descending * kept).sum(1, keepdim=True)
    kept &= _equal_cumsum(descending) - descending < rows.top_p * total
    kept &= descending >= rows.min_p
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _equal_cumsum(weights: Tensor) -> Tensor:
    """Return the cumulative sums of weights [b, n], rounded equally on all GPUs.

    Of a single row, a GPU adds blocks in an order that depends on their timing; of several rows, in a fixed order.
    """
    if weights.is_cuda and len(weights) == 1:
        return weights.expand(2, -1).cumsum(-1)[:1]
    return weights.cumsum(-1)


def _draw_at(cumulative: Tensor, at: Tensor) -> Tensor:
    """Return the first index [b, 1] whose cumulative weight, [b, n], exceeds `at` [b, 1], or the last with a weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=cumulative.shape[-1] - 1)
    return torch.searchsorted(cumulative, at, right=True).minimum(last)


def _vocabulary_logits(logits_shard_v: Tensor, start: int, vocab_size: int) -> Tensor:
    """Return logits [n, padded V / t] in fp32 at least, with -inf for padding; `start` is the rank's first token."""
    logits = logits_shard_v.to(torch.promote_types(logits_shard_v.dtype, torch.float32))
    valid = max(0, min(logits.shape[1], vocab_size - start))
    return F.pad(logits[:, :valid], (0, logits.shape[1] - valid), value=-math.inf)
