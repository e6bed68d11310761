"""Runs checks one after another and writes a table of their outcomes.

A check is a function with a declared number of GPUs, `@check(...)`. It receives the machine and its number of ranks,
starts processes through the machine, which ends them at the check's time limit, and returns its measured figure. It
fails with any exception except `NotRun`, whose text is the reason.
"""

import contextlib
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from megatron_ladder.files import read_if_exists
from tests.helpers.commands import run_command
from tests.helpers.pool import RankPool

R = TypeVar("R")
Result = Literal["passed", "failed", "not run"]

STAND_INS = {1: 1, 2: 2, 8: 4}
"""GPUs -> processes that stand for them on a CPU, and GPUs that do where there are fewer."""
LONGEST_SUMMARY = 200
"""Characters of an error in the table."""
PASSED_ON = ("CUDA", "NCCL", "NVIDIA", "TORCH", "TRITON")
"""Beginnings of environment variables of the user that the processes of a check receive on GPUs."""


class Value(IntEnum):
    """What checks show; on a new machine, they run in this order."""

    RIGHT = 0
    """Results."""
    FAST = 1
    """Measurements of speed."""
    ROBUST = 2
    """Failures, and options that are off by default."""
    STRESS = 3
    """Results again, in slower environments."""


class NotRun(Exception):  # noqa: N818
    """The machine or the environment lacks something that the check needs."""


