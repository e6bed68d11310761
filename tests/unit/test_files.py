"""Atomic file replacement and locks of `megatron_ladder.files`."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ladder.files import atomic_writer, lock_file, remove_temporary_files, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_or_an_error_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "older")
    write_atomically(path, b"old")
    with pytest.raises(RuntimeError), atomic_writer(path) as file:
        file.write(b"new")
        raise RuntimeError
    with pytest.raises(OSError, match=f"Full: '{path}'$"), atomic_writer(path):
        raise OSError(28, "Full")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.json"]


def test_content_and_rename_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def note_sync(descriptor: int) -> None:
        calls.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", lambda *_: calls.append("rename"))
    write_atomically(tmp_path / "a.json", "x")
    assert calls == ["file", "rename", "directory"]


def test_temporary_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from megatron_ladder.files import atomic_writer\n"
        "with atomic_writer(Path(sys.argv[1])) as file: os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "a.json"
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL and len(names(tmp_path)) == 1 and not path.exists()
    remove_temporary_files(path)
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with open(tmp_path / "lock", "w") as file:
        error = lock_file(file.fileno())
    assert error is not None and error.strerror == "No locks available"
