"""The tables of a study's report, as Markdown, and the forms of their numbers.

Losses are in nats a token. What is not there yet is a dash.
"""

import math
from collections.abc import Sequence

from megatron_ladder.lab.study.gathered import Comparison, Gathered, Terms
from megatron_ladder.lab.study.grid import key_of
from megatron_ladder.lab.study.statistics import Paired, Verdict, deviation, first_reaching, mean
from megatron_ladder.lab.study.trial import Result
from megatron_ladder.lab.study.wirings import STANDARD

LENIENCY = 0.05
"""Nats above the baseline's final loss: a second mark, which worse wirings reach as well."""
NOTHING = "–"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right; a `|` in a cell is written so that it stays in it."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def number(value: float, form: str = ".4f") -> str:
    """A dash for NaN, with the minus sign of print."""
    return NOTHING if math.isnan(value) else f"{value:{form}}".replace("-", "−")


def mean_and_deviation(values: Sequence[float], form: str = ".4f") -> str:
    """`mean ± sample standard deviation`; a single value alone, a dash for none."""
    spread = deviation(values)
    return number(mean(values), form) + ("" if math.isnan(spread) else f" ± {number(spread, form)}")


def difference(one: Paired) -> str:
    """Mean of the paired differences ± its standard error."""
    error = one.standard_error
    return number(one.mean, "+.4f") + ("" if math.isnan(error) else f" ± {number(error)}")


def interval(one: Paired) -> str:
    """`low to high`, or a dash."""
    low, high = one.interval
    return NOTHING if math.isnan(low) else f"{number(low, '+.4f')} to {number(high, '+.4f')}"


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that is no number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def verdict(one: Comparison) -> str:
    """In the words of a table: whether it holds when all comparisons of the table are judged together."""
    alone = one.difference.verdict
    told_apart = alone in (Verdict.BETTER, Verdict.WORSE)
    return f"**{alone.value}**" if told_apart and one.holds_among_all else alone.value


def adjusted(one: Comparison) -> str:
    """p after Holm's correction."""
    return "< 0.001" if one.adjusted_p < 0.001 else number(one.adjusted_p, ".3f")


def outcomes(gathered: Gathered, terms: Terms, size: str) -> str:
    """How every wiring ends, and by how much it differs from the baseline at equal `terms`."""
    comparisons = gathered.comparisons(terms, size)
    heads = ["wiring", "runs", "final validation loss", "perplexity", f"less {STANDARD}'s, paired ± s. e."]
    heads += ["95 % interval", "verdict", "p (Holm)"]
    if terms == "time":
        heads.insert(1, "iterations")
    rows = []
    for wiring in gathered.wirings(terms):
        runs = gathered.runs(terms, size, wiring)
        losses = [one.final_loss for one in runs.values()]
        row = [wiring, str(len(runs)), mean_and_deviation(losses), number(perplexity(mean(losses)), ".2f")]
        if terms == "time":
            row.insert(1, _iterations(list(runs.values())))
        if wiring == STANDARD:
            row += [NOTHING] * 4
        else:
            one = comparisons[wiring]
            row += [difference(one.difference), interval(one.difference), verdict(one), adjusted(one)]
        rows.append(row)
    return markdown_table(heads, rows)


def reaching(gathered: Gathered, terms: Terms, size: str) -> str:
    """Tokens, or steps of the baseline's time, to what the baseline's run of the same seed ends with."""
    unit = "M tokens" if terms == "tokens" else f"{STANDARD} steps"
    heads = ["wiring", f"{unit} to {STANDARD}'s final loss", f"{unit} to {LENIENCY:g} nats above it"]
    finals = gathered.final_losses("tokens", size, STANDARD)
    targets = {seed: loss for seed, loss in finals.items() if math.isfinite(loss)}
    scale = 1e6 if terms == "tokens" else 1.0
    whole = gathered.study.iterations * (gathered.study.tokens_per_step if terms == "tokens" else 1)
    rows = []
    for wiring in gathered.wirings(terms):
        curves = gathered.curves(terms, size, wiring)
        row = [wiring]
        for above in (0.0, LENIENCY):
            found = [first_reaching(curves[seed], targets[seed] + above) for seed in sorted(curves.keys() & targets)]
            row.append(_reached(found, scale, whole))
        if terms == "tokens":
            rates = [one.tokens_per_second for one in gathered.runs(terms, size, wiring).values()]
            row.append(mean_and_deviation(rates, ",.0f"))
        rows.append(row)
    return markdown_table([*heads, *(["tokens/s"] if terms == "tokens" else [])], rows)


