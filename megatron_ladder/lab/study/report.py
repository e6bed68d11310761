"""The report of a study: one page of Markdown with its pictures beside it, from what is done so far."""

import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath

from megatron_ladder.data.files import write_atomically
from megatron_ladder.lab.study import conclusions, tables
from megatron_ladder.lab.study.figures import draw_curves, draw_differences, drawable, require_matplotlib, write_png
from megatron_ladder.lab.study.gathered import Gathered, gather
from megatron_ladder.lab.study.wirings import STANDARD

REPORT_NAME = "report.md"


def write_report(folder: Path, output: Path) -> Path:
    """Writes `report.md` and its pictures into `output`, each of them whole or not at all.

    Args:
        folder: a study's, with `study.json`; what is not done yet is said to be missing.
        output: is made if it is not there.

    Returns:
        The report's path.

    Raises:
        UserError: there is no study in the folder, a file of it cannot be read, or matplotlib is not installed.
    """
    require_matplotlib()
    gathered = gather(folder)
    output.mkdir(parents=True, exist_ok=True)
    drawn = {"curves": draw_curves}
    if len(gathered.wirings("tokens")) > 1:
        drawn["differences"] = draw_differences
    pictures: dict[str, list[str]] = {}
    for size in gathered.study.sizes:
        pictures[size] = []
        if drawable(gathered, size):
            for name, draw in drawn.items():
                file = f"{name}-{size}.png"
                write_png(draw(gathered, size), output / file)
                pictures[size].append(file)
    path = output / REPORT_NAME
    write_atomically(path, report_text(gathered, pictures).encode())
    return path


