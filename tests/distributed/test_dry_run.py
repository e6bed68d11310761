"""The dry run of small layouts: compared with real ranks and the planner's memory, and with a fault planted in it."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.dry_run.program import _shortened, dry_run
from ladder_lab.dry_run.recorder import Recorder
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.engine.schedule import make_schedule
from megatron_ladder.errors import UserError
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import DELTA, LATENT
from tests.helpers.training import SIZES, build_trainer_here

RECIPE = [*SIZES, *"--train-iters 9 --lr 1e-3 --bf16 --residual-mode ladder --vocab-size 101".split()]
LARGER = (
    "--train-iters 2 --lr 1e-3 --bf16 --residual-mode ladder --num-layers 4 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --vocab-size 32000"
).split()


@pytest.fixture(autouse=True)
def preloaded(gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the imports of the other tests; the dry run sets the variable."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def launches_of_second_step(argv: Sequence[str]) -> list[tuple[Any, ...]]:
    """On each rank: train two steps, and return the collectives of the second."""
    trainer = build_trainer_here(argv)
    training, recorder = trainer.run.training, Recorder(dist.get_rank())
    tokens = torch.zeros(training.micro_batch_size, training.seq_length, dtype=torch.int64)
    for iteration in (1, 2):
        start = len(recorder.program.collectives)
        with recorder:
            train_step(trainer, [MicroBatch(tokens, tokens)] * trainer.run.accumulation_steps, iteration)
    communicators, collectives = recorder.program
    launches = [(communicators[slot].ranks, *rest) for slot, *rest, _ in collectives[start:]]
    # With ZeRO 3, DeepSpeed compares the order of its modules once; a dry run leaves that out.
    return [one for one in launches if one[1] != "broadcast"]


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--micro-batch-size 1 --global-batch-size 3",
        "--zero-stage 3",
        "--tensor-model-parallel-size 2 --num-experts 4 --moe-layers 1-2 --moe-router-enable-expert-bias",
        f"--tensor-model-parallel-size 2 {LATENT} --q-lora-rank 12 --attention-output-gate --sequence-parallel",
        f"--tensor-model-parallel-size 2 {DELTA} --linear-num-key-heads 1 --attention-output-gate --sequence-parallel",
    ],
)
def test_collectives_are_those_of_real_ranks(gloo_pools: GlooPools, layout: str, tmp_path: Path) -> None:
    argv = [*RECIPE, "--global-batch-size", "2", *layout.split()]
    dry_run(parse_run(argv), 2, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["ranks"]
    for rank, expected in enumerate(gloo_pools(2).run(launches_of_second_step, argv)):
        groups = found[str(rank)]["groups"]
        launches = [
            (tuple(groups[one["slot"]]["ranks"]), one["kind"], one["size"], one["dtype"], one["source"])
            for one in found[str(rank)]["last_step"]
        ]
        assert launches == expected and launches
        assert found[str(rank)]["waits"] == ["engine/state.py: gradient_norm"]


def test_memory_is_that_of_the_planner_and_the_host_waits_once(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()
    dry_run(parse_run([*LARGER, *layout, "--global-batch-size", "64"]), 8)
    report = capsys.readouterr().out
    assert "*** stage" not in report, report
    assert report.count("the host waits") == 2, report
    assert report.count("the host waits for the device once in a step, in engine/state.py: gradient_norm") == 2
    assert "built 6 of them, and ran 2 steps of 3 of the 32 micro-batches" in report
    assert "launches of 8 ranks in 17 communicators match" in report


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--global-batch-size 16", "6 of the 16"),
        # Almost everything is a state: one that has entered, arrives, or is sent.
        (
            "--num-layers 8 --recompute-granularity full --hidden-size 256 --num-attention-heads 4 --seq-length 4096 "
            "--vocab-size 512 --micro-batch-size 4 --global-batch-size 32",
            "8 of the 8",
        ),
    ],
)
def test_memory_of_interleaved_chunks_is_that_of_the_planner(
    capsys: pytest.CaptureFixture[str], words: str, count: str
) -> None:
    layout = f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {words}"
    dry_run(parse_run([*LARGER, *layout.split()]), 2)
    report = capsys.readouterr().out
    assert f"ran 2 steps of {count} micro-batches" in report and "*** stage" not in report, report
    assert "launches of 2 ranks" in report and "match" in report


@pytest.mark.parametrize("micro_batches", range(1, 40))
def test_a_shortened_interleaved_run_holds_as_many_micro_batches(micro_batches: int) -> None:
    stages, chunks = 4, 2
    layout = f"--pipeline-model-parallel-size {stages} --num-layers-per-virtual-pipeline-stage 1"
    sizes = f"--num-layers {stages * chunks} --micro-batch-size 1 --global-batch-size {micro_batches}"
    run = resolve_run(parse_run([*RECIPE, *layout.split(), *sizes.split()], world_size=stages), 101, stages)
    shortened = _shortened(run)

    def most_in_flight(count: int) -> list[int]:
        steps = [
            [1 if slot.work.is_forward else -1 for slot in slots if slot.work]
            for slots in make_schedule(stages, chunks, count)
        ]
        return [max(accumulate(of_rank)) for of_rank in steps]

    assert most_in_flight(shortened.accumulation_steps) == most_in_flight(micro_batches)
    assert shortened.accumulation_steps <= min(micro_batches, stages * chunks + stages)


def assert_planned_memory(capsys: pytest.CaptureFixture[str], ranks: int, words: str, samples: int) -> None:
    """Assert that a dry run of one micro-batch reports no stage whose memory differs from the planner's."""
    sizes = f"--vocab-size 512 --global-batch-size {samples} --micro-batch-size {samples}"
    dry_run(parse_run([*LARGER, *words.split(), *sizes.split()]), ranks)
    report = capsys.readouterr().out
    assert "planner" in report and "*** stage" not in report, report


