"""Grids of test cases of which every run takes a pairwise cover and `--slow` takes all."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def pairwise(
    axes: Sequence[Sequence[object]],
    ids: Sequence[Callable[[Any], str] | Sequence[str]],
) -> list[Any]:
    """Return the product of the axes as pytest parameters.

    A greedy cover, in which each pair of values of two axes occurs at least once, is unmarked; the rest is marked slow.

    Args:
        ids: for each axis, names of its values, or a function from a value to its name.
    """
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    cover = _greedy_cover(cases)
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, case, strict=True)),
            id="-".join(_name(names, axis, place) for names, axis, place in zip(ids, axes, case, strict=True)),
            marks=() if case in cover else pytest.mark.slow,
        )
        for case in cases
    ]


def _greedy_cover(cases: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    bits: dict[object, int] = {}
    pairs = {
        case: sum(1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(enumerate(case), 2))
        for case in cases
    }
    missing, cover = (1 << len(bits)) - 1, set[tuple[int, ...]]()
    # The first of equal cases is taken: in their order, most would have the first value of each axis.
    cases = random.Random(0).sample(cases, len(cases))
    while missing:
        best = max(cases, key=lambda case: (missing & pairs[case]).bit_count())
        cover.add(best)
        missing &= ~pairs[best]
    return cover


def _name(names: Callable[[Any], str] | Sequence[str], axis: Sequence[object], place: int) -> str:
    return names(axis[place]) if callable(names) else names[place]
