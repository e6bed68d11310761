"""Real ranks without the cost of a start: forks of a process that has imported everything.

A forked rank is an ordinary process for signals, locks and files, and runs the real program. The forking process must
not have started any thread of torch, so it computes nothing.
"""

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_ladder.cli.pretrain import main
from megatron_ladder.errors import run_program
from tests.helpers.commands import free_port
from tests.helpers.forks import fork
from tests.helpers.patience import patient
from tests.helpers.pool import import_for_ranks

STACKS_SECONDS = 0.5
"""Time in which a rank writes its stacks."""


class Job:
    """The ranks of one attempt, started together; each writes to a file of its own."""

    def __init__(self, argv_of_ranks: Sequence[Sequence[str | Path]], outputs: str | Path) -> None:
        """`outputs` is the path of the files, to which `.RANK` is added."""
        self._outputs = [Path(f"{outputs}.{rank}") for rank in range(len(argv_of_ranks))]
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        import_for_ranks()
        port = free_port()
        for rank, argv in enumerate(argv_of_ranks):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(argv_of_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "CUDA_VISIBLE_DEVICES": "",
            }
            own = {name: str(value) for name, value in variables.items()}
            self._pids.append(fork(partial(run_program, main, list(map(str, argv))), own, self._outputs[rank]))

    def text(self, rank: int) -> str:
        """Return what a rank has written to stdout and stderr."""
        return self._outputs[rank].read_text(errors="replace") if self._outputs[rank].exists() else ""

    @property
    def output(self) -> str:
        """Return what all ranks have written."""
        return "".join(map(self.text, range(len(self._outputs))))

    @property
    def codes(self) -> dict[int, int]:
        """Return the exit codes of the finished ranks; negative codes are signals."""
        for rank, pid in enumerate(self._pids):
            if rank not in self._codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)
        return self._codes

    @property
    def is_over(self) -> bool:
        """Return whether every rank has finished."""
        return len(self.codes) == len(self._pids)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a running rank."""
        if rank not in self.codes:
            os.kill(self._pids[rank], number)

    def wait(self, seconds: float, ranks: Sequence[int] | None = None) -> dict[int, int]:
        """Wait for these ranks (default: all) and return the exit codes; raise AssertionError at the timeout."""
        deadline = time.monotonic() + patient(seconds)
        awaited = range(len(self._pids)) if ranks is None else ranks
        while not all(rank in self.codes for rank in awaited):
            if time.monotonic() > deadline:
                for rank in awaited:
                    self.signal(rank, signal.SIGUSR1)
                time.sleep(STACKS_SECONDS)
                self.kill()
                raise AssertionError(f"still running after {seconds:g} s:\n{self.output}")
            time.sleep(0.005)
        return self.codes

    def catches(self, number: int) -> bool:
        """Return whether all ranks have a handler of a signal."""
        status = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids]
        masks = [int(text.partition("SigCgt:")[2].split()[0], 16) for text in status]
        return all(mask >> (number - 1) & 1 for mask in masks)

    def kill(self) -> None:
        """Kill the remaining ranks, as a launcher does after a failure."""
        for rank in range(len(self._pids)):
            self.signal(rank, signal.SIGKILL)
        for rank, pid in enumerate(self._pids):
            if rank not in self._codes:
                self._codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