def report_text(gathered: Gathered, pictures: Mapping[str, list[str]]) -> str:
    """The page.

    Args:
        pictures: size -> names of its files.
    """
    named = " and ".join(gathered.study.sizes)
    parts = [f"# Wirings compared: {named}", _summary(gathered), _missing(gathered)]
    parts += ["## What was run", _what_was_run(gathered)]
    for size in gathered.study.sizes:
        suffix = f" ({size})" if len(gathered.study.sizes) > 1 else ""
        parts += [f"## Learning rates{suffix}", _learning_rates(gathered, size)]
        parts += [f"## Equal tokens{suffix}", _equal_tokens(gathered, size)]
        parts += [f"## Equal time{suffix}", _equal_time(gathered, size)]
        if pictures.get(size):
            parts += [f"## Pictures{suffix}", *(f"![{name}]({name})" for name in pictures[size])]
    parts += ["## Limits", _bullets(conclusions.limits(gathered))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _summary(gathered: Gathered) -> str:
    """Everything that the intervals support, before the numbers that it comes from."""
    parts = ["## What it says"]
    for size in gathered.study.sizes:
        prefix = f"{size}, at" if len(gathered.study.sizes) > 1 else "At"
        parts.append(f"{prefix} equal tokens, by 95 % intervals of the paired difference of final validation losses:")
        parts.append(_bullets(conclusions.findings(gathered, "tokens", size)))
        if len(gathered.wirings("time")) > 1:
            parts.append(
                f"{prefix} equal time under the stated interconnect, the measured ratios of step times taken as exact:"
            )
            parts.append(_bullets(conclusions.findings(gathered, "time", size)))
        spreads = conclusions.deviations(gathered, size)
        if STANDARD in spreads:
            losses = list(gathered.final_losses("tokens", size, STANDARD).values())
            least, most = (tables.number(bound(spreads.values())) for bound in (min, max))
            parts.append(
                f"The noise: runs of {STANDARD} that differ in nothing but their seed end with losses of "
                f"{tables.mean_and_deviation(losses)} (sample standard deviation); over all wirings that deviation is "
                f"{least} to {most}."
            )
    return "\n\n".join(parts)


def _missing(gathered: Gathered) -> str:
    phrases = gathered.missing()
    if not phrases:
        return ""
    return "**This study is not finished.** Trials still to run (and how many):\n\n" + _bullets(phrases)


def _what_was_run(gathered: Gathered) -> str:
    study, results = gathered.study, gathered.results
    every = [study.command, *(times.command for times in study.step_times.values())]
    commands = [shlex.join(map(_portable, words)) for words in dict.fromkeys(every) if words]
    tokens = study.iterations * study.tokens_per_step
    rows = [
        f"Data: {study.data}",
        f"Training: {study.iterations:,} iterations of {study.tokens_per_step:,} tokens ({tokens / 1e6:,.2f}M tokens), "
        f"sequences of {study.seq_length:,}; flags of every run: `{shlex.join(study.training_flags)}`",
        *_schedule(study.schedule),
        f"Seeds: {', '.join(map(str, study.seeds))}; runs with the same one start from the same weights, see the same "
        "samples in the same order, and are compared in pairs",
        f"Wirings: {', '.join(study.wirings)}",
        *(f"{name}: {value}" for name, value in {**study.machine, **_versions(gathered)}.items()),
    ]
    if results:
        hours = sum(one.seconds for one in results) / 3600
        stops = sum(one.attempts - 1 for one in results)
        rows.append(f"Done: {len(results)} trainings, {hours:.2f} hours of steps in sum, {stops} interruptions")
    return "\n\n".join(["```sh\n" + "\n".join(commands) + "\n```", _bullets(rows), tables.sizes(gathered)])


def _portable(word: str) -> str:
    """A command's word without the place of the interpreter and of the checkout."""
    path = PurePath(word)
    if path.is_absolute() and path.name.startswith("python"):
        return "python"
    return f"tools/{path.name}" if path.is_absolute() and path.parent.name == "tools" else word


def _schedule(schedule: Mapping[str, float]) -> list[str]:
    if not schedule:
        return []
    return [
        f"Schedule: warm-up over {schedule['warm_up']:.0%} of a run's iterations, then down to {schedule['last']:.0%} "
        "of the highest learning rate at its end, whatever its length"
    ]


def _versions(gathered: Gathered) -> dict[str, str]:
    """Those of the runs that the study's machine does not name; several are all named."""
    found: dict[str, list[str]] = {}
    for one in gathered.results:
        for name, version in one.versions.items():
            if version not in found.setdefault(name, []):
                found[name].append(version)
    known = gathered.study.machine
    return {name: ", ".join(all_of) for name, all_of in found.items() if [known.get(name)] != all_of}


def _learning_rates(gathered: Gathered, size: str) -> str:
    study = gathered.study
    if len(study.learning_rates) == 1:
        return f"{study.learning_rates[0]:g} for every wiring: none was tuned."
    told = (
        f"Final validation loss of one run of {study.tuning_iterations:,} iterations (seed {study.tuning_seed}) for "
        "each rate, and for further ones where the best was at the edge; the rate of the lowest one was taken for all "
        "other runs of the wiring."
    )
    doubts = _bullets([*conclusions.edges(gathered, size), *conclusions.close_calls(gathered, size)])
    return "\n\n".join(filter(None, [told, tables.learning_rates(gathered, size), doubts]))


def _equal_tokens(gathered: Gathered, size: str) -> str:
    runs = {one: gathered.runs("tokens", size, one) for one in gathered.wirings("tokens")}
    if not any(runs.values()):
        return "No run is done yet."
    told = (
        "Loss in nats a token: mean over seeds ± sample standard deviation; perplexity is e to the mean. "
        + conclusions.resolution(gathered, "tokens", size)
    )
    reached = (
        f"Tokens that a wiring needs to come down to what {STANDARD} with the same seed ends with, between the points "
        "of the validation curve; in brackets the share of the whole run. Learning rates are at their lowest only at "
        "the end of a run, so the last stretch is steep and says little of shorter runs. Tokens/s are those of the "
        "trainings themselves on the machine that is named, whatever ran beside them: the stated interconnect has no "
        "part in them."
    )
    return "\n\n".join(
        [told, tables.outcomes(gathered, "tokens", size), reached, tables.reaching(gathered, "tokens", size)]
    )


def _equal_time(gathered: Gathered, size: str) -> str:
    study = gathered.study
    if len(gathered.wirings("time")) < 2:
        return "No wiring was asked to be trained for equal time."
    if size not in study.step_times:
        return "The step times are not measured yet."
    times = study.step_times[size]
    stated = (
        f"The interconnect: {times.interconnect} (`--link {study.link}`), {times.ranks} tensor-parallel processes. "
        "Time here is the number of iterations times the measured step time under that interconnect, and not the wall "
        f"clock of the machine that trained. Every wiring was trained for as many iterations as take what "
        f"{STANDARD} takes for {study.iterations:,}, with a learning-rate schedule of that length."
    )
    ratios = (
        "A step's forward and backward, without the optimizer's update and in fp32 on CPUs, wirings in turn in every "
        "round: the median, the median of the rounds' paired ratios, and the distance of their quartiles."
        if times.command
        else "A step of the runs at equal tokens: the median, the median of the ratios of runs with the same seed, and "
        "the distance of their quartiles."
    )
    parts = [stated, ratios, tables.step_times(gathered, size)]
    if not any(gathered.runs("time", size, one) for one in gathered.wirings("time")):
        return "\n\n".join([*parts, "No run is done yet."])
    outcome = (
        f"{STANDARD}'s runs are those at equal tokens. {conclusions.resolution(gathered, 'time', size)} The intervals "
        "hold for these numbers of iterations: how far the ratios above are uncertain is not in them."
    )
    reached = (
        f"Time that a wiring needs to come down to what {STANDARD} with the same seed ends with, in steps of "
        f"{STANDARD}; in brackets the share of the whole time:"
    )
    tail = [outcome, tables.outcomes(gathered, "time", size), reached, tables.reaching(gathered, "time", size)]
    return "\n\n".join([*parts, *tail])


def _bullets(rows: list[str]) -> str:
    return "\n".join(f"- {row}" for row in rows)
