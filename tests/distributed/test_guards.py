"""Steps with invalid numbers or without targets: all ranks skip them, without side effects."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.train.guards import Finding
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import StepResult, train_step
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces
from tests.helpers.steps import RECIPE, Batch, check_same, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, weight_pieces

BASE = [*RECIPE, "--global-batch-size", "8", "--residual-mode", "ladder"]
EXPERTS = "--num-experts 4 --moe-layers 1 --moe-ffn-hidden-size 16 --moe-router-enable-expert-bias"
CASES = [
    ("--zero-stage 0 --tensor-model-parallel-size 2", 2, "bad numbers"),
    ("--zero-stage 1", 1, "bad numbers"),
    ("--zero-stage 1 --bf16 --tensor-model-parallel-size 2", 1, "bad numbers"),
    ("--zero-stage 2", 2, "bad numbers"),
    ("--zero-stage 3", 1, "bad numbers"),
    ("--zero-stage 1 --offload-optimizer cpu", 2, "bad numbers"),
    ("--zero-stage 1 --bf16 --optimizer muon", 2, "bad numbers"),
    ("--zero-stage 1 --bf16 --pipeline-model-parallel-size 2", 1, "bad numbers"),
    ("--zero-stage 0", 2, "no targets"),
    (f"--zero-stage 3 {EXPERTS}", 2, "no targets"),
    ("--zero-stage 1 --bf16 --pipeline-model-parallel-size 2", 2, "no targets"),
]
"""Layouts, the number of the spoiled step, and its problem."""
SPOILED, SPOILED_RANK = "layers.2.mlp.down_proj.weight", 1


def spoiled_step(trainer: Trainer, batch: list[MicroBatch], iteration: int) -> StepResult:
    """Take a step in which one element of a parameter's gradient is NaN on one rank."""
    state, taken = trainer.engine.optimizer, trainer.engine.optimizer.gradients

    def take() -> list[Any]:
        gradients = taken()
        for span, gradient in gradients:
            if trainer.mesh.world.rank == SPOILED_RANK and any(section.name == SPOILED for section in span.sections):
                gradient.view(-1)[0] = float("nan")
        return gradients

    with mock.patch.object(state, "gradients", take):
        result = train_step(trainer, batch, iteration)
    # Read the moments as a save does; before the first update they do not exist yet.
    moments = [state.moment(span, which) for span in state.spans() for which in span.moments]
    assert iteration > 1 or not any(moment.any() for moment in moments)
    return result


def steps_around(
    argv: Sequence[str], batches: list[list[Batch]], bad: int | None, kind: str
) -> tuple[list[Finding | None], tuple[tuple[list[float], int], Pieces]]:
    """On each rank: return findings; the losses of good steps and the number of updates; and final weights."""
    trainer = build_trainer_here(argv)
    findings, losses = [], []
    for iteration, batch in enumerate(batches, start=1):
        own = own_batches(trainer, batch)
        if iteration == bad and kind == "no targets":
            masked = [one._replace(loss_mask=torch.zeros(one.labels.shape)) for one in own]
            result = train_step(trainer, masked, iteration)
        elif iteration == bad:
            result = spoiled_step(trainer, own, iteration)
        else:
            result = train_step(trainer, own, iteration)
            losses.append(result.loss)
        findings.append(result.finding)
    return findings, ((losses, trainer.engine.optimizer.steps_taken()), weight_pieces(trainer))


@pytest.mark.parametrize(("layout", "bad", "kind"), usual_share(CASES, 2))
def test_a_bad_step_leaves_no_trace(gloo_pools: GlooPools, layout: str, bad: int, kind: str) -> None:
    """The run equals one without the step bitwise. The rate is constant, because its schedule counts skipped steps."""
    argv = [*BASE, *layout.split(), "--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--min-lr", "0"]
    batches = steps_of_batches(3, 4)
    found = gloo_pools(2).run(steps_around, argv, batches, bad, kind)
    wanted = gloo_pools(2).run(steps_around, argv, [*batches[: bad - 1], *batches[bad:]], None, kind)
    check_same([outcome for _, outcome in found], [outcome for _, outcome in wanted])
    for findings, ((_, updates), _) in found:
        assert updates == 2 and [finding is not None for finding in findings] == [i == bad for i in range(1, 4)]
        finding = findings[bad - 1]
        assert finding is not None and finding.skipped and finding.kind == kind
        if kind == "bad numbers":
            assert finding.details == {"rank": SPOILED_RANK, "parameter": SPOILED}
            assert f"iteration {bad}: the gradient's norm is nan" in finding.text
            assert finding.text.endswith(f": first bad parameter {SPOILED}, on rank {SPOILED_RANK}")


def bad_weight(argv: Sequence[str]) -> tuple[Finding, bool, float]:
    """On each rank: return the finding of a step whose loss is NaN, and whether the weights are unchanged."""
    trainer = build_trainer_here(argv)
    with torch.no_grad():
        trainer.model.stack.sub_blocks()[0].norm.weight.fill_(float("nan") if trainer.mesh.world.rank == 1 else 1.0)
    before = [values for _, _, values in weight_pieces(trainer)]
    result = train_step(trainer, own_batches(trainer, steps_of_batches(1, 2)[0]), 1)
    after = [values for _, _, values in weight_pieces(trainer)]
    stayed = all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if not a.isnan().any())
    return result.finding, stayed, result.loss


def test_every_rank_notices_a_loss_that_is_nan(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, "--zero-stage", "1", "--global-batch-size", "4"]
    for finding, stayed, loss in gloo_pools(2).run(bad_weight, argv):
        assert finding.kind == "bad numbers" and stayed and loss != loss
        assert finding.details["parameter"] == "embedding.weight"


def losses_everywhere(argv: Sequence[str]) -> float:
    """On each rank: return the loss that the step reports."""
    trainer = build_trainer_here(argv)
    result = train_step(trainer, own_batches(trainer, steps_of_batches(1, 4)[0]), 1, lambda: [1.0, 0.0])
    assert list(result.extra_sums) == [trainer.mesh.world.size, 0.0]
    return result.loss


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 2)])
def test_every_rank_has_the_loss_and_the_extra_sums(gloo_pools: GlooPools, tensor: int, stages: int) -> None:
    argv = [*BASE, "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(stages)]
    losses = gloo_pools(4).run(losses_everywhere, argv)
    whole = gloo_pools(1).run(losses_everywhere, BASE)
    assert losses == pytest.approx(whole * 4, rel=1e-6) and len({*losses}) == 1
