"""Derives results of trials from the records of their training runs, and step times from benchmarks or trials."""

import contextlib
import json
import math
import platform
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.study.schema import CHECKPOINTS, Result, StepTimes, Study, Trial
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.checkpoint.publish import LATEST_NAME, published_checkpoints, publishing_order
from megatron_ladder.errors import ExitCode
from megatron_ladder.files import write_atomically
from megatron_ladder.train.record import RECORD_NAME, read_record

Event = Mapping[str, Any]


@dataclass(frozen=True)
class TrialHistory:
    """The record of a trial, without lost steps; versions and exit code are those of the last start."""

    progress: Sequence[Event] = ()
    evaluations: Sequence[Event] = ()
    starts: int = 0
    versions: Mapping[str, str] | None = None
    code: int | None = None

    @property
    def iteration(self) -> int:
        """The last recorded step."""
        return max((int(event["iteration"]) for event in self.progress), default=0)


def read_history(folder: Path) -> TrialHistory:
    """Read the history in a trial's folder; empty if nothing was recorded."""
    try:
        return _merge_starts(read_record(folder / CHECKPOINTS))
    except FileNotFoundError:
        return TrialHistory()


def _merge_starts(events: Sequence[Event]) -> TrialHistory:
    progress: list[Event] = []
    evaluations: list[Event] = []
    starts, versions, code = 0, None, None
    for event in events:
        kind = event["event"]
        if kind == "start":
            starts, versions, code = starts + 1, event.get("versions"), None
            progress = _cut_progress(progress, event["iteration"])
            evaluations = [one for one in evaluations if one["iteration"] <= event["iteration"]]
        elif kind == "progress":
            progress.append(event)
        elif kind == "evaluation":
            evaluations.append(event)
        elif kind == "stop":
            code = int(event["code"])
    return TrialHistory(progress, evaluations, starts, versions, code)


def _cut_progress(progress: Sequence[Event], iteration: int) -> list[Event]:
    kept = [event for event in progress if event["iteration"] <= iteration]
    beyond = [event for event in progress if event["iteration"] - event["steps"] < iteration < event["iteration"]]
    for event in beyond[:1]:
        steps = iteration - (event["iteration"] - event["steps"])
        seconds = event["seconds"] * steps / event["steps"]
        kept.append({**event, "iteration": iteration, "steps": steps, "seconds": seconds})
    return kept


def result_of(
    trial: Trial, history: TrialHistory, parameters: int, tokens_per_step: int, command: tuple[str, ...]
) -> Result | None:
    """Return the result of a trial that is evaluated, or is tuning and ended with bad numbers; None if not done."""
    evaluations = _curve(history.evaluations)
    if history.code == ExitCode.BAD_NUMBERS and trial.kind == "tuning":
        evaluations = [point for point in evaluations if point[0] < trial.iterations]
        evaluations.append((trial.iterations, math.inf))
    if not evaluations or evaluations[-1][0] != trial.iterations:
        return None
    speeds = [float(event["tokens_per_second"]) for event in history.progress]
    return Result(
        trial=trial,
        parameters=parameters,
        tokens_per_step=tokens_per_step,
        training=tuple(_curve(history.progress)),
        validation=tuple(evaluations),
        tokens_per_second=statistics.median(speeds) if speeds else 0.0,
        seconds=sum(float(event["seconds"]) for event in history.progress),
        attempts=history.starts,
        command=command,
        versions={**(history.versions or {}), "python": platform.python_version()},
    )


def _curve(events: Sequence[Event]) -> list[tuple[int, float]]:
    """Return the losses by iteration; those that are not finite are recorded as text and become infinite."""
    points = [(int(event["iteration"]), float(event["loss"])) for event in events]
    return [(iteration, loss if math.isfinite(loss) else math.inf) for iteration, loss in points]


def remove_unevaluated_end(folder: Path, iterations: int) -> list[str]:
    """Remove checkpoints of the last step, from which a run would not evaluate again, and return their names."""
    save = folder / CHECKPOINTS
    names = published_checkpoints(save)
    ended = [name for name in names if publishing_order(name)[0] >= iterations]
    if before := [name for name in names if ended and name not in ended]:
        write_atomically(save / LATEST_NAME, f"{before[-1]}\n")
    elif ended:
        (save / LATEST_NAME).unlink(missing_ok=True)
    for name in ended:
        shutil.rmtree(save / name)
    return ended


def remove_checkpoints(folder: Path) -> None:
    """Remove everything that a trial has saved except its record."""
    with contextlib.suppress(FileNotFoundError):
        for entry in (folder / CHECKPOINTS).iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != RECORD_NAME:
                entry.unlink()


def read_step_times(
    output: Path, wirings: Sequence[str], size: str, command: tuple[str, ...]
) -> tuple[StepTimes, list[str]]:
    """Return the step times of wirings that a benchmark measured, and one message for each doubtful one."""
    by_name: dict[str, Event] = {row["wiring"]: row for row in json.loads(output.read_text(encoding="utf-8"))}
    rows = {name: by_name[name] for name in wirings if name in by_name}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    doubts = [f"{size}: {name}: {found}" for name, found in verdicts.items() if found != RatioVerdict.SOUND.value]
    row = rows[STANDARD]
    link = f"{row['interconnect']}, an all-reduce takes {1e3 * row['alpha_seconds']:.3f} ms ({row['alpha']})"
    times = StepTimes(
        interconnect=f"{link}; the measurement is in doubt: {'; '.join(doubts)}" if doubts else link,
        ranks=int(command[command.index("--tp") + 1]),
        seconds={name: float(row["median_seconds"]) for name, row in rows.items()},
        speedup={name: float(row["ratio_to_standard"]) for name, row in rows.items()} | {STANDARD: 1.0},
        spread={name: float(row["spread"]) for name, row in rows.items()} | {STANDARD: 0.0},
        command=command,
    )
    return times, doubts


def times_of_trials(results: Sequence[Result], study: Study, size: str, ranks: int) -> StepTimes | None:
    """Return step times from the trials at equal tokens, paired by seed; None without trials of standard."""
    speeds: dict[str, dict[int, float]] = {}
    for result in results:
        trial = result.trial
        if (trial.kind, trial.size) == ("tokens", size) and result.tokens_per_second > 0:
            speeds.setdefault(trial.wiring, {})[trial.seed] = result.tokens_per_second
    if STANDARD not in speeds:
        return None
    seconds, speedup, spread = {}, {}, {}
    for name in study.timed_wirings:
        if seeds := speeds.get(name, {}).keys() & speeds[STANDARD].keys():
            ratios = [speeds[name][seed] / speeds[STANDARD][seed] for seed in seeds]
            seconds[name] = study.tokens_per_step / statistics.median(speeds[name][seed] for seed in seeds)
            speedup[name] = statistics.median(ratios)
            first, _, third = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else (0.0, 0.0, 0.0)
            spread[name] = third - first
    return StepTimes("that of the trials, from their tokens per second", ranks, seconds, speedup, spread, ())
