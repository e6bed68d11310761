"""Adaptation: rewires the upper layers of standard models, and trains them for a short time (healing).

Validation losses are measured right after rewiring, and after healing runs of several lengths. The control is the
standard model itself, trained for as long: it shows the effect of the additional training alone.
"""

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ladder_lab.markdown import markdown_table
from ladder_lab.study.figures import write_png
from ladder_lab.study.schema import TRIALS_NAME, Result, Trial, read_json, read_result, read_study
from ladder_lab.study.statistics import LossVerdict, Paired, deviation, mean, paired
from ladder_lab.study.tables import NOTHING, mean_and_deviation
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADAPTATION_NAME = "adaptation.json"
REPORT_NAME = "adaptation.md"
FIGURE_NAME = "adaptation.png"
CONTROL = 0
"""Number of rewired layers of the control, which stays standard."""
SEED_OFFSET = 1000
"""Added to the seeds of adapted models, including the control, so that healing sees the data in another order."""


@dataclass(frozen=True)
class Adaptation:
    """The models to adapt, and how they are healed.

    `upper` has the numbers of rewired upper layers and `percents` the lengths of healing in percent of the original
    training, both ascending. `learning_rate` is that of healing.
    """

    size: str
    num_layers: int
    upper: tuple[int, ...]
    percents: tuple[int, ...]
    seeds: tuple[int, ...]
    standard_learning_rate: float
    standard_iterations: int
    learning_rate: float
    command: tuple[str, ...] = ()

    def standard(self, seed: int) -> Trial:
        """Return the trial that trains the standard model: the one at equal tokens."""
        return Trial("tokens", STANDARD, self.size, seed, self.standard_learning_rate, self.standard_iterations)

    def iterations(self, percent: int) -> int:
        """Return the steps of a healing run; 0 without healing."""
        return max(1, round(self.standard_iterations * percent / 100)) if percent else 0

    def trial(self, upper: int, percent: int, seed: int) -> Trial:
        """Return the trial that heals an adapted model; with 0 percent, it is evaluated right after rewiring."""
        wiring = STANDARD if upper == CONTROL else "ladder"
        detail = f"upper{upper}-{percent}pct-of-{self.standard_iterations}"
        rate = self.learning_rate if percent else self.standard_learning_rate
        return Trial("adapt", wiring, self.size, seed, rate, self.iterations(percent), detail)

    def trials(self) -> Iterator[tuple[int, int, Trial]]:
        """Yield upper layers, percent and trial of all; short trials first, so that results come early."""
        for percent, seed, upper in itertools.product((0, *self.percents), self.seeds, self.upper):
            yield upper, percent, self.trial(upper, percent, seed)


