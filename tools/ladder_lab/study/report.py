"""The report of a study: tables of losses with paired differences, step times, and curves.

Two runs with the same seed form a pair: they share initial weights and order of samples, so their difference does not
contain the effect of the seed. All losses are in nats per token. Time is counted in steps of standard under the
interconnect: an iteration of a wiring takes 1 / speedup.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ladder_lab.output import markdown_table
from ladder_lab.study.trials import STANDARD, read_results
from megatron_ladder.errors import UserError
from megatron_ladder.files import write_atomically

REPORT_NAME = "report.md"
STUDY_NAME = "study.json"
CONFIDENCE = 0.95
SHOWN_FROM = 0.3
"""Share of the run that is not drawn, because its losses fall too fast to show differences."""
NOTHING = "–"
Curve = Sequence[tuple[float, float]]
"""Positions, ascending, and the validation loss at each."""


def write_report(folder: Path) -> Path | None:
    """Write `report.md` and its pictures into the folder of a study, and return its path; None without results.

    Raises UserError if the folder has no study.
    """
    try:
        study = json.loads((folder / STUDY_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no {STUDY_NAME}; expected the folder of a study") from None
    results = read_results(folder)
    if not results:
        return None
    runs = pd.DataFrame([{**result["trial"], **result, "loss": result["validation"][-1][1]} for result in results])
    wirings = study["settings"]["wirings"]
    order = runs.wiring.map(lambda wiring: wirings.index(wiring) if wiring in wirings else len(wirings))
    runs = runs.iloc[order.argsort(kind="stable")]
    commands = "\n".join(study["commands"])
    parts = [
        "# Study",
        f"```sh\n{commands}\n```",
        ", ".join([f"On {study['machine']}", *study["data"]]) + ".",
        _losses_of_rates(runs),
    ]
    for size in study["settings"]["sizes"]:
        parts += _comparison(study, runs[runs["size"] == size], size, folder)
    write_atomically(folder / REPORT_NAME, "\n\n".join(filter(None, parts)) + "\n")
    return folder / REPORT_NAME


def paired(losses: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, float]:
    """Return mean, 95 % interval and p-value of the differences from the baseline's losses of the same seeds.

    They are NaN where fewer pairs exist than a value needs, or if a run diverged.
    """
    apart = np.array([losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())])
    nothing = dict.fromkeys(("low", "high", "p"), math.nan)
    if not len(apart) or not np.isfinite(apart).all():
        return {"mean": math.nan, **nothing}
    if len(apart) < 2 or np.ptp(apart) == 0:
        return {"mean": float(apart.mean()), **nothing}
    test = stats.ttest_1samp(apart, 0.0)
    low, high = test.confidence_interval(CONFIDENCE)
    return {"mean": float(apart.mean()), "low": float(low), "high": float(high), "p": float(test.pvalue)}


def holm(probabilities: Sequence[float]) -> list[float]:
    """Adjust p-values for several comparisons (Holm 1979). NaN values are not counted and stay NaN."""
    known = pd.Series(probabilities, dtype=float).dropna().sort_values()
    factors = np.arange(len(known), 0, -1)
    adjusted = (known * factors).cummax().clip(upper=1.0)
    return [float(adjusted.get(index, math.nan)) for index in range(len(probabilities))]


def first_reaching(curve: Curve, loss: float) -> float | None:
    """Return where a curve first reaches a loss, interpolating linearly; None if it never does."""
    positions, losses = (np.array(values, dtype=float) for values in zip(*curve, strict=True))
    reached = np.flatnonzero(losses <= loss)
    if not len(reached):
        return None
    at = reached[0]
    if at == 0 or not math.isfinite(losses[at - 1]):
        return float(positions[at])
    return float(np.interp(loss, losses[[at, at - 1]], positions[[at, at - 1]]))


def _number(value: float, form: str = ".4f") -> str:
    return NOTHING if math.isnan(value) else f"{value:{form}}".replace("-", "−")


def _mean_and_deviation(values: Sequence[float], form: str = ".4f") -> str:
    """Format `mean ± sample standard deviation`; the mean alone for a single value, a dash for none."""
    known = pd.Series(values, dtype=float)
    spread = "" if len(known) < 2 else f" ± {_number(float(known.std()), form)}"
    return _number(float(known.mean()), form) + spread


def _losses_of_rates(runs: pd.DataFrame) -> str:
    tuning = runs[runs.kind == "tuning"]
    if tuning.empty:
        return ""
    table = tuning.pivot_table(index=["size", "wiring"], columns="learning_rate", values="loss")
    rows = [
        {"size": size, "wiring": wiring} | {f"{rate:g}": _number(loss) for rate, loss in row.items()}
        for (size, wiring), row in table.iterrows()
    ]
    return "Final validation losses by learning rate:\n\n" + markdown_table(rows)


def _by_seed(runs: pd.DataFrame) -> dict[int, float]:
    return dict(zip(runs.seed, runs.loss, strict=True))


def _comparison(study: Mapping[str, Any], runs: pd.DataFrame, size: str, folder: Path) -> list[str]:
    """Return the tables of one size at equal tokens and, if it is timed, at equal time."""
    times = study["step_times"].get(size, {})
    chosen = runs[runs.learning_rate == runs.wiring.map(lambda wiring: study["chosen"].get(f"{size}/{wiring}"))]
    tokens = chosen[(chosen.kind == "tokens") & (chosen.iterations == study["settings"]["iterations"])]
    steps = {wiring: max(1, round(study["settings"]["iterations"] * row["speedup"])) for wiring, row in times.items()}
    # A wiring with as many steps at equal time as at equal tokens, like standard, is trained once.
    timed = chosen[chosen.kind.isin(["tokens", "time"]) & (chosen.iterations == chosen.wiring.map(steps))]
    per_step = {"tokens": lambda wiring: study["tokens_per_step"] / 1e6, "time": lambda w: 1 / times[w]["speedup"]}
    groups = {"tokens": tokens, **({"time": timed} if len(timed.wiring.unique()) > 1 else {})}
    parts = [f"## {size}"]
    curves: dict[str, dict[str, list[Curve]]] = {}
    for budget, budget_runs in groups.items():
        scaled = budget_runs.assign(
            curve=[
                [(step * per_step[budget](wiring), loss) for step, loss in validation]
                for wiring, validation in zip(budget_runs.wiring, budget_runs.validation, strict=True)
            ]
        )
        curves[budget] = {
            wiring: list(wiring_runs.curve) for wiring, wiring_runs in scaled.groupby("wiring", sort=False)
        }
        unit = "million tokens" if budget == "tokens" else f"steps of {STANDARD} under the interconnect"
        parts += [f"### Equal {budget}", _outcomes(scaled, unit)]
    if times:
        parts += [_step_times(times)]
    if any(STANDARD in by_wiring for by_wiring in curves.values()):
        name = f"curves-{size}.png"
        _draw(curves, folder / name)
        parts.append(f"![Validation loss]({name})")
    return parts


def _outcomes(runs: pd.DataFrame, unit: str) -> str:
    """Return a table of final losses, paired differences from standard, and where its final loss is reached."""
    groups = {wiring: wiring_runs for wiring, wiring_runs in runs.groupby("wiring", sort=False)}
    baseline = groups.pop(STANDARD, None)
    if baseline is None:
        return f"No run of {STANDARD} is done yet."
    targets = _by_seed(baseline)
    differences = {wiring: paired(_by_seed(wiring_runs), targets) for wiring, wiring_runs in groups.items()}
    adjusted = dict(zip(differences, holm([difference["p"] for difference in differences.values()]), strict=True))
    rows = []
    for wiring, wiring_runs in {STANDARD: baseline, **groups}.items():
        first_steps = [
            first_reaching(curve, targets[seed])
            for seed, curve in zip(wiring_runs.seed, wiring_runs.curve, strict=True)
            if seed in targets
        ]
        reached = [step for step in first_steps if step is not None]
        difference = differences.get(wiring)
        interval = NOTHING
        p = NOTHING
        verdict = NOTHING
        if difference is not None and not math.isnan(difference["low"]):
            interval = f"{_number(difference['low'], '+.4f')} to {_number(difference['high'], '+.4f')}"
            p = f"{adjusted[wiring]:.3f}"
            verdict = "better" if difference["mean"] < 0 else "worse"
            if difference["low"] <= 0 <= difference["high"]:
                verdict = "no difference found"
            elif adjusted[wiring] <= 1 - CONFIDENCE:
                verdict = f"**{verdict}**"
        rows.append(
            {
                "wiring": wiring,
                "iterations": f"{wiring_runs.iterations.iloc[0]:,}",
                "runs": str(len(wiring_runs)),
                "final validation loss": _mean_and_deviation(wiring_runs.loss),
                f"less {STANDARD}'s": NOTHING if difference is None else _number(difference["mean"], "+.4f"),
                "95 % interval": interval,
                "verdict": verdict,
                "p (Holm)": p,
                f"{unit} to {STANDARD}'s final loss": _mean_and_deviation(reached, ".3g")
                + (f" ({len(reached)} of {len(first_steps)} runs)" if len(reached) < len(first_steps) else ""),
                "tokens/s": _mean_and_deviation(wiring_runs.tokens_per_second, ",.0f"),
            }
        )
    note = "A verdict is bold if it also holds among all comparisons of the table."
    return f"{markdown_table(rows)}\n\n{note}"


def _step_times(times: Mapping[str, Any]) -> str:
    rows = [
        {
            "wiring": wiring,
            "step, ms": f"{1e3 * row['seconds']:.2f}",
            f"{STANDARD} / wiring": f"{row['speedup']:.3f}",
            "spread": f"{row['spread']:.3f}",
            "interconnect": row["link"],
        }
        for wiring, row in times.items()
    ]
    return "Step times, with the wirings interleaved:\n\n" + markdown_table(rows)


def _draw(curves: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path) -> None:
    """Draw mean and range over seeds of the validation losses, over tokens and over time, as a PNG."""
    # Imported here because matplotlib takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 4.5 * len(curves), 4.5), layout="constrained")
    for axes, (budget, by_wiring) in zip(
        np.atleast_1d(figure.subplots(1, len(curves), sharey=True)), curves.items(), strict=True
    ):
        for wiring, wiring_curves in by_wiring.items():
            table = pd.concat([pd.Series(dict(curve)) for curve in wiring_curves], axis=1).dropna()
            table = table[table.index >= SHOWN_FROM * table.index.max()]
            (line,) = axes.plot(table.index, table.mean(axis=1), label=wiring)
            axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=line.get_color(), alpha=0.15)
        axes.set_xlabel("million tokens" if budget == "tokens" else f"time (steps of {STANDARD} under the link)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.supylabel("validation loss (nats per token)")
    figure.savefig(path, format="png", dpi=130)
