"""Whether a study that was run again gives the same numbers, within the spread that the first one states."""

import math
from dataclasses import fields
from pathlib import Path

from megatron_ladder.lab.study import tables
from megatron_ladder.lab.study.gathered import Gathered, Terms, gather
from megatron_ladder.lab.study.statistics import deviation, mean

FREE_TO_DIFFER = ("command", "machine", "step_times", "chosen")
"""Of two runs of one study: where it ran, and what is measured there. Other learning rates are told by themselves."""


def compare_studies(first: Path, second: Path) -> str:
    """A table in Markdown: each wiring's mean final loss in both, and whether they lie within the first one's spread.

    Means are over the seeds that both have. The spread is the sample standard deviation over all of the first one's
    seeds. Runs at equal time differ in their length when the step times, measured anew, differ.

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
    if before.study.chosen != again.study.chosen:
        warning = "\n\n".join(filter(None, [warning, _other_rates(before, again)]))
    heads = ["wiring", "size", "at equal", "iterations", "seeds", "first", "second", "second less first"]
    heads.append("within the spread")
    both: tuple[Terms, Terms] = ("tokens", "time")
    rows = [
        [wiring, size, terms, *_row(before, again, terms, size, wiring)]
        for size in before.study.sizes
        for terms in both
        for wiring in (before.wirings(terms) if terms == "tokens" else before.wirings(terms)[1:])
    ]
    return "\n\n".join(filter(None, [warning, tables.markdown_table(heads, rows)]))


def _other_rates(before: Gathered, again: Gathered) -> str:
    first, second = before.study.chosen, again.study.chosen
    told = [
        f"{key} ({first[key]:g}, then {second[key]:g})"
        for key in first
        if key in second and first[key] != second[key]
    ]
    return f"Other learning rates were chosen: {', '.join(told) or 'one of the two has not chosen all of them yet'}."


def _row(before: Gathered, again: Gathered, terms: Terms, size: str, wiring: str) -> list[str]:
    """Lengths, pairs, means with their deviations, their difference, and what it is held against."""
    first, second = (one.final_losses(terms, size, wiring) for one in (before, again))
    seeds = [seed for seed in first if seed in second]
    pairs = [[losses[seed] for seed in seeds] for losses in (first, second)]
    apart, spread = mean(pairs[1]) - mean(pairs[0]), deviation([*first.values()])
    within = "yes" if abs(apart) <= spread else "**no**"
    judged = within if math.isfinite(apart) and math.isfinite(spread) else tables.NOTHING
    lengths = dict.fromkeys(str(one.iterations(terms, size, wiring) or tables.NOTHING) for one in (before, again))
    means = [tables.mean_and_deviation(losses) for losses in pairs]
    return [", ".join(lengths), str(len(seeds)), *means, tables.number(apart, "+.4f"), judged]
