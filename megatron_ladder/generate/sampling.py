"""Sampling: choose the next tokens from vocabulary-parallel logits.

    penalty for seen tokens  ->  logits / temperature  ->  top_k  ->  top_p  ->  min_p  ->  draw

The draw inverts the cumulative distribution in vocabulary order with one uniform number per token. A seed therefore
gives the same tokens at any tensor-parallel size and in any batch, wherever the logits agree up to rounding.

No rank holds the logits of the whole vocabulary. Each rank has those of its part, and shares only:

    greedy                  its most likely token
    top_k, top_p, min_p     its most likely tokens, enough to include every token that can be drawn
    no filter               the sum of its exponentials; then, if it owns the drawn token, the token

Every rank decides from the same gathered numbers by the same operators, so all choose the same tokens. This runs on the
device, and can be captured in a CUDA graph: values of parameters and random numbers are in fixed buffers, and a plan
determines the operators. The host waits once per token, to read the token and its scores.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.comm.copies import to_device
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.generate.scoring import gather_scores, read_scores, vocabulary_logits

NO_TOKEN = -1
"""Chosen where logits are not finite."""
_GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0: they leave no probability to a second token, and overflow in fp32."""
_FIRST_CANDIDATES = 64
"""Candidates per rank where top_p or min_p can keep any number of tokens; multiplied by 8 while they are too few."""
_NEEDS_MORE = -2
_OWNER = -3
"""Codes of a decision: more candidates are needed; or, as -3 - r, rank r owns the token and must find it."""


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
    """The next token of each row, equal on every rank."""

    tokens: list[int]
    """`NO_TOKEN` where the logits are not finite."""
    logprobs: tuple[float, ...] | None
    """None if no row requests them."""


class SamplingPlan(NamedTuple):
    """What determines the operators of a choice: what some row needs. A plan with more operators gives equal tokens."""

    plain: bool
    """A draw from all tokens."""
    filtered: bool
    """A draw from some tokens."""
    repetition: bool
    """A penalty for seen tokens."""
    scored: bool
    """The log-probability of the token."""
    candidates: int
    """Candidates per rank to begin with."""

    @classmethod
    def of(cls, parameters: Sequence[SamplingParameters]) -> "SamplingPlan":
        """Return the plan of a batch."""
        drawn = [one for one in parameters if not one.greedy]
        unknown = any(one.filtered and one.top_k == 0 for one in drawn)
        most = max((one.top_k for one in drawn), default=0)
        return cls(
            plain=not all(one.filtered for one in drawn),
            filtered=any(one.filtered for one in drawn),
            repetition=any(one.repetition_penalty != 1 for one in parameters),
            scored=any(one.logprobs for one in parameters),
            candidates=max(1, most, _FIRST_CANDIDATES if unknown else 1),
        )


