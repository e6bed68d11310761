"""The supervisor of a training command: starts it, forwards signals to its ranks, and restarts it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_ladder.cli.run_resilient import ResilientConfig
from megatron_ladder.errors import ExitCode, UserError
from megatron_ladder.processes import Child, adopt_orphans, find_supervisor, received_signals, start_child
from megatron_ladder.train.lock import lock_holder
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import SAME_SECONDS

POLL_SECONDS = 0.2
END_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL for processes that the command leaves behind."""


def run_supervised(command: Sequence[str], config: ResilientConfig, save: Path) -> None:
    """Run a command that saves in `save`; raises as `main` of cli/run_resilient.py."""
    adopt_orphans()
    with received_signals(merge_seconds=SAME_SECONDS) as received:
        _wait_for_orphans(save, config, received)
        code = 0 if received else _supervise(config, save, received, lambda: _attempt(command, config, received, save))
    if code != 0:
        sys.exit(code)


def _wait_for_orphans(save: Path, config: ResilientConfig, received: Sequence[int]) -> None:
    """Wait for a run in the same directory that stops because its supervisor was killed."""
    holder = lock_holder(save)
    with contextlib.suppress(psutil.Error):
        if holder is None or find_supervisor(holder.environ()) != 0:
            return
        print(f"*** {save}: pid {holder.pid} is saving after its supervisor was killed: waits for it ***", flush=True)
        deadline = time.monotonic() + 60 * config.stop_minutes
        while lock_holder(save) == holder and time.monotonic() < deadline and not received:
            time.sleep(POLL_SECONDS)


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
        with contextlib.suppress(OSError):
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
    except OSError:
        # A record that cannot be read now decides nothing; the exit code does.
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
