"""From logits to the next token, without any rank holding the logits of the whole vocabulary.

    penalties for tokens that were seen  ->  logits / temperature  ->  the top_k most likely
    ->  of those, the fewest that together have top_p  ->  of those, the ones with min_p of the likeliest  ->  draw

The draw inverts the cumulative distribution in the order of the vocabulary: one uniform number a token, so a seed
gives the same tokens wherever the logits agree up to rounding, at any tensor-parallel size and in any batch.

Each rank has the logits of its own words. What it tells the others is little:

    greedy                    its likeliest token
    top_k, top_p, min_p       its likeliest tokens, so many that the ones which may be drawn are surely among them
    no filter                 the sum of its exponentials: rank 0 then says in whose words the number falls, and where

Rank 0 decides, so that no rounding can lead two ranks to different texts.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup

NO_TOKEN = -1
"""Drawn where logits are not finite."""
GREEDY_BELOW = 1e-5
"""A lower temperature is 0: it would leave no probability to a second token, and overflow in fp32."""
FIRST_CANDIDATES = 64
"""Tokens that a rank offers where top_p or min_p may keep any number; eight times as many if they were too few."""
_NEEDS_MORE = -2
_OWNER = -3
"""A decision of -3 - r: the token is rank r's to find."""


@dataclass(frozen=True)
class SamplingParameters:
    """How one request chooses its tokens."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 0
    """Tokens that may be drawn, the most likely ones; 0 means all."""
    top_p: float = 1.0
    """Probability that the tokens which may be drawn have together, above 0."""
    min_p: float = 0.0
    """A token may be drawn if it has this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and of the text so far, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that were generated before,"""
    frequency_penalty: float = 0.0
    """and this as often as they were."""
    seed: int = 1234
    """Of the request's own generator."""
    logprobs: bool = False
    """Whether to tell each token's log-probability, by the model alone."""
    top_logprobs: int = 0
    """With `logprobs`, so many likeliest tokens are told with theirs as well."""

    @property
    def counted(self) -> bool:
        """Whether it matters how often a token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether it takes the most likely token each time."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


GREEDY = SamplingParameters(temperature=0.0)


def request_seed(seed: int, prompt_ids: Sequence[int], sample: int = 0) -> int:
    """A seed for each prompt and sample under one --seed, lest all draw the same numbers; the same in every batch."""
    words = f"{seed}/{','.join(map(str, prompt_ids))}" + (f"/{sample}" if sample else "")
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little")


Alternatives = tuple[tuple[int, float], ...]
"""The likeliest tokens with their log-probabilities, by the model alone, descending."""


class Chosen(NamedTuple):
    """The next token of each row, alike on every rank."""

    tokens: list[int]
    """`NO_TOKEN` where the logits are not finite."""
    logprobs: list[float] | None
    """None if no row asks for them."""
    alternatives: list[Alternatives] | None = None
    """Of each row as many as it asks for; None if no row does."""


class _Offers(NamedTuple):
    """What the ranks tell of their words; all [b, ranks] or [b, ranks, count], float64 on the CPU."""

    highest: Tensor
    """The largest logit of each rank."""
    mass: Tensor
    """Sum of exp((logit - highest) / temperature)."""
    model_highest: Tensor
    """As `highest`, before penalties,"""
    model_mass: Tensor
    """and as `mass`, without a temperature: for log-probabilities."""
    values: Tensor
    """The largest logits, descending,"""
    ids: Tensor
    """and their tokens."""


class Sampler:
    """Chooses the next token of each slot of a batch; what one draws does not depend on the others."""

    def __init__(self, slots: int, vocab_size: int, start: int, group: CommGroup, device: torch.device) -> None:
        """
        Args:
            start: the first word that this rank has logits of.
            group: the ranks that have those of the others.
        """
        self._group, self._device = group, device
        self._start, self._vocab_size = start, vocab_size
        self._parameters = [GREEDY] * slots
        # On the CPU, so that a seed means the same on every device.
        self._generators = [torch.Generator() for _ in range(slots)]
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def place(self, slot: int, parameters: SamplingParameters, prompt_ids: Sequence[int]) -> None:
        """Gives a slot to another request."""
        self._parameters[slot] = parameters
        self._generators[slot].manual_seed(parameters.seed)
        shape = (len(self._parameters), self._vocab_size)
        if parameters.repetition_penalty != 1 and self._seen is None:
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        if parameters.counted and self._counts is None:
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        if self._counts is not None:
            self._counts[slot] = 0
        if self._seen is not None:
            self._seen[slot] = False
            self._seen[slot, list(prompt_ids)] = True

    def __call__(self, logits_shard_v: Tensor, slots: Sequence[int]) -> Chosen:
        """Chooses for some slots; every rank must call it alike.

        Args:
            logits_shard_v: [b, padded V / t], a row for each of `slots`; what is beyond the vocabulary is padding.
        """
        ways = [self._parameters[slot] for slot in slots]
        model_logits = logits_shard_v.to(torch.promote_types(logits_shard_v.dtype, torch.float32))
        valid = max(0, min(model_logits.shape[1], self._vocab_size - self._start))
        if valid < model_logits.shape[1]:
            model_logits = model_logits.clone()
            model_logits[:, valid:] = -math.inf
        logits = self._penalised(model_logits, ways, slots)
        tokens, offers = self._choose(logits, model_logits, ways, slots)
        self._note(tokens, slots)
        if not any(way.logprobs for way in ways):
            return Chosen(tokens.tolist(), None)
        log_total = _log_total(offers)
        logprobs = self._logprobs(tokens, model_logits, log_total)
        return Chosen(tokens.tolist(), logprobs, self._alternatives(model_logits, ways, log_total))

    def _penalised(self, logits: Tensor, ways: Sequence[SamplingParameters], slots: Sequence[int]) -> Tensor:
        def column(numbers: Sequence[float]) -> Tensor:
            return torch.tensor(numbers, device=self._device, dtype=logits.dtype).unsqueeze(1)

        if self._seen is not None and any(way.repetition_penalty != 1 for way in ways):
            seen = self._of_own_words(self._seen, slots, logits.shape[1])
            penalty = column([way.repetition_penalty for way in ways])
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self._counts is not None and any(way.counted for way in ways):
            counts = self._of_own_words(self._counts, slots, logits.shape[1])
            logits = logits - column([way.frequency_penalty for way in ways]) * counts
            logits = logits - column([way.presence_penalty for way in ways]) * (counts > 0)
        return logits

    def _of_own_words(self, table: Tensor, slots: Sequence[int], width: int) -> Tensor:
        """Rows of a table [slots, V], and of them the words that this rank has logits of: [b, width], padded by 0."""
        found = table.new_zeros(len(slots), width)
        ends_at = min(self._vocab_size, self._start + width)
        if ends_at > self._start:
            found[:, : ends_at - self._start] = table[list(slots), self._start : ends_at]
        return found

    def _choose(
        self, logits: Tensor, model_logits: Tensor, ways: Sequence[SamplingParameters], slots: Sequence[int]
    ) -> tuple[Tensor, _Offers]:
        """Tokens [b] on the CPU, alike on every rank, and what the ranks told of."""
        uniform = [
            [0.0 if way.greedy else torch.rand(1, generator=self._generators[slot], dtype=torch.float64).item()]
            for way, slot in zip(ways, slots, strict=True)
        ]
        unknown = any(not way.greedy and way.filtered and way.top_k == 0 for way in ways)
        most = max((way.top_k for way in ways if not way.greedy), default=0)
        count = max(1, most, FIRST_CANDIDATES if unknown else 1)
        while True:
            count = min(count, logits.shape[1])
            offers = self._offer(logits, model_logits, ways, count)
            decisions = torch.empty(len(ways), 2, dtype=torch.float64)
            if self._group.rank == 0:
                everything = count == logits.shape[1]
                decisions = decide(offers, ways, torch.tensor(uniform, dtype=torch.float64), everything)
            decisions = self._group.broadcast(decisions.to(self._device)).cpu()
            codes = decisions[:, 0].long()
            if not (codes == _NEEDS_MORE).any():
                break
            count *= 8
        if (codes <= _OWNER).any():
            codes = self._find_owned(logits, ways, codes, decisions[:, 1])
        return codes, offers

    def _offer(
        self, logits: Tensor, model_logits: Tensor, ways: Sequence[SamplingParameters], count: int
    ) -> _Offers:
        values, ids = logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
        highest = values[:, :1].double()
        mass, model_highest, model_mass = torch.zeros_like(highest), highest, torch.zeros_like(highest)
        if not all(way.greedy for way in ways):
            mass = torch.exp((logits.double() - highest) / self._temperatures(ways)).nan_to_num().sum(-1, keepdim=True)
        if any(way.logprobs for way in ways):
            model_highest = highest if model_logits is logits else model_logits.amax(-1, keepdim=True).double()
            model_mass = torch.exp(model_logits.double() - model_highest).nan_to_num().sum(-1, keepdim=True)
        # Doubles tell ids exactly.
        own = torch.cat((highest, mass, model_highest, model_mass, values.double(), (ids + self._start).double()), 1)
        told = own.unsqueeze(1) if self._group.size == 1 else self._group.all_gather(own.unsqueeze(1), dim=1)
        sizes = [1, 1, 1, 1, count, count]
        first, second, third, fourth, values, ids = told.cpu().split(sizes, dim=-1)
        return _Offers(first.squeeze(-1), second.squeeze(-1), third.squeeze(-1), fourth.squeeze(-1), values, ids)

    def _temperatures(self, ways: Sequence[SamplingParameters]) -> Tensor:
        return _column([1.0 if way.greedy else way.temperature for way in ways]).to(self._device)

    def _find_owned(
        self, logits: Tensor, ways: Sequence[SamplingParameters], codes: Tensor, places: Tensor
    ) -> Tensor:
        """Replaces decisions that say whose words a number falls in by the token that it falls on."""
        found = codes.clone()
        for row in torch.nonzero(codes <= _OWNER).flatten().tolist():
            found[row] = NO_TOKEN
            if _OWNER - int(codes[row]) == self._group.rank:
                exact = logits[row].double()
                weights = torch.exp((exact - exact.max()) / ways[row].temperature)
                found[row] = self._start + draw_at(weights.unsqueeze(0), places[row].view(1, 1).to(self._device)).item()
        reduced = self._group.all_reduce(found.to(self._device), dist.ReduceOp.MAX)
        return reduced.cpu()

    def _note(self, tokens: Tensor, slots: Sequence[int]) -> None:
        if self._seen is None and self._counts is None:
            return
        for token, slot in zip(tokens.tolist(), slots, strict=True):
            if self._seen is not None and token != NO_TOKEN:
                self._seen[slot, token] = True
            if self._counts is not None and token != NO_TOKEN:
                self._counts[slot, token] += 1

    def _logprobs(self, tokens: Tensor, model_logits: Tensor, log_total: Tensor) -> list[float]:
        """Log-softmax of the chosen tokens' logits, before penalties and temperature."""
        local = tokens.to(self._device) - self._start
        elsewhere = (local < 0) | (local >= model_logits.shape[1])
        own = model_logits.gather(1, local.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1).double()
        chosen = self._group.all_reduce(own.masked_fill(elsewhere, -math.inf), dist.ReduceOp.MAX).cpu()
        logprobs: list[float] = (chosen - log_total).tolist()
        return logprobs

    def _alternatives(
        self, model_logits: Tensor, ways: Sequence[SamplingParameters], log_total: Tensor
    ) -> list[Alternatives] | None:
        """Of each rank's likeliest tokens the likeliest of all; a collective if any row asks."""
        wanted = [way.top_logprobs if way.logprobs else 0 for way in ways]
        if not any(wanted):
            return None
        values, ids = model_logits.topk(min(max(wanted), model_logits.shape[1]), dim=-1)
        own = torch.cat((values.double(), (ids + self._start).double()), 1)
        told = own.unsqueeze(1) if self._group.size == 1 else self._group.all_gather(own.unsqueeze(1), dim=1)
        values, ids = told.cpu().split(values.shape[1], dim=-1)
        values, order = values.flatten(1).sort(dim=1, descending=True, stable=True)
        ids = ids.flatten(1).gather(1, order).long()
        rows = zip(ids.tolist(), (values - log_total.unsqueeze(1)).tolist(), wanted, strict=True)
        # A rank may have fewer words than are asked for, and offer padding behind them.
        return [
            tuple(pair for pair in zip(of_row, logprobs, strict=True) if pair[0] < self._vocab_size)[:count]
            for of_row, logprobs, count in rows
        ]


