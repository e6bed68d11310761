"""Checkpoints of runs with real trainers: background saves, failures, and resuming."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import equal

from megatron_ladder.checkpoint import saving
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.data.loader import Sources
from megatron_ladder.errors import BadNumbersError, UserError
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import everything, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches

RECIPE = (
    "--train-iters 4 --lr 1e-2 --micro-batch-size 2 --global-batch-size 4 --residual-mode ladder --bf16 "
    "--loss-spike-factor 9"
).split()
Events = list[tuple[str, dict[str, Any]]]


def batches_at(samples: int, rank: int = 0) -> Any:
    """Batches with a position that only the data knows."""
    return SimpleNamespace(consumed_samples=samples, reader_state={"place": rank})


def saver_of(argv: list[str], checkpoint: Checkpoint | None = None) -> tuple[Trainer, CheckpointSaver, Events]:
    trainer = build_trainer_here([*RECIPE, *argv])
    stream = SimpleNamespace(cut=lambda: "a plan")
    inputs: Any = SimpleNamespace(
        sources=Sources(None, {}),
        tokenizer=None,
        stream=stream,
        checkpoint=checkpoint,
        data={},
        end_ids=frozenset(),
        answers_end=True,
    )
    events: Events = []
    record: Any = RunRecord(None, trainer.mesh.world.rank)
    record.write = lambda kind, /, **fields: events.append((kind, fields))
    return trainer, CheckpointSaver(trainer, inputs, record), events


def train(trainer: Trainer, saver: CheckpointSaver, final: int) -> None:
    """Save after each of four steps."""
    for iteration, batch in enumerate(steps_of_batches(4, 2), start=1):
        train_step(trainer, own_batches(trainer, batch), iteration)
        saver.poll()
        batches = batches_at(4 * iteration, trainer.mesh.data.rank)
        saver.save(iteration, batches, final=iteration == final)
        # A step or a stop may request a checkpoint that exists already.
        saver.save(iteration, batches)


def saves_of_a_run(argv: list[str], final: int) -> Events:
    """On each rank: return the events."""
    trainer, saver, events = saver_of(argv)
    with saver:
        train(trainer, saver, final)
    return events


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--zero-stage 2"])
def test_background_saves_equal_synchronous_saves(gloo_pools: GlooPools, tmp_path: Path, layout: str) -> None:
    synchronous, background = tmp_path / "synchronous", tmp_path / "background"
    run = gloo_pools(2).run
    run(saves_of_a_run, [*layout.split(), "--save", str(synchronous)], 4)
    words = ["--save", str(background), "--async-save", "--keep-last-n-checkpoints", "3"]
    events, others = run(saves_of_a_run, [*layout.split(), *words], 0)
    assert others == []
    assert [kind for kind, _ in events if kind != "save begin"] == ["save end"] * 4
    begun = [fields["iteration"] for kind, fields in events if kind == "save begin"]
    ended = [fields for kind, fields in events if kind == "save end"]
    assert begun == [fields["iteration"] for fields in ended] == [1, 2, 3, 4]
    assert all(0 < fields["blocked_seconds"] <= fields["seconds"] and fields["bytes"] > 10_000 for fields in ended)
    assert [fields["removed"] for fields in ended] == [[], [], [], ["iter_0000001"]]
    assert sorted(path.name for path in background.iterdir()) == [*(f"iter_000000{n}" for n in (2, 3, 4)), "latest"]
    for number in (2, 3, 4):
        one, other = (everything(folder / f"iter_000000{number}") for folder in (synchronous, background))
        assert one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    places = [{"plan": "a plan", "place": rank} for rank in range(2 if "zero" in layout else 1)]
    assert Checkpoint.open(background).manifest["data_streams"] == places


def failing_saves(argv: list[str], failing: int, rank: int) -> tuple[Events, str, int]:
    """On each rank: return the events, the error of the last save, and the steps; `rank` cannot write an iteration."""
    real = saving.write_tensor_file
    trainer, saver, events = saver_of(argv)

    def write(path: Path, *arguments: Any) -> tuple[int, str]:
        if trainer.mesh.world.rank == rank and f"000000{failing}" in path.parent.name:
            raise OSError(28, "No space left on device", str(path))
        return real(path, *arguments)

    with mock.patch.object(saving, "write_tensor_file", write):
        try:
            with saver:
                train(trainer, saver, 4)
        except UserError as error:
            return events, str(error), trainer.engine.optimizer.steps_taken()
    return events, "", trainer.engine.optimizer.steps_taken()


@pytest.mark.parametrize("words", ["", "--async-save"], ids=["synchronous", "background"])
def test_a_failing_save_does_not_stop_training_unless_it_is_the_last(
    gloo_pools: GlooPools, tmp_path: Path, words: str
) -> None:
    for rank, failing, said in ((0, 2, ""), (1, 4, "the last checkpoint could not be written")):
        folder = tmp_path / str(failing)
        ranks = gloo_pools(2).run(failing_saves, ["--save", str(folder), *words.split()], failing, rank)
        assert all(said in message and bool(said) == bool(message) for _, message, _ in ranks)
        assert [steps for _, _, steps in ranks] == [4, 4]
        failed = [fields for kind, fields in ranks[0][0] if kind == "save failed"]
        assert failed and all(fields["iteration"] == failing for fields in failed)
        assert all("No space left on device" in fields["error"] for fields in failed)
        whole = [f"iter_000000{number}" for number in (1, 2, 3, 4) if number != failing]
        assert sorted(path.name for path in folder.iterdir()) == [*whole, "latest"]
        assert Checkpoint.open(folder).directory.name == whole[-1]


def resumed(argv: list[str], load: Path) -> tuple[list[int], Events, list[Any], int, int]:
    """On each rank: return the resumed position, the events, the state of the data, AdamW's steps, and the guard's."""
    trainer, saver, events = saver_of([*argv, "--load", str(load)], Checkpoint.open(load))
    *place, manifest = saver.resume()
    guarded = len(trainer.guard.state()["losses"])
    return place, events, manifest.get("data_streams", []), trainer.engine.optimizer.steps_taken(), guarded


def test_a_damaged_checkpoint_is_skipped_by_all_ranks(gloo_pools: GlooPools, tmp_path: Path) -> None:
    run = gloo_pools(2).run
    run(saves_of_a_run, ["--save", str(tmp_path)], 4)
    for words, start, steps, loaded, judged in (
        ([], [4, 16], 4, 2, 4),
        (["--no-load-optim"], [4, 16], 0, 2, 4),
        (["--finetune"], [0, 0], 0, 0, 0),
        (["--skip-train"], [4, 16], 0, 0, 0),
        (["--skip-train", "--finetune"], [0, 0], 0, 0, 0),
    ):
        for place, _, states, *counts in run(resumed, words, tmp_path):
            assert place == start and counts == [steps, judged] and len(states) == loaded
    damaged = tmp_path / "iter_0000004" / "optimizer_rank_00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(bytes(data))
    (place, events, *_), (other, others, *_) = run(resumed, [], tmp_path)
    assert place == other == [3, 12] and others == []
    assert [kind for kind, _ in events] == ["fallback", "load"]
    assert events[0][1]["directory"] == events[1][1]["directory"] == str(tmp_path / "iter_0000003")
    assert [str(damaged) in fault for fault in events[0][1]["faults"]] == [True]


def saves_a_nan(argv: list[str], rank: int) -> str:
    """On each rank: return the error of a save while one of the weights of `rank` is not a number."""
    trainer, saver, _ = saver_of(argv)
    if trainer.mesh.world.rank == rank:
        next(span for span in trainer.engine.optimizer.spans() if span.owned).master[0] = float("nan")
    trainer.engine.optimizer.copy_masters_to_weights()
    with pytest.raises(BadNumbersError) as raised, saver:
        saver.save(1, batches_at(4))
    return str(raised.value)


@pytest.mark.parametrize("words", ["", "--async-save"], ids=["synchronous", "background"])
def test_a_weight_that_is_not_a_number_ends_all_ranks(gloo_pools: GlooPools, tmp_path: Path, words: str) -> None:
    first, second = gloo_pools(2).run(saves_a_nan, ["--save", str(tmp_path), *words.split()], 1)
    assert first == second and first.startswith("iteration 1: weight of ") and "is not finite, so it was not" in first
    assert list(tmp_path.iterdir()) == []
