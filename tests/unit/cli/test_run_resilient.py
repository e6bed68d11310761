"""Restarts of commands that fail in known ways; each command replaces a launcher and its ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ladder import processes
from megatron_ladder.cli import supervise
from megatron_ladder.cli.run_resilient import ResilientConfig, _find_save_directory
from megatron_ladder.cli.supervise import _supervise
from megatron_ladder.errors import UserError
from megatron_ladder.processes import start_ticks
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import SAME_SECONDS
from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.patience import patient

QUICK = {"backoff_seconds": 0.01, "max_backoff_seconds": 0.04}


def attempts_of(
    save: Path, outcomes: Sequence[tuple[int, list[dict[str, Any]]]]
) -> tuple[Callable[[], int], list[int]]:
    """Return an attempt that produces one outcome (exit code, events) after another, and the list of attempts made."""
    made: list[int] = []

    def attempt() -> int:
        code, events = outcomes[len(made)]
        made.append(code)
        for event in events:
            RunRecord(save).write(event["event"], **{k: v for k, v in event.items() if k != "event"})
        return code

    return attempt, made


STARTED = {"event": "start", "iteration": 0}
SAVED = {"event": "save end", "iteration": 3}


def test_a_failed_job_is_restarted_until_it_succeeds(tmp_path: Path) -> None:
    attempt, made = attempts_of(tmp_path, [(4, []), (-9, []), (1, []), (0, [])])
    assert _supervise(ResilientConfig(max_restarts=3, **QUICK), tmp_path, [], attempt) == 0
    assert made == [4, -9, 1, 0]
    restarts = read_record(tmp_path)
    assert [event["reason"] for event in restarts] == ["exit code 4", "signal SIGKILL", "exit code 1"]
    assert [event["pause_seconds"] for event in restarts] == [0.01, 0.02, 0.04]


def test_a_record_that_cannot_be_read_does_not_end_the_supervisor(tmp_path: Path) -> None:
    record, made = tmp_path / "run.jsonl", list[int]()

    def attempt() -> int:
        made.append(4)
        record.unlink(missing_ok=True)
        record.symlink_to(record)
        return 4

    assert _supervise(ResilientConfig(max_restarts=1, **QUICK), tmp_path, [], attempt) == 4
    assert made == [4, 4]


def test_the_limit_counts_failures_without_a_new_checkpoint(tmp_path: Path) -> None:
    outcomes = [(4, []), (4, []), (4, [SAVED]), (4, []), (4, [])]
    attempt, made = attempts_of(tmp_path, outcomes)
    assert _supervise(ResilientConfig(max_restarts=2, **QUICK), tmp_path, [], attempt) == 4
    assert len(made) == 5
    assert [event["in_a_row"] for event in read_record(tmp_path) if event["event"] == "restart"] == [1, 2, 1, 2]


@pytest.mark.parametrize(("code", "recorded"), [(2, None), (3, None), (1, 3), (1, 2)])
def test_permanent_failures_are_not_retried(tmp_path: Path, code: int, recorded: int | None) -> None:
    """Some launchers have a different exit code; the record contains that of the ranks."""
    attempt, made = attempts_of(tmp_path, [(code, [] if recorded is None else [{"event": "stop", "code": recorded}])])
    assert _supervise(ResilientConfig(**QUICK), tmp_path, [], attempt) == (recorded or code)
    assert len(made) == 1


def test_a_user_error_after_a_start_is_retried(tmp_path: Path) -> None:
    outcomes = [(2, [STARTED, {"event": "stop", "code": 2}]), (2, []), (2, []), (2, [])]
    attempt, made = attempts_of(tmp_path, outcomes)
    assert _supervise(ResilientConfig(max_restarts=2, **QUICK), tmp_path, [], attempt) == 2
    assert len(made) == 3
    # The starts of another supervisor, which may have run a different command, do not count.
    attempt, made = attempts_of(tmp_path, [(2, [])])
    assert _supervise(ResilientConfig(**QUICK), tmp_path, [], attempt) == 2
    attempt, made = attempts_of(tmp_path, [(3, [STARTED, {"event": "stop", "code": 3}])])
    assert _supervise(ResilientConfig(**QUICK), tmp_path, [], attempt) == 3


def test_bad_numbers_are_retried_on_request(tmp_path: Path) -> None:
    attempt, made = attempts_of(tmp_path, [(3, []), (0, [])])
    assert _supervise(ResilientConfig(retry_bad_numbers=True, **QUICK), tmp_path, [], attempt) == 0
    assert made == [3, 0]


def test_a_job_that_saved_after_a_signal_succeeded(tmp_path: Path) -> None:
    attempt, made = attempts_of(tmp_path, [(1, [{"event": "stop", "code": 0, "reason": "SIGTERM"}])])
    assert _supervise(ResilientConfig(**QUICK), tmp_path, [signal.SIGTERM], attempt) == 0
    attempt, made = attempts_of(tmp_path, [(-15, [])])
    assert _supervise(ResilientConfig(**QUICK), tmp_path, [signal.SIGTERM], attempt) == 1
    assert len(made) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no command"),
        (["train"], "no --save and no --load"),
        (["train", "--save", "a"], "no --load"),
        (["train", "--save", "a", "--load=b"], "--load b is not --save a"),
        (["train", "--save", "a", "--load", "a", "--finetune"], "--finetune: every restart would start at iteration 0"),
    ],
)
def test_a_command_that_would_start_from_scratch_is_rejected(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _find_save_directory(words)
    assert _find_save_directory(["train", "--save=a/b", "--load", "a/./b"]) == Path("a/b")


def test_directories_may_be_in_a_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("save: a\nload: ./a\nlr: 1\n")
    assert _find_save_directory(["train", "--config", str(config)]) == Path("a")
    assert _find_save_directory(["train", f"--config={config}", "--save", "b", "--load", "b"]) == Path("b")
    with pytest.raises(UserError, match="--load ./a is not --save b"):
        _find_save_directory(["train", "--config", str(config), "--save", "b"])
    config.write_text("save: a\nload: a\nfinetune: on\n")
    with pytest.raises(UserError, match="--finetune: every restart"):
        _find_save_directory(["train", "--config", str(config)])


# A launcher that starts two ranks in separate sessions, and does not forward signals.
LAUNCHER = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True,
         env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
codes = [rank.wait() for rank in ranks]
sys.exit(max(codes))
"""
POLITE = """
import os, signal, subprocess, sys, time
CHILD = "import signal, time; signal.signal(15, lambda *_: print('child', flush=True)); print(); time.sleep(100)"
child = subprocess.Popen([sys.executable, "-uc", CHILD], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
def end(number, frame):
    time.sleep(0.3)
    child.kill()
    print(f"{child.stdout.read()}rank {os.environ['RANK']} got {number}\\n", end="", flush=True)
    with open(os.environ["RECORD"], "a") as record:
        record.write('{"time": "2026-01-31T12:00:00+00:00", "event": "stop", "code": 0}\\n')
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("rank up\\n", end="", flush=True)
time.sleep(100)
"""
SAVING = """
import os, signal, time
def end(number, frame):
    time.sleep(2)
    with open(os.environ["RECORD"], "a") as record:
        record.write('{"time": "2026-01-31T12:00:00+00:00", "event": "stop", "code": 0}\\n')
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("rank up\\n", end="", flush=True)
time.sleep(100)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank up\\n", end="", flush=True)
time.sleep(100)
"""


