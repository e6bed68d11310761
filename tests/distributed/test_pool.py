"""The pool itself: order of results, and that no rank that fails, hangs or dies harms a later case."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.helpers.commands import REPOSITORY_ROOT, clean_environment, free_port, run_command
from tests.helpers.patience import patient
from tests.helpers.pool import GROUPS_KEPT, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Apart from the run's own pools: the cases here end it again and again."""
    pool = RankPool(2)
    yield pool
    pool.close()


@dataclass
class Nested:
    """A result that holds tensors somewhere inside."""

    parts: list[torch.Tensor]


def _rank_and_sum(values: torch.Tensor, scale: float) -> tuple[int, torch.Tensor]:
    total = values * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total


def _slice_of_a_parameter() -> Nested:
    weight = torch.nn.Parameter(torch.arange(1_000_000, dtype=torch.bfloat16))
    return Nested([weight[2:4] * 1, weight])


def _draw() -> float:
    return torch.rand(()).item()


def _fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank has had enough")
    dist.barrier()


def _exit() -> None:
    sys.exit("left by the door")


def _die_on_first_rank() -> None:
    if dist.get_rank() == 0:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def _wait_for_rank_that_sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


kept_groups: list[dist.ProcessGroup] = []


def _make_groups(count: int, keep: bool) -> None:
    for _ in range(count):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        if keep:
            kept_groups.append(group)


def _use_kept_group() -> tuple[list[int], float]:
    ones = torch.ones(())
    dist.all_reduce(ones, group=kept_groups[0])
    return dist.get_process_group_ranks(kept_groups[0]), ones.item()


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


def test_results_come_in_rank_order(pool: RankPool) -> None:
    results = pool.run(_rank_and_sum, torch.tensor([1.0, 2.0]), scale=2.0)
    assert [rank for rank, _ in results] == [0, 1]
    for _, total in results:
        assert total.tolist() == [6.0, 12.0]


def test_cases_share_processes_and_nothing_random(pool: RankPool) -> None:
    first, process_ids = pool.run(_draw), pool.process_ids
    assert pool.run(_draw) == first
    assert first[0] == first[1]
    assert pool.process_ids == process_ids


def test_tensors_arrive_as_plain_copies(pool: RankPool) -> None:
    for nested in pool.run(_slice_of_a_parameter):
        part, whole = nested.parts
        assert part.tolist() == [2.0, 3.0]
        assert (part.dtype, part.requires_grad, part.untyped_storage().nbytes()) == (torch.bfloat16, False, 4)
        assert type(whole) is torch.Tensor


def test_environment_is_a_launchers_and_an_exit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    with contextlib.closing(RankPool(1, variables={"CUDA_LAUNCH_BLOCKING": "1"})) as alone:
        environment = alone.run(_environment)[0]
        with pytest.raises(AssertionError, match="SystemExit: left by the door"):
            alone.run(_exit)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["OMP_NUM_THREADS"]) == ("0", "1", "1")
    assert environment["MASTER_PORT"] != "1" and environment["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "gloo_pool_1_" in environment["TORCH_EXTENSIONS_DIR"]


def test_abandoned_groups_are_destroyed_and_kept_ones_are_not(pool: RankPool) -> None:
    pool.run(_make_groups, 1, keep=True)
    before = pool.run(_open_descriptors)[0]
    pool.run(_make_groups, GROUPS_KEPT, keep=False)
    after = pool.run(_open_descriptors)[0]
    assert after <= before + 4
    assert pool.run(_use_kept_group) == [([0, 1], 2.0)] * 2


def test_local_functions_are_refused_before_they_are_sent(pool: RankPool) -> None:
    process_ids = pool.process_ids
    with pytest.raises(Exception, match="local"):
        pool.run(lambda: None)
    assert pool.process_ids == process_ids


def test_failing_rank_is_named_and_the_pool_works_afterwards(pool: RankPool) -> None:
    pool.run(_draw)
    process_ids = pool.process_ids
    with pytest.raises(AssertionError, match="rank 1 of 2: Traceback") as failure:
        pool.run(_fail_on_last_rank)
    assert "ValueError: this rank has had enough" in str(failure.value)
    assert "_fail_on_last_rank" in str(failure.value)
    assert _gone(process_ids)
    assert pool.run(_draw)[0] > 0


def test_dead_rank_is_named_with_its_output(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="rank 0 of 2: ended with exit code 7") as failure:
        pool.run(_die_on_first_rank)
    assert "last words" in str(failure.value)


@pytest.mark.parametrize(("failures", "message", "starts"), [(2, "connectFullMesh failed", 3), (1, "no module", 1)])
def test_ranks_whose_connections_fail_are_started_anew(
    monkeypatch: pytest.MonkeyPatch, failures: int, message: str, starts: int
) -> None:
    begun: list[int] = []

    def start(self: RankPool) -> None:
        begun.append(len(begun))
        if len(begun) <= failures:
            raise AssertionError(f"rank 1 of 2: {message}")

    monkeypatch.setattr(RankPool, "_start", start)
    monkeypatch.setattr(RankPool, "_exchange", lambda self, call, timeout: ["done"])
    pool = RankPool(1)
    if starts > failures:
        assert pool.run(_draw) == ["done"]
    else:
        with pytest.raises(AssertionError, match=message):
            pool.run(_draw)
    assert len(begun) == starts


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


def test_command_returns_code_and_streams() -> None:
    script = "import os, sys; print(os.environ['FLAG']); print('bad', file=sys.stderr); sys.exit(2)"
    done = run_command([sys.executable, "-c", script], timeout=20, env={"FLAG": "here"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "here\n", "bad\n")


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


def test_command_may_not_leave_a_process_behind() -> None:
    script = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
"""
    with pytest.raises(AssertionError, match="left a process behind") as failure:
        run_command([sys.executable, "-c", script], timeout=1)
    process_id = int(str(failure.value).split("--- stdout\n")[1].split("\n")[0])
    assert _soon(lambda: _gone([process_id]))


def test_free_port_can_be_bound() -> None:
    assert 1024 <= free_port() < 65536
