"""The tables of a study's report in Markdown, and the formats of their numbers.

Losses are in nats per token. A missing value is a dash.
"""

import math
from collections.abc import Sequence

from megatron_ladder.lab.study.grid import rate_key
from megatron_ladder.lab.study.results import Budget, Comparison, StudyResults
from megatron_ladder.lab.study.statistics import LossVerdict, deviation, first_reaching, mean
from megatron_ladder.lab.study.wirings import STANDARD

LENIENCY = 0.05
"""Nats above the baseline's final loss: a second target, which worse wirings reach as well."""
NOTHING = "–"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the first column aligned left and the others right; escapes `|` in cells."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def number(value: float, form: str = ".4f") -> str:
    """Format a number with a typographic minus sign; a dash for NaN."""
    return NOTHING if math.isnan(value) else f"{value:{form}}".replace("-", "−")


def mean_and_deviation(values: Sequence[float], form: str = ".4f") -> str:
    """Format `mean ± sample standard deviation`; the mean alone for a single value, a dash for none."""
    spread = deviation(values)
    return number(mean(values), form) + ("" if math.isnan(spread) else f" ± {number(spread, form.replace('+', ''))}")


def outcomes_table(results: StudyResults, budget: Budget, size: str) -> str:
    """Return the final losses of every wiring and their differences from the baseline."""
    comparisons = results.comparisons(budget, size)
    heads = ["wiring", "runs", "final validation loss", "perplexity", f"less {STANDARD}'s, paired ± s. e."]
    heads += ["95 % interval", "verdict", "p (Holm)"]
    if budget == "time":
        heads.insert(1, "iterations")
    rows = []
    for wiring in results.wirings(budget):
        runs = results.runs(budget, size, wiring)
        losses = [one.final_loss for one in runs.values()]
        row = [wiring, str(len(runs)), mean_and_deviation(losses), number(_perplexity(mean(losses)), ".2f")]
        if budget == "time":
            row.insert(1, f"{next(iter(runs.values())).trial.iterations:,}" if runs else NOTHING)
        row += [NOTHING] * 4 if wiring == STANDARD else _comparison_cells(comparisons[wiring])
        rows.append(row)
    return markdown_table(heads, rows)


def _comparison_cells(one: Comparison) -> list[str]:
    """Return the difference with its standard error, the interval, the verdict, and the adjusted p-value."""
    error, (low, high), verdict = one.difference.standard_error, one.difference.interval, one.difference.verdict
    found = verdict in (LossVerdict.BETTER, LossVerdict.WORSE)
    return [
        number(one.difference.mean, "+.4f") + ("" if math.isnan(error) else f" ± {number(error)}"),
        NOTHING if math.isnan(low) else f"{number(low, '+.4f')} to {number(high, '+.4f')}",
        f"**{verdict.value}**" if found and one.holds_among_all else verdict.value,
        adjusted_p(one),
    ]


def adjusted_p(one: Comparison) -> str:
    """Format the adjusted p-value."""
    return "< 0.001" if one.adjusted_p < 0.001 else number(one.adjusted_p, ".3f")


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def reaching_table(results: StudyResults, budget: Budget, size: str) -> str:
    """Return the tokens, or steps of the baseline's time, to the final loss of the baseline's run of the same seed."""
    unit = "M tokens" if budget == "tokens" else f"{STANDARD} steps"
    heads = ["wiring", f"{unit} to {STANDARD}'s final loss", f"{unit} to {LENIENCY:g} nats above it"]
    finals = results.final_losses("tokens", size, STANDARD)
    targets = {seed: loss for seed, loss in finals.items() if math.isfinite(loss)}
    scale = 1e6 if budget == "tokens" else 1.0
    whole = results.study.iterations * (results.study.tokens_per_step if budget == "tokens" else 1)
    rows = []
    for wiring in results.wirings(budget):
        curves = results.curves(budget, size, wiring)
        row = [wiring]
        for above in (0.0, LENIENCY):
            found = [first_reaching(curves[seed], targets[seed] + above) for seed in sorted(curves.keys() & targets)]
            row.append(_reached(found, scale, whole))
        if budget == "tokens":
            rates = [one.tokens_per_second for one in results.runs(budget, size, wiring).values()]
            row.append(mean_and_deviation(rates, ",.0f"))
        rows.append(row)
    return markdown_table([*heads, *(["tokens/s"] if budget == "tokens" else [])], rows)


