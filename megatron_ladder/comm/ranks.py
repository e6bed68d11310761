"""A program that starts itself anew as several ranks on this machine, and sees to it that none outlives it.

The process that the user started is no rank. It waits, hands on the signals that end it, and ends all ranks as soon
as one has failed. Should it be killed, the kernel ends the ranks. It imports no torch, so the ranks start at once.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_ladder.errors import LostPeerError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0
"""From asking a rank to end until it is ended, for a program that needs no longer."""
PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>: the signal that the kernel sends to a process when its parent is gone."""


def run_ranks(
    module: str, argv: Sequence[str], count: int, grace_seconds: float = GRACE_SECONDS, ends_by_signal: bool = False
) -> None:
    """Calls `module.entry_point` with the same command line in `count` processes, and waits for all of them.

    Args:
        grace_seconds: from asking a rank to end until it is ended.
        ends_by_signal: whether a signal is how the program is meant to end: then it is done if all ranks say so.

    Raises:
        SystemExit: a rank failed, with its code; or a signal ended the program, with 128 + its number.
        KeyboardInterrupt: it was Ctrl-C.
        LostPeerError: a rank was killed.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in ENDING_SIGNALS}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        environment = _common_environment(count)
        for rank in range(count):
            processes.append(_start_rank(module, argv, environment, rank))
        failure = _wait(processes, received)
    finally:
        _end(processes, grace_seconds)
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and not (ends_by_signal and all(process.returncode == 0 for process in processes)):
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])
    if failure is not None:
        rank, code = failure
        if code < 0:
            raise LostPeerError(f"rank {rank} of {count} was ended by {signal.Signals(-code).name}")
        sys.exit(code)


def _common_environment(count: int) -> dict[str, str]:
    """What a launcher tells every rank."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }


def _start_rank(module: str, argv: Sequence[str], environment: dict[str, str], rank: int) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).resolve().parents[2])
    program = f"import sys; sys.path.append({root!r}); from {module} import entry_point; entry_point()"
    parent = os.getpid()

    def prepare() -> None:
        # Ctrl-C reaches every process of a terminal; the parent answers it for all.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    # -P: a file in the current directory must not stand in for a module.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *argv],
        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        preexec_fn=prepare,
    )


def _wait(processes: Sequence["subprocess.Popen[bytes]"], received: Sequence[int]) -> tuple[int, int] | None:
    """Until all have ended well (None), one has failed (rank and code), or a signal was received (None)."""
    while not received:
        codes = [process.poll() for process in processes]
        failures = [(rank, code) for rank, code in enumerate(codes) if code]
        if failures:
            # A rank that was killed, with a code below zero, is why others fail at the same moment.
            return min(failures, key=lambda failure: (failure[1] > 0, failure[0]))
        if None not in codes:
            return None
        time.sleep(POLL_SECONDS)
    return None


def _end(processes: Sequence["subprocess.Popen[bytes]"], grace_seconds: float) -> None:
    """Ends those that still run, politely first."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + grace_seconds
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