def _log_total(offers: _Offers) -> Tensor:
    """Logarithm of the sum of exp(logit) over all words, by the model alone: [b]."""
    highest = offers.model_highest.amax(1, keepdim=True)
    total = (offers.model_mass * torch.exp(offers.model_highest - highest)).sum(1)
    return highest.squeeze(1) + total.log()


def decide(
    offers: _Offers, ways: Sequence[SamplingParameters], uniform: Tensor, everything: bool
) -> Tensor:
    """What rank 0 makes of the offers: [b, 2], a token or a code for each row, and the number that goes with it.

    Args:
        uniform: [b, 1] in [0, 1).
        everything: whether the offers are all tokens that there are.
    """
    highest, leader = offers.highest.max(1)
    codes = offers.ids[:, :, 0].gather(1, leader.unsqueeze(1)).squeeze(1)
    places = torch.zeros_like(codes)
    plain = torch.tensor([not way.greedy and not way.filtered for way in ways])
    filtered = torch.tensor([not way.greedy and way.filtered for way in ways])
    masses = offers.mass
    if plain.any() or filtered.any():
        temperatures = _column([1.0 if way.greedy else way.temperature for way in ways])
        masses = masses * torch.exp((offers.highest - highest.unsqueeze(1)) / temperatures)
    if plain.any():
        owners = draw_at(masses, uniform * masses.sum(1, keepdim=True))
        before = (masses.cumsum(1) - masses).gather(1, owners.unsqueeze(1))
        share = masses.gather(1, owners.unsqueeze(1))
        own_mass = offers.mass.gather(1, owners.unsqueeze(1))
        within = ((uniform * masses.sum(1, keepdim=True) - before) / share * own_mass).squeeze(1)
        codes = torch.where(plain, _OWNER - owners, codes)
        places = torch.where(plain, within, places)
    if filtered.any():
        drawn = _draw_filtered(offers, ways, uniform, masses.sum(1, keepdim=True), everything)
        codes = torch.where(filtered, drawn, codes)
    # The largest of logits that hold a NaN is NaN.
    codes = codes.masked_fill(~highest.isfinite(), NO_TOKEN)
    return torch.stack((codes, places), dim=1)


