"""Sampling: choose the next tokens from vocabulary-parallel logits.

    penalties for seen tokens  ->  logits / temperature  ->  top_k  ->  top_p  ->  min_p  ->  draw

The draw inverts the cumulative distribution in vocabulary order with one uniform number per token. A seed therefore
gives the same tokens at any tensor-parallel size and in any batch, wherever the logits agree up to rounding.

No rank holds the logits of the whole vocabulary. Each rank has those of its part, and shares only:

    greedy                  its most likely token
    top_k, top_p, min_p     its most likely tokens, enough to include every token that can be drawn
    no filter               the sum of its exponentials; rank 0 answers which rank owns the drawn token, and where

Rank 0 decides, so that rounding cannot make ranks diverge. All of this runs on the device, and the host waits for it
once per token, to read the token.
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

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.generate.scoring import Alternatives, score_tokens, vocabulary_logits

NO_TOKEN = -1
"""Chosen where logits are not finite."""
_GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0: they leave no probability to a second token, and overflow in fp32."""
_FIRST_CANDIDATES = 64
"""Candidates per rank where top_p or min_p can keep any number of tokens; multiplied by 8 while they are too few."""
_ALL = 1 << 62
"""More tokens than any vocabulary has."""
_NEEDS_MORE = -2
_OWNER = -3
"""Codes of rank 0's decision: more candidates are needed; or, as -3 - r, rank r owns the token and must find it."""


@dataclass(frozen=True)
class SamplingParameters:
    """Sampling parameters of one request; see the flags of the same names in `options.SamplingOptions`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 1234
    logprobs: bool = False
    """Whether to return each token's log-probability under the model, without penalties and temperature."""
    top_logprobs: int = 0
    """With `logprobs`, the number of most likely tokens to return as well."""

    @classmethod
    def like(cls, source: object, **changes: Any) -> "SamplingParameters":
        """Return the parameters of the same names in `source`, except for `changes`."""
        names = {entry.name for entry in fields(cls)} - changes.keys()
        return cls(**{name: getattr(source, name) for name in names}, **changes)

    @property
    def counted(self) -> bool:
        """Whether a penalty depends on the number of times that a token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

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
    alternatives: list[Alternatives] | None = None
    """As many per row as the row requests; None if no row requests any."""


class _Rows(NamedTuple):
    """The parameters of the rows of a batch, as columns [b, 1] on the device or masks [b]."""

    temperatures: Tensor
    top_k: Tensor
    limited: Tensor
    """Whether top_k is given."""
    top_p: Tensor
    min_p: Tensor
    plain: Tensor
    """[b], drawn from all tokens."""
    filtered: Tensor
    """[b], drawn from some tokens."""
    plain_rows: list[int]
    any_filtered: bool
    first_count: int
    """Candidates per rank to begin with."""

    @classmethod
    def of(cls, parameters: Sequence[SamplingParameters], device: torch.device) -> "_Rows":
        drawn = [one for one in parameters if not one.greedy]
        unknown = any(one.filtered and one.top_k == 0 for one in drawn)
        most = max((one.top_k for one in drawn), default=0)
        plain = [not one.greedy and not one.filtered for one in parameters]
        return cls(
            temperatures=_column([1.0 if one.greedy else one.temperature for one in parameters]).to(device),
            # top_k may exceed 64 bits.
            top_k=torch.tensor([[min(one.top_k or _ALL, _ALL)] for one in parameters], device=device),
            limited=torch.tensor([[one.top_k > 0] for one in parameters], device=device),
            # The cumulative weight can round to the total before the last token, which top_p = 1 must keep.
            top_p=_column([one.top_p if one.top_p < 1 else math.inf for one in parameters]).to(device),
            min_p=_column([one.min_p for one in parameters]).to(device),
            plain=torch.tensor(plain, device=device),
            filtered=torch.tensor([not one.greedy and one.filtered for one in parameters], device=device),
            plain_rows=[row for row, is_plain in enumerate(plain) if is_plain],
            any_filtered=any(one.filtered for one in drawn),
            first_count=max(1, most, _FIRST_CANDIDATES if unknown else 1),
        )

    @property
    def any_drawn(self) -> bool:
        return bool(self.plain_rows) or self.any_filtered


class _Candidates(NamedTuple):
    """Summaries of all ranks' logits: float64, [b, ranks], `values` and `ids` [b, ranks, count]."""

    highest: Tensor
    mass: Tensor
    """Sum of exp((logit - highest) / temperature)."""
    values: Tensor
    """Largest logits in descending order; `ids` are their tokens."""
    ids: Tensor


