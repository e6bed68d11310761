"""Forks of the test process, which has imported vLLM for all of them."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 600.0
"""Seconds; a test that compiles takes a tenth of it."""


class Workers:
    """Processes that call functions with the same arguments: the ranks of vLLM's `external_launcher`."""

    def __init__(self, count: int, variables: Mapping[str, str]) -> None:
        """`variables` are added to the environment of the processes."""
        context = multiprocessing.get_context("fork")
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": "lo",
            **variables,
        }
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_serve, args=(theirs, list(self._pipes), variables | ranks), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results in rank order; raise an AssertionError with the traceback of a rank that failed.

        A failure ends all ranks, and they cannot be forked again: by now, this process may have an engine's threads.
        """
        if not self._processes:
            raise AssertionError("an earlier test failed and ended the ranks: run this test alone")
        from vllm.utils.network_utils import get_open_port

        # If all engines used one port, a rank could connect to the store of the other rank's previous engine.
        port = str(get_open_port())
        for pipe in self._pipes:
            pipe.send((port, function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT):
                self.close()
                raise AssertionError(f"rank {rank} did not answer within {TIMEOUT:g} s")
            try:
                result, error = pipe.recv()
            except EOFError:
                result, error = None, "the process ended without an answer"
            if error is not None:
                # The other ranks may wait for this one in a collective.
                self.close()
                raise AssertionError(f"rank {rank}:\n{error}")
            results.append(result)
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()


def _serve(pipe: Connection, inherited: list[Connection], variables: Mapping[str, str]) -> None:
    from vllm.distributed import parallel_state

    for other in inherited:
        other.close()
    os.environ.update(variables)
    # vLLM names shared memory by these counters, so two test runs on one machine would share it.
    parallel_state._group_name_counter.update(tp=os.getppid(), pp=os.getppid())
    while True:
        try:
            os.environ["MASTER_PORT"], function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(*arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)
