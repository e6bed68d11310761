"""The report of an adaptation: tables, one sentence per comparison, and a picture."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ladder.files import write_atomically
from megatron_ladder.lab.study.adaptation import CONTROL, SEED_OFFSET, AdaptationResults, read_adaptation
from megatron_ladder.lab.study.description import TRIALS_NAME, read_study
from megatron_ladder.lab.study.figures import write_png
from megatron_ladder.lab.study.statistics import LossVerdict, Paired, deviation, mean
from megatron_ladder.lab.study.tables import NOTHING, markdown_table, mean_and_deviation
from megatron_ladder.lab.study.trial import read_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_NAME = "adaptation.md"
FIGURE_NAME = "adaptation.png"


def write_adaptation(folder: Path, output: Path) -> Path | None:
    """Write `adaptation.md` and its picture into `output`, and return the report's path.

    Args:
        folder: a study's.
        output: folder for the report; created if needed.

    Returns:
        None if the study has no adaptation.

    Raises:
        UserError: a file of the study is invalid.
    """
    adaptation, study = read_adaptation(folder), read_study(folder)
    if adaptation is None or study is None:
        return None
    trials = [trial for _, _, trial in adaptation.trials()]
    found = {trial: read_result(folder / TRIALS_NAME / trial.name) for trial in trials}
    results = {trial: result for trial, result in found.items() if result is not None}
    adapted = AdaptationResults.of(adaptation, results)
    output.mkdir(parents=True, exist_ok=True)
    write_png(_draw_adaptation(adapted), output / FIGURE_NAME)
    path = output / REPORT_NAME
    machine = ", ".join(f"{name} {value}" for name, value in study.machine.items())
    facts = [
        f"```sh\n{shlex.join(adaptation.command)}\n```\n",
        f"* Data: {study.data}.",
        f"* Flags of every run: `{shlex.join(study.training_flags)}`.",
        f"* Machine: {machine}.",
    ]
    write_atomically(path, "\n".join([_adaptation_report(adapted), *facts, ""]))
    return path


def _adaptation_report(adapted: AdaptationResults) -> str:
    """Return the page in Markdown, from the finished runs."""
    plan = adapted.adaptation
    lengths = ", ".join(f"{plan.iterations(percent)} ({percent} %)" for percent in plan.percents)
    seeds = len(plan.seeds)
    missing = sum(seeds - len(found) for found in adapted.losses.values())
    parts = [
        "# Adaptation: a standard model becomes a hybrid",
        f"Standard models of size {plan.size} ({plan.num_layers} layers, {plan.standard_iterations} steps, seeds "
        f"{_numbers(plan.seeds)}) are rewired: their upper layers become ladder, the tensors stay. Zero-shot is the "
        f"validation loss right after rewiring. Healing takes {lengths} steps with a new AdamW, learning rate "
        f"{plan.learning_rate:g} ({plan.learning_rate / plan.standard_learning_rate:g} of the standard training's) and "
        "a schedule of the length of the run. It uses the training data again, in the order of another seed (the "
        f"model's + {SEED_OFFSET}), which also draws the validation samples. The row of 0 layers is the control: the "
        "standard model, trained further in the same way.",
        f"**This adaptation is not finished**: {missing} of {seeds * len(adapted.losses)} runs are missing."
        if missing
        else "",
        f"Validation loss in nats per token: mean and standard deviation over {seeds} seeds; with their number if runs "
        "are missing.",
        _losses_table(adapted),
        "Difference from the control of the same seed and length: mean and standard deviation over seeds. Above zero "
        "is worse than the standard model.",
        _differences_table(adapted),
        "*Back* means that the mean difference is at most the standard deviation of the standard model's loss over "
        "seeds.",
        "\n".join(f"* {sentence}" for sentence in _findings(adapted)),
        f"![Loss over the number of rewired layers]({FIGURE_NAME})",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _findings(adapted: AdaptationResults) -> list[str]:
    """Return one sentence per reference: the hybrids that are back within the seeds' spread of it."""
    return [
        _finding(
            adapted,
            "the standard model trained for as long",
            lambda upper, percent: (adapted.to_control(upper, percent), adapted.losses[CONTROL, percent]),
        ),
        _finding(
            adapted,
            "the original standard model",
            lambda upper, percent: (adapted.to_before(upper, percent), adapted.before),
        ),
    ]


