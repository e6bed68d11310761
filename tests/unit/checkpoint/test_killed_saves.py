"""SIGKILL at every file-system call of a save."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.publish import Retention, published_checkpoints
from megatron_ladder.checkpoint.saving import HostMemory
from megatron_ladder.comm.group import CommGroup
from tests.helpers.killer import killed_everywhere
from tests.unit.checkpoint.tiny_training import TinyState, begin, hand_over, holds, on_ranks, save_at_once


def save_in_background(save: Path, iteration: int, seed: int, retention: Retention) -> None:
    """Save from two ranks whose state changes while files are written."""

    def rank(world: CommGroup) -> None:
        state = TinyState(seed, world.rank, world.size)
        saving = begin(save, iteration, state, world, retention=retention, host=HostMemory())
        state.train()
        hand_over(saving, world)

    failures = [answer for answer in on_ranks(2, rank) if answer is not None]
    assert not failures, failures


def save_alone(save: Path, iteration: int, seed: int, retention: Retention) -> None:
    save_at_once(save, iteration, TinyState(seed), CommGroup.alone(), retention=retention)


SCENARIOS: dict[str, tuple[Callable[..., None], int, Retention]] = {
    "again": (save_alone, 100, Retention(keep_last=1)),
    "background": (save_in_background, 200, Retention(keep_last=2)),
}
"""Function, iteration and retention of the killed save; iterations 50 and 100 exist before."""


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["again", pytest.param("background", marks=pytest.mark.slow)])
def test_a_save_may_be_killed_anywhere(tmp_path: Path, scenario: str) -> None:
    """`latest` names a complete checkpoint, the old or the new one, and the next save cleans up."""
    save, iteration, retention = SCENARIOS[scenario]
    old, new, newest = (TinyState(seed).whole for seed in (1, 2, 3))
    before = tmp_path / "before"
    for earlier in (50, 100):
        save_alone(before, earlier, 1, Retention())
    points = []
    outcomes = []
    for killed in killed_everywhere(before, lambda directory: save(directory, iteration, 2, retention), tmp_path):
        directory = killed.directory
        is_new = holds(directory, new)
        assert is_new or holds(directory, old), killed
        points.append(killed.call)
        outcomes.append(is_new)
        for published in published_checkpoints(directory):
            Checkpoint.open(directory / published)
        # Wait for the next tick of a coarse file-system clock.
        time.sleep(0.005)
        save_alone(directory, 300, 3, retention)
        assert holds(directory, newest)
        assert all(entry.name in ("latest", *published_checkpoints(directory)) for entry in directory.iterdir())
    assert len(points) >= 20 and {"open", "write", "fsync"} <= {*points} and points.count("os.rename") >= 3
    assert set(outcomes) == {False, True}
    if scenario == "again":
        # A new checkpoint stays once it exists; the order of threads is not fixed.
        assert outcomes == sorted(outcomes) and {"os.remove", "os.rmdir"} <= {*points}
