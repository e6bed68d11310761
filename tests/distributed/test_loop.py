"""The training loop with real trainers: the order of saves, evaluations and stops, and what is logged."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.loader import OrderOptions, open_sources
from megatron_ladder.tokenizers.kinds import NullTokenizer
from megatron_ladder.train import loop
from megatron_ladder.train import step as train_step_module
from megatron_ladder.train.guards import Finding
from megatron_ladder.train.inputs import RunInputs, SamplePrompt
from megatron_ladder.train.loop import OpenRun
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import Stopper
from tests.helpers.pool import GlooPools
from tests.helpers.tokens import write_tokens
from tests.helpers.training import build_trainer_here

RECIPE = "--train-iters 4 --lr 1e-2 --micro-batch-size 2 --eval-interval 2 --eval-iters 2 --log-interval 1".split()
SKIPPED = Finding("bad numbers", True, "the loss is nan")


def train(
    argv: list[str],
    data: DataConfig,
    save: Path,
    signal_at: int = 0,
    in_evaluation: bool = False,
    loaded: bool = False,
    bad_step: int = 0,
    prompts: Sequence[SamplePrompt] = (),
) -> list[dict[str, Any]]:
    """On each rank: train, with a SIGTERM to rank 1 during a save or an evaluation; on rank 0, return the events.

    The loss of step `bad_step` is not a number.
    """
    trainer = build_trainer_here([*RECIPE, *argv, "--save", str(save)])
    run, rank, signals = trainer.run, dist.get_rank(), list[int]()
    sources = open_sources(data, OrderOptions(run.training.seq_length, 1))
    record = RunRecord(save, rank)

    def save_checkpoint(iteration: int, batches: Any, reason: str, final: bool) -> None:
        record.write_first("save", iteration=iteration)
        if iteration == signal_at and rank == 1:
            signals.append(15)

    real, real_step = trainer.engine.run_passes, loop.train_step

    def run_passes(micro_batches: Any, trains: bool, **options: Any) -> Any:
        if in_evaluation and rank == 1 and not trains:
            signals.append(15)
        return real(micro_batches, trains, **options)

    def step(trainer: Any, micro_batches: Any, iteration: int, *more: Any) -> Any:
        result = real_step(trainer, micro_batches, iteration, *more)
        return result._replace(loss=math.nan, finding=SKIPPED) if iteration == bad_step else result

    checkpoints: Any = mock.MagicMock(save=save_checkpoint)
    stopper = Stopper(run.reliability, signals, rank, 0.0)
    inputs = RunInputs(run=run, tokenizer=NullTokenizer(100), sources=sources, sample_prompts=tuple(prompts))
    opened = OpenRun(trainer, inputs, sample_batches(trainer, sources.train, 0), checkpoints, record, iteration=0)
    with (
        mock.patch.object(loop, "Watch"),
        mock.patch.object(loop, "train_step", step),
        mock.patch.object(trainer.engine, "run_passes", run_passes),
    ):
        run_opened = loop._evaluate_loaded if loaded else loop._train
        reason = run_opened(opened, stopper)
    record.write_first("stop", iteration=0, reason=reason, code=0)
    assert reason == "SIGTERM" or not in_evaluation
    # Only rank 0 writes.
    return read_record(save) if rank == 0 else []


def split_data(folder: Path) -> DataConfig:
    return DataConfig((write_tokens(folder / "tokens"),), split="8,2")


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["event"], event["iteration"]) for event in events if event["event"] != "progress"]


@pytest.mark.parametrize(
    ("flags", "signal_at", "expected"),
    [
        ("--exit-interval 2", 0, [("save", 2), ("evaluation", 2)]),
        ("--exit-interval 2", 2, [("save", 2)]),
        ("--save-interval 2", 4, [("save", 2), ("evaluation", 2), ("save", 4)]),
        ("--eval-interval 3", 0, [("evaluation", 3), ("save", 4), ("evaluation", 4)]),
    ],
    ids=["scheduled end", "signal at a scheduled end", "signal at the last step", "last step"],
)
def test_a_scheduled_end_evaluates_and_a_signal_does_not_wait(
    gloo_pools: GlooPools, tmp_path: Path, flags: str, signal_at: int, expected: list[tuple[str, int]]
) -> None:
    words = [*flags.split(), "--tensor-model-parallel-size", "2"]
    found, _ = gloo_pools(2).run(train, words, split_data(tmp_path), tmp_path, signal_at)
    assert kinds(found) == [*expected, ("stop", 0)]


def test_a_signal_ends_an_evaluation(gloo_pools: GlooPools, tmp_path: Path) -> None:
    data, words = split_data(tmp_path), ["--zero-stage", "2"]
    found, _ = gloo_pools(2).run(train, words, data, tmp_path, in_evaluation=True)
    assert kinds(found) == [("save", 3), ("stop", 0)], "the next step ends the run"
    (tmp_path / "loaded").mkdir()
    found, _ = gloo_pools(2).run(train, words, data, tmp_path / "loaded", in_evaluation=True, loaded=True)
    assert kinds(found) == [("stop", 0)]


def test_the_logged_mean_leaves_out_skipped_steps(gloo_pools: GlooPools, tmp_path: Path) -> None:
    (found,) = gloo_pools(1).run(train, ["--log-interval", "2"], split_data(tmp_path), tmp_path, bad_step=2)
    logged = [float(event["loss"]) for event in found if event["event"] == "progress"]
    assert len(logged) == 2 and all(map(math.isfinite, logged))


@pytest.mark.parametrize("layout", ["--pipeline-model-parallel-size 2", "--zero-stage 3"])
def test_all_evaluations_are_recorded(gloo_pools: GlooPools, tmp_path: Path, layout: str) -> None:
    train_set, *valid_sets = (write_tokens(tmp_path / str(seed), seed=seed) for seed in range(3))
    named = (f"web={valid_sets[0]}", "code=0.5", valid_sets[0], "2", valid_sets[1])
    data = DataConfig(train_data_path=(train_set,), valid_data_path=tuple(map(Path, named)))
    argv = [*layout.split(), *"--eval-iters 1 --sample-prompts p --sample-tokens 3".split()]
    events, _ = gloo_pools(2).run(train, argv, data, tmp_path, prompts=(("5 6", (5, 6)), ("7", (7,))))
    events = [event for event in events if event["event"] in ("evaluation", "sample")]
    names = [(event["event"], event["iteration"], event.get("name", event.get("prompt"))) for event in events]
    each = [("evaluation", "web"), ("evaluation", "code"), ("sample", "5 6"), ("sample", "7")]
    assert names == [(kind, iteration, name) for iteration in (2, 4) for kind, name in each]
    for event in events:
        if event["event"] == "evaluation":
            assert event["ppl"] == pytest.approx(math.exp(event["loss"])) and event["ppl"] > 1
        else:
            assert len(event["text"].split()) == 3


def launches_of_a_run(data: DataConfig, save: Path) -> list[str]:
    """On each rank: train, and return what is exchanged, in order."""
    launches: list[str] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **named: Any) -> Any:
            launches.append(name)
            return call(*args, **named)

        return record

    with (
        mock.patch.object(CommGroup, "broadcast_object", recorded("rows", CommGroup.broadcast_object)),
        mock.patch.object(train_step_module, "gradient_norm", recorded("norm", train_step_module.gradient_norm)),
    ):
        train(["--eval-iters", "0", "--tensor-model-parallel-size", "2"], data, save)
    return launches


def test_the_rows_of_a_step_arrive_before_the_host_waits_for_the_step_before_it(
    gloo_pools: GlooPools, tmp_path: Path
) -> None:
    for launches in gloo_pools(2).run(launches_of_a_run, split_data(tmp_path), tmp_path):
        steps = launches.count("norm")
        assert steps > 2 and launches == ["rows", *["rows", "norm"] * (steps - 1), "norm"]