class _Rows(NamedTuple):
    """The parameters of a batch's rows, as columns [b, 1] in float64, and masks [b]: kind of draw, and with top_k."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    plain: Tensor
    filtered: Tensor
    limited: Tensor

    @classmethod
    def of(cls, parameters: Sequence[SamplingParameters], device: torch.device) -> "_Rows":
        def numbers(one: SamplingParameters) -> list[float]:
            # The cumulative weight can round to the total before the last token, which top_p = 1 must keep.
            temperature, top_p = 1.0 if one.greedy else one.temperature, one.top_p if one.top_p < 1 else math.inf
            return [temperature, one.top_k or math.inf, top_p, one.min_p, one.repetition_penalty]

        masks = [(not (one.greedy or one.filtered), one.filtered > one.greedy, one.top_k > 0) for one in parameters]
        columns = to_device(torch.tensor([*map(numbers, parameters)], dtype=torch.float64), device).split(1, dim=1)
        return cls(*columns, *to_device(torch.tensor(masks), device).unbind(1))

    def first(self, count: int) -> "_Rows":
        return _Rows(*(values[:count] for values in self))


class _Candidates(NamedTuple):
    """Summaries of all ranks' logits: float64, [b, ranks], `values` and `ids` [b, ranks, count]."""

    highest: Tensor
    mass: Tensor
    """Sum of exp((logit - highest) / temperature)."""
    uniforms: Tensor
    """Random numbers in [0, 1), of which that of rank 0 counts."""
    values: Tensor
    """Largest logits in descending order; `ids` are their tokens."""
    ids: Tensor


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

    def draw(self, count: int) -> list[float]:
        """Return the random numbers in [0, 1) for the next tokens of the first samples."""
        return [
            0.0 if one.greedy else torch.rand(1, generator=generator, dtype=torch.float64).item()
            for one, generator in zip(self._parameters[:count], self._generators[:count], strict=True)
        ]

    def count(self, tokens: Tensor) -> None:
        """Note the newest tokens [b, 1] of the first samples for the penalty."""
        if self._seen is not None:
            self._seen[: len(tokens)].scatter_(1, tokens, True)

    def choose(self, logits_shard_v: Tensor, uniform: Tensor, candidates: int | None = None) -> Tensor:
        """Choose the next tokens of the first b samples, from logits [b, padded V / t]; padding is ignored.

        `uniform` [b, 1] are the numbers of `draw`; `candidates` replaces the number of the plan. Return what `read`
        needs: [b, 1 + n] float64 on the device, each row's token and its scores. The host waits for nothing.
        """
        plan, rows = self.plan, self._rows.first(len(logits_shard_v))
        model_logits = vocabulary_logits(logits_shard_v, self._start, self._vocab_size)
        logits = self._penalized(model_logits, rows)
        count = min(candidates or plan.candidates, logits.shape[1])
        gathered = self._gather_candidates(logits, rows, uniform, count)
        codes, positions = _decide(gathered, rows, plan, complete=count == logits.shape[1])
        if plan.plain:
            codes = self._find_owned(logits, rows, codes, positions)
        chosen = codes.double().unsqueeze(1)
        if not plan.scored:
            return chosen
        scores = gather_scores(model_logits, codes, self._start, self._group)
        return torch.cat((chosen, scores.flatten(1)), 1)

    def read(self, chosen: Tensor, logits_shard_v: Tensor, uniform: Tensor) -> Chosen:
        """Read the result of `choose`, which is called again with its arguments if the candidates were too few."""
        chosen, candidates = chosen.cpu(), self.plan.candidates
        while _NEEDS_MORE in chosen[:, 0].tolist():
            candidates *= 8
            chosen = self.choose(logits_shard_v, uniform, candidates).cpu()
        # Without rows of unused slots.
        chosen = chosen[: len(self._parameters)]
        scores = read_scores(chosen[:, 1:].unflatten(1, (-1, 4))) if self.plan.scored else None
        return Chosen(chosen[:, 0].long().tolist(), None if scores is None else scores.logprobs)

    def _penalized(self, logits: Tensor, rows: _Rows) -> Tensor:
        if self._seen is None:
            return logits
        own = self._seen[: len(logits), self._start : self._start + logits.shape[1]]
        # The padding of the vocabulary has no columns.
        seen, penalty = F.pad(own, (0, logits.shape[1] - own.shape[1])), rows.repetition.to(logits.dtype)
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def _gather_candidates(self, logits: Tensor, rows: _Rows, uniform: Tensor, count: int) -> _Candidates:
        values, ids = logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
        highest = values[:, :1].double()
        mass = torch.zeros_like(highest)
        if self.plan.plain or self.plan.filtered:
            mass = torch.exp((logits.double() - highest) / rows.temperatures).nan_to_num().sum(-1, keepdim=True)
        # Doubles represent all ids exactly.
        own = torch.cat((highest, mass, uniform, values.double(), (ids + self._start).double()), 1)
        gathered = self._group.all_gather(own.unsqueeze(1), dim=1)
        return _Candidates(*gathered[..., :3].unbind(-1), *gathered[..., 3:].split(count, dim=-1))

    def _find_owned(self, logits: Tensor, rows: _Rows, codes: Tensor, positions: Tensor) -> Tensor:
        """Replace codes that name the owner of a token by the token, which the owner finds."""
        exact = logits.double()
        weights = torch.exp((exact - exact.amax(1, keepdim=True)) / rows.temperatures)
        drawn = self._start + _draw_at(weights.cumsum(-1), positions.unsqueeze(1).contiguous())
        found = torch.where(codes <= _OWNER, NO_TOKEN, codes)
        found = torch.where(codes == _OWNER - self._group.rank, drawn, found)
        return self._group.all_reduce(found, dist.ReduceOp.MAX)


