"""Several data sets read as one, each by its weight.

The data sets take turns by Tijdeman's rule ("The chairman assignment problem", Discrete Mathematics 32, 1980). With
weights w_i that add up to 1, and c_i samples taken from data set i among the first n, every prefix of the run has

    |c_i - w_i n| <= 1 - 1 / (2k - 2)        for all of k > 1 data sets,

so none is ever a whole sample ahead or behind. (Taking whichever is furthest behind, as Megatron does, has no such
bound.) Weights are whole numbers with sum Q, and the turns repeat after Q samples: sample n of the run is found from
n alone, and the order depends on the data and the weights, never on how long the run is. Sample j taken from a data
set is sample j of that data set's own order.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.packing import PackedSource
from megatron_ladder.data.samples import SampleRows, SampleSource, rows_to_fill
from megatron_ladder.errors import UserError

MOST_TURNS = 1 << 18
"""Weights that need a longer period are rounded to this many parts, at most 4e-6 of the run away."""


class Blend(NamedTuple):
    """Which data sets, in which proportion."""

    prefixes: tuple[Path, ...]
    weights: tuple[Fraction, ...] | None
    """Of each, above 0, of any sum; None: by their numbers of samples."""


def parse_blend(flag: str, words: Sequence[str]) -> Blend:
    """Reads `W1 P1 W2 P2 ...`, or paths alone.

    Raises:
        UserError: a weight without a path, a path without a weight beside others with one, a weight that is not
            above 0, a path that is named twice.
    """
    if any(_is_weight(word) for word in words[::2]) and (len(words) % 2 or not all(map(_is_weight, words[::2]))):
        raise UserError(f"{flag} {' '.join(words)}: expected paths alone, or a weight before each of them")
    is_weighted = bool(words) and _is_weight(words[0])
    prefixes = tuple(map(Path, words[1::2] if is_weighted else words))
    twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
    if twice is not None:
        raise UserError(f"{flag} {twice}: is named twice: name it once, with the sum of its weights")
    if not is_weighted:
        return Blend(prefixes, None)
    weights = tuple(Fraction(word) for word in words[::2])
    if min(weights) <= 0:
        raise UserError(f"{flag}: weight {words[2 * weights.index(min(weights))]}: expected more than 0")
    return Blend(prefixes, weights)


def _is_weight(word: str) -> bool:
    try:
        Fraction(word)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """Whole numbers of the same proportion, or, if their sum were above MOST_TURNS, the nearest with that sum."""
    denominator = math.lcm(*(weight.denominator for weight in weights))
    exact = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*exact)
    exact = [weight // divisor for weight in exact]
    total = sum(exact)
    if total <= MOST_TURNS:
        return exact
    # One turn for each at least; the rest by the largest remainder.
    shares = [Fraction(weight * (MOST_TURNS - len(exact)), total) for weight in exact]
    turns = [1 + math.floor(share) for share in shares]
    by_remainder = sorted(range(len(exact)), key=lambda i: (math.floor(shares[i]) - shares[i], i))
    for i in by_remainder[: MOST_TURNS - sum(turns)]:
        turns[i] += 1
    return turns


def turns_of(weights: Sequence[int]) -> NDArray[np.int32]:
    """Which data set each sample of a period is taken from [sum(weights)], by Tijdeman's rule.

    A data set's next sample may be taken from its release on, the first n with w n - c >= 1 / (2k - 2), and must be
    by its deadline, the last n with w n - c <= 1 - 1 / (2k - 2); of those released the nearest deadline is served.
    """
    period, count = sum(weights), len(weights)
    turns = np.zeros(period, np.int32)
    if count == 1:
        return turns
    parts = 2 * count - 2
    taken = [0] * count

    def release(i: int) -> tuple[int, int]:
        return -(-(period * (parts * taken[i] + 1)) // (parts * weights[i])), i

    def deadline(i: int) -> tuple[int, int]:
        return (period * (parts * taken[i] + parts - 1)) // (parts * weights[i]), i

    waiting = [release(i) for i in range(count)]
    heapq.heapify(waiting)
    released: list[tuple[int, int]] = []
    for place in range(period):
        while waiting[0][0] <= place + 1:
            heapq.heappush(released, deadline(heapq.heappop(waiting)[1]))
            if not waiting:
                break
        i = heapq.heappop(released)[1]
        turns[place] = i
        taken[i] += 1
        heapq.heappush(waiting, release(i))
    return turns


def places_among_equals(turns: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """How often each entry's value occurs before it: [0, 1, 0, 0] -> [0, 0, 1, 2]."""
    places = np.empty(len(turns), np.int64)
    for i in range(count):
        mine = turns == i
        places[mine] = np.arange(np.count_nonzero(mine))
    return places


class BlendedSource:
    """An endless, randomly accessible run of samples taken from several sources in turn."""

    def __init__(self, sources: Sequence[SampleSource | PackedSource], weights: Sequence[Fraction]) -> None:
        """
        Args:
            weights: of each source, above 0, of any sum.
        """
        self.sources = tuple(sources)
        whole = whole_weights(weights)
        self.weights: Sequence[float] = whole
        self.seq_length = sources[0].seq_length
        self._turns: NDArray[Any] = turns_of(whole)
        self._places = places_among_equals(self._turns, len(sources))

    @property
    def name(self) -> str:
        """The prefixes of all sources."""
        return " + ".join(source.name for source in self.sources)

    @property
    def token_dtype(self) -> "np.dtype[Any]":
        """The smallest type that holds the tokens of all sources."""
        return np.result_type(*(source.token_dtype for source in self.sources))

    @property
    def has_loss_mask(self) -> bool:
        """Whether any source says which tokens count; in the others all do."""
        return any(source.has_loss_mask for source in self.sources)

    @property
    def has_begins(self) -> bool:
        """Whether the sources say where documents begin; they do so all or none."""
        return all(source.has_begins for source in self.sources)

    def describe(self) -> dict[str, Any]:
        """See SampleSource; a weight, of any sum, for each data set besides."""
        members = [source.describe() for source in self.sources]
        sets = [member["sets"][0] | {"weight": weight} for member, weight in zip(members, self.weights, strict=True)]
        return members[0] | {"sets": sets}

    def origins(self, numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Of samples of the run [n]: which source each is taken from [n], and its number there [n]."""
        periods, places = numbers // len(self._turns), numbers % len(self._turns)
        origins = self._turns[places]
        return origins, periods * np.array(self.weights)[origins] + self._places[places]

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        """See Samples."""
        if len(numbers) and int(numbers.min()) < 0:
            raise IndexError(f"sample {numbers.min()} of {self.name}")
        rows = rows_to_fill(self, len(numbers), out)
        origins, own_numbers = self.origins(numbers)
        for i in np.unique(origins):
            chosen = np.flatnonzero(origins == i)
            self.sources[i].fill(own_numbers[chosen], chosen, rows)
        return rows
