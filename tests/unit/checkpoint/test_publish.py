"""Publishing: the process may die at any call, and `latest` still names a complete checkpoint."""

import os
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.publish import create_temporary_directory, temporary_directory
from tests.unit.checkpoint.tiny_training import holds, save_state, small_state


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
    for path in (*tmp_path.rglob("*"), outside / "kept", outside):
        os.utime(path, (1000, 1000), follow_symlinks=False)
    future = (ours[1].stat().st_mtime + 1e10,) * 2
    os.utime(ours[1] / "weights_rank_00000.safetensors", future)
    before = {path.name for path in tmp_path.iterdir()}

    with pytest.warns(match=r"iter_0000400\.tmp-link: left by a failed save, cannot be removed"):
        running = create_temporary_directory(tmp_path, 200, "new")

    assert before - {path.name for path in tmp_path.iterdir()} == {ours[0].name}
    assert running.is_dir() and (outside / "kept").exists()
    assert all((directory / "kept").exists() for directory in foreign)
    assert holds(tmp_path, small_state(1))