SOON = """
from megatron_ladder.cli import run_resilient, supervise
supervise.END_SECONDS = 0.5
run_resilient.entry_point()
"""


def start(
    tmp_path: Path, rank: str, *program: str, launcher: str = LAUNCHER, begins: str = ""
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", launcher, rank, "--save", str(tmp_path), "--load", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, *(program or ["tools/run_resilient.py"]), "--max-restarts", "0", "--", *command],
        cwd=REPOSITORY_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RECORD": str(tmp_path / "run.jsonl")},
    )
    assert process.stdout is not None
    assert not begins or process.stdout.readline().startswith(begins)
    assert [process.stdout.readline() for _ in range(2)] == ["rank up\n"] * 2
    return process


def test_a_signal_is_forwarded_to_the_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, POLITE)
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) == 5
    process.terminate()
    output, _ = process.communicate(timeout=patient(20))
    assert sorted(output.splitlines()) == ["rank 0 got 15", "rank 1 got 15"] and process.returncode == 0
    assert not [one for one in descendants if one.is_running()]


def test_sighup_is_forwarded_as_sigterm(tmp_path: Path) -> None:
    process = start(tmp_path, POLITE)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=patient(20))
    assert sorted(output.splitlines()) == ["rank 0 got 15", "rank 1 got 15"] and process.returncode == 0


