"""The reports of a study: one page of Markdown with its pictures, and the comparison with a repeated study."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from ladder_lab.markdown import markdown_table
from ladder_lab.study import tables
from ladder_lab.study.adaptation import write_adaptation
from ladder_lab.study.figures import draw_curves, draw_differences, drawable, write_png
from ladder_lab.study.options import ReportOptions
from ladder_lab.study.results import BUDGETS, Budget, Comparison, StudyResults, read_results
from ladder_lab.study.schema import changed_fields
from ladder_lab.study.statistics import LossVerdict, deviation, mean
from ladder_lab.study.tables import number
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.files import write_atomically


def report_study(options: ReportOptions) -> None:
    """Write the reports of a folder's finished trials, and print the comparison with another study if requested."""
    results = read_results(options.output_dir)
    output = options.report_dir or options.output_dir
    adaptation = write_adaptation(options.output_dir, output)
    if adaptation is None or results.study.wirings != (STANDARD,):
        print(f"report: {write_report(results, output)}", flush=True)
    if adaptation is not None:
        print(f"report: {adaptation}", flush=True)
    if options.compare_with is not None:
        print(_compare_studies(results, read_results(options.compare_with)), flush=True)


def write_report(results: StudyResults, output: Path) -> Path:
    """Write `report.md` and its pictures into a folder, each of them atomically, and return the report's path."""
    output.mkdir(parents=True, exist_ok=True)
    has_differences = len(results.wirings("tokens")) > 1
    drawn = {"curves": draw_curves, **({"differences": draw_differences} if has_differences else {})}
    pictures: dict[str, list[str]] = {}
    for size in results.study.sizes:
        pictures[size] = [f"{name}-{size}.png" for name in drawn] if drawable(results, size) else []
        for file, draw in zip(pictures[size], drawn.values(), strict=False):
            write_png(draw(results, size), output / file)
    write_atomically(output / "report.md", _report_text(results, pictures))
    return output / "report.md"