class Sampler:
    """Chooses the next tokens of a batch of samples, independently of each other."""

    def __init__(
        self,
        parameters: Sequence[SamplingParameters],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        start: int,
        group: CommGroup,
        device: torch.device,
    ) -> None:
        """`start` is the first token of this rank's part of the vocabulary; `group` are the tensor-parallel ranks."""
        self._group, self._device = group, device
        self._start, self._vocab_size = start, vocab_size
        self._parameters = list(parameters)
        # On the CPU, so that a seed draws the same numbers on every device.
        self._generators = [torch.Generator().manual_seed(one.seed) for one in parameters]
        self._rows: _Rows | None = None
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        shape = (len(parameters), vocab_size)
        if any(one.repetition_penalty != 1 for one in parameters):
            self._seen = torch.zeros(shape, dtype=torch.bool, device=device)
            for row, ids in enumerate(prompts):
                self._seen[row, list(ids)] = True
        if any(one.counted for one in parameters):
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)

    def choose(self, logits_shard_v: Tensor) -> Chosen:
        """Choose the next tokens of the first b samples, from logits [b, padded V / t]; padding is ignored."""
        parameters = self._parameters[: len(logits_shard_v)]
        model_logits = vocabulary_logits(logits_shard_v, self._start, self._vocab_size)
        tokens = self._choose_tokens(self._penalized(model_logits, parameters), parameters)
        for row, token in enumerate(tokens):
            if self._seen is not None and token != NO_TOKEN:
                self._seen[row, token] = True
            if self._counts is not None and token != NO_TOKEN:
                self._counts[row, token] += 1
        if not any(one.logprobs for one in parameters):
            return Chosen(tokens, None)
        wanted = [one.top_logprobs if one.logprobs else 0 for one in parameters]
        chosen = torch.tensor(tokens)
        scores = score_tokens(model_logits, chosen, max(wanted), self._start, self._vocab_size, self._group)
        alternatives = [row[:count] for row, count in zip(scores.alternatives, wanted, strict=True)]
        return Chosen(tokens, scores.logprobs, alternatives if any(wanted) else None)

    def _penalized(self, logits: Tensor, parameters: Sequence[SamplingParameters]) -> Tensor:
        def column(numbers: Sequence[float]) -> Tensor:
            return torch.tensor(numbers, device=self._device, dtype=logits.dtype).unsqueeze(1)

        if self._seen is not None:
            seen = self._own_columns(self._seen, logits)
            penalty = column([one.repetition_penalty for one in parameters])
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self._counts is not None:
            counts = self._own_columns(self._counts, logits)
            logits = logits - column([one.frequency_penalty for one in parameters]) * counts
            logits = logits - column([one.presence_penalty for one in parameters]) * (counts > 0)
        return logits

    def _own_columns(self, table: Tensor, logits: Tensor) -> Tensor:
        """Return the rows and columns of a table [samples, V] that belong to logits, padded with 0."""
        rows, width = logits.shape
        own = table[:rows, self._start : self._start + width]
        return F.pad(own, (0, width - own.shape[1]))

    def _choose_tokens(self, logits: Tensor, parameters: Sequence[SamplingParameters]) -> list[int]:
        """Return the tokens, equal on every rank."""
        if self._rows is None or len(self._rows.top_k) != len(parameters):
            self._rows = _Rows.of(parameters, self._device)
        rows = self._rows
        uniform = None
        if rows.any_drawn:
            numbers = [
                0.0 if one.greedy else torch.rand(1, generator=generator, dtype=torch.float64).item()
                for one, generator in zip(parameters, self._generators[: len(parameters)], strict=True)
            ]
            uniform = to_device(_column(numbers), self._device)
        count = rows.first_count
        while True:
            count = min(count, logits.shape[1])
            candidates = self._gather_candidates(logits, rows, count)
            decisions = logits.new_empty(len(parameters), 2, dtype=torch.float64)
            if self._group.rank == 0:
                decisions = _decide(candidates, rows, uniform, complete=count == logits.shape[1])
            decisions = self._group.broadcast(decisions)
            codes = decisions[:, 0].long()
            if rows.plain_rows:
                codes = self._find_owned(logits, rows, codes, decisions[:, 1])
            found: list[int] = codes.cpu().tolist()
            if _NEEDS_MORE not in found:
                return found
            count *= 8

    def _gather_candidates(self, logits: Tensor, rows: _Rows, count: int) -> _Candidates:
        values, ids = logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
        highest = values[:, :1].double()
        mass = torch.zeros_like(highest)
        if rows.any_drawn:
            mass = torch.exp((logits.double() - highest) / rows.temperatures).nan_to_num().sum(-1, keepdim=True)
        # Doubles represent all ids exactly.
        own = torch.cat((highest, mass, values.double(), (ids + self._start).double()), 1)
        gathered = self._group.all_gather(own.unsqueeze(1), dim=1)
        return _Candidates(*gathered[..., :2].unbind(-1), *gathered[..., 2:].split(count, dim=-1))

    def _find_owned(self, logits: Tensor, rows: _Rows, codes: Tensor, positions: Tensor) -> Tensor:
        """Replace codes that name the owner of a token by the token, which the owner finds."""
        exact = logits.double()
        weights = torch.exp((exact - exact.amax(1, keepdim=True)) / rows.temperatures)
        drawn = self._start + _draw_at(weights, positions.unsqueeze(1).contiguous())
        found = torch.where(codes <= _OWNER, NO_TOKEN, codes)
        found = torch.where(codes == _OWNER - self._group.rank, drawn, found)
        return self._group.all_reduce(found, dist.ReduceOp.MAX)


