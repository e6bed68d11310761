"""Exit codes and messages for every way in which a program can end."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.commands import REPOSITORY_ROOT, clean_environment
from tests.helpers.patience import patient

PROGRAM = """
from megatron_ladder import errors
errors.GRACE_SECONDS = 0.01
def main(argv):
    {body}
errors.run_program(main, [])
"""


def run(body: str, rank: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = (
        clean_environment() | {"PYTHONIOENCODING": "utf-8:strict"} | ({} if rank is None else {"RANK": str(rank)})
    )
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=REPOSITORY_ROOT,
        timeout=patient(30),
    )


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("print('fine')", 0, ""),
        ("raise errors.UserError('--a is wrong', '--b too')", 2, "error: --a is wrong\nerror: --b too\n"),
        ("raise errors.BadNumbersError('nan')", 3, "error: BadNumbersError: nan\n"),
        ("raise errors.LostPeerError('gone')", 4, "error: LostPeerError: gone\n"),
        ("raise errors.UserError('https://me:secret@host/x fails')", 2, "error: https://host/x fails\n"),
        ("raise OSError(28, 'Full', 'a.png')", 1, "error: OSError: [Errno 28] Full: 'a.png'\n"),
        ("print('fine: \\udcff')", 0, ""),
    ],
)
def test_exit_codes(body: str, code: int, message: str) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, message)


def test_a_bug_shows_its_traceback() -> None:
    done = run("return 1 // 0", rank=3)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and 'File "<string>", line 5, in main' in done.stderr
    assert "error: rank 3: ZeroDivisionError: " in done.stderr.splitlines()[-1]
    assert "secret" not in run("raise ValueError('https://me:secret@host')").stderr


def test_a_process_that_the_system_ends_shows_its_stack() -> None:
    done = run("import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("Fatal Python error: Bus error") and ", line 5 in main" in done.stderr


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    program = PROGRAM.format(body="[print('line', flush=True) for _ in range(100000)]")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY_ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert (process.wait(30), process.stderr.read()) == (1, "")


def test_a_missing_package_is_one_line_and_a_missing_module_a_bug() -> None:
    done = run("import a_package_that_nobody_has.part")
    assert done.returncode == 2 and done.stderr.startswith("error: the Python package a_package_that_nobody_has is not")
    assert len(done.stderr.splitlines()) == 1
    for module in ("megatron_ladder.nothing", "json.nothing"):
        done = run(f"import {module}")
        assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_closed_output_is_no_error() -> None:
    command = [sys.executable, "-c", PROGRAM.format(body="print('nowhere')")]
    closed = ["sh", "-c", 'exec "$0" "$@" >&-']
    done = subprocess.run([*closed, *command], cwd=REPOSITORY_ROOT, env=clean_environment(), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