def _draw_filtered(
    offers: _Offers, ways: Sequence[SamplingParameters], uniform: Tensor, total: Tensor, everything: bool
) -> Tensor:
    """Tokens [b] as float64, or `_NEEDS_MORE` where a token that was not offered might be among those to draw from."""
    ids, by_id = offers.ids.flatten(1).sort(dim=1)
    values, order = offers.values.flatten(1).gather(1, by_id).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    temperatures = _column([1.0 if way.greedy else way.temperature for way in ways])
    weights = torch.exp((values - values[:, :1]) / temperatures)
    kept = keep_most_likely(weights, total, ways)
    # Whatever a rank did not offer is below the last that it did.
    surely = values > offers.values[:, :, -1].amax(1, keepdim=True)
    known = torch.tensor([everything or way.top_k > 0 for way in ways]) | (kept & ~surely).any(1).logical_not()
    ids, by_id = ids.sort(dim=1)
    drawn = draw((weights * kept).gather(1, by_id), uniform)
    tokens = ids.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return torch.where(known, tokens, float(_NEEDS_MORE))


def keep_most_likely(weights: Tensor, total: Tensor, ways: Sequence[SamplingParameters]) -> Tensor:
    """Which tokens may be drawn.

    Args:
        weights: [b, n], descending, as shares of the likeliest token's.
        total: [b, 1]: weight of all tokens of the vocabulary.
    """
    # A top_k may be larger than any tensor holds.
    top_k = torch.tensor([[min(way.top_k or weights.shape[1], weights.shape[1])] for way in ways])
    kept = torch.arange(weights.shape[1]) < top_k
    limited = torch.tensor([[way.top_k > 0] for way in ways])
    total = torch.where(limited, (weights * kept).sum(1, keepdim=True), total)
    # The cumulative weight of all tokens may round to the total before the last one, which top_p = 1 must keep.
    top_p = _column([way.top_p if way.top_p < 1 else math.inf for way in ways])
    kept &= weights.cumsum(1) - weights < top_p * total
    return kept & (weights >= _column([way.min_p for way in ways]))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first place at which the cumulative weight exceeds `uniform`.

    Args:
        weights: [b, n] float64, with any sum.
        uniform: [b, 1] float64 in [0, 1), as a share of that sum.

    Returns:
        [b] int64, never a place of weight zero.
    """
    return draw_at(weights, uniform * weights.cumsum(-1)[:, -1:])


def draw_at(weights: Tensor, at: Tensor) -> Tensor:
    """The first place at which the cumulative weight exceeds `at` [b, 1], or the last one with a weight: [b]."""
    cumulative = weights.cumsum(-1)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=weights.shape[-1] - 1)
    return torch.searchsorted(cumulative, at, right=True).minimum(last).squeeze(-1)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
