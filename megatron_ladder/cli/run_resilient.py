"""Starts a training command, and starts it again when it fails, from the checkpoints that it has saved.

    run_resilient.py --max-restarts 5 -- deepspeed --num_gpus 8 pretrain_ladder.py ... --save DIR --load DIR

It imports no torch, and sees nothing of the run but its exit code and its record.
"""

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from megatron_ladder.errors import ExitCode, UserError, run_program
from megatron_ladder.flags import parse_command_line
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import SAME_SECONDS

POLL_SECONDS = 0.2
END_SECONDS = 5.0
"""From asking what a job has left behind to end until it is ended."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""They ask for the end."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Of <linux/prctl.h>."""
FINAL = (ExitCode.USER_ERROR, ExitCode.BAD_NUMBERS)
"""What another attempt would end with as well; a command that has once started to train is no mistake, though."""


@dataclass(frozen=True)
class ResilientConfig:
    """Restarts. What stands after -- is the command."""

    max_restarts: int = 5
    """Restarts in a row between which no checkpoint was saved; the count begins anew with each one that was."""
    backoff_seconds: float = 10.0
    """Seconds before the first restart in a row; twice as many before each further one."""
    max_backoff_seconds: float = 600.0
    """Most seconds before a restart."""
    retry_bad_numbers: bool = False
    """Restart also what has ended with bad numbers (exit code 3)."""
    stop_minutes: float = 30.0
    """Minutes that the job may take to save after SIGTERM, SIGINT or SIGHUP, before it is ended."""


