"""Processes without the cost of a start: forks of this one, which has imported what they need."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""


def fork(work: Callable[[], object], variables: Mapping[str, str], output: Path, errors: Path | None = None) -> int:
    """Call `work` in a fork of this process, in its own session; return the fork's process id.

    Its exit code is that of the SystemExit that `work` raises, 1 after another exception, and otherwise 0. It is killed
    when this process ends, and writes the stacks of its threads to its stderr on SIGUSR1.

    Args:
        variables: added to the environment.
        output, errors: where stdout and stderr are appended; both to `output` without `errors`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    if child := os.fork():
        return child
    code = 1
    try:
        os.setsid()
        # Even while a collective blocks it.
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:
            os.environ.update(variables)
            _redirect_streams(output, errors or output)
            work()
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        # The exit handlers and buffers of the parent are not this process's to run.
        os._exit(code)


def _redirect_streams(output: Path, errors: Path) -> None:
    for descriptor, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1)
