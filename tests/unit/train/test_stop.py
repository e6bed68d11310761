"""Signals that request a shutdown or end the process, and votes that stop a run."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from megatron_ladder.comm import agreement
from megatron_ladder.config.run import read_run
from megatron_ladder.config.sections import ReliabilityConfig
from megatron_ladder.errors import LostPeerError
from megatron_ladder.train.loop import pretrain
from megatron_ladder.train.stop import Stopper, stop_signals
from tests.helpers.commands import Command, running
from tests.helpers.patience import patient, wait_until

# Blocks in C without returning to the interpreter, like a rank that waits in a collective.
PROGRAM = """
import ctypes
from megatron_ladder.train.stop import stop_signals
with stop_signals():
    print("ready", flush=True)
    for _ in range(10):
        ctypes.CDLL(None).usleep(900000)
"""


@pytest.mark.long
def test_two_quick_signals_count_as_one_and_a_later_one_ends_the_process(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", PROGRAM], tmp_path / "output")
    with running(command):
        command.wait_for("ready", 60)
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        command.process.send_signal(signal.SIGTERM)
        time.sleep(2.3)
        assert command.process.poll() is None
        command.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert command.wait(10) == 128 + signal.SIGTERM and time.monotonic() - began < patient(0.8)
    assert command.stderr == "a second SIGTERM: ends at once\n"


def test_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals() as received:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: bool(received), 5)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGINT, ignored)


def test_the_vote_of_any_rank_ends_the_run() -> None:
    received: list[int] = []
    asked = Stopper(ReliabilityConfig(), received, 1, time.monotonic())
    others = Stopper(ReliabilityConfig(), (), 0, time.monotonic())
    assert asked.votes() == others.votes() == [0.0] * 4
    assert others.reason([0.0] * 4, 7) is None
    received.append(signal.SIGINT)
    sums = [a + b for a, b in zip(asked.votes(), others.votes(), strict=True)]
    assert asked.reason(sums, 7) == others.reason(sums, 7) == "SIGINT"


def test_time_steps_and_a_file_end_the_run(tmp_path: Path) -> None:
    late = Stopper(ReliabilityConfig(exit_duration_in_mins=2.0), (), 0, time.monotonic() - 121)
    assert late.reason(late.votes()) == "--exit-duration-in-mins 2.0"
    early = Stopper(ReliabilityConfig(exit_duration_in_mins=2.0, exit_interval=3), (), 0, time.monotonic() - 119)
    assert [early.reason(early.votes(), step) is not None for step in range(7)] == [s in (3, 6) for s in range(7)]
    switch = tmp_path / "stop"
    first, second = (Stopper(ReliabilityConfig(kill_switch_file=switch), (), rank, 0.0) for rank in (0, 1))
    assert first.votes() == [0.0] * 4
    switch.touch()
    first._looked -= 1.1
    assert first.reason(first.votes()) == f"--kill-switch-file {switch}"
    assert second.votes() == [0.0] * 4, "only the first rank checks the file"


def test_a_signal_ends_a_rank_whose_master_port_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SIGNAL_SECONDS", 0.2)
    flags = "--train-iters 1 --lr 1 --vocab-size 9 --data-path none --tp 2 --distributed-timeout-minutes 0.1"
    with socket.create_server(("127.0.0.1", 0)) as other:
        variables = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": other.getsockname()[1]}
        for name, value in {**variables, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(LostPeerError, match="SIGTERM at start-up: ends without rank 0"):
            pretrain(read_run(flags.split()), [signal.SIGTERM])
