"""The report of a study: tables of losses with paired differences, step times, curves, and differences over sizes.

Two runs with the same seed form a pair: they share initial weights and order of samples, so their difference does not
contain the effect of the seed. All losses are in nats per token. Time is counted in steps of standard under the
interconnect: an iteration of a wiring takes 1 / speedup.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd

from ladder_lab.effective_speed import ScalingLaw
from ladder_lab.output import markdown_table
from ladder_lab.study.figures import (
    NOTHING,
    Curve,
    at_chosen_rates,
    at_equal_tokens,
    first_reaching,
    holm,
    losses_by_seed,
    mean_and_deviation,
    number,
    paired,
    verdict,
)
from ladder_lab.study.over_sizes import over_sizes, scaling_law, transferred_rates
from ladder_lab.study.trials import STANDARD, read_results
from megatron_ladder.errors import UserError
from megatron_ladder.files import read_if_exists, write_atomically
from megatron_ladder.typed import read_json, typed

REPORT_NAME = "report.md"
STUDY_NAME = "study.json"
SHOWN_FROM = 0.3
"""Share of the run that is not drawn, because its losses fall too fast to show differences."""


class Study(TypedDict):
    """The content of `study.json`."""

    data: list[str]
    settings: dict[str, Any]
    sizes: dict[str, dict[str, int]]
    chosen: dict[str, float]
    step_times: dict[str, Any]
    tokens_per_step: int
    machine: str
    commands: list[str]


def read_study(folder: Path) -> Study | None:
    """Return the study of a folder, or None if it has none; raise UserError if it is damaged."""
    path = folder / STUDY_NAME
    content = read_if_exists(path)
    if content is None:
        return None
    try:
        return typed(read_json(content), Study)
    except ValueError as error:
        raise UserError(f"{path}: {error}: restore it, or give another --output-dir") from None


def write_report(folder: Path) -> Path | None:
    """Write `report.md` and its pictures into the folder of a study, and return its path; None without results.

    Raises UserError if the folder has no study.
    """
    study = read_study(folder)
    if study is None:
        raise UserError(f"{folder}: no {STUDY_NAME}; expected the folder of a study")
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
        transferred_rates(study),
    ]
    law = scaling_law(study, runs)
    for size in study["settings"]["sizes"]:
        parts += _comparison(study, runs, size, law, folder)
    parts += over_sizes(study, runs, folder)
    write_atomically(folder / REPORT_NAME, "\n\n".join(filter(None, parts)) + "\n")
    return folder / REPORT_NAME


def _losses_of_rates(runs: pd.DataFrame) -> str:
    tuning = runs[runs.kind == "tuning"]
    if tuning.empty:
        return ""
    table = tuning.pivot_table(index=["size", "wiring"], columns="learning_rate", values="loss")
    rows = [
        {"size": size, "wiring": wiring} | {f"{rate:g}": number(loss) for rate, loss in row.items()}
        for (size, wiring), row in table.iterrows()
    ]
    return "Final validation losses by learning rate:\n\n" + markdown_table(rows)


def _comparison(study: Mapping[str, Any], runs: pd.DataFrame, size: str, law: ScalingLaw, folder: Path) -> list[str]:
    """Return the tables of one size at equal tokens and, if it is timed, at equal time."""
    times = study["step_times"].get(size, {})
    iterations = study["sizes"][size]["iterations"]
    tokens = at_equal_tokens(study, runs, size)
    steps = {wiring: max(1, round(iterations * row["speedup"])) for wiring, row in times.items()}
    chosen = at_chosen_rates(study, runs, size)
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
        parts += [_step_times(times), _effective_speeds(tokens, times, law)]
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
    targets = losses_by_seed(baseline)
    differences = {wiring: paired(losses_by_seed(wiring_runs), targets) for wiring, wiring_runs in groups.items()}
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
        judgement = NOTHING
        if difference is not None and not math.isnan(difference["low"]):
            interval = f"{number(difference['low'], '+.4f')} to {number(difference['high'], '+.4f')}"
            p = f"{adjusted[wiring]:.3f}"
            judgement = verdict(difference, adjusted[wiring], "better", "worse", "no difference found")
        rows.append(
            {
                "wiring": wiring,
                "iterations": f"{wiring_runs.iterations.iloc[0]:,}",
                "runs": str(len(wiring_runs)),
                "final validation loss": mean_and_deviation(wiring_runs.loss),
                f"minus {STANDARD}'s": NOTHING if difference is None else number(difference["mean"], "+.4f"),
                "95 % interval": interval,
                "verdict": judgement,
                "p (Holm)": p,
                f"{unit} to {STANDARD}'s final loss": mean_and_deviation(reached, ".3g")
                + (f" ({len(reached)} of {len(first_steps)} runs)" if len(reached) < len(first_steps) else ""),
                "tokens/s": mean_and_deviation(wiring_runs.tokens_per_second, ",.0f"),
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


def _effective_speeds(tokens: pd.DataFrame, times: Mapping[str, Any], law: ScalingLaw) -> str:
    """Return a table of effective speeds, with intervals over the pairs of runs at equal tokens."""
    losses = {wiring: losses_by_seed(wiring_runs) for wiring, wiring_runs in tokens.groupby("wiring", sort=False)}
    standard = losses.pop(STANDARD, {})
    # Logarithms, because the figure is a ratio.
    logarithms = {}
    for wiring, by_seed in losses.items():
        if wiring in times:
            speeds = {
                seed: law.effective_speed(standard[seed], loss, times[wiring]["speedup"])
                for seed, loss in by_seed.items()
                if seed in standard
            }
            logarithms[wiring] = paired(
                {seed: math.log(speed) for seed, speed in speeds.items()}, dict.fromkeys(speeds, 0.0)
            )
    adjusted = dict(zip(logarithms, holm([logarithm["p"] for logarithm in logarithms.values()]), strict=True))
    rows = []
    for wiring, logarithm in logarithms.items():
        mean, low, high = (math.exp(logarithm[name]) for name in ("mean", "low", "high"))
        speedup = times[wiring]["speedup"]
        rows.append(
            {
                "wiring": wiring,
                f"compute of {STANDARD} for the same loss": number(mean / speedup, ".3f"),
                "speed-up": number(speedup, ".3f"),
                "effective speed": number(mean, ".3f"),
                "95 % interval": NOTHING if math.isnan(low) else f"{number(low, '.3f')} to {number(high, '.3f')}",
                "verdict": verdict(logarithm, adjusted[wiring], "does not pay", "pays", "undecided"),
            }
        )
    if not rows:
        return ""
    return (
        f"Effective speed: ((L of {STANDARD} - L_inf) / (L - L_inf))^(1 / alpha), the share of its compute with which "
        f"{STANDARD} reaches the loss L at equal tokens, times the speed-up of a step, with {law}:\n\n"
        + markdown_table(rows)
    )


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
