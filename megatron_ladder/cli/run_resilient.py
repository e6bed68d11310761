"""Starts a training command, and restarts it after failures from the checkpoints that it saved.

    run_resilient.py --max-restarts 5 -- deepspeed --num_gpus 8 pretrain_ladder.py ... --save DIR --load DIR

It imports no torch, and observes only the exit code and the record of the run.
"""

import contextlib
import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_ladder.cli.programs import Command
from megatron_ladder.errors import ExitCode, UserError, run_program
from megatron_ladder.flags import flag, parse_config
from megatron_ladder.processes import Child, adopt_orphans, received_signals, start_child
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import SAME_SECONDS

POLL_SECONDS = 0.2
END_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL for processes that the command leaves behind."""


@dataclass(frozen=True)
class ResilientConfig:
    """Restarts. The command follows after --."""

    max_restarts: int = flag(5, minimum=0)
    """Maximum number of consecutive restarts without a new checkpoint."""
    backoff_seconds: float = flag(10.0, minimum=0)
    """Pause before the first restart; it doubles with each consecutive restart without a new checkpoint."""
    max_backoff_seconds: float = flag(600.0, minimum=0)
    """Maximum pause before a restart."""
    retry_bad_numbers: bool = False
    """Also restart after a non-finite loss or gradient (exit code 3)."""
    stop_minutes: float = flag(30.0, minimum=0)
    """Minutes that the command may take to save after SIGTERM, SIGINT or SIGHUP before it is killed."""


COMMANDS = (Command((ResilientConfig,)),)


def parse_options(argv: Sequence[str]) -> tuple[ResilientConfig, list[str], Path]:
    """Return the options before `--`, the command after it, and the directory in which the command saves.

    Raise a UserError if a flag is wrong, there is no command, or the command does not load from where it saves.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    config = parse_config(ResilientConfig, argv[:split], "run_resilient.py", __doc__)
    command = list(argv[split + 1 :])
    return config, command, _find_save_directory(command)


def main(argv: Sequence[str]) -> None:
    """Run the command until it succeeds, must not be restarted, or is stopped by a signal.

    Raises:
        UserError: see `parse_options`; or the command cannot be started.
        SystemExit: with the command's last exit code, if it is not 0.
    """
    config, command, save = parse_options(argv)
    adopt_orphans()
    with received_signals(merge_seconds=SAME_SECONDS) as received:
        code = _supervise(config, save, received, lambda: _attempt(command, config, received, save))
    if code != 0:
        sys.exit(code)


def _find_save_directory(command: Sequence[str]) -> Path:
    if not command:
        raise UserError("there is no command: give it after --, as in `run_resilient.py -- deepspeed ...`")
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in ("--save", "--load"):
            found[name] = value if equals else following
    missing = [name for name in ("--save", "--load") if not found.get(name)]
    if missing:
        raise UserError(f"the command has no {' and no '.join(missing)}: a restart would start from scratch: give both")
    if Path(found["--save"]).resolve() != Path(found["--load"]).resolve():
        raise UserError(
            f"--load {found['--load']} is not --save {found['--save']}: a restart would not find the checkpoints: give "
            "both the same directory"
        )
    return Path(found["--save"])


