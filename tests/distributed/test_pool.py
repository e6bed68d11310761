"""The pool itself: order of results, and that no rank that fails, hangs or dies harms a later case."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.helpers.commands import REPOSITORY_ROOT, clean_environment, run_command
from tests.helpers.patience import patient
from tests.helpers.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Apart from the run's own pools: the cases here end it again and again."""
    pool = RankPool(2)
    yield pool
    pool.close()


def _draw() -> float:
    return torch.rand(()).item()


def _fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank has had enough")
    dist.barrier()


def _wait_for_rank_that_sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def _show_and_sleep(sign: Path) -> None:
    sign.write_text(str(os.getpid()))
    time.sleep(600)


def _gone(process_ids: list[int]) -> bool:
    """No such process, or one that waits only to be reaped."""
    for process_id in process_ids:
        try:
            if psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


def _soon(happened: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + patient(seconds)
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


def test_failing_rank_is_named_and_the_pool_works_afterwards(pool: RankPool) -> None:
    pool.run(_draw)
    process_ids = pool.process_ids
    with pytest.raises(AssertionError, match="rank 1 of 2: Traceback") as failure:
        pool.run(_fail_on_last_rank)
    assert "ValueError: this rank has had enough" in str(failure.value)
    assert "_fail_on_last_rank" in str(failure.value)
    assert _gone(process_ids)
    assert pool.run(_draw)[0] > 0


def test_hanging_ranks_are_shown_and_all_processes_end(pool: RankPool) -> None:
    pool.run(_draw)
    process_ids = pool.process_ids
    started = time.monotonic()
    with pytest.raises(AssertionError, match="no answer within 0.5 s") as failure:
        pool.run_within(0.5, _wait_for_rank_that_sleeps)
    first, second = str(failure.value).split("rank 1 of 2 hangs in:")
    assert "rank 0 of 2 hangs in:" in first
    assert "_wait_for_rank_that_sleeps" in first
    assert "barrier" in second
    assert time.monotonic() - started < patient(5)
    assert _gone(process_ids)
    assert pool.process_ids == []


ORPHANING_PROGRAM = """
import sys
from pathlib import Path
from tests.distributed import test_pool
from tests.helpers import pool

pool.RankPool(1).run(test_pool._show_and_sleep, Path(sys.argv[1]))
"""


def test_busy_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    sign = tmp_path / "process_id"
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    program = [sys.executable, "-c", ORPHANING_PROGRAM, str(sign)]
    with subprocess.Popen(program, cwd=REPOSITORY_ROOT, env=environment) as parent:
        assert _soon(lambda: sign.exists() and bool(sign.read_text()), seconds=60)
        parent.send_signal(signal.SIGKILL)
    assert _soon(lambda: _gone([int(sign.read_text())]))


def test_command_that_hangs_ends_with_all_its_processes() -> None:
    script = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), flush=True)
time.sleep(600)
"""
    with pytest.raises(AssertionError, match=f"still ran after {patient(1):g} s") as failure:
        run_command([sys.executable, "-c", script], timeout=1)
    process_ids = [int(word) for word in str(failure.value).split("--- stdout\n")[1].split("\n")[0].split()]
    assert len(process_ids) == 2
    assert _soon(lambda: _gone(process_ids))