def test_memory_with_a_drafting_head_is_not_compared_with_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans do not include the head, so no estimate of them is off."""
    dry_run(parse_run([*RECIPE, "--mtp-num-layers", "1", "--mtp-depths", "2"]), 1)
    report = capsys.readouterr().out
    (stage,) = (line for line in report.splitlines() if line.split()[:2] == ["0", "0"])
    assert stage.split()[-1] == "-" and "*** stage" not in report, report


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharding", ["width", "experts"])
def test_memory_of_experts_is_that_of_the_planner(
    capsys: pytest.CaptureFixture[str], sharding: str, ranks: int
) -> None:
    words = (
        f"--tensor-model-parallel-size {ranks} --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024 "
        f"--expert-sharding {sharding} --hidden-size 512 --num-attention-heads 8"
    )
    assert_planned_memory(capsys, ranks, words, samples=2)


def test_memory_of_divided_experts_is_that_of_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups of expert-parallel ranks, which receive a quarter more rows than they send."""
    words = (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --num-experts 16 "
        "--moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 --hidden-size 512 "
        "--num-attention-heads 8 --num-layers 2 --vocab-size 512 --micro-batch-size 2 --global-batch-size 8"
    )
    dry_run(parse_run([*LARGER, *words.split()]), 8)
    report = capsys.readouterr().out
    assert "*** stage" not in report and "launches of 8 ranks" in report, report
    assert "all_to_all" in report and "group 'experts' of ranks 0-3" in report, report


@pytest.mark.parametrize("value", [128, 96, 160])
def test_memory_of_latents_is_that_of_the_planner(capsys: pytest.CaptureFixture[str], value: int) -> None:
    """Values as wide as queries, narrower ones, which are padded, and wider ones.

    Attention stores most activations here.
    """
    words = (
        "--tensor-model-parallel-size 4 --kv-lora-rank 512 --q-lora-rank 768 --qk-nope-head-dim 96 "
        f"--qk-rope-head-dim 32 --v-head-dim {value} --attention-output-gate --hidden-size 512 --ffn-hidden-size 512"
    )
    assert_planned_memory(capsys, 4, words, samples=8)


@pytest.mark.parametrize(
    "sizes", ["", pytest.param("--linear-key-head-dim 64 --linear-num-key-heads 2", marks=pytest.mark.slow)]
)
def test_memory_of_gated_delta_is_that_of_the_planner(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    """Most is what backward recomputes of a layer."""
    words = (
        "--tensor-model-parallel-size 4 --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
        f"--hidden-size 512 --ffn-hidden-size 512 --num-attention-heads 8 --seq-length 1024 {sizes}"
    )
    assert_planned_memory(capsys, 4, words, samples=8)


def test_a_reduce_that_one_rank_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start, launches = CommGroup.start_all_reduce, []

    def leave_one_out(group: CommGroup, tensor: Tensor) -> Work | None:
        launches.append(tensor)
        return None if group.rank == 1 and len(launches) == 4 else start(group, tensor)

    monkeypatch.setattr(CommGroup, "start_all_reduce", leave_one_out)
    argv = [*RECIPE, "--tensor-model-parallel-size", "2", "--global-batch-size", "1"]
    with pytest.raises(UserError) as caught:
        dry_run(parse_run(argv), 2)
    assert caught.value.messages == (
        "the dry run found: group 'tensor' of ranks 0-1, collective 4: rank 1 launches all_reduce of 768 bytes "
        "(bfloat16) in layers.1.mlp forward, but rank 0 launches all_reduce of 768 bytes (bfloat16) in "
        "layers.1.attention forward",
    )
