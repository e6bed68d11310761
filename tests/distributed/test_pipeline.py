"""Pipeline stages: whole steps in every layout against a plain model, what crosses a border, and what it costs."""

import pytest
import torch

from megatron_ladder.train.setup import build_schedule
from megatron_ladder.train.step import train_step
from tests.distributed.pool import GlooPools
from tests.distributed.sharded import Pieces, assert_pieces
from tests.distributed.test_training import Batch, steps_of_batches
from tests.distributed.training import build_trainer_here, own_batches, run_of, weight_pieces
from tests.reference import ReferenceConfig, Weights, make_weights, reference_training

STEPS = 5
RECIPE = (
    f"--train-iters {STEPS} --lr 1e-3 --min-lr 1e-4 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2 "
    "--global-batch-size 8"
).split()


def train(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> tuple[list[tuple[float, float]], Pieces]:
    """On each rank: loss and gradient norm of every step, and the final weights."""
    trainer = build_trainer_here(argv, weights)
    history = []
    for iteration, batch in enumerate(batches, start=1):
        result = train_step(trainer, own_batches(trainer, batch), iteration)
        loss = trainer.mesh.pipeline.all_reduce(trainer.mesh.data.all_reduce(result.loss_sum.clone()))
        history.append((loss.item(), result.gradient_norm))
    return history, weight_pieces(trainer)


def check_steps(gloo_pools: GlooPools, argv: list[str], world: int) -> None:
    run = run_of(argv, world)
    config = ReferenceConfig.like(run.model)
    weights = make_weights(config, seed=1, dtype=torch.float32)
    batches = steps_of_batches(STEPS, 4)
    expected, final = reference_training(
        weights, config, batches, build_schedule(run).at, (0.9, 0.95), 1e-8, 0.1, 0.5,
        no_decay=lambda name: name.endswith(("norm.weight", ".bias")),
    )  # fmt: skip
    assert any(norm > 0.5 for _, norm in expected), "nothing was clipped, so clipping is not tested"
    results = gloo_pools(world).run(train, argv, weights, batches)
    for history, _ in results:
        for found, wanted in zip(history, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    assert_pieces([pieces for _, pieces in results], final, 2e-4)


@pytest.mark.parametrize("zero", ["0", "1"])
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize("wiring", ["", "--residual-mode ladder"])
def test_try(gloo_pools: GlooPools, layout: tuple[int, int, int], zero: str, wiring: str) -> None:
    t, p, d = layout
    argv = [*RECIPE, *wiring.split(), *f"--tensor-model-parallel-size {t} --pipeline-model-parallel-size {p} --zero-stage {zero}".split()]
    check_steps(gloo_pools, argv, t * p * d)
