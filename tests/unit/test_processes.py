"""Child processes and signals of `megatron_ladder.processes`."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from megatron_ladder.processes import end_children, received_signals, start_child
from tests.helpers.commands import REPOSITORY_ROOT as ROOT

IGNORES_TERMINATION = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"


@pytest.mark.parametrize("death_signal", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_dies_with_its_parent(death_signal: signal.Signals) -> None:
    program = (
        "import os, signal, sys; from megatron_ladder.processes import start_child\n"
        f"child = start_child(['sleep', '60'], signal.Signals({int(death_signal)}))\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(10)


@pytest.mark.parametrize("kill_groups", [False, True])
def test_children_that_ignore_termination_are_killed(kill_groups: bool) -> None:
    stubborn = start_child(
        [sys.executable, "-c", IGNORES_TERMINATION + "; time.sleep(60)"], stdout=subprocess.PIPE, start_new_session=True
    )
    polite = start_child(["sleep", "60"], start_new_session=True)
    assert stubborn.stdout is not None and stubborn.stdout.readline() == b"ready\n"
    end_children([stubborn, polite], grace_seconds=0.2, kill_groups=kill_groups)
    assert (stubborn.returncode, polite.returncode) == (-signal.SIGKILL, -signal.SIGTERM)


def test_a_child_ignores_signals_that_its_parent_answers() -> None:
    child = start_child(["sleep", "60"], ignored_signals=[signal.SIGINT])
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


def test_signals_are_collected_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with received_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert sorted(received) == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
