"""What a run's record tells: how much of its time went into steps that were kept, what cut it off, and a picture."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line
from megatron_ladder.train.record import EVALUATES, RECORD_NAME, read_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = {"lost": "C3", "stop": "C2", "hang": "C1", "skip": "C4"}
"""Colors of vertical lines."""


@dataclass(frozen=True)
class ReportRunConfig:
    """Input and output. `report_run.py DIR` is short for `report_run.py --run DIR`."""

    run: Path
    """Directory of checkpoints (--save) that has a run.jsonl."""
    output: Path | None = None
    """Image to write; report.png in the directory if not given. The ending chooses the kind (.png, .pdf, .svg)."""


@dataclass
class Attempt:
    """What happened between a start and the next one."""

    start: datetime
    first: int
    """Steps done before it."""
    progress: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """The event that ended it, unless it was cut off."""
    last: datetime | None = None
    """Of its last event."""
    trains: bool = True
    """Unless it evaluates what is saved, and takes no step."""

    @property
    def reached(self) -> int:
        """The last step that is recorded."""
        return max([self.first, *(event["iteration"] for event in self.progress)])


@dataclass(frozen=True)
class Summary:
    """Numbers of a whole record."""

    wall_seconds: float
    kept_seconds: float
    """In steps whose results were kept."""
    steps: int
    """Done and kept."""
    lost_steps: int
    """Done and not kept: they were done again, or never."""
    interruptions: int
    """Attempts that did not end by themselves with exit code 0."""
    attempts: list[Attempt]

    @property
    def goodput(self) -> float:
        """Share of the time since the first start that went into steps that were kept."""
        return self.kept_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def read_attempts(events: Sequence[dict[str, Any]]) -> list[Attempt]:
    """Cuts a record at its starts."""
    attempts: list[Attempt] = []
    for event in events:
        if event["event"] == "start":
            trains = event.get("reason") != EVALUATES
            attempts.append(Attempt(event["time"], event["iteration"], trains=trains))
        elif attempts:
            if event["event"] == "progress":
                attempts[-1].progress.append(event)
            elif event["event"] == "stop":
                attempts[-1].end = event
        if attempts and event["event"] != "restart":
            attempts[-1].last = event["time"]
    return attempts


def summarize(events: Sequence[dict[str, Any]]) -> Summary:
    """Adds up a record that has a start.

    A step counts as kept unless a later start, other than one that only evaluates, begins before it. A line of progress
    over several steps, some of them kept, counts in proportion.
    """
    attempts = read_attempts(events)
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
    return Summary(
        wall_seconds=(events[-1]["time"] - attempts[0].start).total_seconds(),
        kept_seconds=kept_seconds,
        steps=round(kept),
        lost_steps=round(done - kept),
        interruptions=len(cut_off) - running,
        attempts=attempts,
    )


def describe(events: Sequence[dict[str, Any]], summary: Summary) -> str:
    """The report, some lines of text."""
    counts = {kind: sum(event["event"] == kind for event in events) for kind in ("skip", "spike", "hang", "restart")}
    saves = [event for event in events if event["event"] == "save end"]
    blocked = sum(event["blocked_seconds"] for event in saves)
    starts = len(summary.attempts)
    lines = [
        f"time since the first start: {summary.wall_seconds:,.1f} s",
        f"goodput: {summary.goodput:.1%}: {summary.kept_seconds:,.1f} s in {summary.steps} steps that were kept",
        f"interruptions: {summary.interruptions}; starts: {starts}; restarts by run_resilient.py: {counts['restart']}",
        f"lost steps: {summary.lost_steps}",
        f"saves: {len(saves)}, which kept training waiting for {blocked:,.1f} s",
        f"steps left out: {counts['skip']}; loss spikes kept: {counts['spike']}; hangs: {counts['hang']}",
    ]
    for number, attempt in enumerate(summary.attempts, start=1):
        end = attempt.end
        how = "no end is recorded" if end is None else f"{end['reason']} (exit code {end['code']})"
        steps = f"{attempt.first} -> {attempt.reached}"
        lines.append(f"  start {number}, {attempt.start:%Y-%m-%d %H:%M:%S}: {steps}: {how}")
    return "\n".join(lines)


def draw(events: Sequence[dict[str, Any]], summary: Summary) -> "Figure":
    """Loss and throughput over hours since the first start, with a line where something happened."""
    # Not above: matplotlib comes with the extra [plot], and its absence deserves a sentence.
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
    labels = {"lost": "cut off", "stop": "ended", "hang": "a rank was lost", "skip": "step left out, or spike"}
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
    """Reads the command line.

    Args:
        found: where to append mistakes instead of raising them, for a caller that looks for more.

    Raises:
        UserError: a line for each mistake.
    """
    mistakes: list[str] = []
    words = ["--run", *argv] if argv and not argv[0].startswith("-") else list(argv)
    config: ReportRunConfig
    (config,) = parse_command_line([ReportRunConfig], words, "report_run.py", (__doc__ or "").split("\n")[0])
    if config.output is not None and config.output.suffix not in (".png", ".pdf", ".svg"):
        mistakes.append(f"--output {config.output}: expected a name that ends in .png, .pdf or .svg")
    if found is not None:
        found.extend(mistakes)
    elif mistakes:
        raise UserError(*mistakes)
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the record, prints the report and draws the picture."""
    mistakes: list[str] = []
    config = parse_options(argv, mistakes)
    output = config.output or config.run / "report.png"
    if importlib.util.find_spec("matplotlib") is None:
        mistakes.append("matplotlib is not installed: pip install matplotlib")
    events: list[dict[str, Any]] = []
    try:
        events = read_record(config.run)
        if not any(event["event"] == "start" for event in events):
            mistakes.append(f"{config.run / RECORD_NAME}: has no start: no run got as far")
    except OSError as error:
        mistakes.append(f"--run {config.run}: {RECORD_NAME} cannot be read: {error.strerror}: give the --save of a run")
    if mistakes:
        raise UserError(*mistakes)
    summary = summarize(events)
    print(describe(events, summary))
    draw(events, summary).savefig(output, dpi=120)
    print(f"plot: {output}")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
