"""The reports of a study: one page of Markdown with its pictures, and the comparison with a repeated study."""

import importlib.util
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePath

from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.files import write_atomically
from megatron_ladder.lab.study import tables
from megatron_ladder.lab.study.adapt_report import write_adaptation
from megatron_ladder.lab.study.description import CHANGEABLE_FIELDS, STUDY_NAME, read_study
from megatron_ladder.lab.study.figures import draw_curves, draw_differences, drawable, write_png
from megatron_ladder.lab.study.options import ReportOptions
from megatron_ladder.lab.study.results import Budget, Comparison, StudyResults, read_results
from megatron_ladder.lab.study.statistics import LossVerdict, deviation, mean
from megatron_ladder.lab.study.tables import number
from megatron_ladder.lab.study.wirings import STANDARD

REPORT_NAME = "report.md"
BUDGETS: tuple[Budget, Budget] = ("tokens", "time")


def report_study(options: ReportOptions) -> None:
    """Write the reports of a folder's finished trials, and print the comparison with another study if requested."""
    study = read_study(options.output_dir)
    if study is None:
        raise UserError(f"--output-dir {options.output_dir}: contains no {STUDY_NAME}: give the folder of a study")
    raise_user_errors(missing_library_errors())
    output = options.report_dir or options.output_dir
    adaptation = write_adaptation(options.output_dir, output)
    if adaptation is None or study.wirings != (STANDARD,):
        print_report_path(write_report(options.output_dir, output))
    print_report_path(adaptation)
    if options.compare_with is not None:
        print(_compare_studies(options.output_dir, options.compare_with), flush=True)


def print_report_path(path: Path | None) -> None:
    """Print the path of a report, if there is one."""
    if path is not None:
        print(f"report: {path}", flush=True)


def missing_library_errors() -> list[str]:
    """Return one message for each library that reports need and that is not installed."""
    needed = {"matplotlib": "plot", "scipy": "lab"}
    return [
        f"{name} is not installed, but reports of studies need it: pip install 'megatron-ladder[{extra}]'"
        for name, extra in needed.items()
        if importlib.util.find_spec(name) is None
    ]


def write_report(folder: Path, output: Path) -> Path:
    """Write `report.md` and its pictures, each of them atomically, and return the report's path.

    Args:
        folder: a study's, with `study.json`; the report lists trials that are still missing.
        output: folder for the report; created if needed.

    Raises:
        UserError: the folder has no study or an invalid file, or a library is not installed.
    """
    raise_user_errors(missing_library_errors())
    results = read_results(folder)
    output.mkdir(parents=True, exist_ok=True)
    drawn = {"curves": draw_curves}
    if len(results.wirings("tokens")) > 1:
        drawn["differences"] = draw_differences
    pictures: dict[str, list[str]] = {}
    for size in results.study.sizes:
        pictures[size] = []
        if drawable(results, size):
            for name, draw in drawn.items():
                file = f"{name}-{size}.png"
                write_png(draw(results, size), output / file)
                pictures[size].append(file)
    path = output / REPORT_NAME
    write_atomically(path, _report_text(results, pictures))
    return path