class Machine:
    """The devices of the checks, a folder for files, and the processes and the time of the current check."""

    def __init__(self, device: Literal["cuda", "cpu"], gpus: int, folder: Path) -> None:
        self.device = device
        self.gpus = gpus
        self.folder = folder
        self.description = ""
        """Name and number of the devices, once a rank has found them."""
        self._deadline = 0.0
        self._pools: dict[tuple[int, tuple[tuple[str, str], ...]], RankPool] = {}

    @property
    def on_gpu(self) -> bool:
        """Whether checks run on GPUs."""
        return self.device == "cuda"

    def ranks(self, gpus: int) -> int:
        """Return the number of ranks of a check for so many GPUs; raise NotRun if there are too few."""
        if not self.on_gpu or self.gpus < gpus:
            gpus = STAND_INS[gpus]
        if self.on_gpu and self.gpus < gpus:
            raise NotRun(f"needs {gpus} GPUs, found {self.gpus}")
        return gpus

    @contextlib.contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """End everything that the block starts, at its end or after this time."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()

    @property
    def seconds_left(self) -> float:
        """Time until the limit of the current check."""
        return max(0.1, self._deadline - time.monotonic())

    def call(
        self, ranks: int, function: Callable[..., R], *args: Any, variables: Mapping[str, str] | None = None
    ) -> list[R]:
        """Call a function on all ranks and return their results; `variables` are added to their environment.

        Ranks with the same variables stay alive until the check ends.
        """
        key = ranks, tuple(sorted((variables or {}).items()))
        if key not in self._pools:
            backend: Literal["nccl", "gloo"] = "nccl" if self.on_gpu else "gloo"
            self._pools[key] = RankPool(ranks, backend, self.environment() | dict(variables or {}))
        return self._pools[key].run_within(self.seconds_left, function, *args)

    def command(self, *argv: str | Path, codes: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run a program and return its output; raise AssertionError unless it ends in time with one of these codes."""
        try:
            done = run_command(argv, round(self.seconds_left, 1), self.environment())
        except AssertionError as error:
            command, ending, *output = str(error).split("\n", 2)
            raise AssertionError("\n".join([f"{ending}: {command}", *output])) from None
        command = " ".join(map(str, argv))
        assert done.returncode in codes, f"exit code {done.returncode}: {command}\n{done.stdout}\n{done.stderr}"
        return done

    def environment(self) -> dict[str, str]:
        """Return the variables that processes need in addition to those of every test."""
        if not self.on_gpu:
            return {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


@dataclass(frozen=True)
class Check:
    """A check for a number of GPUs, with its time limit."""

    title: str
    gpus: int
    seconds: float
    value: Value
    run: Callable[[Machine, int], str]

    @property
    def name(self) -> str:
        """The title with the number of GPUs."""
        return f"{self.title}, {self.gpus} GPU{'s' * (self.gpus > 1)}"


class Outcome(NamedTuple):
    """What became of a check. `figure` is the measured figure, or the reason why there is none."""

    check: Check
    result: Result
    figure: str
    seconds: float
    details: str = ""
    """The whole error of a failed check."""


CHECKS: list[Check] = []
"""All checks of the modules imported so far."""


def check(
    title: str, gpus: int | Sequence[int], seconds: float, value: Value = Value.RIGHT
) -> Callable[[Callable[[Machine, int], str]], None]:
    """Register a function as a check, separately for each of these numbers of GPUs."""

    def register(function: Callable[[Machine, int], str]) -> None:
        numbers = [gpus] if isinstance(gpus, int) else gpus
        CHECKS.extend(Check(title, number, seconds, value, function) for number in numbers)

    return register


def run_checks(
    checks: Sequence[Check], machine: Machine, seconds: float, report: Callable[[Outcome], object]
) -> list[Outcome]:
    """Run the checks, of which none begins after this time, and call `report` after each."""
    outcomes = []
    ends = time.monotonic() + seconds
    for one in checks:
        outcomes.append(_run(one, machine, ends - time.monotonic()))
        report(outcomes[-1])
    return outcomes


def _run(one: Check, machine: Machine, seconds_left: float) -> Outcome:
    began = time.monotonic()

    def outcome(result: Result, figure: str, details: str = "") -> Outcome:
        return Outcome(one, result, figure, time.monotonic() - began, details)

    try:
        ranks = machine.ranks(one.gpus)
        if seconds_left <= 0:
            raise NotRun("the time of all checks is used up: raise --minutes, or give --only")
        with machine.limited_to(one.seconds):
            figure = one.run(machine, ranks)
            has_fewer = machine.on_gpu and ranks < one.gpus
            return outcome("passed", f"with {ranks}: {figure}" if has_fewer else figure)
    except NotRun as reason:
        return outcome("not run", str(reason))
    except Exception as error:
        return outcome("failed", _summary(error), traceback.format_exc())


def _summary(error: Exception) -> str:
    """Return the line that names the problem: the first, the last of a rank's traceback, or the code that failed."""
    failed_line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    first, *more = str(error).strip().splitlines() or [f"{type(error).__name__}: {failed_line}"]
    if not first.endswith("Traceback (most recent call last):"):
        return first[:LONGEST_SUMMARY]
    return next((line for line in more if line and not line.startswith(" ")), first)[:LONGEST_SUMMARY]


def as_json(heading: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes as values for a JSON file, with what describes the device and the versions."""
    return {
        "device": heading,
        "checks": [
            {"check": one.check.name, "result": one.result, "figure": one.figure, "seconds": one.seconds}
            | ({"details": one.details} if one.details else {})
            for one in outcomes
        ],
    }


def read_passed(path: Path | None, heading: str, checks: Sequence[Check]) -> list[Outcome]:
    """Return the outcomes of those checks that passed on the same device, according to a file of `as_json`."""
    content = None if path is None else read_if_exists(path)
    found = json.loads(content) if content else {}
    if found.get("device") != heading:
        return []
    passed = {row["check"]: row for row in found["checks"] if row["result"] == "passed"}
    return [
        Outcome(one, "passed", passed[one.name]["figure"], passed[one.name]["seconds"])
        for one in checks
        if one.name in passed
    ]


def summary(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return the outcomes as a Markdown table, and the errors of failed checks; the latter is empty if all passed."""
    lines = ["| check | GPUs | result | figure, or reason | seconds |", "|---|---|---|---|---|"]
    for one in outcomes:
        figure = one.figure.replace("|", "\\|")
        lines.append(f"| {one.check.title} | {one.check.gpus} | {one.result} | {figure} | {one.seconds:.0f} |")
    failed = (one for one in outcomes if one.result == "failed")
    errors = [f"\n{one.check.name}:\n\n```\n{one.details}```\n" for one in failed]
    return "\n".join(lines), "".join(errors)
