"""Reports on a run: its goodput, its interruptions, and a picture of its loss and speed.

With `--status`, the exit code reports how the last attempt ended: 0 it finished or was asked to stop, 2 invalid input,
3 a loss or gradient that is not finite, otherwise 1: worth another attempt.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import ErrorCollector, ExitCode, run_program
from megatron_ladder.files import atomic_writer, output_problem
from megatron_ladder.flags import flag, rule
from megatron_ladder.train.record import EVALUATES, RECORD_NAME, attempt_outcome, read_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ReportRunConfig:
    """Input and output. `report_run.py DIR` and `--status DIR` are short for `--run DIR`."""

    run: Path
    """Directory of checkpoints (--save) with a run.jsonl file."""
    output: Path | None = flag(None, output="file")
    """Image file (.png, .pdf or .svg); report.png in the directory by default."""
    status: bool = False
    """Only print how the last attempt ended, and exit with 0 (finished), 2 (invalid input), 3 (bad numbers) or 1 (worth
    another attempt). Launchers lose the exit codes of their ranks; the record has them."""

    checks = (
        rule(
            lambda output, status: not status and output is not None and output.suffix not in (".png", ".pdf", ".svg"),
            "{output}: expected a name that ends in .png, .pdf or .svg",
        ),
        rule(
            lambda status: not status and importlib.util.find_spec("matplotlib") is None,
            "matplotlib is not installed",
            "pip install matplotlib",
        ),
    )


_KILLED = "killed (for example for lack of memory) or crashed"


@dataclass
class _Attempt:
    """The part of a run between one start and the next.

    `first` is the number of steps completed before it. An attempt that does not train only evaluates a checkpoint.
    `last` is the time of its last event. An interrupted attempt has no `end`. `peer_loss` is the first event about
    lost ranks, if there is one.
    `unlogged` has the steps between the last progress and the last save, and `blocked_seconds` the time of saves there.
    """

    start: datetime
    first: int
    trains: bool
    last: datetime
    progress: list[dict[str, Any]] = field(default_factory=list)
    unlogged: dict[str, Any] | None = None
    blocked_seconds: float = 0.0
    end: dict[str, Any] | None = None
    peer_loss: dict[str, Any] | None = None

    @property
    def hung(self) -> bool:
        return self.end is None and self.peer_loss is not None and self.peer_loss["event"] == "hang"

    def outcome(self, is_last: bool) -> str:
        if self.end is not None:
            return f"{self.end.get('reason')} (exit code {self.end['code']})"
        if self.peer_loss is None:
            running = "running, or " if is_last else ""
            return f"no end is recorded: {running}{_KILLED}"
        who = self.peer_loss.get("where") or f"ranks {self.peer_loss.get('ranks')}"
        return f"interrupted: {who}: " + ("did not answer in time" if self.hung else _KILLED)

    @property
    def step_events(self) -> list[dict[str, Any]]:
        """The events that count steps."""
        return self.progress if self.unlogged is None else [*self.progress, self.unlogged]

    @property
    def reached(self) -> int:
        return max([self.first, *(event["iteration"] for event in self.step_events)])

    def add(self, event: dict[str, Any]) -> None:
        """Record an event that follows the start."""
        self.last = event["time"]
        if event["event"] == "progress":
            self.progress.append(event)
            self.unlogged = None
            self.blocked_seconds = 0.0
        elif event["event"] == "save begin":
            logged = self.progress[-1] if self.progress else {"time": self.start, "iteration": self.first}
            seconds = (event["time"] - logged["time"]).total_seconds() - self.blocked_seconds
            if (steps := event["iteration"] - logged["iteration"]) > 0:
                self.unlogged = {"iteration": event["iteration"], "steps": steps, "seconds": max(0.0, seconds)}
        elif event["event"] == "save end":
            self.blocked_seconds += event["blocked_seconds"]
        elif event["event"] in ("hang", "lost"):
            # Ranks that lose the one that noticed it report it as well.
            self.peer_loss = self.peer_loss or event
        elif event["event"] == "stop":
            self.end = event

    @property
    def ended_well(self) -> bool:
        return self.end is not None and self.end["code"] == 0


@dataclass(frozen=True)
class _Summary:
    """Totals of a record.

    Kept steps, and the time in them, are those whose results were kept; lost steps were repeated or are missing.
    Attempts without a regular end with exit code 0 are interruptions; the last one may be running.
    """

    wall_seconds: float
    kept_seconds: float
    steps: int
    lost_steps: int
    interruptions: int
    attempts: list[_Attempt]

    @property
    def goodput(self) -> float:
        """Fraction of the time from the first start to the last event that was spent in steps that were kept."""
        return self.kept_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def _summarize(events: Sequence[dict[str, Any]]) -> _Summary:
    """Compute the totals of a record that has at least one start.

    A step is kept unless a later start that trains begins before it. A progress event that covers several steps, some
    of them kept, counts proportionally. A save counts the steps before it that no progress event covers; their time
    includes evaluations.
    """
    attempts: list[_Attempt] = []
    is_starting = True
    for event in events:
        if event["event"] == "start":
            is_starting = False
            trains = event.get("reason") != EVALUATES
            attempts.append(_Attempt(event["time"], event["iteration"], trains, event["time"]))
        elif event["event"] in ("launch", "load", "fallback"):
            # These precede the start to which they belong, possibly by hours.
            is_starting = True
        elif not is_starting and attempts[-1].end is None:
            # Events after an end are those of a later start that failed early.
            attempts[-1].add(event)
    kept_seconds = done = kept = 0.0
    for number, attempt in enumerate(attempts):
        horizon = min([later.first for later in attempts[number + 1 :] if later.trains], default=attempt.reached)
        for event in attempt.step_events:
            steps = event["steps"]
            begin = event["iteration"] - steps
            kept_here = min(max(horizon - begin, 0), steps)
            kept_seconds += event["seconds"] * kept_here / steps
            done += steps
            kept += kept_here
    is_running = attempts[-1].end is None and attempts[-1].peer_loss is None
    ended = attempts[:-1] if is_running else attempts
    return _Summary(
        wall_seconds=(events[-1]["time"] - attempts[0].start).total_seconds(),
        kept_seconds=kept_seconds,
        steps=round(kept),
        lost_steps=round(done - kept),
        interruptions=sum(not attempt.ended_well for attempt in ended),
        attempts=attempts,
    )


def _describe(events: Sequence[dict[str, Any]], summary: _Summary) -> str:
    counts = {kind: sum(event["event"] == kind for event in events) for kind in ("skip", "spike")}
    saves = [event for event in events if event["event"] == "save end"]
    blocked = sum(event["blocked_seconds"] for event in saves)
    hangs = sum(attempt.hung for attempt in summary.attempts)
    failed = sum(attempt.end is not None and not attempt.ended_well for attempt in summary.attempts)
    lines = [
        f"time from the first start to the last event: {summary.wall_seconds:,.1f} s",
        f"goodput: {summary.goodput:.1%}: {summary.kept_seconds:,.1f} s in {summary.steps} steps that were kept",
        f"interruptions: {summary.interruptions}; starts: {len(summary.attempts)}",
        f"lost steps: {summary.lost_steps}",
        f"saves: {len(saves)}, which blocked training for {blocked:,.1f} s",
        f"skipped steps: {counts['skip']}; loss spikes kept: {counts['spike']}",
        f"hangs: {hangs}; killed or crashed: {summary.interruptions - failed - hangs}",
    ]
    last = summary.attempts[-1]
    for number, attempt in enumerate(summary.attempts, start=1):
        steps = f"{attempt.first} -> {attempt.reached}"
        lines.append(
            f"  start {number}, {attempt.start:%Y-%m-%d %H:%M:%S}: {steps}: {attempt.outcome(attempt is last)}"
        )
    return "\n".join(lines)


def _draw(events: Sequence[dict[str, Any]], summary: _Summary) -> "Figure":
    """Draw loss and throughput over the hours since the first start, with vertical lines at notable events."""
    # matplotlib is optional; its absence is reported by main.
    from matplotlib.figure import Figure

    began = summary.attempts[0].start

    def hours(when: datetime) -> float:
        return (when - began).total_seconds() / 3600

    figure = Figure(figsize=(10, 6), layout="constrained")
    loss_axis, speed_axis = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for attempt in summary.attempts:
        times = [hours(event["time"]) for event in attempt.progress]
        for axis, key in ((loss_axis, "loss"), (speed_axis, "tokens_per_second")):
            values = [float(event[key]) for event in attempt.progress]
            axis.plot(times, values, color="C0", linewidth=1, marker=".", markersize=2)
    validations = [event for event in events if event["event"] == "evaluation"]
    for number, name in enumerate(dict.fromkeys(event.get("name", "") for event in validations)):
        curve = [(hours(event["time"]), float(event["loss"])) for event in validations if event.get("name", "") == name]
        style = {"linestyle": "--", "marker": "o", "markersize": 4, "color": f"C{5 + number}"}
        loss_axis.plot(*zip(*curve, strict=True), label=f"validation {name}".rstrip(), **style)
    *earlier, last = summary.attempts
    finished = earlier if last.end is None else summary.attempts
    lost = [attempt.peer_loss["time"] for attempt in summary.attempts if attempt.peer_loss is not None]
    marks = [
        ("skipped step, or spike", "C4", [event["time"] for event in events if event["event"] in ("skip", "spike")]),
        ("a rank was lost, or hung", "C1", lost),
        ("ended", "C2", [attempt.last for attempt in finished if attempt.ended_well]),
        ("interrupted", "C3", [attempt.last for attempt in finished if not attempt.ended_well]),
    ]
    for label, color, moments in marks:
        for number, moment in enumerate(moments):
            loss_axis.axvline(hours(moment), color=color, linewidth=0.8, label=None if number else label)
            speed_axis.axvline(hours(moment), color=color, linewidth=0.8)
    loss_axis.set_title(f"goodput {summary.goodput:.1%}, {summary.interruptions} interruptions")
    loss_axis.set_ylabel("loss (nats per token)")
    speed_axis.set_ylabel("tokens/s")
    speed_axis.set_xlabel("hours since the first start")
    if loss_axis.get_legend_handles_labels()[0]:
        loss_axis.legend()
    for axis in (loss_axis, speed_axis):
        axis.grid(alpha=0.3)
    return figure


_OUTCOMES = {
    ExitCode.DONE: "the run finished, or was asked to stop",
    ExitCode.USER_ERROR: "the input was invalid: fix the command",
    ExitCode.BAD_NUMBERS: "the loss or the gradients are not finite: look at the data and the learning rate",
    ExitCode.INTERNAL: "the run did not finish: worth another attempt",
}


def parse_options(argv: Sequence[str]) -> ReportRunConfig:
    words = list(argv)
    place = 1 if words[:1] == ["--status"] else 0
    if words[place:] and not words[place].startswith("-"):
        words.insert(place, "--run")
    return parse_config(ReportRunConfig, words, "report_run.py", __doc__)


def main(argv: Sequence[str]) -> None:
    """Read the record, print the report and draw the picture; with --status, print and return only how it ended."""
    errors = ErrorCollector()
    config = parse_options(argv)
    events: list[dict[str, Any]] = []
    try:
        events = read_record(config.run)
        if not config.status and not any(event["event"] == "start" for event in events):
            errors.add(f"{config.run / RECORD_NAME}: records no start of a run")
    except OSError as error:
        # A run that was killed before it could write anything is worth another attempt.
        if not config.status:
            errors.add(f"--run {config.run}: {RECORD_NAME} cannot be read: {error.strerror}: give the --save of a run")
    output = config.output or config.run / "report.png"
    if not config.status and (problem := output_problem(output, "file")):
        errors.add(f"{output} cannot be written: {problem}: give another path with --output")
    errors.raise_if_any()
    if config.status:
        outcome = attempt_outcome(events)
        print(f"{config.run}: {_OUTCOMES[outcome]}", flush=True)
        raise SystemExit(outcome)
    summary = _summarize(events)
    print(_describe(events, summary))
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(output) as file:
        _draw(events, summary).savefig(file, format=output.suffix[1:], dpi=120)
    print(f"plot: {output}")


entry_point = functools.partial(run_program, main)
