"""Precision of the ZeRO stages, and copies to an offloaded optimizer."""

import inspect
import re
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.engine import deepspeed as door
from megatron_ladder.engine.deepspeed import PRIVATE_PARTS
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces
from tests.helpers.steps import (
    GENTLE_RECIPE,
    RECIPE,
    Batch,
    History,
    check_same,
    launch_of,
    steps_of_batches,
    train,
)
from tests.helpers.training import build_trainer_here, run_of
from tests.reference import ReferenceConfig, Weights, make_weights


def test_bf16_follows_fp32(gloo_pools: GlooPools) -> None:
    """Gradients are summed in fp32 over micro-batches and over data-parallel ranks in every stage."""
    argv = [*RECIPE, *"--global-batch-size 8 --residual-mode ladder --tie-embeddings --qk-layernorm".split()]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 2).model), seed=1, dtype=torch.float32)
    batches = steps_of_batches(3, 4)

    def history(layout: str, words: str) -> History:
        world, more = launch_of(layout, words)
        return gloo_pools(world).run(train, [*argv, *more], weights, batches)[0][0]

    pipelined = history("2x2x1", "--bf16")
    words = ("--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--zero-stage 1 --offload-optimizer cpu")
    first, *others = (history("1x1x2", f"--bf16 {stage}") for stage in words)
    for layout, half in (("1x1x2", first), ("2x2x1", pipelined)):
        for found, wanted in zip(half, history(layout, ""), strict=True):
            assert found == pytest.approx(wanted, rel=2e-2) and found != wanted
    for other in others:
        assert other == [pytest.approx(of_step, rel=1e-6) for of_step in first]


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
    together = gloo_pools(2).run(norm_with_small_parts, [*argv, str(4 * 9)], 8)[0]
    assert together / alone == pytest.approx(1 + 8 * SMALL, rel=2.5e-3)


def error_without(argv: list[str], owner: str) -> str:
    """On each rank: return the error of a trainer if DeepSpeed has no part `gone`."""
    with (
        mock.patch.dict(PRIVATE_PARTS[owner], gone="a part of an earlier version"),
        pytest.raises(RuntimeError) as error,
    ):
        build_trainer_here(argv)
    return str(error.value)


@pytest.mark.parametrize(
    ("stage", "owner"),
    [("2", "DeepSpeedZeroOptimizer"), ("3", "DeepSpeedZeroOptimizer_Stage3"), ("3", "Parameter")],
)
def test_a_missing_private_part_names_deepspeeds_version(gloo_pools: GlooPools, stage: str, owner: str) -> None:
    for error in gloo_pools(2).run(error_without, [*RECIPE, "--zero-stage", stage], owner):
        assert error.startswith(f"DeepSpeed {version('deepspeed')}: {owner} has no gone: install the version of")


def test_private_parts_are_those_in_use() -> None:
    """The list of private parts has all that the file names, and no more."""
    _, _, code = inspect.getsource(door).partition("def _require_private_parts")
    listed = {name for parts in PRIVATE_PARTS.values() for name in parts}
    assert listed == set(re.findall(r"(?:zero|partitioned|ops)\.(_*[a-z]\w*)", code))


def train_with_late_copies(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> tuple[History, Pieces]:
    """`train`, if a copy of gradients to the host ends only when the host waits for the device."""
    from deepspeed.accelerator import get_accelerator

    in_flight: list[tuple[Tensor, Tensor]] = []
    hosts: set[int] = set()
    copy, build = Tensor.copy_, build_trainer_here

    def build_here(*arguments: Any, **options: Any) -> Trainer:
        trainer = build(*arguments, **options)
        gradients = (span.flat_master.grad for span in trainer.engine.optimizer.spans())
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
    check_same(pool.run(train_with_late_copies, argv, weights, batches), pool.run(train, argv, weights, batches))
