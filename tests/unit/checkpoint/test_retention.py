"""Removal of old checkpoints after a save."""

from pathlib import Path

import pytest

from megatron_ladder.checkpoint.publish import Retention, remove_old_checkpoints
from megatron_ladder.comm.group import CommGroup
from tests.unit.checkpoint.tiny_training import TinyState, holds, save_at_once


def names(save: Path) -> list[str]:
    return sorted(entry.name for entry in save.iterdir())


RETAINED = [
    (Retention(), [50, 100, 150, 200]),
    (Retention(keep_last=2), [150, 200]),
    (Retention(keep_last=2, interval=100), [100, 150, 200]),
    (Retention(keep_last=1, protected=Path("iter_0000050")), [50, 200]),
]


@pytest.mark.parametrize(("retention", "kept"), RETAINED)
def test_retention(tmp_path: Path, retention: Retention, kept: list[int]) -> None:
    for iteration in (50, 100, 150):
        save_at_once(tmp_path, iteration, TinyState(1), CommGroup.alone())
    protected = None if retention.protected is None else tmp_path / retention.protected
    retention = Retention(retention.keep_last, retention.interval, protected)
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
