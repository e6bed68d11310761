"""What an adaptation says: tables, the sentences that they support, and a picture."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ladder.data.files import write_atomically
from megatron_ladder.lab.study.adaptation import CONTROL, SEED_OFFSET, Adapted, read_adaptation
from megatron_ladder.lab.study.description import TRIALS_NAME, read_study
from megatron_ladder.lab.study.figures import require_matplotlib, write_png
from megatron_ladder.lab.study.statistics import Paired, Verdict, deviation, mean
from megatron_ladder.lab.study.trial import read_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "-"
REPORT_NAME = "adaptation.md"
FIGURE_NAME = "adaptation.png"


def write_adaptation(folder: Path, output: Path) -> Path | None:
    """Writes `adaptation.md` and its picture into `output`, from what is done of it.

    Args:
        folder: a study's.
        output: is made if it is not there.

    Returns:
        The report's path; None if the study has no adaptation.

    Raises:
        UserError: a file of the study cannot be read, or matplotlib is not installed.
    """
    adaptation, study = read_adaptation(folder), read_study(folder)
    if adaptation is None or study is None:
        return None
    require_matplotlib()
    trials = [trial for _, _, trial in adaptation.trials()]
    found = {trial: read_result(folder / TRIALS_NAME / trial.name) for trial in trials}
    adapted = Adapted.of(adaptation, {trial: result for trial, result in found.items() if result is not None})
    output.mkdir(parents=True, exist_ok=True)
    write_png(draw_adaptation(adapted), output / FIGURE_NAME)
    path = output / REPORT_NAME
    machine = ", ".join(f"{name} {value}" for name, value in study.machine.items())
    facts = [
        f"```sh\n{shlex.join(adaptation.command)}\n```\n",
        f"* Data: {study.data}.",
        f"* Flags of every run: `{shlex.join(study.training_flags)}`.",
        f"* Machine: {machine}.",
    ]
    write_atomically(path, "\n".join([adaptation_report(adapted), *facts, ""]).encode())
    return path


def adaptation_report(adapted: Adapted) -> str:
    """The section of a report, in Markdown, with what is there of it."""
    plan = adapted.adaptation
    lengths = ", ".join(f"{plan.iterations(percent)} ({percent} %)" for percent in plan.percents)
    return "\n".join(
        [
            "# Adaptation: a standard model becomes a hybrid",
            "",
            f"Standard models of size {plan.size} ({plan.num_layers} layers, {plan.standard_iterations} steps, seeds "
            f"{_numbers(plan.seeds)}) are rewired: their upper layers become ladder, the tensors stay. Zero-shot is "
            f"the validation loss right after it. Healing takes {lengths} steps of the same batch: a run each, from "
            f"the rewired weights with a new AdamW, learning rate {plan.learning_rate:g} "
            f"({plan.learning_rate / plan.standard_learning_rate:g} of the standard training's) and a schedule of the "
            "same form as before, as long as the run. The data are those of the training before, in the order of "
            f"another seed (the model's + {SEED_OFFSET}), so that samples come again; all losses are of "
            "the validation samples that this seed draws. The row of 0 layers is the control: the standard model, "
            "trained on in the same way, with the same samples.",
            "",
            *_missing(adapted),
            f"Validation loss in nats a token: mean and standard deviation over {len(plan.seeds)} seeds; where runs "
            "are missing, how many there are.",
            "",
            *_losses(adapted),
            "",
            "Difference to the control of the same seed and length: mean and standard deviation over seeds. Above zero "
            "is worse than the standard model.",
            "",
            *_differences(adapted),
            "",
            *verdict(adapted),
            "",
            f"![Loss over the number of rewired layers]({FIGURE_NAME})",
            "",
        ]
    )


def verdict(adapted: Adapted) -> list[str]:
    """Sentences: which hybrids are back within the seeds' spread of the standard model, or that none is."""
    control = _sentence(
        adapted,
        "the standard model trained on for as long",
        lambda upper, percent: (adapted.to_control(upper, percent), adapted.losses[CONTROL, percent]),
    )
    before = _sentence(
        adapted,
        "the standard model as it was before",
        lambda upper, percent: (adapted.to_before(upper, percent), adapted.before),
    )
    return [
        "*Back* means here: the mean difference is at most the standard deviation of the standard model's loss over "
        "seeds, to which the validation samples that each seed draws contribute. A difference within it may still be "
        "one: where the 95 % interval of the paired differences lies above zero, that is said.",
        "",
        f"* {control}",
        f"* {before}",
    ]