def parse_options(argv: Sequence[str]) -> tuple[ResilientConfig, list[str], Path]:
    """Reads what stands before `--`; with it the command behind, and where that saves.

    Raises:
        UserError: a flag is wrong, there is no command, or it does not save where it loads.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    config: ResilientConfig
    (config,) = parse_command_line([ResilientConfig], argv[:split], "run_resilient.py", (__doc__ or "").split("\n")[0])
    command = list(argv[split + 1 :])
    return config, command, find_save_directory(command)


def main(argv: Sequence[str]) -> None:
    """Runs the command until it is done, may not go on, or is asked to end.

    Raises:
        UserError: as of `parse_options`, or the command cannot be started.
        SystemExit: the command's last exit code, if it is not 0.
    """
    config, command, save = parse_options(argv)
    # Whom a launcher leaves behind is then a child of this process, and is found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with noted_signals() as received:
        code = supervise(config, save, received, lambda: attempt(command, config, received, save))
    if code != 0:
        sys.exit(code)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, signals that ask for the end are appended to the list; those soon after the first are one with it.

    A signal that the parent has set to be ignored, as nohup does with a hang-up, stays so.
    """
    received: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        first = first if received else now
        if not received or now - first > SAME_SECONDS:
            received.append(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_save_directory(command: Sequence[str]) -> Path:
    """Where the command saves, which must be where it loads.

    Raises:
        UserError: it is not.
    """
    if not command:
        raise UserError("there is no command: give it after --, as in `run_resilient.py -- deepspeed ...`")
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in ("--save", "--load"):
            found[name] = value if equals else following
    missing = [name for name in ("--save", "--load") if not found.get(name)]
    if missing:
        raise UserError(f"the command has no {' and no '.join(missing)}: a restart would begin anew: give both")
    if Path(found["--save"]).resolve() != Path(found["--load"]).resolve():
        raise UserError(
            f"--load {found['--load']} is not --save {found['--save']}: a restart would not see what was saved: give "
            "both the same directory"
        )
    return Path(found["--save"])


def supervise(
    config: ResilientConfig, save: Path, received: Sequence[int], attempt: Callable[[], int]
) -> int:
    """Makes attempts, with pauses between them, until one is the last; its exit code.

    Args:
        received: signals that ask for the end, as they come.
        attempt: runs the command and returns its exit code, below zero if a signal has ended it.
    """
    record, in_a_row, has_run = RunRecord(save), 0, False
    while True:
        known = read_events(save)
        code = attempt()
        happened = read_events(save)[len(known) :]
        # A launcher may have an exit code of its own; the record has that of the ranks.
        ends = [event["code"] for event in happened if event["event"] == "stop"]
        told = int(ends[-1]) if ends else code
        if code == 0 or (received and told == 0):
            return 0
        has_run = has_run or any(event["event"] == "start" for event in happened)
        # What it then meets may pass: a name that is not resolved for a moment, a file system that is away.
        tried_again = has_run if told == ExitCode.USER_ERROR else config.retry_bad_numbers
        if received or (told in FINAL and not tried_again):
            return told if told > 0 else ExitCode.INTERNAL
        in_a_row = 1 if any(event["event"] == "save end" for event in happened) else in_a_row + 1
        if in_a_row > config.max_restarts:
            print(f"*** {in_a_row} failures without a new checkpoint between them: gives up ***", flush=True)
            return told if told > 0 else ExitCode.INTERNAL
        pause = min(config.max_backoff_seconds, config.backoff_seconds * 2 ** (in_a_row - 1))
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {told or code}"
        save.mkdir(parents=True, exist_ok=True)
        record.write("restart", reason=reason, in_a_row=in_a_row, pause_seconds=pause)
        limit = f"{in_a_row} of {config.max_restarts} without a new checkpoint"
        print(f"*** the job has ended with {reason}: starts again in {pause:g} s ({limit}) ***", flush=True)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not received:
            time.sleep(POLL_SECONDS)
        if received:
            return ExitCode.DONE


def read_events(save: Path) -> list[dict[str, Any]]:
    """The record so far; empty if there is none."""
    try:
        return read_record(save)
    except FileNotFoundError:
        return []


def good_ends(save: Path) -> int:
    """How many ends with exit code 0 are in the record."""
    return sum(event["event"] == "stop" and event["code"] == ExitCode.DONE for event in read_events(save))


def attempt(command: Sequence[str], config: ResilientConfig, received: Sequence[int], save: Path) -> int:
    """Runs the command to its end, and ends what it leaves behind.

    Returns:
        Its exit code. 0 becomes 1 when the record has no such end: the `deepspeed` command ends with 0 also when the
        process that it has started was killed.
    """

    def prepare() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    known = good_ends(save)
    try:
        # In a group of its own, Ctrl-C does not reach it: it is handed on below.
        job = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from error
    try:
        wait(job, config, received)
        # Ranks that are ended below may record a good end too.
        ended_well = good_ends(save) > known
    finally:
        end_descendants(job)
    code = job.wait()
    if code == 0 and not ended_well:
        print(f"*** the command has ended with exit code 0, but no end is recorded in {save} ***", flush=True)
        return ExitCode.INTERNAL
    return code


def wait(job: "subprocess.Popen[bytes]", config: ResilientConfig, received: Sequence[int]) -> None:
    """Until the job has ended, or has to be ended: a second signal, or too long after the first.

    A launcher may die of the signal that its ranks were sent too, and they still save.
    """
    asked: float | None = None
    ranks: list[psutil.Process] = []
    while True:
        if received and asked is None:
            asked = time.monotonic()
            # Ranks know no hang-up.
            ranks = hand_on(signal.SIGTERM if received[0] == signal.SIGHUP else received[0], job)
        late = asked is not None and time.monotonic() - asked > 60 * config.stop_minutes
        ended = job.poll() is not None and not psutil.wait_procs(ranks, 0)[1]
        if ended or late or len(received) > 1:
            return
        time.sleep(POLL_SECONDS)


def hand_on(number: int, job: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Sends a signal to the ranks on this machine, and returns them; to the launcher where there are none.

    Ranks agree on the end by themselves. A launcher that is asked gives them 30 seconds, too little for a large
    checkpoint, and then fails.
    """
    ranks = rank_processes()
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    if not ranks:
        job.send_signal(number)
    return ranks


def rank_processes() -> list[psutil.Process]:
    """This process's descendants that a launcher has given a rank, without their own children."""
    ranks = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= process.environ().keys():
                ranks[process.pid] = (process, process.ppid())
        except psutil.Error:
            continue
    return [process for process, parent in ranks.values() if parent not in ranks]


def end_descendants(job: "subprocess.Popen[bytes]") -> None:
    """Ends all processes that this one has started, and theirs."""
    left = psutil.Process().children(recursive=True)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        # Who waits for the job gets its exit code, and nobody after.
        psutil.wait_procs([process for process in left if process.pid != job.pid], END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END_SECONDS)
        # An orphan may have become a child of this process in the meantime.
        left = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
