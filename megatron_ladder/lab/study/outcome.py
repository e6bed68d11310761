"""What a training has recorded, as the result of a trial.

A run that was cut off goes on from its last checkpoint, and does the steps after it again: what was recorded of them
the first time is dropped.
"""

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

from megatron_ladder.checkpoint.publish import LATEST_NAME, published_checkpoints, publishing_order, write_whole
from megatron_ladder.errors import ExitCode
from megatron_ladder.lab.study.trial import RESULT_NAME, Result, Trial
from megatron_ladder.train.record import RECORD_NAME, read_record

CHECKPOINTS = "checkpoints"
"""Folder of a trial for --save and --load."""


@dataclass(frozen=True)
class Course:
    """What is kept of a run's record."""

    progress: tuple[Mapping[str, Any], ...] = ()
    """Events of training, in the order of their iterations."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    starts: int = 0
    versions: Mapping[str, str] | None = None
    """Of the last start."""
    code: int | None = None
    """Exit code of the last start, if it has ended."""

    @property
    def iteration(self) -> int:
        """The last step that is recorded."""
        return max((int(event["iteration"]) for event in self.progress), default=0)


def read_course(folder: Path) -> Course:
    """Of a trial's folder; an empty one if nothing was recorded."""
    try:
        return follow(read_record(folder / CHECKPOINTS))
    except FileNotFoundError:
        return Course()


def follow(events: Sequence[Mapping[str, Any]]) -> Course:
    """Puts the starts of a record together, without steps that were lost."""
    progress: list[Mapping[str, Any]] = []
    evaluations: list[Mapping[str, Any]] = []
    starts, versions, code = 0, None, None
    for event in events:
        kind = event["event"]
        if kind == "start":
            starts, versions, code = starts + 1, event.get("versions"), None
            progress = _until(progress, event["iteration"])
            evaluations = [one for one in evaluations if one["iteration"] <= event["iteration"]]
        elif kind == "progress":
            progress.append(event)
        elif kind == "evaluation":
            evaluations.append(event)
        elif kind == "stop":
            code = int(event["code"])
    return Course(tuple(progress), tuple(evaluations), starts, versions, code)


def _until(progress: Sequence[Mapping[str, Any]], iteration: int) -> list[Mapping[str, Any]]:
    """Lines that end there at the latest, and of one that goes beyond it the share of its time."""
    kept = [event for event in progress if event["iteration"] <= iteration]
    beyond = [event for event in progress if event["iteration"] - event["steps"] < iteration < event["iteration"]]
    for event in beyond[:1]:
        steps = iteration - (event["iteration"] - event["steps"])
        seconds = event["seconds"] * steps / event["steps"]
        kept.append({**event, "iteration": iteration, "steps": steps, "seconds": seconds})
    return kept


def result_of(
    trial: Trial, course: Course, parameters: int, tokens_per_step: int, command: tuple[str, ...]
) -> Result | None:
    """The result of a training whose last step is evaluated, or None if it is not done.

    One that only tries a learning rate, and has ended with bad numbers, is done too: its loss is infinite.

    Args:
        parameters: of the model.
        command: that trained it.
    """
    evaluations = [(int(event["iteration"]), _loss(event)) for event in course.evaluations]
    if course.code == ExitCode.BAD_NUMBERS and trial.kind == "tuning":
        evaluations = [point for point in evaluations if point[0] < trial.iterations]
        evaluations.append((trial.iterations, math.inf))
    if not evaluations or evaluations[-1][0] != trial.iterations:
        return None
    speeds = [float(event["tokens_per_second"]) for event in course.progress]
    return Result(
        trial=trial,
        parameters=parameters,
        tokens_per_step=tokens_per_step,
        training=tuple((int(event["iteration"]), _loss(event)) for event in course.progress),
        validation=tuple(evaluations),
        tokens_per_second=statistics.median(speeds) if speeds else 0.0,
        seconds=sum(float(event["seconds"]) for event in course.progress),
        attempts=course.starts,
        command=command,
        versions={**(course.versions or {}), "python": platform.python_version()},
    )


def _loss(event: Mapping[str, Any]) -> float:
    """Bad numbers are recorded as text."""
    loss = float(event["loss"])
    return loss if math.isfinite(loss) else math.inf


def write_result(folder: Path, result: Result) -> None:
    """Makes a trial done: the file is there whole, or not at all."""
    values = result.to_dict()
    for curve in ("training", "validation"):
        values[curve] = [[step, loss if math.isfinite(loss) else "inf"] for step, loss in values[curve]]
    write_whole(folder / RESULT_NAME, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def remove_unevaluated_end(folder: Path, iterations: int) -> list[str]:
    """Removes checkpoints that have all their steps, and returns their names.

    A run saves before its last evaluation. If it is ended between the two, a run that goes on from there finds nothing
    to do and does not evaluate; so it has to go on from the checkpoint before, or from the beginning.
    """
    save = folder / CHECKPOINTS
    names = published_checkpoints(save)
    ended = [name for name in names if publishing_order(name)[0] >= iterations]
    if ended:
        before = [name for name in names if name not in ended]
        if before:
            write_whole(save / LATEST_NAME, f"{before[-1]}\n".encode())
        else:
            (save / LATEST_NAME).unlink(missing_ok=True)
        for name in ended:
            shutil.rmtree(save / name)
    return ended


def remove_checkpoints(folder: Path) -> None:
    """Removes all that a trial has saved but its record."""
    save = folder / CHECKPOINTS
    with contextlib.suppress(FileNotFoundError):
        for entry in save.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != RECORD_NAME:
                entry.unlink()
