"""Publishing: the process may die at any call, and `latest` still names a complete checkpoint."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.publish import (
    create_temporary_directory,
    temporary_directory,
)
from tests.unit.checkpoint.tiny_training import holds, save_state, small_state


def test_order_in_which_names_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, str]] = []
    random_part = re.compile(r"(?<=json)\.[0-9a-f]+(?=\.partial)")
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def recorded_fsync(descriptor: int) -> None:
        steps.append(("fsync", random_part.sub("", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)))
        fsync(descriptor)

    def recorded(name: str, real: Callable[..., None]) -> Callable[..., None]:
        return lambda source, target: steps.append((name, target.name)) or real(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded("replace", replace))
    monkeypatch.setattr(os, "rename", recorded("rename", rename))
    save_state(tmp_path / "save", 100, "a", small_state(1))
    data = [step for step in steps if step[1].endswith(".safetensors")]
    assert len(data) == 6 and steps[:6] == data
    assert steps[6:] == [
        ("fsync", "manifest.json.partial"),
        ("replace", "manifest.json"),
        ("fsync", "iter_0000100.tmp-a"),
        ("fsync", "iter_0000100.tmp-a"),
        ("fsync", "latest.partial"),
        ("rename", "iter_0000100"),
        ("fsync", "save"),
        ("replace", "latest"),
        ("fsync", "save"),
    ]


def test_only_remains_of_dead_saves_are_removed(tmp_path: Path) -> None:
    save_state(tmp_path, 100, "a", small_state(1))
    ours = [temporary_directory(tmp_path, 200, token) for token in ("dead", "alive")]
    for directory in ours:
        directory.mkdir()
        (directory / "weights_rank_00000.safetensors").write_bytes(b"half")
    foreign = [tmp_path / name for name in ("iter_0000300.tmp", "iter_3.tmp-a", "notes.tmp-a", "tensorboard")]
    outside = tmp_path.parent / "outside"
    for directory in (*foreign, outside):
        directory.mkdir()
        (directory / "kept").touch()
    (tmp_path / "iter_0000400.tmp-link").symlink_to(outside)
    (tmp_path / "iter_0000500.tmp-file").touch()
    for path in (*tmp_path.rglob("*"), outside / "kept", outside):
        os.utime(path, (1000, 1000), follow_symlinks=False)
    future = (ours[1].stat().st_mtime + 1e10,) * 2
    os.utime(ours[1] / "weights_rank_00000.safetensors", future)
    before = {path.name for path in tmp_path.iterdir()}

    running = create_temporary_directory(tmp_path, 200, "new")

    assert before - {path.name for path in tmp_path.iterdir()} == {ours[0].name}
    assert running.is_dir() and (outside / "kept").exists()
    assert all((directory / "kept").exists() for directory in foreign)
    assert holds(tmp_path, small_state(1))
