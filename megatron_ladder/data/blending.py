"""Blends of data sets with weights.

The data sets alternate by Tijdeman's rule ("The chairman assignment problem", Discrete Mathematics 32, 1980). If the
weights w_i add up to 1 and c_i of the first n samples are from data set i, then

    |c_i - w_i n| <= 1 - 1 / (2k - 2)        for all k > 1 data sets and every n,

so no data set is ever a whole sample ahead or behind. (Megatron's rule, which takes the data set that is furthest
behind, has no such bound.) Weights are integers with sum Q, and the turns repeat after Q samples. So sample n of the
run follows from n alone, and the order depends on the data and the weights, never on the length of the run. The j-th
sample from a data set is sample j of that data set's order.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.samples import DatasetSamples, SampleRows, Samples
from megatron_ladder.errors import Problem, UserError

_MAX_TURNS = 1 << 18
"""Longest period. Weights that need a longer one are rounded, which changes shares of the run by at most 4e-6."""


class Blend(NamedTuple):
    """Data sets, and their weights above 0, of any sum; None: proportional to their numbers of samples."""

    prefixes: tuple[Path, ...]
    weights: tuple[Fraction, ...] | None


def parse_blend(field_name: str, words: Sequence[str]) -> Blend:
    """Parse `W1 P1 W2 P2 ...` or paths only; raises UserError for missing or invalid weights, or a repeated path."""
    are_weights = [_is_weight(word) for word in words[::2]]
    is_weighted = any(are_weights)
    follow_paths = len(words) > 1 and not is_weighted and all(map(_is_weight, words[1::2]))
    if follow_paths or (is_weighted and (len(words) % 2 or not all(are_weights))):
        raise UserError(Problem({field_name: " ".join(words)}, "{}: expected paths only, or a weight before each path"))
    prefixes = tuple(map(Path, words[1::2] if is_weighted else words))
    twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
    if twice is not None:
        raise UserError(Problem({field_name: twice}, "{}: is given twice", "give it once, with the sum of its weights"))
    if not is_weighted:
        return Blend(prefixes, None)
    weights = tuple(Fraction(word) for word in words[::2])
    if min(weights) <= 0:
        smallest = words[2 * weights.index(min(weights))]
        raise UserError(Problem({field_name: None}, "{}: weight {smallest}: expected more than 0", smallest=smallest))
    return Blend(prefixes, weights)


def _is_weight(word: str) -> bool:
    try:
        Fraction(word)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def _whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """Return integers of the same proportion, or the nearest with sum _MAX_TURNS if their sum would be larger."""
    denominator = math.lcm(*(weight.denominator for weight in weights))
    exact = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*exact)
    exact = [weight // divisor for weight in exact]
    total = sum(exact)
    if total <= _MAX_TURNS:
        return exact
    # At least one turn each; the rest by the largest remainder.
    shares = [Fraction(weight * (_MAX_TURNS - len(exact)), total) for weight in exact]
    turns = [1 + math.floor(share) for share in shares]
    by_remainder = sorted(range(len(exact)), key=lambda i: (math.floor(shares[i]) - shares[i], i))
    for i in by_remainder[: _MAX_TURNS - sum(turns)]:
        turns[i] += 1
    return turns


def _turns_of(weights: Sequence[int]) -> NDArray[np.int32]:
    """Return the data set of each sample of a period [sum(weights)] by Tijdeman's rule.

    The next sample of a data set may be taken from its release on, which is the first n with w n - c >= 1 / (2k - 2),
    and must be taken by its deadline, the last n with w n - c <= 1 - 1 / (2k - 2). Among the released data sets, the
    one with the earliest deadline is taken.
    """
    period = sum(weights)
    count = len(weights)
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
    for turn in range(period):
        while waiting[0][0] <= turn + 1:
            heapq.heappush(released, deadline(heapq.heappop(waiting)[1]))
            if not waiting:
                break
        i = heapq.heappop(released)[1]
        turns[turn] = i
        taken[i] += 1
        heapq.heappush(waiting, release(i))
    return turns


class BlendedSource(Samples):
    """Samples of several sources alternately. If any of them has a loss mask, all tokens of the others count."""

    def __init__(self, sources: Sequence[DatasetSamples], weights: Sequence[Fraction]) -> None:
        """The sources alternate by the rule at the top of this file; the weights are above 0, of any sum."""
        self.sources = tuple(sources)
        self.weights = _whole_weights(weights)
        # The source of each sample of a period, and its number in that source: [0, 1, 0, 0] and [0, 0, 1, 2].
        self.turns = _turns_of(self.weights)
        self.places = np.empty(len(self.turns), np.int64)
        for number in range(len(sources)):
            of_source = self.turns == number
            self.places[of_source] = np.arange(np.count_nonzero(of_source))
        self.seq_length = sources[0].seq_length
        self.name = " + ".join(source.name for source in sources)
        self.token_dtype = np.result_type(*(source.token_dtype for source in sources))
        self.has_loss_mask = any(source.has_loss_mask for source in sources)
        self.has_begins = all(source.has_begins for source in sources)

    def describe(self) -> dict[str, Any]:
        """See DatasetSamples; each of several data sets also has a weight, of any sum."""
        members = [source.describe() for source in self.sources]
        if len(members) == 1:
            return members[0]
        sets = [member["sets"][0] | {"weight": weight} for member, weight in zip(members, self.weights, strict=True)]
        return members[0] | {"sets": sets}

    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        periods, positions = np.divmod(numbers, len(self.turns))
        origins = self.turns[positions]
        source_numbers = periods * np.array(self.weights)[origins] + self.places[positions]
        for i in np.unique(origins):
            chosen = np.flatnonzero(origins == i)
            self.sources[i].fill(source_numbers[chosen], rows[chosen], out)
