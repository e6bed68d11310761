"""The parent of ranks: it forwards exit codes and signals, and no rank outlives it."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from megatron_ladder.comm import ranks
from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import LostPeerError
from tests.helpers.commands import REPOSITORY_ROOT, Command, running

MODULE = "tests.unit.comm.rank_program"


@pytest.fixture(autouse=True)
def ranks_find_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY_ROOT))


def process_ids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in sorted(folder.glob("pid.*"))]


def gone(folder: Path) -> bool:
    return not any(psutil.pid_exists(number) for number in process_ids(folder))


def test_success_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = signal.getsignal(signal.SIGINT)
    run_ranks(MODULE, [str(tmp_path), "0", "0"], 2)
    assert len(process_ids(tmp_path)) == 2
    assert signal.getsignal(signal.SIGINT) is before
    first, second = ((tmp_path / f"environment.{rank}").read_text().splitlines() for rank in range(2))
    assert {"RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "OMP_NUM_THREADS=3"} <= set(first)
    assert {"RANK=1", "LOCAL_RANK=1"} <= set(second)
    (port,) = {line for line in first + second if line.startswith("MASTER_PORT=")}
    assert port != "MASTER_PORT=0"


@pytest.mark.parametrize("words", [("2", "sleep"), ("sleep", "2"), ("0", "2")])
def test_the_exit_code_of_a_failed_rank_is_returned(tmp_path: Path, words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_ranks(MODULE, [str(tmp_path), *words], 2)
    assert ended.value.code == 2
    assert gone(tmp_path)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(LostPeerError, match="rank 1 of 2 was ended by SIGKILL"):
        run_ranks(MODULE, [str(tmp_path), "sleep", "killed"], 2)
    assert gone(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals, code: int) -> None:
    program = (
        "from megatron_ladder.errors import run_program; from megatron_ladder.comm.ranks import run_ranks; "
        f"run_program(lambda argv: run_ranks({MODULE!r}, argv, 2))"
    )
    parent = Command([sys.executable, "-c", program, tmp_path, "sleep", "sleep"], tmp_path / "parent")
    with running(parent):
        parent.wait_for("sleep\nsleep\n", 10)
        # Ctrl-C reaches all processes of a terminal.
        os.killpg(parent.process.pid, number) if number == signal.SIGINT else parent.process.send_signal(number)
        assert (parent.wait(10), parent.stderr) == (code, "")
        for rank in process_ids(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(rank).wait(10)


def test_a_killed_rank_is_the_cause_of_other_failures() -> None:
    processes = [Mock(poll=Mock(return_value=code)) for code in (0, 1, -9, 4)]
    assert ranks._wait(processes, []) == (2, -9)