def _decide(candidates: _Candidates, rows: _Rows, plan: SamplingPlan, complete: bool) -> tuple[Tensor, Tensor]:
    """Return a token or code of each row, and for an owner the position of its draw, [b] each, equal on all ranks."""
    highest, leader = candidates.highest.max(1)
    codes = candidates.ids[:, :, 0].gather(1, leader.unsqueeze(1)).squeeze(1)
    positions = torch.zeros_like(codes)
    if plan.plain or plan.filtered:
        masses = candidates.mass * torch.exp((candidates.highest - highest.unsqueeze(1)) / rows.temperatures)
        total, uniform = masses.sum(1, keepdim=True), candidates.uniforms[:, :1]
        if plan.plain:
            cumulative = _equal_cumsum(masses)
            owners = _draw_at(cumulative, uniform * total).unsqueeze(1)
            before, share = (cumulative - masses).gather(1, owners), masses.gather(1, owners)
            within = (uniform * total - before) / share * candidates.mass.gather(1, owners)
            codes = torch.where(rows.plain, _OWNER - owners.squeeze(1), codes)
            positions = torch.where(rows.plain, within.squeeze(1), positions)
        if plan.filtered:
            drawn = _draw_filtered(candidates, rows, total, complete)
            codes = torch.where(rows.filtered, drawn, codes)
    # The maximum of logits with a NaN is NaN.
    return codes.masked_fill(~highest.isfinite(), NO_TOKEN).long(), positions


def _draw_filtered(candidates: _Candidates, rows: _Rows, total: Tensor, complete: bool) -> Tensor:
    """Return tokens [b] as float64, or `_NEEDS_MORE` where a token outside the candidates could be drawn."""
    ids, by_id = candidates.ids.flatten(1).sort(dim=1)
    values, order = candidates.values.flatten(1).gather(1, by_id).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = torch.exp((values - values[:, :1]) / rows.temperatures)
    kept = _keep_most_likely(weights, total, rows)
    # Tokens that are no candidates have smaller logits than the last candidate of their rank.
    above_others = values > candidates.values[:, :, -1].amax(1, keepdim=True)
    sufficient = rows.limited | complete | ~(kept & ~above_others).any(1)
    ids, by_id = ids.sort(dim=1)
    cumulative = _equal_cumsum((weights * kept).gather(1, by_id))
    drawn = _draw_at(cumulative, candidates.uniforms[:, :1] * cumulative[:, -1:])
    tokens = ids.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return torch.where(sufficient, tokens, float(_NEEDS_MORE))


def _keep_most_likely(weights: Tensor, total: Tensor, rows: _Rows) -> Tensor:
    """Return a mask of the tokens to draw from, by descending weights [b, n] and the vocabulary's total [b, 1]."""
    kept = torch.arange(weights.shape[1], device=weights.device) < rows.top_k
    total = torch.where(rows.limited.unsqueeze(1), (weights * kept).sum(1, keepdim=True), total)
    kept &= _equal_cumsum(weights) - weights < rows.top_p * total
    return kept & (weights >= rows.min_p)


def _equal_cumsum(weights: Tensor) -> Tensor:
    """Return the cumulative sums of weights [b, n], rounded equally on all GPUs.

    Of a single row, a GPU adds blocks in an order that depends on their timing; of several rows, in a fixed order.
    """
    if weights.is_cuda and len(weights) == 1:
        return weights.expand(2, -1).cumsum(-1)[:1]
    return weights.cumsum(-1)


def _draw_at(cumulative: Tensor, at: Tensor) -> Tensor:
    """Return the first index [b] whose cumulative weight, [b, n], exceeds `at` [b, 1], or the last with a weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=cumulative.shape[-1] - 1)
    return torch.searchsorted(cumulative, at, right=True).minimum(last).squeeze(-1)