def test_ranks_can_save_after_the_launcher_died(tmp_path: Path) -> None:
    process = start(tmp_path, SAVING, "-c", SOON)
    descendants = psutil.Process(process.pid).children(recursive=True)
    (launcher,) = psutil.Process(process.pid).children()
    process.terminate()
    launcher.terminate()
    process.communicate(timeout=patient(20))
    assert [event["code"] for event in read_record(tmp_path)] == [0, 0] and process.returncode == 0
    assert not [one for one in descendants if one.is_running()]


def test_exit_code_0_without_a_recorded_end_is_a_failure(tmp_path: Path) -> None:
    """The deepspeed command exits with 0 if its launcher is killed. A signal then ends the ranks that still run."""
    process = start(tmp_path, POLITE, launcher=f"import signal; signal.signal(15, lambda *_: os._exit(0)){LAUNCHER}")
    psutil.Process(process.pid).children()[0].terminate()
    output, _ = process.communicate(timeout=patient(20))
    assert f"exit code 0, but no successful end is recorded in {tmp_path}" in output and process.returncode == 1
    assert [event["code"] for event in read_record(tmp_path)] == [0, 0]


FOLLOWING = """
import os, sys, time
from contextlib import ExitStack
from pathlib import Path
from megatron_ladder.train.lock import SaveLock
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.stop import StopSignals
folder = Path(os.environ["RECORD"]).parent
with ExitStack() as stack, StopSignals() as signals:
    if os.environ["RANK"] == "0":
        stack.enter_context(SaveLock(folder))
    print("rank up\\n", end="", flush=True)
    while not signals.received:
        time.sleep(0.01)
    time.sleep(0.5 * (os.environ["RANK"] == "0"))
    RunRecord(folder).write("stop", rank=int(os.environ["RANK"]), code=0)
"""


def test_ranks_follow_a_killed_supervisor_and_the_next_one_waits_for_them(tmp_path: Path) -> None:
    """The launcher ends without its ranks, as `deepspeed` does."""
    first = start(tmp_path, FOLLOWING)
    ranks = [one for one in psutil.Process(first.pid).children(recursive=True) if "RANK" in one.environ()]
    assert len(ranks) == 2
    first.kill()
    second = start(tmp_path, FOLLOWING, begins=f"*** {tmp_path}: pid ")
    assert [event["code"] for event in read_record(tmp_path)] == [0, 0]
    assert [start_ticks(one.pid) for one in ranks] == [None, None]
    second.terminate()
    second.communicate(timeout=patient(20))
    assert second.returncode == 0 and len(read_record(tmp_path)) == 4
    first.communicate(timeout=patient(20))


def test_nothing_outlives_a_second_signal(tmp_path: Path) -> None:
    process = start(tmp_path, STUBBORN)
    descendants = psutil.Process(process.pid).children(recursive=True)
    for _ in range(2):
        process.terminate()
        time.sleep(0.5)
    assert all(one.is_running() for one in descendants)
    time.sleep(SAME_SECONDS)
    process.terminate()
    process.communicate(timeout=patient(20))
    assert process.returncode != 0
    assert not [one for one in descendants if one.is_running()]


def test_a_signal_while_waiting_for_orphans_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = f"{processes.boot_id()}/{os.readlink('/proc/self/ns/pid')}/{os.getpid()}/0"
    with subprocess.Popen(["sleep", "100"], env={"PATH": os.defpath, processes._SUPERVISOR: supervisor}) as orphan:

        def holder(save: Path) -> psutil.Process:
            os.kill(os.getpid(), signal.SIGTERM)
            return psutil.Process(orphan.pid)

        monkeypatch.setattr(supervise, "lock_holder", holder)
        monkeypatch.setattr(supervise, "adopt_orphans", lambda: None)
        supervise.run_supervised(["touch", str(tmp_path / "started")], ResilientConfig(), tmp_path)
        orphan.kill()
    assert list(tmp_path.iterdir()) == []
