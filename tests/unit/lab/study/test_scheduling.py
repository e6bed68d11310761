"""Jobs in slots, with programs that stand in for trainings."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_ladder.lab.study.scheduling import Job, Pool, noting_signals

SLEEPER = "import time; print('here', flush=True); time.sleep({})"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
)
SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("here", flush=True)
time.sleep(60)
"""


def job(tmp_path: Path, name: str, script: str, slots: int = 1) -> Job:
    return Job(name, (sys.executable, "-S", "-c", script), dict(os.environ), tmp_path / name / "output.txt", slots)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_jobs_start_in_order_in_as_many_slots_as_there_are(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, SLEEPER.format(0.2), slots) for name, slots in [("a", 1), ("b", 2), ("c", 1), ("d", 9)]]
    seen: list[list[str]] = []
    codes: dict[str, int] = {}

    def tick(running: object) -> None:
        names = [one.name for one in running]  # type: ignore[attr-defined]
        if names and names not in seen:
            seen.append(names)

    assert Pool(2, []).run(jobs, lambda ended, code: codes.update({ended.name: code}), tick)
    # b needs both slots, so c waits behind it; d takes all that there are.
    assert seen == [["a"], ["b"], ["c"], ["d"]] and codes == dict.fromkeys("abcd", 0)


def test_two_jobs_run_side_by_side(tmp_path: Path) -> None:
    meeting = (
        "import os, sys, time\nopen({0!r}, 'w').close(); deadline = time.monotonic() + 20\n"
        "while not os.path.exists({1!r}): time.sleep(0.01) if time.monotonic() < deadline else sys.exit(1)\n"
    )
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    codes: dict[str, int] = {}
    jobs = [job(tmp_path, "a", meeting.format(here, there)), job(tmp_path, "b", meeting.format(there, here))]
    assert Pool(2, []).run(jobs, lambda ended, code: codes.update({ended.name: code}))
    assert codes == {"a": 0, "b": 0}, "each waits for the other"


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    codes: dict[str, int] = {}
    jobs = [job(tmp_path, "bad", "print('why'); raise SystemExit(7)"), job(tmp_path, "good", "print('fine')")]
    assert Pool(1, []).run(jobs, lambda ended, code: codes.update({ended.name: code}))
    assert codes == {"bad": 7, "good": 0}
    assert (tmp_path / "bad" / "output.txt").read_text() == "why\n"


def test_a_signal_lets_jobs_save_and_starts_no_more(tmp_path: Path) -> None:
    received: list[int] = []
    codes: dict[str, int] = {}
    before = set(psutil.Process().children())

    def tick(running: object) -> None:
        wait_for(tmp_path / "a" / "output.txt", "here")
        received.append(signal.SIGTERM)

    jobs = [job(tmp_path, name, SAVES) for name in "ab"]
    assert not Pool(1, received).run(jobs, lambda ended, code: codes.update({ended.name: code}), tick)
    assert codes == {"a": 0} and "saved" in (tmp_path / "a" / "output.txt").read_text()
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("signals", [1, 2])
def test_a_job_that_does_not_end_is_ended(tmp_path: Path, signals: int) -> None:
    received: list[int] = []
    codes: list[int] = []

    def tick(running: object) -> None:
        wait_for(tmp_path / "a" / "output.txt", "here")
        received.extend([signal.SIGINT] * signals)

    grace = 0.3 if signals == 1 else 60.0
    began = time.monotonic()
    assert not Pool(1, received, grace).run([job(tmp_path, "a", STUBBORN)], lambda _, code: codes.append(code), tick)
    assert codes == [-signal.SIGKILL] and time.monotonic() - began < 30


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noting_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_noted_and_then_left_to_others_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with noting_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