def default_upper(num_layers: int) -> tuple[int, ...]:
    """Return 0, a quarter, a half, three quarters and all of the layers."""
    return tuple(sorted({num_layers * quarters // 4 for quarters in range(5)}))


@dataclass(frozen=True)
class _AdaptationResults:
    plan: Adaptation
    finished: Mapping[Trial, Result]

    def losses(self, upper: int, percent: int) -> dict[int, float]:
        """Map each seed to the validation loss of an adapted model, on the same samples for all."""
        trials = {seed: self.plan.trial(upper, percent, seed) for seed in self.plan.seeds}
        return {seed: self.finished[trial].final_loss for seed, trial in trials.items() if trial in self.finished}

    def difference(self, upper: int, percent: int, control_percent: int) -> Paired:
        return paired(self.losses(upper, percent), self.losses(CONTROL, control_percent))


def write_adaptation(folder: Path, output: Path) -> Path | None:
    """Write `adaptation.md` and its picture into `output`, and return its path; None if the study has no adaptation."""
    plan, study = _read_adaptation(folder), read_study(folder)
    if plan is None or study is None:
        return None
    found = {trial: read_result(folder / TRIALS_NAME / trial.name) for _, _, trial in plan.trials()}
    adapted = _AdaptationResults(plan, {trial: result for trial, result in found.items() if result is not None})
    output.mkdir(parents=True, exist_ok=True)
    write_png(_draw_adaptation(adapted), output / FIGURE_NAME)
    facts = [
        f"```sh\n{shlex.join(plan.command)}\n```\n",
        f"* Data: {study.data}.",
        f"* Flags of every run: `{shlex.join(study.training_flags)}`.",
        f"* Machine: {', '.join(f'{name} {value}' for name, value in study.machine.items())}.",
    ]
    write_atomically(output / REPORT_NAME, "\n".join([_adaptation_report(adapted), *facts, ""]))
    return output / REPORT_NAME


def _read_adaptation(folder: Path) -> Adaptation | None:
    return read_json(folder / ADAPTATION_NAME, Adaptation, "an adaptation", "remove it")


def _adaptation_report(adapted: _AdaptationResults) -> str:
    plan = adapted.plan
    seeds, percents = len(plan.seeds), (0, *plan.percents)
    lengths = ", ".join(f"{plan.iterations(percent)} ({percent} %)" for percent in plan.percents)
    expected = seeds * len(plan.upper) * len(percents)
    missing = expected - len(adapted.finished)

    def cell(values: Sequence[float], form: str = ".4f") -> str:
        text = mean_and_deviation(values, form)
        return text if len(values) in (0, seeds) else f"{text} ({len(values)} of {seeds})"

    heads = {percent: f"healed {percent} %" if percent else "zero-shot" for percent in percents}
    before = cell([*adapted.losses(CONTROL, 0).values()])
    losses, differences = [], []
    for upper in plan.upper:
        name = {"upper layers": "0, the control" if upper == CONTROL else str(upper)}
        healed = {head: cell([*adapted.losses(upper, percent).values()]) for percent, head in heads.items()}
        if upper == CONTROL:
            healed[heads[0]] = NOTHING
        else:
            apart = {percent: adapted.difference(upper, percent, percent).differences for percent in percents}
            differences.append({**name, **{head: cell(apart[percent], "+.4f") for percent, head in heads.items()}})
        losses.append({**name, "standard, before": before, **healed})
    parts = [
        "# Adaptation: a standard model becomes a hybrid",
        f"Standard models of size {plan.size} ({plan.num_layers} layers, {plan.standard_iterations} steps, seeds "
        f"{', '.join(map(str, plan.seeds))}) are rewired: their upper layers become ladder, the tensors stay. "
        f"Zero-shot is the validation loss right after rewiring. Healing takes {lengths} steps with a new AdamW, "
        f"learning rate {plan.learning_rate:g} ({plan.learning_rate / plan.standard_learning_rate:g} of the original) "
        f"and a schedule of the length of the run. Another seed (the model's + {SEED_OFFSET}) orders the same data and "
        "draws the validation samples. The row of 0 layers is the control: the standard model, trained further.",
        f"**This adaptation is not finished**: {missing} of {expected} runs are missing." if missing else "",
        f"Validation loss in nats per token: mean and standard deviation over {seeds} seeds.",
        markdown_table(losses),
        "Difference from the control of the same seed and length; above zero is worse than the standard model.",
        markdown_table(differences),
        "*Back* means that the mean difference is at most the deviation of the standard model's loss over seeds.",
        "\n".join(f"* {sentence}" for sentence in _findings(adapted)),
        f"![Loss over the number of rewired layers]({FIGURE_NAME})",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _findings(adapted: _AdaptationResults) -> list[str]:
    percents = adapted.plan.percents
    references = {
        "the standard model trained for as long": {percent: percent for percent in percents},
        "the original standard model": dict.fromkeys(percents, 0),
    }
    return [f"Compared with {name}{_finding(adapted, one)}" for name, one in references.items()]


def _finding(adapted: _AdaptationResults, references: Mapping[int, int]) -> str:
    """Compare all hybrids with the control, whose length of healing `references` maps from theirs."""
    plan, seeds = adapted.plan, len(adapted.plan.seeds)
    if seeds < 2:
        return ": no conclusion, because one seed has no spread."
    back: dict[int, list[str]] = {}
    rewired = [upper for upper in plan.upper if upper != CONTROL]
    for upper in rewired:
        for percent, control_percent in references.items():
            difference = adapted.difference(upper, percent, control_percent)
            reference = [*adapted.losses(CONTROL, control_percent).values()]
            if difference.pairs < seeds or len(reference) < seeds:
                return ": no conclusion yet, because runs are missing."
            if difference.mean <= deviation(reference):
                note = " (though significantly worse)" if difference.verdict is LossVerdict.WORSE else ""
                back.setdefault(upper, []).append(f"{percent} %{note}")
    if not back:
        return ": **no** hybrid is back, after any length of healing."
    named = "; ".join(f"upper {upper} after {', '.join(healed)}" for upper, healed in back.items())
    others = ", ".join(str(upper) for upper in rewired if upper not in back)
    rest = f"; not back after any length: upper {others}" if others else ""
    return f", these are back: **{named}**{rest}."


def _draw_adaptation(adapted: _AdaptationResults) -> "Figure":
    """Draw losses over the number of rewired layers, and next to them the differences from the control."""
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plan = adapted.plan
    for number, percent in enumerate((0, *plan.percents)):
        losses = [[*adapted.losses(upper, percent).values()] for upper in plan.upper]
        differences = [adapted.difference(upper, percent, percent).differences for upper in plan.upper]
        look = {"marker": "o", "capsize": 3, "color": f"C{number}" if percent else "0.4"}
        look["label"] = f"healed {percent} %" if percent else "zero-shot"
        for axes, values in ((left, losses), (right, differences)) if percent else ((left, losses),):
            bars = [0.0 if math.isnan(spread) else spread for spread in map(deviation, values)]
            axes.errorbar(plan.upper, [mean(some) for some in values], yerr=bars, **look)
    left.axhline(mean([*adapted.losses(CONTROL, 0).values()]), color="black", linestyle=":", label="standard, before")
    left.set_ylabel("validation loss, nats per token")
    spread = deviation([*adapted.losses(CONTROL, plan.percents[-1]).values()])
    if not math.isnan(spread):
        right.axhspan(-spread, spread, color="0.9", label=f"control after {plan.percents[-1]} %: spread over seeds")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set_ylabel("difference from the control")
    for axes in (left, right):
        axes.set_xlabel(f"rewired upper layers of {plan.num_layers}")
        axes.set_xticks(plan.upper)
        axes.legend(fontsize="small")
    return figure