def _report_text(results: StudyResults, pictures: Mapping[str, list[str]]) -> str:
    study = results.study
    parts = [f"# Wirings compared: {' and '.join(study.sizes)}", "## Results"]
    for size in study.sizes:
        for budget in BUDGETS if len(results.wirings("time")) > 1 else BUDGETS[:1]:
            comparisons = results.comparisons(budget, size)
            judged = sum(not math.isnan(one.adjusted_p) for one in comparisons.values())
            parts.append(f"{f'{size}, at' if len(study.sizes) > 1 else 'At'} equal {budget}, with 95 % intervals:")
            parts.append(_bullets([_finding(wiring, one, judged) for wiring, one in comparisons.items()]))
    if missing := results.missing():
        parts.append("**This study is not finished.** Trials still to run (and how many):\n\n" + _bullets(missing))
    parts += ["## Setup", *_setup(results)]
    for size in study.sizes:
        suffix = f" ({size})" if len(study.sizes) > 1 else ""
        parts += [f"## Learning rates{suffix}", *_learning_rates(results, size)]
        parts += [f"## Equal tokens{suffix}", *_equal_tokens(results, size)]
        parts += [f"## Equal time{suffix}", *_equal_time(results, size)]
        if pictures.get(size):
            parts += [f"## Pictures{suffix}", *(f"![{name}]({name})" for name in pictures[size])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _finding(wiring: str, one: Comparison, judged: int) -> str:
    """Return one sentence on one of the `judged` comparisons of a table."""
    paired, (low, high) = one.difference, one.difference.interval
    if paired.pairs == 0:
        return f"**{wiring}** has no pair of runs with {STANDARD} yet."
    if paired.verdict is LossVerdict.DIVERGED:
        return f"**{wiring}** has no verdict, because a run of its {paired.pairs} pairs diverged."
    if paired.verdict is LossVerdict.TOO_FEW:
        return f"**{wiring}** has no verdict from a single pair (difference {number(paired.mean, '+.4f')} nats)."
    if paired.verdict is LossVerdict.NO_DIFFERENCE:
        span = f"{number(max(0.0, -low))} nats better to {number(max(0.0, high))} nats worse"
        return f"**{wiring}** shows no significant difference from {STANDARD}: {span}."
    least, most = sorted((abs(low), abs(high)))
    significance = f", {'also' if one.holds_among_all else 'but not'} significant among {judged} comparisons"
    note = f"{significance} (Holm's p {tables.adjusted_p(one)})" if judged > 1 else ""
    return f"**{wiring}** ends {number(least)} to {number(most)} nats {paired.verdict.value} than {STANDARD}{note}."


def _setup(results: StudyResults) -> list[str]:
    study, finished = results.study, results.finished.values()
    timings = [words for times in study.step_times.values() for words in (times.command, *times.later_commands)]
    every = [study.command, *timings]
    commands = [shlex.join(map(_portable, words)) for words in dict.fromkeys(every) if words]
    tokens = study.iterations * study.tokens_per_step
    rows = [
        f"Data: {study.data}",
        f"Training: {study.iterations:,} iterations of {study.tokens_per_step:,} tokens ({tokens / 1e6:,.2f}M tokens), "
        f"sequences of {study.seq_length:,}; flags of every run: `{shlex.join(study.training_flags)}`",
    ]
    warm_up, last = study.schedule["warm_up"], study.schedule["last"]
    rows.append(f"Schedule: warm-up over {warm_up:.0%} of a run, then decay to {last:.0%} of the highest rate")
    rows.append(f"Seeds: {', '.join(map(str, study.seeds))}; runs with the same seed are compared in pairs")
    rows.append(f"Wirings: {', '.join(study.wirings)}")
    versions: dict[str, dict[str, None]] = {}
    for name, version in (item for one in finished for item in one.versions.items()):
        versions.setdefault(name, {})[version] = None
    software = {name: ", ".join(found) for name, found in versions.items()}
    rows += [f"{name}: {value}" for name, value in {**study.machine, **software}.items()]
    if finished:
        hours = sum(one.seconds for one in finished) / 3600
        stops = sum(one.attempts - 1 for one in finished)
        rows.append(f"Done: {len(finished)} runs, {hours:.2f} hours of steps in total, {stops} interruptions")
    return ["```sh\n" + "\n".join(commands) + "\n```", _bullets(rows), tables.sizes_table(results)]


def _portable(word: str) -> str:
    path = PurePath(word)
    if path.is_absolute() and path.name.startswith("python"):
        return "python"
    return f"tools/{path.name}" if path.is_absolute() and path.parent.name == "tools" else word


def _learning_rates(results: StudyResults, size: str) -> list[str]:
    study = results.study
    if len(study.learning_rates) == 1:
        return [f"{study.learning_rates[0]:g} for every wiring, without tuning."]
    if not study.learning_rates:
        caption = "Those of another study, times the ratio of the hidden sizes (`--learning-rates-from`)."
        return [caption, tables.learning_rates_table(results, size)]
    caption = (
        f"Final validation loss of one run of {study.tuning_iterations:,} iterations (seed {study.tuning_seed}) per "
        "rate. (edge) marks a chosen rate that is the lowest or highest one tried."
    )
    return [caption, tables.learning_rates_table(results, size)]


def _equal_tokens(results: StudyResults, size: str) -> list[str]:
    outcome = (
        "Losses are in nats per token, mean over seeds ± sample standard deviation, and intervals those of the mean "
        "paired difference. A verdict is bold if it also holds among all comparisons (Holm's p at most 0.05)."
    )
    reached = (
        f"Tokens until a run reaches the final loss of {STANDARD} with the same seed (share of the whole run), "
        "interpolated on the validation curve. Tokens/s are those on this machine, without the stated interconnect."
    )
    return _outcomes(results, "tokens", size, outcome, reached)


def _equal_time(results: StudyResults, size: str) -> list[str]:
    study = results.study
    if len(results.wirings("time")) < 2:
        return ["No wiring is trained for equal time in this study."]
    if size not in study.step_times:
        return ["The step times are not measured yet."]
    times = study.step_times[size]
    interconnect = (
        f"Interconnect: {times.interconnect} (`--link {study.link}`), {times.ranks} tensor-parallel processes. Every "
        f"wiring was trained for the time of {STANDARD}'s {study.iterations:,} iterations, by these step times."
    )
    steps = (
        "Forward and backward of a step in fp32 on CPUs, without the optimizer, wirings interleaved"
        if times.command
        else "Steps of the runs at equal tokens"
    )
    ratios = f"{steps}: the median, the median of the paired ratios, and their interquartile range."
    outcome = f"{STANDARD}'s runs are those at equal tokens. The intervals take the measured ratios as exact."
    reached = f"Steps of {STANDARD} until a run reaches {STANDARD}'s final loss (share of the whole time):"
    measured = [interconnect, ratios, tables.step_times_table(results, size)]
    return [*measured, *_outcomes(results, "time", size, outcome, reached)]


def _outcomes(results: StudyResults, budget: Budget, size: str, outcome: str, reached: str) -> list[str]:
    if not any(results.runs(budget, size, one) for one in results.wirings(budget)):
        return ["No run is done yet."]
    outcomes, reaching = (table(results, budget, size) for table in (tables.outcomes_table, tables.reaching_table))
    return [outcome, outcomes, reached, reaching]


def _bullets(rows: Sequence[str]) -> str:
    return "\n".join(f"- {row}" for row in rows)


def _compare_studies(before: StudyResults, after: StudyResults) -> str:
    """Compare means of two runs of a study over common seeds, with the deviation over all seeds of the first."""
    warnings = []
    if changed := changed_fields(before.study, after.study):
        warnings.append(f"The two folders are not runs of the same study: {', '.join(changed)} differ.")
    rates, new_rates = before.study.chosen, after.study.chosen
    if rates != new_rates:
        changes = {key: (rate, new_rates.get(key, rate)) for key, rate in rates.items()}
        different = [f"{key} ({rate:g}, then {now:g})" for key, (rate, now) in changes.items() if rate != now]
        warnings.append(f"The chosen learning rates differ: {', '.join(different) or 'one study is incomplete'}.")
    rows = []
    for size in before.study.sizes:
        # Standard's runs at equal time are those at equal tokens.
        cases = [(budget, one) for budget in BUDGETS for one in before.wirings(budget)[budget == "time" :]]
        for budget, wiring in cases:
            losses, new_losses = (one.final_losses(budget, size, wiring) for one in (before, after))
            seeds = [seed for seed in losses if seed in new_losses]
            pairs = [[by_seed[seed] for seed in seeds] for by_seed in (losses, new_losses)]
            apart, spread = mean(pairs[1]) - mean(pairs[0]), deviation([*losses.values()])
            within = "yes" if abs(apart) <= spread else "**no**"
            lengths = (one.iterations(budget, size, wiring) for one in (before, after))
            row = {
                "wiring": wiring,
                "size": size,
                "at equal": budget,
                "iterations": ", ".join(dict.fromkeys(str(length or tables.NOTHING) for length in lengths)),
                "seeds": str(len(seeds)),
                "first": tables.mean_and_deviation(pairs[0]),
                "second": tables.mean_and_deviation(pairs[1]),
                "second less first": number(apart, "+.4f"),
                "within the spread": within if math.isfinite(apart) and math.isfinite(spread) else tables.NOTHING,
            }
            rows.append(row)
    return "\n\n".join([*warnings, markdown_table(rows)])
