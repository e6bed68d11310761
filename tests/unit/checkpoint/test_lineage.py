"""Branches of a directory of checkpoints: falling back and retention stay on one of them."""

import shutil
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.lineage import Lineage
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.publish import published_checkpoints
from megatron_ladder.checkpoint.retention import Retention
from megatron_ladder.checkpoint.saving import SaveOptions, TrainingSave
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError
from tests.unit.checkpoint.tiny_training import TinyState, add_vocabulary, header_of


def load_as_a_run(save: Path) -> Checkpoint:
    return load_newest(save, TinyState(1), CommGroup.alone(), lambda checkpoint: [])[0]


def save_in(branch: Lineage | None, save: Path, iteration: int, keep_last: int | None = None) -> None:
    header = header_of(iteration) | ({} if branch is None else {"lineage": branch.record()})
    options = SaveOptions(retention=Retention(keep_last))
    saving = TrainingSave.begin(save, header, TinyState(iteration), CommGroup.alone(), add_vocabulary, options)
    assert saving.write(CommGroup.alone().gather_objects) is not None


@pytest.mark.parametrize("old", [Lineage.begin(), None], ids=["recorded", "earlier version"])
def test_falling_back_stays_on_the_branch(tmp_path: Path, old: Lineage | None) -> None:
    """A run went back from 300 to 100, saved 150 and 300 again, and then its checkpoints were damaged one by one."""
    for iteration in (100, 200, 300):
        save_in(old, tmp_path, iteration)
    branch = (old or Lineage()).fork(100)
    for iteration in (150, 300):
        save_in(branch, tmp_path, iteration)
    assert (tmp_path / "latest").read_text() == "iter_0000300.1\n"
    for damaged, next_one in (("iter_0000300.1", "iter_0000150"), ("iter_0000150", "iter_0000100")):
        (tmp_path / damaged / "weights_rank_00000.safetensors").unlink()
        assert Checkpoint.open(tmp_path).directory.name == next_one
        assert load_as_a_run(tmp_path).directory.name == next_one
    assert Checkpoint.open(tmp_path).lineage == (old or Lineage())
    (tmp_path / "iter_0000100" / "weights_rank_00000.safetensors").unlink()
    for read in (Checkpoint.open, load_as_a_run):
        with pytest.raises(UserError) as raised:
            read(tmp_path)
        assert raised.value.messages[-1].endswith(f"--load {tmp_path / 'iter_0000300'} loads the last")


def test_a_new_run_in_a_directory_does_not_fall_back_to_the_old_one(tmp_path: Path) -> None:
    """Neither if nothing but the checkpoints themselves records which of them is the current one."""
    for branch, iteration in ((Lineage.begin(), 100), (Lineage.begin(), 200)):
        save_in(branch, tmp_path, iteration)
    (tmp_path / "iter_0000200" / "weights_rank_00000.safetensors").unlink()
    with pytest.raises(UserError, match="none of its 1 checkpoints is complete"):
        Checkpoint.open(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(UserError, match="holds checkpoints of several runs"):
        Checkpoint.open(tmp_path)
    # One branch that continues another is one line.
    save_in(branch.fork(200), tmp_path, 300)
    (tmp_path / "latest").unlink()
    shutil.rmtree(tmp_path / "iter_0000100")
    assert Checkpoint.open(tmp_path).iteration == 300


def test_retention_leaves_other_branches_alone(tmp_path: Path) -> None:
    old, new = Lineage.begin(), Lineage.begin()
    for iteration in (50, 100, 150):
        save_in(old, tmp_path, iteration)
    forked = old.fork(100)
    for branch, iterations in ((new, (40, 60, 160, 170)), (forked, (110, 120, 180))):
        for iteration in iterations:
            save_in(branch, tmp_path, iteration, keep_last=2)
    kept = [50, 100, 120, 150, 160, 170, 180]
    assert published_checkpoints(tmp_path) == [f"iter_{iteration:07d}" for iteration in kept]
    manifest = tmp_path / "iter_0000120" / "manifest.json"
    manifest.write_bytes(b"")
    assert Retention(keep_last=1).to_remove(tmp_path) == []
