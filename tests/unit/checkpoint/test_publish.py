"""Publishing: what a save removes."""

import os
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.publish import (
    Retention,
    create_temporary_directory,
    remove_old_checkpoints,
    temporary_directory,
)
from megatron_ladder.comm.group import CommGroup
from tests.unit.checkpoint.tiny_training import TinyState, holds, names, save_at_once, save_of_ranks


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [50, 100, 150, 200]),
        (Retention(keep_last=2), [150, 200]),
        (Retention(keep_last=2, interval=100), [100, 150, 200]),
        (Retention(keep_last=1, protected=Path("iter_0000050")), [50, 200]),
    ],
)
def test_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retention: Retention, kept: list[int]) -> None:
    monkeypatch.chdir(tmp_path)
    for iteration in (50, 100, 150):
        save_at_once(tmp_path, iteration, TinyState(1), CommGroup.alone())
    outcome = save_at_once(tmp_path, 200, TinyState(2), CommGroup.alone(), retention=retention)
    assert names(tmp_path) == [*(f"iter_{iteration:07d}" for iteration in kept), "latest"]
    assert list(outcome.removed) == [f"iter_{i:07d}" for i in (50, 100, 150) if i not in kept]
    assert holds(tmp_path, TinyState(2).whole)


def test_iterations_saved_again_do_not_count(tmp_path: Path) -> None:
    """A damaged checkpoint that was saved again does not replace an undamaged one."""
    for iteration in (50, 100, 150, 150, 200, 200):
        save_at_once(tmp_path, iteration, TinyState(1), CommGroup.alone())
    # The run saved the iteration again from which it was loaded.
    retention = Retention(keep_last=2, interval=50, protected=tmp_path / "iter_0000150")
    assert retention.to_remove(tmp_path) == ["iter_0000200"]
    retention = Retention(keep_last=2)
    assert retention.to_remove(tmp_path) == ["iter_0000150", "iter_0000200", "iter_0000050", "iter_0000100"]
    remove_old_checkpoints(tmp_path, retention)
    assert names(tmp_path) == ["iter_0000150.1", "iter_0000200.1", "latest"]


def test_only_remains_of_dead_saves_are_removed(tmp_path: Path) -> None:
    save_of_ranks(tmp_path, 100, 1)
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
    assert holds(tmp_path, TinyState(1).whole)