def _reached(found: Sequence[float | None], scale: float, whole: float) -> str:
    """Format the mean if every run reached the loss; a mean of only those that did would flatter the wiring."""
    reached = [position for position in found if position is not None]
    if not found:
        return NOTHING
    if len(reached) < len(found):
        return f"{len(reached)} of {len(found)} runs reach it" if reached else "not reached"
    form = ".2f" if scale > 1 else ",.0f"
    return f"{mean_and_deviation([one / scale for one in reached], form)} ({mean(reached) / whole:.0%})"


def learning_rates_table(results: StudyResults, size: str) -> str:
    """Return the losses of the tuning runs, the chosen rate's in bold."""
    tried = {wiring: results.tuning(size, wiring) for wiring in results.study.wirings}
    rates = sorted({*results.study.learning_rates, *(rate for losses in tried.values() for rate in losses)})
    rows = []
    for wiring, losses in tried.items():
        chosen = results.study.chosen.get(rate_key(size, wiring))
        cells = [number(losses.get(rate, math.nan)) for rate in rates]
        cells = [f"**{cell}**" if rate == chosen else cell for rate, cell in zip(rates, cells, strict=True)]
        is_edge = len(losses) > 1 and chosen in (min(losses), max(losses))
        named = NOTHING if chosen is None else f"{chosen:g}{' (edge)' if is_edge else ''}"
        rows.append([wiring, *cells, named])
    return markdown_table(["wiring", *(f"{rate:g}" for rate in rates), "chosen"], rows)


def step_times_table(results: StudyResults, size: str) -> str:
    """Return the seconds of a step, and the number of steps that a wiring does in one step of the baseline."""
    times = results.study.step_times[size]
    rows = []
    for wiring, seconds in times.seconds.items():
        ratio, spread = times.speedup.get(wiring, math.nan), times.spread.get(wiring, math.nan)
        own_spread = NOTHING if wiring == STANDARD else number(spread, ".3f")
        rows.append([wiring, number(1e3 * seconds, ".2f"), number(ratio, ".3f"), own_spread])
    return markdown_table(["wiring", "step, ms", f"{STANDARD} / wiring", "interquartile range"], rows)


def sizes_table(results: StudyResults) -> str:
    """Return the shapes of the models and their exact numbers of parameters."""
    shapes = results.study.sizes
    names = list(dict.fromkeys(name for shape in shapes.values() for name in shape))
    rows = [
        [size, *(str(shape.get(name, NOTHING)) for name in names), _parameters(results, size)]
        for size, shape in shapes.items()
    ]
    return markdown_table(["size", *(name.replace("_", " ") for name in names), "parameters"], rows)


def _parameters(results: StudyResults, size: str) -> str:
    """Group the wirings by their number of parameters; without names if all have the same number."""
    wirings: dict[int, list[str]] = {}
    for one in results.finished:
        if one.trial.size == size and one.trial.wiring not in wirings.setdefault(one.parameters, []):
            wirings[one.parameters].append(one.trial.wiring)
    order = list(results.study.wirings)
    if len(wirings) < 2:
        return "".join(f"{count:,}" for count in wirings) or NOTHING
    named = {n: sorted(found, key=lambda name: order.index(name) if name in order else len(order))
             for n, found in sorted(wirings.items(), key=lambda item: -len(item[1]))}  # fmt: skip
    return "; ".join(f"{count:,} ({', '.join(found)})" for count, found in named.items())