def _decide(candidates: _Candidates, rows: _Rows, uniform: Tensor | None, complete: bool) -> Tensor:
    """Return rank 0's decision [b, 2]: a token or a code for each row, and for an owner its position of the draw.

    `uniform` is [b, 1] in [0, 1), if any row is drawn; `complete`: the candidates are the whole vocabulary.
    """
    highest, leader = candidates.highest.max(1)
    codes = candidates.ids[:, :, 0].gather(1, leader.unsqueeze(1)).squeeze(1)
    positions = torch.zeros_like(codes)
    if uniform is not None:
        masses = candidates.mass * torch.exp((candidates.highest - highest.unsqueeze(1)) / rows.temperatures)
        total = masses.sum(1, keepdim=True)
        if rows.plain_rows:
            owners = _draw_at(masses, uniform * total).unsqueeze(1)
            before, share = (masses.cumsum(1) - masses).gather(1, owners), masses.gather(1, owners)
            within = (uniform * total - before) / share * candidates.mass.gather(1, owners)
            codes = torch.where(rows.plain, _OWNER - owners.squeeze(1), codes)
            positions = torch.where(rows.plain, within.squeeze(1), positions)
        if rows.any_filtered:
            drawn = _draw_filtered(candidates, rows, uniform, total, complete)
            codes = torch.where(rows.filtered, drawn, codes)
    # The maximum of logits with a NaN is NaN.
    return torch.stack((codes.masked_fill(~highest.isfinite(), NO_TOKEN), positions), dim=1)


def _draw_filtered(candidates: _Candidates, rows: _Rows, uniform: Tensor, total: Tensor, complete: bool) -> Tensor:
    """Return tokens [b] as float64, or `_NEEDS_MORE` where a token outside the candidates could be drawn."""
    ids, by_id = candidates.ids.flatten(1).sort(dim=1)
    values, order = candidates.values.flatten(1).gather(1, by_id).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = torch.exp((values - values[:, :1]) / rows.temperatures)
    kept = _keep_most_likely(weights, total, rows)
    # Tokens that are no candidates have smaller logits than the last candidate of their rank.
    above_others = values > candidates.values[:, :, -1].amax(1, keepdim=True)
    sufficient = rows.limited.squeeze(1) | complete | ~(kept & ~above_others).any(1)
    ids, by_id = ids.sort(dim=1)
    weights = (weights * kept).gather(1, by_id)
    drawn = _draw_at(weights, uniform * weights.cumsum(-1)[:, -1:])
    tokens = ids.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return torch.where(sufficient, tokens, float(_NEEDS_MORE))


def _keep_most_likely(weights: Tensor, total: Tensor, rows: _Rows) -> Tensor:
    """Return a mask of the tokens to draw from, by descending weights [b, n] and the vocabulary's total [b, 1]."""
    kept = torch.arange(weights.shape[1], device=weights.device) < rows.top_k
    total = torch.where(rows.limited, (weights * kept).sum(1, keepdim=True), total)
    kept &= weights.cumsum(1) - weights < rows.top_p * total
    return kept & (weights >= rows.min_p)


def _draw_at(weights: Tensor, at: Tensor) -> Tensor:
    """Return the first index [b] whose cumulative weight, of [b, n], exceeds `at` [b, 1], or the last with a weight."""
    cumulative = weights.cumsum(-1)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=weights.shape[-1] - 1)
    return torch.searchsorted(cumulative, at, right=True).minimum(last).squeeze(-1)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device; the host does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
