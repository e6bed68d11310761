"""Targets of conversions: checkpoints of other programs stay, and interrupted conversions do not get in the way."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.publish import published_checkpoints
from megatron_ladder.convert import conversions
from megatron_ladder.convert.copying import _Reader
from megatron_ladder.errors import UserError
from tests.unit.convert.hand_made import write_directory
from tests.unit.convert.saved_models import convert, small_config, write_cut_checkpoint


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Actions of another program between the last byte of a conversion and its publication."""
    actions: list[Callable[[], object]] = []

    def after_actions(publish: Callable[..., object], *args: object) -> object:
        for action in actions:
            action()
        return publish(*args)

    for name in ("publish_save", "publish_hf"):
        monkeypatch.setattr(conversions, name, partial(after_actions, getattr(conversions, name)))
    return actions


@pytest.mark.parametrize(("name", "words"), [("iter_0000030", []), ("iter_0000000.1", ["--overwrite"])])
def test_checkpoints_published_meanwhile_stay(
    tmp_path: Path, meanwhile: list[Callable[[], object]], name: str, words: list[str]
) -> None:
    directory, ours = write_directory(tmp_path / "hf"), tmp_path / "ours"
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    if words:
        convert("import", "--hf", directory, "--save", ours)
    meanwhile.append(lambda: os.rename(tmp_path / "run" / "iter_0000030", ours / name))
    with pytest.raises(UserError, match=rf"{name}: another program published .*move it to another directory"):
        convert("import", "--hf", directory, "--save", ours, *words)
    Checkpoint.open(ours / name).verify()
    assert published_checkpoints(ours) == sorted({name, "iter_0000000"} if words else {name})
    (work,) = ours.glob("iter_0000000.tmp-*")
    (tmp_path / "another").mkdir()
    os.rename(work, tmp_path / "another" / "iter_0000000")
    Checkpoint.open(tmp_path / "another").verify()


def test_directories_created_meanwhile_stay(tmp_path: Path, meanwhile: list[Callable[[], object]]) -> None:
    convert("import", "--hf", write_directory(tmp_path / "hf"), "--save", tmp_path / "ours")
    meanwhile.append(lambda: write_directory(tmp_path / "back", {"mine": True}))
    with pytest.raises(UserError, match=r"exists and is not empty.*is complete in .*back\.tmp-"):
        convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {"mine": True}


def dying_after(name: str) -> Callable[[Path], None]:
    """Return a removal of a directory that dies after one file."""

    def remove(directory: Path) -> None:
        (directory / name).unlink()
        raise ZeroDivisionError

    return remove


def test_death_while_replacing_leaves_no_incomplete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, ours = write_directory(tmp_path / "hf"), tmp_path / "ours"
    convert("import", "--hf", directory, "--save", ours)
    monkeypatch.setattr(shutil, "rmtree", dying_after("manifest.json"))
    with pytest.raises(ZeroDivisionError):
        convert("import", "--hf", directory, "--save", ours, "--overwrite")
    assert published_checkpoints(ours) == ["iter_0000000.1"]


def refusing(number: int) -> Callable[[int, int], None]:
    """Return a flock that fails."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF], ids=errno.errorcode.get)
def test_file_systems_without_locks_work(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    convert("import", "--hf", write_directory(tmp_path / "hf"), "--save", tmp_path / "ours")
    printed = capsys.readouterr().out
    assert f"cannot be locked ({os.strerror(number)}); no other conversion must write there" in printed
    Checkpoint.open(tmp_path / "ours").verify()


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES], ids=errno.errorcode.get)
def test_a_second_conversion_is_rejected(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    with pytest.raises(UserError, match="the same conversion is already running; wait for it"):
        convert("import", "--hf", write_directory(tmp_path / "hf"), "--save", tmp_path / "ours")


@pytest.mark.parametrize("unreadable", [False, True], ids=["other bytes", "cannot be read"])
def test_files_that_fail_verification_are_written_again(
    tmp_path: Path, unreadable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four files are wrong; both are written again, and the others are kept."""
    directory, ours = write_directory(tmp_path / "hf"), tmp_path / "ours"
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    words = ["import", "--hf", directory, "--save", ours, *layout]
    names = [f"weights_rank_0000{rank}.safetensors" for rank in range(4)]
    fsync, read_into = os.fsync, _Reader.read_into

    def flipping(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith((f"{names[1]}.partial", f"{names[3]}.partial")):
            os.pwrite(descriptor, b"\1", os.fstat(descriptor).st_size - 1)
        fsync(descriptor)

    def failing(reader: _Reader, path: Path, begin: int, out: memoryview) -> None:
        if path.name in (names[1], names[3]):
            raise UserError(f"{path}: cannot be read: {os.strerror(errno.EIO)}")
        read_into(reader, path, begin, out)

    with monkeypatch.context() as patch:
        if unreadable:
            patch.setattr(_Reader, "read_into", failing)
        else:
            patch.setattr(os, "fsync", flipping)
        with pytest.raises(RuntimeError, match=f"{names[1]}: weight:.*{names[3]}: weight:.*writes these files again"):
            convert(*words, "--verify")
    (work,) = ours.iterdir()
    kept = {path.name: path.stat().st_ino for path in work.glob("*.safetensors")}
    assert sorted(kept) == [names[0], names[2]]
    convert(*words)
    assert {name: (ours / "iter_0000000" / name).stat().st_ino for name in kept} == kept
    convert("import", "--hf", directory, "--save", tmp_path / "right", *layout)
    for name in names:
        right = (tmp_path / "right" / "iter_0000000" / name).read_bytes()
        assert (ours / "iter_0000000" / name).read_bytes() == right, name


@pytest.mark.parametrize("step", ["before the new one is renamed", "while the old one is removed"])
def test_an_export_killed_while_replacing_continues(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convert("import", "--hf", write_directory(tmp_path / "hf"), "--save", tmp_path / "ours")
    back = tmp_path / "back"
    words = ["export", "--load", tmp_path / "ours", "--hf", back, "--overwrite"]
    convert(*words)
    with monkeypatch.context() as patch:
        if "removed" in step:
            patch.setattr(shutil, "rmtree", dying_after("config.json"))
        else:
            rename = os.rename
            patch.setattr(os, "rename", lambda one, other: 1 / 0 if other == back else rename(one, other))
        with pytest.raises(ZeroDivisionError):
            convert(*words)
    assert back.exists() == ("removed" in step)
    assert len(list(tmp_path.glob("back.tmp-*.old"))) == 1
    convert(*words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]
