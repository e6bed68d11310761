"""Saves: in the background, failing, and followed by the removal of old checkpoints; and the choice when loading."""

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ladder.checkpoint import saving
from megatron_ladder.checkpoint.format import Checkpoint, find_checkpoint
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.saving import HostMemory, SaveError
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError
from tests.helpers.runs import errors_of
from tests.unit.checkpoint.tiny_training import (
    DAMAGES,
    TinyState,
    begin,
    flip,
    hand_over,
    holds,
    names,
    on_ranks,
    save_at_once,
    save_of_ranks,
)


def test_background_saves_write_the_copied_state(tmp_path: Path) -> None:
    before = TinyState(1).whole

    def rank(world: CommGroup) -> None:
        state, host = TinyState(1, world.rank, world.size), HostMemory()
        begun = begin(tmp_path, 100, state, world, host=host)
        state.train()
        hand_over(begun, world)
        # The same memory with other values.
        begun = begin(tmp_path, 200, state, world, host=host)
        hand_over(begun, world)

    assert on_ranks(2, rank) == [None, None]
    assert names(tmp_path) == ["iter_0000100", "iter_0000200", "latest"]
    assert holds(tmp_path / "iter_0000100", before)
    after = {(name, kind): value + 1 if kind == "weight" else value * 2 for (name, kind), value in before.items()}
    assert holds(tmp_path, after)


