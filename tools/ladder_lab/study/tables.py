"""The tables of a study's report in Markdown, and the formats of their numbers.

Losses are in nats per token. A missing value is a dash.
"""

import math
from collections.abc import Sequence

from ladder_lab.markdown import markdown_table
from ladder_lab.study.grid import is_at_the_edge
from ladder_lab.study.results import Budget, Comparison, StudyResults
from ladder_lab.study.statistics import LossVerdict, deviation, first_reaching, mean
from ladder_lab.study.wirings import STANDARD

LENIENCY = 0.05
"""Nats above the baseline's final loss: a second target, which worse wirings reach as well."""
NOTHING = "–"


def number(value: float, form: str = ".4f") -> str:
    """Format a number with a typographic minus sign; a dash for NaN."""
    return NOTHING if math.isnan(value) else f"{value:{form}}".replace("-", "−")


def mean_and_deviation(values: Sequence[float], form: str = ".4f") -> str:
    """Format `mean ± sample standard deviation`; the mean alone for a single value, a dash for none."""
    return _with_error(mean(values), deviation(values), form)


def _with_error(value: float, error: float, form: str) -> str:
    return number(value, form) + ("" if math.isnan(error) else f" ± {number(error, form.replace('+', ''))}")


def adjusted_p(one: Comparison) -> str:
    return "< 0.001" if one.adjusted_p < 0.001 else number(one.adjusted_p, ".3f")


def outcomes_table(results: StudyResults, budget: Budget, size: str) -> str:
    """Return the final losses of every wiring and their differences from the baseline."""
    comparisons = results.comparisons(budget, size)
    rows = []
    for wiring in results.wirings(budget):
        losses = [*results.final_losses(budget, size, wiring).values()]
        # Larger losses would overflow.
        perplexity = math.inf if mean(losses) > 700 else math.exp(mean(losses))
        row = {"wiring": wiring}
        if budget == "time":
            row["iterations"] = f"{results.iterations(budget, size, wiring):,}" if losses else NOTHING
        row |= {"runs": str(len(losses)), "final validation loss": mean_and_deviation(losses)}
        rows.append({**row, "perplexity": number(perplexity, ".2f"), **_comparison_cells(comparisons.get(wiring))})
    return markdown_table(rows)


def _comparison_cells(one: Comparison | None) -> dict[str, str]:
    heads = (f"less {STANDARD}'s, paired ± s. e.", "95 % interval", "verdict", "p (Holm)")
    if one is None:
        return dict.fromkeys(heads, NOTHING)
    (low, high), verdict = one.difference.interval, one.difference.verdict
    is_certain = verdict in (LossVerdict.BETTER, LossVerdict.WORSE) and one.holds_among_all
    cells = (
        _with_error(one.difference.mean, one.difference.standard_error, "+.4f"),
        NOTHING if math.isnan(low) else f"{number(low, '+.4f')} to {number(high, '+.4f')}",
        f"**{verdict.value}**" if is_certain else verdict.value,
        adjusted_p(one),
    )
    return dict(zip(heads, cells, strict=True))


def reaching_table(results: StudyResults, budget: Budget, size: str) -> str:
    """Return the tokens, or steps of the baseline's time, to the final loss of the baseline's run of the same seed."""
    study = results.study
    unit, scale, form = ("M tokens", 1e6, ".2f") if budget == "tokens" else (f"{STANDARD} steps", 1.0, ",.0f")
    whole = study.iterations * (study.tokens_per_step if budget == "tokens" else 1)
    finals = results.final_losses("tokens", size, STANDARD)
    targets = {seed: loss for seed, loss in finals.items() if math.isfinite(loss)}

    def reached(wiring: str, above: float) -> str:
        """Return the mean if every run reached the loss; one of only those that did would flatter the wiring."""
        curves = results.curves(budget, size, wiring)
        found = [first_reaching(curves[seed], targets[seed] + above) for seed in sorted(curves.keys() & targets)]
        positions = [position for position in found if position is not None]
        if not found:
            return NOTHING
        if len(positions) < len(found):
            return f"{len(positions)} of {len(found)} runs reach it" if positions else "not reached"
        return f"{mean_and_deviation([one / scale for one in positions], form)} ({mean(positions) / whole:.0%})"

    rows = []
    for wiring in results.wirings(budget):
        row = {"wiring": wiring, f"{unit} to {STANDARD}'s final loss": reached(wiring, 0.0)}
        row[f"{unit} to {LENIENCY:g} nats above it"] = reached(wiring, LENIENCY)
        if budget == "tokens":
            speeds = [one.tokens_per_second for one in results.runs(budget, size, wiring).values()]
            row["tokens/s"] = mean_and_deviation(speeds, ",.0f")
        rows.append(row)
    return markdown_table(rows)


def learning_rates_table(results: StudyResults, size: str) -> str:
    """Return the losses of the tuning runs, the chosen rate's in bold."""
    study = results.study
    tried = {wiring: results.tuning(size, wiring) for wiring in study.wirings}
    rates = sorted({*study.learning_rates, *(rate for losses in tried.values() for rate in losses)})
    rows = []
    for wiring, losses in tried.items():
        chosen = study.rate(size, wiring)
        texts = {rate: number(losses.get(rate, math.nan)) for rate in rates}
        cells = {f"{rate:g}": f"**{text}**" if rate == chosen else text for rate, text in texts.items()}
        choice = NOTHING if chosen is None else f"{chosen:g}{' (edge)' if is_at_the_edge(chosen, losses) else ''}"
        rows.append({"wiring": wiring, **cells, "chosen": choice})
    return markdown_table(rows)


def step_times_table(results: StudyResults, size: str) -> str:
    """Return the milliseconds of a step, and the number of steps that a wiring does in one step of the baseline."""
    times = results.study.step_times[size]
    spread = {**times.spread, STANDARD: math.nan}
    rows = [
        {
            "wiring": wiring,
            "step, ms": number(1e3 * seconds, ".2f"),
            f"{STANDARD} / wiring": number(times.speedup[wiring], ".3f"),
            "interquartile range": number(spread[wiring], ".3f"),
        }
        for wiring, seconds in times.seconds.items()
    ]
    return markdown_table(rows)


def sizes_table(results: StudyResults) -> str:
    """Return the shapes of the models and their exact numbers of parameters."""
    shapes, order = results.study.sizes, results.study.wirings
    names = dict.fromkeys(name for shape in shapes.values() for name in shape)
    rows = []
    for size, shape in shapes.items():
        wirings: dict[int, set[str]] = {}
        for trial, result in results.finished.items():
            if trial.size == size:
                wirings.setdefault(result.parameters, set()).add(trial.wiring)
        named = [f"{count:,}" for count in wirings]
        if len(wirings) > 1:
            groups = sorted(wirings.items(), key=lambda group: -len(group[1]))
            named = [f"{count:,} ({', '.join(one for one in order if one in found)})" for count, found in groups]
        fields = {name.replace("_", " "): str(shape.get(name, NOTHING)) for name in names}
        rows.append({"size": size, **fields, "parameters": "; ".join(named) or NOTHING})
    return markdown_table(rows)
