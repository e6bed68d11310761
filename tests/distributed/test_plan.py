"""Assumptions of the planner: bytes that DeepSpeed's optimizers, and a forward pass, allocate."""

import time

import pytest
import torch

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.memory import Precision, _stage_moments, _state_bytes, stage_parameters
from megatron_ladder.train.step import train_step
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pool import GlooPools
from tests.helpers.steps import steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches

SHAPE = "--hidden-size 128 --ffn-hidden-size 352 --train-iters 4 --lr 1e-3 --micro-batch-size 2".split()
TOLERANCE = 0.001
"""Alignment of flat buffers, and batches."""


def lowest(memory: LiveBytes) -> int:
    """Return the fewest of several counts: gloo's threads release buffers of finished collectives a little later."""

    def later() -> int:
        time.sleep(0.05)
        return memory.live

    return min(later() for _ in range(10))


def state_of_a_step(argv: list[str]) -> tuple[int, int, int]:
    """Return per rank the bytes that a trainer holds between micro-batches of its second step, and its parameters.

    The last number is how many of these are in matrices of layers.
    """
    batches = steps_of_batches(2, 2 * torch.distributed.get_world_size())
    with LiveBytes() as memory:
        trainer = build_trainer_here([*SHAPE, *argv])
        first, second = (own_batches(trainer, batch) for batch in batches)
        train_step(trainer, first, 1)
        with trainer.engine.optimizer.reducing(len(second)):
            loss = trainer.model(*second[0]) / 100
            trainer.engine.backward(loss, None)
            del loss
            held = lowest(memory)
    model = trainer.run.model
    layout = Layout(optimizer=trainer.run.optimizer.optimizer)
    return held, stage_parameters(model, layout, 0), _stage_moments(model, layout, 0)


@pytest.mark.parametrize(
    ("ranks", "precision", "zero", "optimizer"),
    [(2, "fp32", 0, "muon"), (2, "fp32", 1, "muon"), (2, "fp32", 1, "adamw"), (2, "bf16", 1, "adamw")],
)
def test_states_are_what_the_engine_allocates(
    gloo_pools: GlooPools, ranks: int, precision: Precision, zero: int, optimizer: str
) -> None:
    argv = f"--zero-stage {zero} --global-batch-size {4 * ranks} --optimizer {optimizer}".split()
    argv += ["--bf16"] if precision == "bf16" else []
    for held, parameters, moments in gloo_pools(ranks).run(state_of_a_step, argv):
        expected = sum(_state_bytes(parameters, moments, Layout(data=ranks, zero=zero), precision))
        assert held == pytest.approx(expected, abs=TOLERANCE * 12 * parameters)
