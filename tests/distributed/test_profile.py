"""Traces of real training steps over two ranks, and what is read from them."""

import contextlib
from pathlib import Path

import pytest
import torch

from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.step import train_step
from tests.distributed.pool import GlooPools
from tests.distributed.training import CPU, build_trainer_here, own_batches

RECIPE = "--train-iters 5 --lr 1e-3 --micro-batch-size 2 --global-batch-size 4 --tensor-model-parallel-size 2".split()


def profiled_steps(argv: list[str], first_iteration: int = 1) -> list[float]:
    """On each rank: the losses of the steps up to the fifth, around them what --profile puts there."""
    trainer = build_trainer_here([*RECIPE, *argv])
    around = step_contexts(trainer.run, trainer.mesh.world, CPU, first_iteration, contextlib.nullcontext)
    ids = torch.arange(26).view(2, 13)
    batch = (ids[:, :-1], ids[:, 1:], torch.ones(2, 12))
    losses = []
    for iteration in range(first_iteration, 6):
        with around(iteration):
            losses.append(train_step(trainer, own_batches(trainer, [batch, batch]), iteration).loss_sum.item())
    return losses