def test_a_rank_that_does_not_finish_is_reported(tmp_path: Path) -> None:
    def rank(world: CommGroup) -> Any:
        begun = begin(tmp_path, 100, TinyState(1, world.rank, world.size), world)
        return hand_over(begun, world, timeout_seconds=0.2) if world.rank == 0 else None

    outcome = on_ranks(2, rank)[0]
    assert outcome.directory == "" and outcome.error == "rank 1 did not finish writing in 0.2 s"
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["weight", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_not_published(tmp_path: Path, value: float, kind: str) -> None:
    save_of_ranks(tmp_path, 100, 1)

    def save(world: CommGroup) -> Any:
        state = TinyState(2, world.rank, world.size)
        spans = list(state.spans())
        # Weights are named first, whatever else is bad.
        moment = state.moment(spans[kind != "weight"], "exp_avg_sq")
        for bad in [moment, spans[1].master][: 1 + (kind == "weight")]:
            bad[3] = value if world.rank else 1.0
        state.copy_masters_to_weights()
        return save_at_once(tmp_path, 200, state, world)

    for outcome in on_ranks(2, save):
        assert outcome.bad_numbers and outcome.error == f"{kind} of norm.weight is not finite"
    assert names(tmp_path) == ["iter_0000100", "latest"] and holds(tmp_path, TinyState(1).whole)


def test_no_save_begins_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the bytes of all ranks and for the manifest."""
    save_of_ranks(tmp_path, 100, 1)
    needed = 38 * 3 * 4 + saving._OTHER_BYTES
    for free, blocks, fits in ((needed, 9, True), (needed - 1, 9, False), (0, 0, True)):
        room = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=blocks)
        monkeypatch.setattr(os, "statvfs", lambda path, room=room: room)
        answers = save_of_ranks(tmp_path, 200, 2)
        assert [isinstance(answer, SaveError) for answer in answers] == [not fits] * 2
        if not fits:
            assert str(answers[1]) == f"a checkpoint needs 1.0 MiB, and 1.0 MiB are free in {tmp_path}"
    assert names(tmp_path) == ["iter_0000100", "iter_0000200", "iter_0000200.1", "latest"]


def load(save: Path, world: CommGroup, state: TinyState) -> tuple[str, list[str]]:
    checkpoint, faults = load_newest(save, state, world, lambda checkpoint: [])
    return checkpoint.directory.name, faults


def verified(directory: Path) -> None:
    Checkpoint.open(directory).verify()


@pytest.mark.parametrize("damage", DAMAGES)
def test_loading_ranks_agree_on_the_newest_undamaged_checkpoint(tmp_path: Path, damage: Any) -> None:
    """Whichever file is damaged and whichever rank reads it: all ranks load the checkpoint before it."""
    for seed, iteration in enumerate((50, 100, 200)):
        save_of_ranks(tmp_path / "whole", iteration, seed)
    files = names(tmp_path / "whole" / "iter_0000200")
    assert len(files) == 8
    for name in files:
        save = Path(shutil.copytree(tmp_path / "whole", tmp_path / name))
        damaged = save / "iter_0000200" / name
        damage(damaged)
        errors = errors_of(verified, damaged.parent)
        assert errors and all(line.startswith(f"{damaged}: ") for line in errors)
        found = find_checkpoint(save)
        assert found is not None
        # Only `verify` reads the data.
        if damage is flip and name != "manifest.json":
            assert found.directory.name == "iter_0000200"
        else:
            assert found.directory.name == "iter_0000100" and any(str(damaged) in line for line in found.warnings)
            assert "iter_0000100: is used instead" in found.warnings[-1]
        states = [TinyState(3, rank, 2) for rank in range(2)]
        answers = on_ranks(2, lambda w, save=save, states=states: load(save, w, states[w.rank]))
        for directory, faults in answers:
            assert directory == "iter_0000100"
            assert faults and all(str(damaged) in fault for fault in faults)
        for rank, state in enumerate(states):
            wanted = TinyState(1, rank, 2)
            for span, other in zip(state.spans(), wanted.spans(), strict=True):
                assert torch.equal(span.master, other.master) and torch.equal(span.weight, other.weight)
                for which in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(state.moment(span, which), wanted.moment(other, which))


@pytest.mark.parametrize("unseen", ["iter_0000200", "iter_0000100"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_checkpoint_that_one_rank_cannot_open_is_skipped_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unseen: str, stale: bool
) -> None:
    """For example a directory on a local disk of another host, or a stale file handle."""
    for iteration in (100, 200):
        save_of_ranks(tmp_path, iteration, iteration)
    real = Checkpoint.open_unchecked

    def see(path: Path) -> Checkpoint:
        if threading.current_thread().name == "rank 1" and path.name >= unseen:
            raise OSError(116, "Stale file handle") if stale else UserError(f"{path}: cannot be read: gone")
        return real(path)

    monkeypatch.setattr(Checkpoint, "open_unchecked", see)
    one, other = on_ranks(2, lambda world: load(tmp_path, world, TinyState(3, world.rank, 2)))
    reason = f"{tmp_path / 'iter_0000200'}: cannot be read: {'Stale file handle' if stale else 'gone'} (on rank 1)"
    if unseen == "iter_0000200":
        assert one == other == ("iter_0000100", [reason])
    else:
        assert isinstance(one, UserError) and isinstance(other, UserError)
        assert one.messages == other.messages and len(one.messages) == 3 and one.messages[1] == reason


def test_a_named_checkpoint_is_the_only_candidate(tmp_path: Path) -> None:
    for iteration in (100, 200):
        save_at_once(tmp_path, iteration, TinyState(1), CommGroup.alone())
    flip(tmp_path / "iter_0000200" / "weights_rank_00000.safetensors")
    with pytest.raises(UserError, match="no checkpoint can be loaded") as raised:
        load(tmp_path / "iter_0000200", CommGroup.alone(), TinyState(3))
    assert "weights_rank_00000.safetensors: damaged" in raised.value.messages[1]
    (tmp_path / "latest").write_text("iter_0000100\n")
    with pytest.raises(UserError, match="of another model"):
        load_newest(tmp_path, TinyState(3), CommGroup.alone(), lambda checkpoint: ["of another model"])


def test_generators_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(3)
    save_at_once(tmp_path, 100, TinyState(1), CommGroup.alone())
    expected = torch.rand(4)
    load_newest(tmp_path, TinyState(3), CommGroup.alone(), lambda c: [], generators=False)
    assert not torch.equal(torch.rand(4), expected)
    load_newest(tmp_path, TinyState(3), CommGroup.alone(), lambda c: [])
    assert torch.equal(torch.rand(4), expected)