def _report_text(results: StudyResults, pictures: Mapping[str, list[str]]) -> str:
    """Return the page; `pictures` maps each size to the names of its files."""
    study = results.study
    parts = [f"# Wirings compared: {' and '.join(study.sizes)}", "## Results"]
    for size in study.sizes:
        for budget in BUDGETS if len(results.wirings("time")) > 1 else BUDGETS[:1]:
            prefix = f"{size}, at" if len(study.sizes) > 1 else "At"
            parts += [f"{prefix} equal {budget}, with 95 % intervals:", _bullets(_findings(results, budget, size))]
    if missing := results.missing():
        parts.append("**This study is not finished.** Trials still to run (and how many):\n\n" + _bullets(missing))
    parts += ["## Setup", _setup(results)]
    for size in study.sizes:
        suffix = f" ({size})" if len(study.sizes) > 1 else ""
        parts += [f"## Learning rates{suffix}", _learning_rates(results, size)]
        parts += [f"## Equal tokens{suffix}", _equal_tokens(results, size)]
        parts += [f"## Equal time{suffix}", _equal_time(results, size)]
        if pictures.get(size):
            parts += [f"## Pictures{suffix}", *(f"![{name}]({name})" for name in pictures[size])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _findings(results: StudyResults, budget: Budget, size: str) -> list[str]:
    """Return one sentence per comparison of a table."""
    comparisons = results.comparisons(budget, size)
    judged = sum(not math.isnan(one.adjusted_p) for one in comparisons.values())
    return [_finding(wiring, one, judged) for wiring, one in comparisons.items()]


def _finding(wiring: str, one: Comparison, judged: int) -> str:
    paired = one.difference
    if paired.pairs == 0:
        return f"**{wiring}** has no pair of runs with {STANDARD} yet."
    if paired.verdict is LossVerdict.DIVERGED:
        return f"**{wiring}** has no verdict, because a run of its {paired.pairs} pairs diverged."
    if paired.verdict is LossVerdict.TOO_FEW:
        return f"**{wiring}** has no verdict from a single pair (difference {number(paired.mean, '+.4f')} nats)."
    low, high = paired.interval
    if paired.verdict is LossVerdict.NOT_TOLD_APART:
        return (
            f"**{wiring}** shows no significant difference from {STANDARD}: {number(max(0.0, -low))} nats better to "
            f"{number(max(0.0, high))} nats worse."
        )
    least, most = sorted((abs(low), abs(high)))
    note = ""
    if judged > 1:
        significance = "also" if one.holds_among_all else "but not"
        note = f", {significance} significant among {judged} comparisons (Holm's p {tables.adjusted_p(one)})"
    return f"**{wiring}** ends {number(least)} to {number(most)} nats {paired.verdict.value} than {STANDARD}{note}."


def _setup(results: StudyResults) -> str:
    study, finished = results.study, results.finished
    every = [study.command, *(times.command for times in study.step_times.values())]
    commands = [shlex.join(map(_portable, words)) for words in dict.fromkeys(every) if words]
    tokens = study.iterations * study.tokens_per_step
    rows = [
        f"Data: {study.data}",
        f"Training: {study.iterations:,} iterations of {study.tokens_per_step:,} tokens ({tokens / 1e6:,.2f}M tokens), "
        f"sequences of {study.seq_length:,}; flags of every run: `{shlex.join(study.training_flags)}`",
    ]
    if study.schedule:
        rows.append(
            f"Schedule: warm-up over {study.schedule['warm_up']:.0%} of a run's iterations, then decay to "
            f"{study.schedule['last']:.0%} of the highest learning rate at the end of the run"
        )
    rows += [
        f"Seeds: {', '.join(map(str, study.seeds))}; runs with the same seed share initial weights and order of "
        "samples, and are compared in pairs",
        f"Wirings: {', '.join(study.wirings)}",
        *(f"{name}: {value}" for name, value in {**study.machine, **_versions(results)}.items()),
    ]
    if finished:
        hours = sum(one.seconds for one in finished) / 3600
        stops = sum(one.attempts - 1 for one in finished)
        rows.append(f"Done: {len(finished)} runs, {hours:.2f} hours of steps in total, {stops} interruptions")
    return "\n\n".join(["```sh\n" + "\n".join(commands) + "\n```", _bullets(rows), tables.sizes_table(results)])


def _portable(word: str) -> str:
    """Shorten paths of the interpreter and the checkout in a command."""
    path = PurePath(word)
    if path.is_absolute() and path.name.startswith("python"):
        return "python"
    return f"tools/{path.name}" if path.is_absolute() and path.parent.name == "tools" else word


def _versions(results: StudyResults) -> dict[str, str]:
    """Return the versions of the runs that differ from those of the study's machine."""
    found: dict[str, list[str]] = {}
    for one in results.finished:
        for name, version in one.versions.items():
            if version not in found.setdefault(name, []):
                found[name].append(version)
    known = results.study.machine
    return {name: ", ".join(all_of) for name, all_of in found.items() if [known.get(name)] != all_of}


def _learning_rates(results: StudyResults, size: str) -> str:
    study = results.study
    if len(study.learning_rates) == 1:
        return f"{study.learning_rates[0]:g} for every wiring, without tuning."
    caption = (
        f"Final validation loss of one run of {study.tuning_iterations:,} iterations (seed {study.tuning_seed}) per "
        "rate. The best rate is used for all other runs of the wiring; (edge) marks a best rate that is the lowest or "
        "highest one tried."
    )
    return f"{caption}\n\n{tables.learning_rates_table(results, size)}"


OUTCOME_CAPTION = (
    "Losses are in nats per token, mean over seeds ± sample standard deviation. Intervals are those of the mean paired "
    "difference (Student's t). A verdict is bold if it also holds among all comparisons of the table (Holm's p at most "
    "0.05)."
)


def _equal_tokens(results: StudyResults, size: str) -> str:
    if not any(results.runs("tokens", size, one) for one in results.wirings("tokens")):
        return "No run is done yet."
    reached = (
        f"Tokens until a run reaches the final loss of {STANDARD} with the same seed, interpolated on the validation "
        "curve; in brackets the share of the whole run. Tokens/s are those of the runs on this machine, without the "
        "stated interconnect."
    )
    outcomes, reaching = tables.outcomes_table(results, "tokens", size), tables.reaching_table(results, "tokens", size)
    return "\n\n".join([OUTCOME_CAPTION, outcomes, reached, reaching])


def _equal_time(results: StudyResults, size: str) -> str:
    study = results.study
    if len(results.wirings("time")) < 2:
        return "No wiring is trained for equal time in this study."
    if size not in study.step_times:
        return "The step times are not measured yet."
    times = study.step_times[size]
    interconnect = (
        f"Interconnect: {times.interconnect} (`--link {study.link}`), {times.ranks} tensor-parallel processes. Time is "
        "the number of iterations times the measured step time under that interconnect. Every wiring was trained for "
        f"the time that {STANDARD} takes for {study.iterations:,} iterations, with a schedule of that length."
    )
    ratios = (
        "Forward and backward of a step in fp32 on CPUs, without the optimizer, wirings interleaved: the median, the "
        "median of the paired ratios, and their interquartile range."
        if times.command
        else "Steps of the runs at equal tokens: the median, the median of the ratios of runs with the same seed, and "
        "their interquartile range."
    )
    parts = [interconnect, ratios, tables.step_times_table(results, size)]
    if not any(results.runs("time", size, one) for one in results.wirings("time")):
        return "\n\n".join([*parts, "No run is done yet."])
    outcome = f"{STANDARD}'s runs are those at equal tokens. The intervals take the measured ratios as exact."
    reached = (
        f"Time until a run reaches the final loss of {STANDARD} with the same seed, in steps of {STANDARD}; in "
        "brackets the share of the whole time:"
    )
    outcomes, reaching = tables.outcomes_table(results, "time", size), tables.reaching_table(results, "time", size)
    return "\n\n".join([*parts, outcome, outcomes, reached, reaching])


def _bullets(rows: Sequence[str]) -> str:
    return "\n".join(f"- {row}" for row in rows)


def _compare_studies(first: Path, second: Path) -> str:
    """Return a Markdown table of each wiring's mean final loss in two runs of the same study.

    Means are over the seeds that both have. The spread is the sample standard deviation over all seeds of the first
    study. Runs at equal time differ in length if the step times differ.

    Raises:
        UserError: a folder has no study, or an invalid file.
    """
    before, after = read_results(first), read_results(second)
    warnings = []
    changed = [
        one.name
        for one in fields(before.study)
        if one.name not in CHANGEABLE_FIELDS and getattr(before.study, one.name) != getattr(after.study, one.name)
    ]
    if changed:
        warnings.append(f"The two folders are not runs of the same study: {', '.join(changed)} differ.")
    rates, new_rates = before.study.chosen, after.study.chosen
    if rates != new_rates:
        different = [
            f"{key} ({rate:g}, then {new_rates[key]:g})"
            for key, rate in rates.items()
            if key in new_rates and rate != new_rates[key]
        ]
        warnings.append(f"The chosen learning rates differ: {', '.join(different) or 'one study is incomplete'}.")
    heads = ["wiring", "size", "at equal", "iterations", "seeds", "first", "second", "second less first"]
    heads.append("within the spread")
    rows = [
        [wiring, size, budget, *_repeated_row(before, after, budget, size, wiring)]
        for size in before.study.sizes
        for budget in BUDGETS
        for wiring in (before.wirings(budget) if budget == "tokens" else before.wirings(budget)[1:])
    ]
    return "\n\n".join([*warnings, tables.markdown_table(heads, rows)])


def _repeated_row(before: StudyResults, after: StudyResults, budget: Budget, size: str, wiring: str) -> list[str]:
    first, second = (one.final_losses(budget, size, wiring) for one in (before, after))
    seeds = [seed for seed in first if seed in second]
    pairs = [[losses[seed] for seed in seeds] for losses in (first, second)]
    apart, spread = mean(pairs[1]) - mean(pairs[0]), deviation([*first.values()])
    within = "yes" if abs(apart) <= spread else "**no**"
    judged = within if math.isfinite(apart) and math.isfinite(spread) else tables.NOTHING
    lengths = dict.fromkeys(str(one.iterations(budget, size, wiring) or tables.NOTHING) for one in (before, after))
    means = [tables.mean_and_deviation(losses) for losses in pairs]
    return [", ".join(lengths), str(len(seeds)), *means, number(apart, "+.4f"), judged]
