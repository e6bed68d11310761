"""Conversions that are interrupted, repeated, or meet other programs: complete or nothing, and nothing else is lost."""

import errno
import os
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.errors import UserError
from tests.unit.convert.hand_made import write_directory, zeros
from tests.unit.convert.saved_models import (
    assert_equal_bits,
    convert,
    save_model,
    small_config,
    tensors_of,
    write_cut_checkpoint,
)


@pytest.fixture
def export(tmp_path: Path) -> list[object]:
    """The command that exports a checkpoint to the four files of `tmp_path / "back"`."""
    save_model(tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    return ["export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--max-shard-size", "110KB"]


def test_an_interrupted_conversion_continues_after_its_complete_files(
    tmp_path: Path, export: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, renamed = os.replace, []

    def dying(source: Path, target: Path) -> None:
        if len(renamed) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        renamed.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(
            UserError, match="No space left on device: free some space, .* run the same command again to continue"
        ):
            convert(*export)
    assert not (tmp_path / "back").exists()
    (work,) = tmp_path.glob("back.tmp-*")
    whole = {path.name: path.stat().st_ino for path in work.iterdir()}
    assert len(whole) == 2
    (work / "model-00003-of-00004.safetensors.0123.partial").write_text("left by a kill")
    capsys.readouterr()
    convert(*export, "--verify")
    assert f"continues an interrupted conversion in {work}" in capsys.readouterr().out
    assert {name: (tmp_path / "back" / name).stat().st_ino for name in whole} == whole
    assert not list((tmp_path / "back").glob("*.partial")) and not list(tmp_path.glob("back.tmp-*"))
    assert_equal_bits(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))


def test_a_changed_source_is_converted_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file has the same name, header and size."""
    directory = write_directory(tmp_path / "hf")
    words = ["import", "--hf", directory, "--save", tmp_path / "ours"]
    with monkeypatch.context() as patch:
        real = os.replace
        patch.setattr(os, "replace", lambda one, other: real(one, other) if "weights" in str(other) else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(*words)
    weights = bytearray(zeros())
    weights[-1] = 1
    write_directory(directory, weights=bytes(weights))
    os.utime(directory / "model.safetensors", ns=(1, 1))
    convert(*words, "--verify")
    Checkpoint.open(tmp_path / "ours").verify()


def test_overwriting(tmp_path: Path) -> None:
    directory, ours, back = write_directory(tmp_path / "hf"), tmp_path / "ours", tmp_path / "back"
    convert("import", "--hf", directory, "--save", ours)
    with pytest.raises(UserError, match="--overwrite"):
        convert("import", "--hf", directory, "--save", ours)
    back.mkdir()
    (back / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        convert("export", "--load", ours, "--hf", back)
    with pytest.raises(UserError, match="no config.json"):
        convert("export", "--load", ours, "--hf", back, "--overwrite")
    assert (back / "notes.txt").read_text() == "mine"
    convert("export", "--load", ours, "--hf", tmp_path / "again")
    convert("export", "--load", ours, "--hf", tmp_path / "again", "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "hf", "ours"]
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    with pytest.raises(UserError, match="another run"):
        convert("import", "--hf", directory, "--save", tmp_path / "run", "--overwrite")