def _sentence(
    adapted: Adapted, what: str, against: Callable[[int, int], tuple[Paired, Mapping[int, float]]]
) -> str:
    """What holds against one of the standard models.

    Args:
        against: upper layers and percent -> the paired differences, and the standard model's losses by seed.
    """
    layers, percents = adapted.rewired, adapted.adaptation.percents
    cases = {(upper, percent): against(upper, percent) for upper in layers for percent in percents}
    found = {case: adapted.is_back(*compared) for case, compared in cases.items()}
    if len(adapted.adaptation.seeds) < 2:
        return f"Against {what}: one seed has no spread, so nothing can be said."
    if None in found.values():
        return f"Against {what}: runs are missing, so nothing is said yet."
    back = {
        upper: [
            f"{percent} %" + " (though told apart as worse)" * (cases[upper, percent][0].verdict is Verdict.WORSE)
            for percent in percents
            if found[upper, percent]
        ]
        for upper in layers
        if any(found[upper, percent] for percent in percents)
    }
    if not back:
        return f"Against {what}: **no** hybrid is back within the spread over seeds, at no length of healing."
    told = "; ".join(f"upper {upper} after {', '.join(healed)}" for upper, healed in back.items())
    others = [upper for upper in layers if upper not in back]
    rest = f" Not back after any length: upper {_numbers(others)}." if others else ""
    return f"Against {what}, back within the spread over seeds: **{told}**.{rest}"


def _missing(adapted: Adapted) -> list[str]:
    seeds = len(adapted.adaptation.seeds)
    missing = sum(seeds - len(found) for found in adapted.losses.values())
    told = f"**This adaptation is not finished**: {missing} of {seeds * len(adapted.losses)} runs are missing."
    return [told, ""] if missing else []


def _losses(adapted: Adapted) -> list[str]:
    plan = adapted.adaptation
    seeds = len(plan.seeds)
    rows = [["upper layers", "standard, before", "zero-shot", *(f"healed {percent} %" for percent in plan.percents)]]
    for upper in plan.upper:
        cells = [_spread([*adapted.losses[upper, percent].values()], seeds) for percent in (0, *plan.percents)]
        if upper == CONTROL:
            cells[0] = MISSING
        rows.append([_name(upper), _spread([*adapted.before.values()], seeds), *cells])
    return _table(rows)


def _differences(adapted: Adapted) -> list[str]:
    plan = adapted.adaptation
    columns = (0, *plan.percents)
    rows = [["upper layers", "zero-shot", *(f"healed {percent} %" for percent in plan.percents)]]
    rows += [
        [_name(upper), *(_difference(adapted.to_control(upper, percent), len(plan.seeds)) for percent in columns)]
        for upper in adapted.rewired
    ]
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def _name(upper: int) -> str:
    return "0, the control" if upper == CONTROL else str(upper)


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _spread(losses: Sequence[float], seeds: int) -> str:
    return _with_deviation(losses, seeds, "")


def _difference(difference: Paired, seeds: int) -> str:
    return _with_deviation(difference.differences, seeds, "+")


def _with_deviation(values: Sequence[float], seeds: int, sign: str) -> str:
    """`+0.0123 ± 0.0045`; without what cannot be said, and with ` (2 of 3)` where some are missing."""
    if not values:
        return MISSING
    spread = deviation(values)
    text = format(mean(values), f"{sign}.4f") + ("" if math.isnan(spread) else f" ± {spread:.4f}")
    return text if len(values) == seeds else f"{text} ({len(values)} of {seeds})"


def draw_adaptation(adapted: Adapted) -> "Figure":
    """Loss over rewired layers, all of it and the healed ones as differences to the control.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not above: matplotlib comes with the extra [plot], and importing it takes a second.
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
    left.set_ylabel("validation loss, nats a token")
    spread = deviation([*adapted.losses[CONTROL, plan.percents[-1]].values()])
    if not math.isnan(spread):
        right.axhspan(-spread, spread, color="0.9", label=f"control after {plan.percents[-1]} %: spread over seeds")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set_ylabel("difference to the control")
    for axes in (left, right):
        axes.set_xlabel(f"upper layers that are ladder, of {plan.num_layers}")
        axes.set_xticks(plan.upper)
        axes.legend(fontsize="small")
    return figure


def _errors(
    axes: "Axes", places: Sequence[int], means: Sequence[float], spreads: Sequence[float], label: str, color: str
) -> None:
    bars = [0.0 if math.isnan(spread) else spread for spread in spreads]
    axes.errorbar(places, means, yerr=bars, marker="o", capsize=3, label=label, color=color)
