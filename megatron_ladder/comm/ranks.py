"""Runs a program as several ranks on this machine.

The process that the user started is not a rank. It starts the ranks, forwards the signals that end a program, and ends
all ranks as soon as one fails. If it is killed, the kernel kills the ranks. It imports no torch, so the ranks start
immediately.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ladder.errors import ExitCode, LostPeerError
from megatron_ladder.processes import Child, end_children, received_signals, start_child

POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0
"""Default time between SIGTERM and SIGKILL."""


def run_ranks(module: str, argv: Sequence[str], count: int, grace_seconds: float = GRACE_SECONDS) -> None:
    """Call `module.entry_point` with the same command line in `count` processes, and wait for all of them.

    A signal is forwarded; if all ranks then end with exit code 0, it was the request of a normal end.

    Args:
        module: name of an importable module, or path of a script (.py) to run instead.
        grace_seconds: time between SIGTERM and SIGKILL.

    Raises:
        SystemExit: a rank failed, with its exit code; or a signal ended the program, with 128 + its number.
        KeyboardInterrupt: Ctrl-C ended the program.
        LostPeerError: a rank was killed.
    """
    environments = _rank_environments(count)
    ranks: list[Child] = []
    with received_signals() as received:
        try:
            for environment in environments:
                ranks.append(_start_rank(module, argv, environment))
            failure = _wait(ranks, received)
        finally:
            end_children(ranks, grace_seconds)
    if received and any(process.returncode for process in ranks):
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])
    if failure is not None:
        rank, code = failure
        if code < 0:
            raise LostPeerError(f"rank {rank} of {count} was ended by {signal.Signals(-code).name}")
        sys.exit(code)


def _rank_environments(count: int) -> list[dict[str, str]]:
    """Return the variables that a launcher adds to the environment of each rank, with a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    common = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), **address, **sizes}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _start_rank(module: str, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
    if module.endswith(".py"):
        command = [sys.executable, module, *argv]
    else:
        command = [sys.executable, "-P", "-c", _calling(module), *argv]
    # Ctrl-C reaches every process of a terminal; the parent handles it for all ranks.
    return start_child(command, signal.SIGKILL, [signal.SIGINT], env={**os.environ, **environment})


def _calling(module: str) -> str:
    """Return the program of a rank; -P because a file in the current directory must not replace a module."""
    root = str(Path(__file__).resolve().parents[2])
    return f"import sys; sys.path.append({root!r}); from {module} import entry_point; entry_point()"


class OtherRanks:
    """Ranks 1 to `count` - 1, which call `module.entry_point`; the process that starts them is rank 0.

    If one of them fails, this process prints its exit code and exits with it, because it may wait for that rank.

    Attributes:
        environment: variables that rank 0 needs to join the others.
    """

    def __init__(self, module: str, argv: Sequence[str], count: int) -> None:
        self.environment, *others = _rank_environments(count)
        self._ranks = [_start_rank(module, argv, variables) for variables in others]
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def close(self) -> None:
        """End the ranks that still run."""
        self._closed.set()
        end_children(self._ranks, GRACE_SECONDS)

    def _watch(self) -> None:
        failure = _wait(self._ranks, ())
        # Rank 0 usually notices an error that concerns all ranks, and reports it.
        if failure is None or self._closed.wait(GRACE_SECONDS):
            return
        rank, code = failure
        print(f"error: rank {rank + 1} of {len(self._ranks) + 1} ended with exit code {code}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(code if code > 0 else ExitCode.LOST_PEER)


def _wait(ranks: Sequence[Child], received: Sequence[int]) -> tuple[int, int] | None:
    """Wait until all ranks succeed, one fails or a signal arrives; return the failed rank and its exit code."""
    while not received:
        codes = [process.poll() for process in ranks]
        failures = [(rank, code) for rank, code in enumerate(codes) if code]
        if failures:
            # A killed rank has a negative code, and is the reason why others fail at the same moment.
            return min(failures, key=lambda failure: (failure[1] > 0, failure[0]))
        if None not in codes:
            return None
        time.sleep(POLL_SECONDS)
    return None
