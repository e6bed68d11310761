"""All ZeRO stages: steps compared with a plain model, checkpoints across stages, precision, offloaded optimizer."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces
from tests.helpers.steps import RECIPE, Batch, check_resume, check_steps, everything, pass_on, steps_of_batches, train
from tests.helpers.training import (
    build_trainer_here,
    own_batches,
    run_of,
    weight_pieces,
)
from tests.reference import ReferenceConfig, Weights, make_weights, reference_loss

GENTLE_RECIPE = [*RECIPE, "--lr", "1e-3", "--global-batch-size", "8"]
slow = pytest.mark.slow
LAYOUTS = {"111": (1, 1), "211": (2, 1), "112": (1, 2), "212": (2, 2)}
"""Tensor-parallel and data-parallel size of the layouts TP, PP, DP."""
WIRINGS = {
    "standard": "--residual-mode standard --tie-embeddings --add-mlp-bias",
    "ladder": "--residual-mode ladder --qk-layernorm --add-attention-output-bias",
    "hybrid": "--residual-mode ladder --ladder-layers 2 --qk-layernorm --tie-embeddings",
}
STAGES = "0123"
PAIRWISE = [
    (layout, list(WIRINGS)[(place + int(stage)) % 3], stage)
    for (place, layout), stage in itertools.product(enumerate(LAYOUTS), STAGES)
]
"""Every pair of layout, wiring and stage occurs."""


@pytest.mark.parametrize(("layout", "wiring", "stage"), PAIRWISE)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, layout: str, wiring: str, stage: str) -> None:
    """Compares loss and gradient norm of five steps, and the final weights."""
    tensor_parallel, data_parallel = LAYOUTS[layout]
    words = f"{WIRINGS[wiring]} --tensor-model-parallel-size {tensor_parallel} --zero-stage {stage}"
    check_steps(gloo_pools, [*GENTLE_RECIPE, *words.split()], tensor_parallel * data_parallel)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (4, "--tensor-model-parallel-size 2 --zero-stage 2 --residual-mode desync --add-attention-output-bias"),
        (4, "--tensor-model-parallel-size 2 --zero-stage 3 --sequence-parallel --qk-layernorm --tie-embeddings"),
        (2, "--zero-stage 3 --residual-mode ladder-parallel --recompute-granularity full"),
        (2, "--zero-stage 2 --offload-optimizer cpu"),
        (2, "--zero-stage 3 --offload-optimizer cpu"),
        (4, "--tensor-model-parallel-size 2 --zero-stage 2 --lanes 4 --num-key-value-heads 4"),
        (4, "--tensor-model-parallel-size 2 --zero-stage 3 --lanes 2 --residual-staleness 2"),
    ],
)
def test_other_wirings_and_an_offloaded_optimizer(gloo_pools: GlooPools, world: int, words: str) -> None:
    check_steps(gloo_pools, [*GENTLE_RECIPE, "--residual-mode", "ladder", *words.split()], world)


RESUMED = [
    ("--zero-stage 0", 1, 1),
    ("--zero-stage 1 --tie-embeddings", 1, 2),
    ("--bf16 --ladder-layers 0,2", 2, 4),
    ("--zero-stage 2 --bf16", 1, 2),
    ("--zero-stage 3 --bf16 --offload-optimizer cpu", 1, 2),
    ("--zero-stage 3 --bf16 --num-experts 4 --moe-router-enable-expert-bias", 2, 4),
]


@pytest.mark.parametrize(("words", "tensor_parallel", "world"), RESUMED)
def test_resumed_steps_equal_uninterrupted_ones_bitwise(
    gloo_pools: GlooPools, tmp_path: Path, words: str, tensor_parallel: int, world: int
) -> None:
    layout = ["--tensor-model-parallel-size", str(tensor_parallel), "--global-batch-size", "8"]
    check_resume(gloo_pools, tmp_path, [*RECIPE, *words.split(), *layout, "--residual-mode", "ladder"], world)


class Stay(NamedTuple):
    """A layout that a checkpoint passes through."""

    words: str
    world: int


JOURNEYS = [
    [Stay("--zero-stage 3 --tensor-model-parallel-size 2", 4), Stay("--zero-stage 0", 1)],
    [Stay("--zero-stage 2", 2), Stay("--zero-stage 3 --tensor-model-parallel-size 2 --offload-optimizer cpu", 2)],
    [Stay("--zero-stage 3 --bf16", 2), Stay("--zero-stage 1 --bf16 --tensor-model-parallel-size 2", 4)],
]


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: " to ".join(stay.words for stay in journey))
def test_a_checkpoint_survives_changes_of_stage_and_layout(
    gloo_pools: GlooPools, tmp_path: Path, journey: list[Stay]
) -> None:
    recipe = [*RECIPE, "--global-batch-size", "8", "--residual-mode", "ladder", "--qk-layernorm", "--add-mlp-bias"]
    check_journey(gloo_pools, tmp_path, recipe, journey)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=slow), "muon"])
def test_lanes_survive_changes_of_stage_and_layout(gloo_pools: GlooPools, tmp_path: Path, optimizer: str) -> None:
    """A rank of the first layout computes one lane, and the ranks of the others two or all four."""
    recipe = [*RECIPE, *"--global-batch-size 8 --residual-mode ladder --lanes 4 --num-key-value-heads 4".split()]
    journey = [
        Stay("--zero-stage 1 --tensor-model-parallel-size 4", 4),
        Stay("--zero-stage 0", 1),
        Stay("--zero-stage 1 --tensor-model-parallel-size 2", 4),
    ]
    check_journey(gloo_pools, tmp_path, [*recipe, "--optimizer", optimizer], journey)


def check_journey(gloo_pools: GlooPools, tmp_path: Path, recipe: list[str], journey: list[Stay]) -> None:
    """Assert that weights and moments stay bitwise the same in every stage and layout, and back in the first."""
    load, first = None, {}
    for number, stay in enumerate([*journey, journey[0]]):
        save = str(tmp_path / str(number))
        argv = [*recipe, *stay.words.split()]
        steps = gloo_pools(stay.world).run(pass_on, argv, load, save, 0 if load else 2)
        assert steps == [2] * stay.world
        values, load = everything(Path(save)), save
        first = first or values
        assert values.keys() == first.keys()
        assert all(torch.equal(values[key], first[key]) for key in first)
    assert any(moment.any() for (_, kind), moment in first.items() if kind == "exp_avg_sq")


def test_bf16_gives_equal_losses_in_every_stage(gloo_pools: GlooPools) -> None:
    """Gradients are summed in fp32 over micro-batches and over data-parallel ranks in every stage."""
    argv = [*RECIPE, *"--bf16 --global-batch-size 8 --residual-mode ladder".split()]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 2).model), seed=1, dtype=torch.float32)
    batches, pool = steps_of_batches(3, 4), gloo_pools(2)
    histories = [
        pool.run(train, [*argv, *words.split()], weights, batches)[0][0]
        for words in ("--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--zero-stage 1 --offload-optimizer cpu")
    ]
    plain = [word for word in argv if word != "--bf16"]
    for found, wanted in zip(histories[0], pool.run(train, plain, weights, batches)[0][0], strict=True):
        assert found == pytest.approx(wanted, rel=2e-2) and found != wanted
    for history in histories[1:]:
        for found, wanted in zip(history, histories[0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)


SMALL = 2.0**-9
"""Less than half the distance between neighbouring bf16 numbers: parts of this size would be lost one by one."""


def norm_with_small_parts(argv: list[str], parts: int) -> float:
    """On each rank: return the gradient norm after one batch, and after `parts` more batches of weight `SMALL`."""
    trainer = build_trainer_here(argv)
    ((tokens, labels, _),) = steps_of_batches(1, 1)[0]
    masks = [1.0, *[SMALL] * parts]
    batches = [MicroBatch(tokens, labels, torch.full(labels.shape, mask)) for mask in masks]
    # DeepSpeed reduces after all micro-batches; the scale makes the sum a weighted mean.
    return train_step(trainer, batches, 1).gradient_norm * sum(masks)


@pytest.mark.parametrize("stage", "123")
def test_bf16_gradients_accumulate_in_fp32(gloo_pools: GlooPools, stage: str) -> None:
    argv = [*RECIPE, "--bf16", "--zero-stage", stage, "--residual-mode", "ladder", "--global-batch-size"]
    alone = gloo_pools(2).run(norm_with_small_parts, [*argv, "4"], 0)[0]
    together = gloo_pools(2).run(norm_with_small_parts, [*argv, str(4 * 17)], 16)[0]
    assert together / alone == pytest.approx(1 + 16 * SMALL, rel=5e-3)


def evaluated(argv: list[str], batches: list[list[Batch]]) -> tuple[float, float, list[tuple[str, Tensor]]]:
    """On each rank: return the validation losses before and after the first step, and the initial weights."""
    trainer = build_trainer_here(argv)
    weights = [(name, values) for name, _, values in weight_pieces(trainer)]
    losses = []
    for _ in range(2):
        losses.append(evaluate(trainer, iter([own_batches(trainer, batches[0])]), 1))
        train_step(trainer, own_batches(trainer, batches[1]), 1)
    return losses[0], losses[1], weights


def test_evaluation_gathers_partitioned_weights(gloo_pools: GlooPools) -> None:
    """Evaluation works between steps, and before the first step, when no weight was gathered yet."""
    argv = [*GENTLE_RECIPE, "--lr-warmup-iters", "0", *WIRINGS["hybrid"].split()]
    batches = steps_of_batches(2, 4)
    plain = gloo_pools(1).run(evaluated, [*argv, "--zero-stage", "0"], batches)[0]
    tokens, labels, mask = (torch.cat(parts) for parts in zip(*batches[0], strict=True))
    config = ReferenceConfig.like(run_of(argv, 1).model)
    assert plain[0] == pytest.approx(float(reference_loss(dict(plain[2]), config, tokens, labels, mask)), rel=1e-5)
    for before, after, _ in gloo_pools(2).run(evaluated, [*argv, "--zero-stage", "3"], batches):
        assert (before, after) == pytest.approx(plain[:2], rel=1e-5)
    assert plain[0] != pytest.approx(plain[1], rel=1e-4)


def train_with_late_copies(
    argv: list[str], weights: Weights, batches: list[list[Batch]]
) -> tuple[list[tuple[float, float]], Pieces]:
    """`train`, if a copy of gradients to the host ends only when the host waits for the device."""
    from deepspeed.accelerator import get_accelerator

    in_flight: list[tuple[Tensor, Tensor]] = []
    hosts: set[int] = set()
    copy, build = Tensor.copy_, build_trainer_here

    def build_here(*arguments: Any, **options: Any) -> Trainer:
        trainer = build(*arguments, **options)
        gradients = (span.flat_master.grad for span in trainer.engine.state.spans())
        hosts.update(gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None)
        return trainer

    def copy_later(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not (non_blocking and target.untyped_storage().data_ptr() in hosts):
            return copy(target, source, non_blocking)
        in_flight.append((target, source.clone()))
        return target

    def synchronize(*_: object) -> None:
        while in_flight:
            copy(*in_flight.pop(0))

    with (
        mock.patch.object(Tensor, "copy_", copy_later),
        mock.patch.object(type(get_accelerator()), "synchronize", synchronize),
        mock.patch("tests.helpers.steps.build_trainer_here", build_here),
    ):
        return train(argv, weights, batches)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_copies_of_gradients_to_the_host_are_waited_for(gloo_pools: GlooPools, stage: str) -> None:
    argv = [*GENTLE_RECIPE, "--zero-stage", stage, "--offload-optimizer", "cpu", "--residual-mode", "ladder"]
    batches = steps_of_batches(2, 4)
    weights = make_weights(ReferenceConfig.like(run_of(argv, 2).model), seed=1, dtype=torch.float32)
    pool = gloo_pools(2)
    results = zip(
        pool.run(train, argv, weights, batches), pool.run(train_with_late_copies, argv, weights, batches), strict=True
    )
    for (history, pieces), (history_late, pieces_late) in results:
        assert history == history_late
        for (name, _, values), (_, _, values_late) in zip(pieces, pieces_late, strict=True):
            assert torch.equal(values, values_late), name