def _supervise(config: ResilientConfig, save: Path, received: Sequence[int], attempt: Callable[[], int]) -> int:
    """Make attempts, with pauses between them, and return the exit code of the last one.

    Signals in `received` stop the program. A negative code of an attempt is a signal that ended it.
    """
    record, consecutive, has_run = RunRecord(save), 0, False
    while True:
        known = _read_events(save)
        code = attempt()
        events = _read_events(save)[len(known) :]
        # A launcher may have a different exit code; the record contains that of the ranks.
        recorded = [event["code"] for event in events if event["event"] == "stop"]
        reported = int(recorded[-1]) if recorded else code
        if code == 0 or (received and reported == 0):
            return 0
        has_run = has_run or any(event["event"] == "start" for event in events)
        # After training has started, a user error may be temporary: a failed name look-up or file system, for example.
        is_final = (reported == ExitCode.USER_ERROR and not has_run) or (
            reported == ExitCode.BAD_NUMBERS and not config.retry_bad_numbers
        )
        if received or is_final:
            return reported if reported > 0 else ExitCode.INTERNAL
        consecutive = 1 if any(event["event"] == "save end" for event in events) else consecutive + 1
        if consecutive > config.max_restarts:
            print(f"*** giving up after {consecutive} consecutive failures without a new checkpoint ***", flush=True)
            return reported if reported > 0 else ExitCode.INTERNAL
        pause = min(config.max_backoff_seconds, config.backoff_seconds * 2 ** (consecutive - 1))
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {reported or code}"
        save.mkdir(parents=True, exist_ok=True)
        record.write("restart", reason=reason, in_a_row=consecutive, pause_seconds=pause)
        limit = f"{consecutive} of {config.max_restarts} without a new checkpoint"
        print(f"*** the command ended with {reason}: restarting in {pause:g} s ({limit}) ***", flush=True)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not received:
            time.sleep(POLL_SECONDS)
        if received:
            return ExitCode.DONE


def _read_events(save: Path) -> list[dict[str, Any]]:
    try:
        return read_record(save)
    except FileNotFoundError:
        return []


def _successful_ends(save: Path) -> int:
    return sum(event["event"] == "stop" and event["code"] == ExitCode.DONE for event in _read_events(save))


def _attempt(command: Sequence[str], config: ResilientConfig, received: Sequence[int], save: Path) -> int:
    """Run the command to its end, end the processes that it leaves behind, and return its exit code.

    The code is 1 instead of 0 if the record has no successful end, because the `deepspeed` command also exits with 0
    when the process that it started was killed.
    """
    known = _successful_ends(save)
    try:
        # A separate session does not receive Ctrl-C; `_wait` forwards it.
        job = start_child(command, start_new_session=True)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from error
    try:
        _wait(job, config, received)
        # Checked now: ranks that are ended below may also record a successful end.
        succeeded = _successful_ends(save) > known
    finally:
        _end_descendants(job)
    code = job.wait()
    if code == 0 and not succeeded:
        print(f"*** the command ended with exit code 0, but no successful end is recorded in {save} ***", flush=True)
        return ExitCode.INTERNAL
    return code


def _wait(job: Child, config: ResilientConfig, received: Sequence[int]) -> None:
    """Wait until the job ends or must be killed: after a second signal, or too long after the first.

    If the launcher dies of a signal that its ranks received too, wait for the ranks, which are still saving.
    """
    stopping_since: float | None = None
    ranks: list[psutil.Process] = []
    while True:
        if received and stopping_since is None:
            stopping_since = time.monotonic()
            # Ranks do not handle SIGHUP.
            ranks = _forward(signal.SIGTERM if received[0] == signal.SIGHUP else received[0], job)
        late = stopping_since is not None and time.monotonic() - stopping_since > 60 * config.stop_minutes
        ended = job.poll() is not None and not psutil.wait_procs(ranks, 0)[1]
        if ended or late or len(received) > 1:
            return
        time.sleep(POLL_SECONDS)


def _forward(number: int, job: Child) -> list[psutil.Process]:
    """Send a signal to the ranks on this machine and return them; send it to the launcher if there are none.

    The launcher would kill its ranks after 30 seconds, which is too short for a large checkpoint. Ranks stop together
    without it. Their own children inherit the variables by which ranks are found, but do not get the signal.
    """
    with_rank = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= process.environ().keys():
                with_rank[process.pid] = (process, process.ppid())
    ranks = [process for process, parent in with_rank.values() if parent not in with_rank]
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    if not ranks:
        job.send_signal(number)
    return ranks


def _end_descendants(job: Child) -> None:
    remaining = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        # Only `job.wait` may collect the exit code of the job.
        psutil.wait_procs([process for process in remaining if process.pid != job.pid], END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END_SECONDS)
        # An orphan may have become a child of this process in the meantime.
        remaining = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


entry_point = functools.partial(run_program, main)
