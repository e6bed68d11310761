"""Whether a study that was run again gives the same numbers, within the spread that the first one states."""

import math
from dataclasses import fields
from pathlib import Path

from megatron_ladder.study import tables
from megatron_ladder.study.gathered import Gathered, Terms, gather
from megatron_ladder.study.statistics import deviation, mean

FREE_TO_DIFFER = ("command", "machine", "step_times")
"""Of two runs of one study: where it ran, and what is measured there."""


def compare_studies(first: Path, second: Path) -> str:
    """A table in Markdown: each wiring's mean final loss in both, and whether they lie within the first one's spread.

    The spread is the sample standard deviation over the first one's seeds. Runs at equal time differ in their length
    when the step times, measured anew, differ.

    Args:
        first: folder of a study.
        second: folder of the same study, run again.

    Raises:
        UserError: one of them holds no study, or a file that cannot be read.
    """
    before, again = gather(first), gather(second)
    changed = [
        one.name
        for one in fields(before.study)
        if one.name not in FREE_TO_DIFFER and getattr(before.study, one.name) != getattr(again.study, one.name)
    ]
    warning = f"These are not two runs of one study: {', '.join(changed)} differ." if changed else ""
    heads = ["wiring", "size", "at equal", "first", "second", "second less first", "within the spread"]
    both: tuple[Terms, Terms] = ("tokens", "time")
    rows = [
        [wiring, size, terms, *_row(before, again, terms, size, wiring)]
        for size in before.study.sizes
        for terms in both
        for wiring in (before.wirings(terms) if terms == "tokens" else before.wirings(terms)[1:])
    ]
    return "\n\n".join(filter(None, [warning, tables.markdown_table(heads, rows)]))


def _row(before: Gathered, again: Gathered, terms: Terms, size: str, wiring: str) -> list[str]:
    """Means with their deviations, their difference, and what it is held against."""
    first, second = (list(one.final_losses(terms, size, wiring).values()) for one in (before, again))
    apart, spread = mean(second) - mean(first), deviation(first)
    within = "yes" if abs(apart) <= spread else "**no**"
    judged = within if math.isfinite(apart) and math.isfinite(spread) else tables.NOTHING
    return [tables.mean_and_deviation(first), tables.mean_and_deviation(second), tables.number(apart, "+.4f"), judged]
