"""Grids and lists of test cases of which short runs take a part."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def pairwise(*axes: Iterable[str] | Mapping[str, object]) -> list[Any]:
    """Return the product of the axes as pytest parameters; an axis has values by name, or names that are values.

    A greedy cover, in which each pair of values of two axes occurs at least once, is unmarked; the rest is marked slow.
    """
    values = [axis if isinstance(axis, Mapping) else {name: name for name in axis} for axis in axes]
    cases = list(itertools.product(*values))
    cover = _greedy_cover(cases)
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(values, case, strict=True)),
            id="-".join(case),
            marks=() if case in cover else pytest.mark.slow,
        )
        for case in cases
    ]


def quick_share(cases: Iterable[object], every: int) -> list[Any]:
    """Return cases as pytest parameters, of which `tests/run.sh --quick` takes the first of each `every`."""
    return _with_mark(cases, every, pytest.mark.long)


def usual_share(cases: Iterable[object], every: int) -> list[Any]:
    """Return cases as pytest parameters, of which runs without `--slow` take the first of each `every`."""
    return _with_mark(cases, every, pytest.mark.slow)


def _with_mark(cases: Iterable[object], every: int, mark: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark if number % every else ())
        for number, case in enumerate(cases)
    ]


def _greedy_cover(cases: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]]:
    bits: dict[object, int] = {}
    pairs = {
        case: sum(1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(enumerate(case), 2))
        for case in cases
    }
    missing, cover = (1 << len(bits)) - 1, set[tuple[str, ...]]()
    # The first of equal cases is taken: in their order, most would have the first value of each axis.
    cases = random.Random(0).sample(cases, len(cases))
    while missing:
        best = max(cases, key=lambda case: (missing & pairs[case]).bit_count())
        cover.add(best)
        missing &= ~pairs[best]
    return cover