def learning_rates(gathered: Gathered, size: str) -> str:
    """Losses of the short runs, the chosen rate's in bold."""
    tried = {wiring: gathered.tuning(size, wiring) for wiring in gathered.study.wirings}
    rates = sorted({*gathered.study.learning_rates, *(rate for losses in tried.values() for rate in losses)})
    rows = []
    for wiring, losses in tried.items():
        chosen = gathered.study.chosen.get(key_of(size, wiring))
        cells = [number(losses.get(rate, math.nan)) for rate in rates]
        cells = [f"**{cell}**" if rate == chosen else cell for rate, cell in zip(rates, cells, strict=True)]
        rows.append([wiring, *cells, NOTHING if chosen is None else f"{chosen:g}"])
    return markdown_table(["wiring", *(f"{rate:g}" for rate in rates), "chosen"], rows)


def step_times(gathered: Gathered, size: str) -> str:
    """Seconds of a step, and how many the wiring makes while the baseline makes one."""
    times = gathered.study.step_times[size]
    rows = []
    for wiring, seconds in times.seconds.items():
        ratio, spread = times.speedup.get(wiring, math.nan), times.spread.get(wiring, math.nan)
        own_spread = NOTHING if wiring == STANDARD else number(spread, ".3f")
        rows.append([wiring, number(1e3 * seconds, ".2f"), number(ratio, ".3f"), own_spread])
    return markdown_table(["wiring", "step, ms", f"{STANDARD} / wiring", "quartile distance"], rows)


def sizes(gathered: Gathered) -> str:
    """Shapes of the models, and their exact numbers of parameters."""
    shapes = gathered.study.sizes
    names = list(dict.fromkeys(name for shape in shapes.values() for name in shape))
    rows = [
        [size, *(str(shape.get(name, NOTHING)) for name in names), _parameters(gathered, size)]
        for size, shape in shapes.items()
    ]
    return markdown_table(["size", *(name.replace("_", " ") for name in names), "parameters"], rows)


def _parameters(gathered: Gathered, size: str) -> str:
    """Wirings with as many are named together: without names if all have as many."""
    wirings: dict[int, list[str]] = {}
    for one in gathered.results:
        if one.trial.size == size and one.trial.wiring not in wirings.setdefault(one.parameters, []):
            wirings[one.parameters].append(one.trial.wiring)
    order = list(gathered.study.wirings)
    if len(wirings) < 2:
        return "".join(f"{count:,}" for count in wirings) or NOTHING
    named = {n: sorted(found, key=lambda name: order.index(name) if name in order else len(order))
             for n, found in sorted(wirings.items(), key=lambda item: -len(item[1]))}  # fmt: skip
    return "; ".join(f"{count:,} ({', '.join(found)})" for count, found in named.items())


def _iterations(runs: Sequence[Result]) -> str:
    return f"{runs[0].trial.iterations:,}" if runs else NOTHING


def _reached(found: Sequence[float | None], scale: float, whole: float) -> str:
    """The mean if every run got there: that of those alone which did would flatter the wiring."""
    there = [position for position in found if position is not None]
    if not found:
        return NOTHING
    if len(there) < len(found):
        return f"{len(there)} of {len(found)} runs reach it" if there else "not reached"
    form = ".2f" if scale > 1 else ",.0f"
    return f"{mean_and_deviation([one / scale for one in there], form)} ({mean(there) / whole:.0%})"
