"""Jobs in slots, with fake training runs."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from ladder_lab.study.scheduling import Job, run_jobs
from tests.helpers.patience import patient

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
    deadline = time.monotonic() + patient(20)
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_jobs_start_in_order_when_slots_are_free(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, SLEEPER.format(0.2), slots) for name, slots in [("a", 1), ("b", 2), ("c", 1), ("d", 9)]]
    seen: list[list[str]] = []
    codes: dict[str, int] = {}

    def tick(running: object) -> None:
        names = [one.name for one in running]  # type: ignore[attr-defined]
        if names and names not in seen:
            seen.append(names)

    assert run_jobs(jobs, 2, [], lambda ended, code: codes.update({ended.name: code}), tick)
    # b needs both slots, so c waits for it; d uses all slots.
    assert seen == [["a"], ["b"], ["c"], ["d"]] and codes == dict.fromkeys("abcd", 0)


def test_two_jobs_run_at_the_same_time(tmp_path: Path) -> None:
    meeting = (
        "import os, sys, time\nopen({0!r}, 'w').close(); deadline = time.monotonic() + 20\n"
        "while not os.path.exists({1!r}): time.sleep(0.01) if time.monotonic() < deadline else sys.exit(1)\n"
    )
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    codes: dict[str, int] = {}
    jobs = [job(tmp_path, "a", meeting.format(here, there)), job(tmp_path, "b", meeting.format(there, here))]
    assert run_jobs(jobs, 2, [], lambda ended, code: codes.update({ended.name: code}))
    assert codes == {"a": 0, "b": 0}, "each waits for the other"


def test_other_jobs_continue_after_a_failure(tmp_path: Path) -> None:
    codes: dict[str, int] = {}
    jobs = [job(tmp_path, "bad", "print('why'); raise SystemExit(7)"), job(tmp_path, "good", "print('fine')")]
    assert run_jobs(jobs, 1, [], lambda ended, code: codes.update({ended.name: code}))
    assert codes == {"bad": 7, "good": 0}
    assert (tmp_path / "bad" / "output.txt").read_text() == "why\n"


def test_after_a_signal_jobs_save_and_no_job_starts(tmp_path: Path) -> None:
    received: list[int] = []
    codes: dict[str, int] = {}
    before = set(psutil.Process().children())

    def tick(running: object) -> None:
        wait_for(tmp_path / "a" / "output.txt", "here")
        received.append(signal.SIGTERM)

    jobs = [job(tmp_path, name, SAVES) for name in "ab"]
    assert not run_jobs(jobs, 1, received, lambda ended, code: codes.update({ended.name: code}), tick)
    assert codes == {"a": 0} and "saved" in (tmp_path / "a" / "output.txt").read_text()
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("signals", [1, 2])
def test_a_job_that_ignores_sigterm_is_killed(tmp_path: Path, signals: int) -> None:
    received: list[int] = []
    codes: list[int] = []

    def tick(running: object) -> None:
        wait_for(tmp_path / "a" / "output.txt", "here")
        received.extend([signal.SIGINT] * signals)

    grace = 0.3 if signals == 1 else 60.0
    began = time.monotonic()
    assert not run_jobs([job(tmp_path, "a", STUBBORN)], 1, received, lambda _, code: codes.append(code), tick, grace)
    assert codes == [-signal.SIGKILL] and time.monotonic() - began < patient(30)
