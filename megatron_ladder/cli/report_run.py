"""Reports on a run: its goodput, its interruptions, and a picture of its loss and speed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ladder.cli.images import image_name_errors, matplotlib_errors
from megatron_ladder.cli.programs import Command
from megatron_ladder.errors import ErrorCollector, run_program
from megatron_ladder.flags import parse_config
from megatron_ladder.train.record import EVALUATES, RECORD_NAME, read_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = {"lost": "C3", "stop": "C2", "hang": "C1", "skip": "C4"}
"""Colors of the vertical lines."""


@dataclass(frozen=True)
class ReportRunConfig:
    """Input and output. `report_run.py DIR` is short for `report_run.py --run DIR`."""

    run: Path
    """Directory of checkpoints (--save) with a run.jsonl file."""
    output: Path | None = None
    """Image file (.png, .pdf or .svg); report.png in the directory by default."""


COMMANDS = (Command((ReportRunConfig,)),)


@dataclass
class _Attempt:
    """The part of a run between one start and the next."""

    start: datetime
    first: int
    """Number of steps completed before it."""
    progress: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """The event of its regular end; None if it was interrupted."""
    last: datetime | None = None
    """Time of its last event."""
    trains: bool = True
    """False if it only evaluates a checkpoint."""

    @property
    def reached(self) -> int:
        """The last recorded step."""
        return max([self.first, *(event["iteration"] for event in self.progress)])


@dataclass(frozen=True)
class _Summary:
    """Totals of a record."""

    wall_seconds: float
    kept_seconds: float
    """Time in steps whose results were kept."""
    steps: int
    """Steps whose results were kept."""
    lost_steps: int
    """Steps whose results were lost, so that they were repeated or are missing."""
    interruptions: int
    """Attempts without a regular end with exit code 0."""
    attempts: list[_Attempt]

    @property
    def goodput(self) -> float:
        """Fraction of the time since the first start that was spent in steps that were kept."""
        return self.kept_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def _read_attempts(events: Sequence[dict[str, Any]]) -> list[_Attempt]:
    """Split a record at its starts."""
    attempts: list[_Attempt] = []
    for event in events:
        if event["event"] == "start":
            trains = event.get("reason") != EVALUATES
            attempts.append(_Attempt(event["time"], event["iteration"], trains=trains))
        elif attempts:
            if event["event"] == "progress":
                attempts[-1].progress.append(event)
            elif event["event"] == "stop":
                attempts[-1].end = event
        if attempts and event["event"] != "restart":
            attempts[-1].last = event["time"]
    return attempts


def _summarize(events: Sequence[dict[str, Any]]) -> _Summary:
    """Compute the totals of a record that has at least one start.

    A step is kept unless a later start that trains begins before it. A progress event that covers several steps, some
    of them kept, counts proportionally.
    """
    attempts = _read_attempts(events)
    kept_seconds, done, kept = 0.0, 0.0, 0.0
    for number, attempt in enumerate(attempts):
        horizon = min([later.first for later in attempts[number + 1 :] if later.trains], default=attempt.reached)
        for event in attempt.progress:
            steps, begin = event["steps"], event["iteration"] - event["steps"]
            kept_here = min(max(horizon - begin, 0), steps)
            kept_seconds += event["seconds"] * kept_here / steps
            done += steps
            kept += kept_here
    cut_off = [attempt for attempt in attempts if attempt.end is None or attempt.end["code"] != 0]
    running = attempts[-1].end is None
    return _Summary(
        wall_seconds=(events[-1]["time"] - attempts[0].start).total_seconds(),
        kept_seconds=kept_seconds,
        steps=round(kept),
        lost_steps=round(done - kept),
        interruptions=len(cut_off) - running,
        attempts=attempts,
    )


def _describe(events: Sequence[dict[str, Any]], summary: _Summary) -> str:
    """Format the report."""
    counts = {kind: sum(event["event"] == kind for event in events) for kind in ("skip", "spike", "hang", "restart")}
    saves = [event for event in events if event["event"] == "save end"]
    blocked = sum(event["blocked_seconds"] for event in saves)
    starts = len(summary.attempts)
    lines = [
        f"time since the first start: {summary.wall_seconds:,.1f} s",
        f"goodput: {summary.goodput:.1%}: {summary.kept_seconds:,.1f} s in {summary.steps} steps that were kept",
        f"interruptions: {summary.interruptions}; starts: {starts}; restarts by run_resilient.py: {counts['restart']}",
        f"lost steps: {summary.lost_steps}",
        f"saves: {len(saves)}, which blocked training for {blocked:,.1f} s",
        f"skipped steps: {counts['skip']}; loss spikes kept: {counts['spike']}; hangs: {counts['hang']}",
    ]
    for number, attempt in enumerate(summary.attempts, start=1):
        end = attempt.end
        how = "interrupted, no end is recorded" if end is None else f"{end['reason']} (exit code {end['code']})"
        steps = f"{attempt.first} -> {attempt.reached}"
        lines.append(f"  start {number}, {attempt.start:%Y-%m-%d %H:%M:%S}: {steps}: {how}")
    return "\n".join(lines)


def _draw(events: Sequence[dict[str, Any]], summary: _Summary) -> "Figure":
    """Draw loss and throughput over the hours since the first start, with vertical lines at notable events."""
    # matplotlib is optional; its absence is reported by main.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    began = summary.attempts[0].start

    def hours(when: datetime) -> float:
        return (when - began).total_seconds() / 3600

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axis, speed_axis = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for attempt in summary.attempts:
        times = [hours(event["time"]) for event in attempt.progress]
        losses = [float(event["loss"]) for event in attempt.progress]
        speeds = [event["tokens_per_second"] for event in attempt.progress]
        for axis, values in ((loss_axis, losses), (speed_axis, speeds)):
            axis.plot(times, values, color="C0", linewidth=1, marker=".", markersize=2)
    marks = [("skip", hours(event["time"])) for event in events if event["event"] in ("skip", "spike")]
    marks += [("hang", hours(event["time"])) for event in events if event["event"] == "hang"]
    for number, attempt in enumerate(summary.attempts, start=1):
        ended_well = attempt.end is not None and attempt.end["code"] == 0
        if attempt.last is not None and (attempt.end is not None or number < len(summary.attempts)):
            marks.append(("stop" if ended_well else "lost", hours(attempt.last)))
    labels = {"lost": "interrupted", "stop": "ended", "hang": "a rank was lost", "skip": "skipped step, or spike"}
    for kind, when in marks:
        for axis in (loss_axis, speed_axis):
            axis.axvline(when, color=MARKS[kind], linewidth=0.8, label=labels.pop(kind, None))
    loss_axis.set_title(f"goodput {summary.goodput:.1%}, {summary.interruptions} interruptions")
    loss_axis.set_ylabel("loss (nats per token)")
    speed_axis.set_ylabel("tokens/s")
    speed_axis.set_xlabel("hours since the first start")
    if marks:
        loss_axis.legend()
    for axis in (loss_axis, speed_axis):
        axis.grid(alpha=0.3)
    return figure


def parse_options(argv: Sequence[str], found: list[str] | None = None) -> ReportRunConfig:
    """Read the command line, appending errors to `found` if it is given."""
    words = ["--run", *argv] if argv and not argv[0].startswith("-") else list(argv)
    return parse_config(
        ReportRunConfig,
        words,
        "report_run.py",
        __doc__,
        find_errors=lambda config: image_name_errors("--output", config.output),
        found=found,
    )


def main(argv: Sequence[str]) -> None:
    """Read the record, print the report and _draw the picture."""
    errors = ErrorCollector()
    config = parse_options(argv, errors.messages)
    errors.add(*matplotlib_errors())
    events: list[dict[str, Any]] = []
    try:
        events = read_record(config.run)
        if not any(event["event"] == "start" for event in events):
            errors.add(f"{config.run / RECORD_NAME}: records no start of a run")
    except OSError as error:
        errors.add(f"--run {config.run}: {RECORD_NAME} cannot be read: {error.strerror}: give the --save of a run")
    errors.raise_if_any()
    output = config.output or config.run / "report.png"
    summary = _summarize(events)
    print(_describe(events, summary))
    _draw(events, summary).savefig(output, dpi=120)
    print(f"plot: {output}")


entry_point = functools.partial(run_program, main)
