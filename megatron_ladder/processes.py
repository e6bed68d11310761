"""Child processes that do not outlive their parent, and the signals that end a program.

A parent starts children with `start_child`, collects signals with `received_signals`, and ends the children with
`end_children`. If the parent is killed, the kernel signals its children.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

# An option of prctl(2), from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1

Child = subprocess.Popen[bytes]


def start_child(
    command: Sequence[str],
    death_signal: signal.Signals = signal.SIGTERM,
    ignored_signals: Sequence[signal.Signals] = (),
    **popen_options: Any,
) -> Child:
    """Start a process to which the kernel sends `death_signal` when the process that started it dies.

    The child ignores `ignored_signals` until it installs its own handlers. With `start_new_session=True` it does not
    receive the terminal's Ctrl-C and can be killed together with its own children. Raise OSError if it cannot start.
    """
    parent = os.getpid()

    def prepare() -> None:
        for number in ignored_signals:
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:
            # The parent died before prctl took effect.
            os._exit(1)

    return subprocess.Popen(command, preexec_fn=prepare, **popen_options)


def end_children(
    children: Sequence[Child],
    grace_seconds: float,
    kill_groups: bool = False,
    is_impatient: Callable[[], bool] = lambda: False,
) -> None:
    """Send SIGTERM to all children that still run, wait, and send SIGKILL to those that remain.

    `kill_groups` sends SIGKILL to the whole process group of each child, which must lead one. `is_impatient` ends the
    grace period early when it returns True, for example after a second signal.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + grace_seconds
    while running and time.monotonic() < deadline and not is_impatient():
        time.sleep(0.02)
        running = [child for child in running if child.poll() is None]
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            if kill_groups:
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
        child.wait()


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list inside the block, instead of letting them end the process.

    A signal that the parent process ignores (as `nohup` does with SIGHUP) stays ignored.
    """
    received: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in ending
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C inside the block, on the main thread; processes that are started in it ignore it from the beginning.

    The terminal sends Ctrl-C to them too, but their parent ends them.
    """
    handler = signal.getsignal(signal.SIGINT)
    # A blocked signal is kept although it is ignored. Ignoring it alone would lose it, and multiprocessing unblocks it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Let Ctrl-C take effect after the block, which it would leave half done, and a second one at once."""
    handler = signal.getsignal(signal.SIGINT)
    # Python runs handlers on the main thread, and only there can they be set.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[FrameType | None] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(frame)
        if len(received) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(signal.SIGINT, received[0])