def _finding(
    adapted: AdaptationResults,
    reference: str,
    against: Callable[[int, int], tuple[Paired, Mapping[int, float]]],
) -> str:
    """Compare all hybrids with one reference.

    Args:
        against: maps upper layers and percent to the paired differences, and the reference's losses by seed.
    """
    layers, percents = adapted.rewired, adapted.adaptation.percents
    cases = {(upper, percent): against(upper, percent) for upper in layers for percent in percents}
    found = {case: adapted.is_back(*compared) for case, compared in cases.items()}
    if len(adapted.adaptation.seeds) < 2:
        return f"Compared with {reference}: no conclusion, because one seed has no spread."
    if None in found.values():
        return f"Compared with {reference}: no conclusion yet, because runs are missing."
    back = {
        upper: [
            f"{percent} %" + " (though significantly worse)" * (cases[upper, percent][0].verdict is LossVerdict.WORSE)
            for percent in percents
            if found[upper, percent]
        ]
        for upper in layers
        if any(found[upper, percent] for percent in percents)
    }
    if not back:
        return f"Compared with {reference}: **no** hybrid is back, after any length of healing."
    named = "; ".join(f"upper {upper} after {', '.join(healed)}" for upper, healed in back.items())
    others = [upper for upper in layers if upper not in back]
    rest = f"; not back after any length: upper {_numbers(others)}" if others else ""
    return f"Compared with {reference}, these are back: **{named}**{rest}."


def _losses_table(adapted: AdaptationResults) -> str:
    plan = adapted.adaptation
    seeds = len(plan.seeds)
    rows = []
    for upper in plan.upper:
        cells = [_cell([*adapted.losses[upper, percent].values()], seeds) for percent in (0, *plan.percents)]
        if upper == CONTROL:
            cells[0] = NOTHING
        rows.append([_name(upper), _cell([*adapted.before.values()], seeds), *cells])
    heads = ["upper layers", "standard, before", "zero-shot", *(f"healed {percent} %" for percent in plan.percents)]
    return markdown_table(heads, rows)


def _differences_table(adapted: AdaptationResults) -> str:
    plan = adapted.adaptation
    rows = []
    for upper in adapted.rewired:
        found = [adapted.to_control(upper, percent).differences for percent in (0, *plan.percents)]
        rows.append([_name(upper), *(_cell(differences, len(plan.seeds), "+.4f") for differences in found)])
    return markdown_table(["upper layers", "zero-shot", *(f"healed {percent} %" for percent in plan.percents)], rows)


def _name(upper: int) -> str:
    return "0, the control" if upper == CONTROL else str(upper)


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _cell(values: Sequence[float], seeds: int, form: str = ".4f") -> str:
    """Format `mean ± deviation`, followed by ` (2 of 3)` if some values are missing."""
    text = mean_and_deviation(values, form)
    return text if len(values) in (0, seeds) else f"{text} ({len(values)} of {seeds})"


def _draw_adaptation(adapted: AdaptationResults) -> "Figure":
    """Draw losses over the number of rewired layers, and next to them the differences from the control.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plan = adapted.adaptation
    for number, percent in enumerate((0, *plan.percents)):
        label, color = (f"healed {percent} %", f"C{number}") if percent else ("zero-shot", "0.4")
        losses = [[*adapted.losses[upper, percent].values()] for upper in plan.upper]
        _errors(left, plan.upper, [mean(some) for some in losses], [deviation(some) for some in losses], label, color)
        if percent:
            differences = [adapted.to_control(upper, percent) for upper in plan.upper]
            spreads = [deviation(one.differences) for one in differences]
            _errors(right, plan.upper, [one.mean for one in differences], spreads, label, color)
    before = [*adapted.before.values()]
    left.axhline(mean(before), color="black", linestyle=":", label="standard, before")
    left.set_ylabel("validation loss, nats per token")
    spread = deviation([*adapted.losses[CONTROL, plan.percents[-1]].values()])
    if not math.isnan(spread):
        right.axhspan(-spread, spread, color="0.9", label=f"control after {plan.percents[-1]} %: spread over seeds")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set_ylabel("difference from the control")
    for axes in (left, right):
        axes.set_xlabel(f"rewired upper layers of {plan.num_layers}")
        axes.set_xticks(plan.upper)
        axes.legend(fontsize="small")
    return figure


def _errors(
    axes: "Axes", places: Sequence[int], means: Sequence[float], spreads: Sequence[float], label: str, color: str
) -> None:
    bars = [0.0 if math.isnan(spread) else spread for spread in spreads]
    axes.errorbar(places, means, yerr=bars, marker="o", capsize=3, label=label, color=color)
