"""The report of an adaptation: tables, one sentence per comparison, and a picture."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ladder.files import write_atomically
from megatron_ladder.lab.study.adaptation import CONTROL, SEED_OFFSET, AdaptationResults, read_adaptation
from megatron_ladder.lab.study.figures import write_png
from megatron_ladder.lab.study.schema import TRIALS_NAME, read_result, read_study
from megatron_ladder.lab.study.statistics import LossVerdict, Paired, deviation, mean
from megatron_ladder.lab.study.tables import NOTHING, markdown_table, mean_and_deviation

if TYPE_CHECKING:
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
    plan, study = read_adaptation(folder), read_study(folder)
    if plan is None or study is None:
        return None
    found = {trial: read_result(folder / TRIALS_NAME / trial.name) for _, _, trial in plan.trials()}
    adapted = AdaptationResults(plan, {trial: result for trial, result in found.items() if result is not None})
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


def _adaptation_report(adapted: AdaptationResults) -> str:
    """Return the page in Markdown, from the finished runs."""
    plan = adapted.plan
    seeds, percents = len(plan.seeds), (0, *plan.percents)
    lengths = ", ".join(f"{plan.iterations(percent)} ({percent} %)" for percent in plan.percents)
    expected = seeds * len(plan.upper) * len(percents)
    missing = expected - len(adapted.finished)

    def cell(values: Sequence[float], form: str = ".4f") -> str:
        text = mean_and_deviation(values, form)
        return text if len(values) in (0, seeds) else f"{text} ({len(values)} of {seeds})"

    heads = {percent: f"healed {percent} %" if percent else "zero-shot" for percent in percents}
    losses, differences = [], []
    for upper in plan.upper:
        name = {"upper layers": "0, the control" if upper == CONTROL else str(upper)}
        healed = {head: cell([*adapted.losses(upper, percent).values()]) for percent, head in heads.items()}
        if upper == CONTROL:
            healed[heads[0]] = NOTHING
        else:
            apart = {percent: adapted.to_control(upper, percent).differences for percent in percents}
            differences.append({**name, **{head: cell(apart[percent], "+.4f") for percent, head in heads.items()}})
        losses.append({**name, "standard, before": cell([*adapted.before.values()]), **healed})
    parts = [
        "# Adaptation: a standard model becomes a hybrid",
        f"Standard models of size {plan.size} ({plan.num_layers} layers, {plan.standard_iterations} steps, seeds "
        f"{_numbers(plan.seeds)}) are rewired: their upper layers become ladder, the tensors stay. Zero-shot is the "
        f"validation loss right after rewiring. Healing takes {lengths} steps with a new AdamW, learning rate "
        f"{plan.learning_rate:g} ({plan.learning_rate / plan.standard_learning_rate:g} of the standard training's) and "
        "a schedule of the length of the run. It uses the training data again, in the order of another seed (the "
        f"model's + {SEED_OFFSET}), which also draws the validation samples. The row of 0 layers is the control: the "
        "standard model, trained further in the same way.",
        f"**This adaptation is not finished**: {missing} of {expected} runs are missing." if missing else "",
        f"Validation loss in nats per token: mean and standard deviation over {seeds} seeds; with their number if runs "
        "are missing.",
        markdown_table(losses),
        "Difference from the control of the same seed and length: mean and standard deviation over seeds. Above zero "
        "is worse than the standard model.",
        markdown_table(differences),
        "*Back* means that the mean difference is at most the standard deviation of the standard model's loss over "
        "seeds.",
        "\n".join(f"* {sentence}" for sentence in _findings(adapted)),
        f"![Loss over the number of rewired layers]({FIGURE_NAME})",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _findings(adapted: AdaptationResults) -> list[str]:
    """Return one sentence per reference: the hybrids that are back within the seeds' spread of it."""
    control = _finding(adapted, adapted.to_control, lambda percent: adapted.losses(CONTROL, percent))
    before = _finding(adapted, adapted.to_before, lambda percent: adapted.before)
    return [
        f"Compared with the standard model trained for as long{control}",
        f"Compared with the original standard model{before}",
    ]


def _finding(
    adapted: AdaptationResults,
    compare: Callable[[int, int], Paired],
    reference: Callable[[int], Mapping[int, float]],
) -> str:
    """Compare all hybrids with one reference, and return the end of the sentence.

    Args:
        compare: maps upper layers and percent to the paired differences.
        reference: maps percent to the reference's losses by seed.
    """
    plan, seeds = adapted.plan, len(adapted.plan.seeds)
    if seeds < 2:
        return ": no conclusion, because one seed has no spread."
    cases = [(upper, percent) for upper in plan.rewired for percent in plan.percents]
    if any(compare(*case).pairs < seeds or len(reference(case[1])) < seeds for case in cases):
        return ": no conclusion yet, because runs are missing."
    back: dict[int, list[str]] = {}
    for upper, percent in cases:
        difference = compare(upper, percent)
        if difference.mean <= deviation([*reference(percent).values()]):
            note = " (though significantly worse)" if difference.verdict is LossVerdict.WORSE else ""
            back.setdefault(upper, []).append(f"{percent} %{note}")
    if not back:
        return ": **no** hybrid is back, after any length of healing."
    named = "; ".join(f"upper {upper} after {', '.join(healed)}" for upper, healed in back.items())
    others = [upper for upper in plan.rewired if upper not in back]
    rest = f"; not back after any length: upper {_numbers(others)}" if others else ""
    return f", these are back: **{named}**{rest}."


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _draw_adaptation(adapted: AdaptationResults) -> "Figure":
    """Draw losses over the number of rewired layers, and next to them the differences from the control.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plan = adapted.plan
    for number, percent in enumerate((0, *plan.percents)):
        losses = [[*adapted.losses(upper, percent).values()] for upper in plan.upper]
        differences = [adapted.to_control(upper, percent).differences for upper in plan.upper]
        look = {"marker": "o", "capsize": 3, "color": f"C{number}" if percent else "0.4"}
        look["label"] = f"healed {percent} %" if percent else "zero-shot"
        for axes, values in ((left, losses), (right, differences)) if percent else ((left, losses),):
            bars = [0.0 if math.isnan(spread) else spread for spread in map(deviation, values)]
            axes.errorbar(plan.upper, [mean(some) for some in values], yerr=bars, **look)
    left.axhline(mean([*adapted.before.values()]), color="black", linestyle=":", label="standard, before")
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
