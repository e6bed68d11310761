"""Whole commands in tests: a free port, a clean environment, and a run that leaves no process behind."""

import contextlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.helpers.patience import patient

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]

_LAUNCHERS = {
    "deepspeed": "deepspeed --num_gpus {} --master_port {}",
    "torchrun": "torchrun --nproc-per-node {} --master-port {}",
}
_KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER", "VIRTUAL_ENV")


def package_metadata() -> dict[str, Any]:
    """Return what setup.py passes to setuptools."""
    passed: dict[str, Any] = {}
    with mock.patch("setuptools.setup", lambda **arguments: passed.update(arguments)):
        runpy.run_path(str(REPOSITORY_ROOT / "setup.py"))
    return passed


def free_port() -> int:
    """A TCP port that nothing listened on a moment ago, below those that Linux gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def launch(launcher: str, ranks: int = 2) -> list[str]:
    """Return the words that start processes of `pretrain_ladder.py`."""
    return [*_LAUNCHERS[launcher].format(ranks, free_port()).split(), "pretrain_ladder.py"]


def tracked_files() -> list[str]:
    """Return the paths, relative to the repository, of the files that git tracks."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if (REPOSITORY_ROOT / name).is_file()]


def clean_environment() -> dict[str, str]:
    """The variables that a test's process starts with: no rank, master or flag of the shell that runs pytest.

    The interpreter's own folder leads PATH, so that `deepspeed` and `torchrun` are found where the tests'
    environment is not activated. One OpenMP thread: the processes of a case share few cores.
    """
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def write_program(path: Path, text: str) -> None:
    """Write an executable script."""
    path.write_text(text)
    path.chmod(0o755)


def write_nvidia_smi(folder: Path, gpus: int, driver: str = "580.65.06", capability: str = "9.0") -> None:
    """Write an `nvidia-smi` that lists this many GPUs, slowly, or fails as without a driver if there are none.

    The first GPU has the capability 8.0, and the others the given one.
    """
    write_program(
        folder / "nvidia-smi",
        f"""#!/bin/bash
[ {gpus} -gt 0 ] || {{
    echo "it couldn't communicate with the driver"
    exit 9
}}
for ((number = 0; number < {gpus}; number++)); do
    case $* in
    --list-gpus) echo "GPU $number: a GPU" ;;
    "--query-gpu=driver_version --format=csv,noheader") echo {driver} ;;
    "--query-gpu=name,driver_version --format=csv,noheader") echo "a GPU, {driver}" ;;
    "--query-gpu=compute_cap --format=csv,noheader") [ $number -gt 0 ] && echo {capability} || echo 8.0 ;;
    *) exit 1 ;;
    esac || exit
    sleep 0.01
done
""",
    )


def kill_tree(process: subprocess.Popen[str] | psutil.Process) -> int | None:
    """End a child, started in its own session, with its group and its descendants in other groups.

    Return its exit code; None if psutil finds that it was collected before. A launcher may give each worker its own
    session (torchrun does), which a signal to the group cannot reach.
    """
    descendants: list[psutil.Process] = []
    # Another process may have its number once it was collected.
    if getattr(process, "returncode", None) is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(process.pid).children(recursive=True)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _start(
    argv: Sequence[str | Path], env: Mapping[str, str] | None, cwd: Path, extensions: str, **streams: Any
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in argv],
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=clean_environment() | {"TORCH_EXTENSIONS_DIR": extensions} | dict(env or {}),
        cwd=cwd,
        start_new_session=True,
        **streams,
    )


class Command:
    """A running command, whose output goes to files so that it can be read at any time."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        output: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY_ROOT,
    ) -> None:
        """Write to the files `output`.out and `output`.err; `env` is added to `clean_environment()`."""
        self._paths = [output.with_name(f"{output.name}.{kind}") for kind in ("out", "err")]
        with self._paths[0].open("w") as out, self._paths[1].open("w") as err:
            self.process = _start(argv, env, cwd, f"{output}.extensions", stdout=out, stderr=err)

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._paths[1].read_text(errors="replace")

    @property
    def description(self) -> str:
        """The command and all that it has written, for messages."""
        return f"{self.process.args}\n{self.stdout}\n{self.stderr}"

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(patient(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still ran after {seconds:.3g} s: {self.description}") from None

    def wait_for(self, words: str, seconds: float) -> None:
        """Wait until these words were printed to stdout."""
        deadline = time.monotonic() + patient(seconds)
        while True:
            # Its last output is complete once it has ended.
            code = self.process.poll()
            if words in self.stdout:
                return
            assert code is None, f"exit code {code}: {self.description}"
            assert time.monotonic() < deadline, f"did not print {words!r}: {self.description}"
            time.sleep(0.02)


@contextlib.contextmanager
def running(*commands: Command) -> Iterator[None]:
    """End the commands and all their descendants when the block ends."""
    try:
        yield
    finally:
        for command in commands:
            kill_tree(command.process)


def run_command(
    argv: Sequence[str | Path],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY_ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return exit code, stdout and stderr.

    `timeout` is in seconds, before `patient`; `env` is added to `clean_environment()`. The command may not outlive
    its timeout nor leave a process behind that holds its output: both raise AssertionError with the output so far,
    and every process of the command is ended.
    """
    timeout, pipe = patient(timeout), subprocess.PIPE
    with (
        tempfile.TemporaryDirectory(prefix="torch_extensions_") as extensions,
        _start(argv, env, cwd, extensions, stdout=pipe, stderr=pipe) as process,
    ):
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            ending = "still ran" if process.poll() is None else "left a process behind that still ran"
            # Bytes, even of a text stream.
            out, err = ((output or b"").decode(errors="replace") for output in (expired.stdout, expired.stderr))
            raise AssertionError(
                f"{process.args}\n{ending} after {timeout:g} s\n--- stdout\n{out}\n--- stderr\n{err}"
            ) from None
        finally:
            kill_tree(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
