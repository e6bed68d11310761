"""Documents that do not attend to each other, and ranks that read batches: steps compared with a plain model."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_ladder.data.samples import SampleRows
from megatron_ladder.errors import UserError
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.step import Evaluation, evaluate, train_step
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces
from tests.helpers.steps import (
    DELTA,
    LATENT,
    check_outcome,
    launch_of,
    plain_steps,
    with_drafting_loss,
    with_extra_losses,
)
from tests.helpers.training import build_trainer_here, weight_pieces
from tests.reference import MicroBatch, Sight, Weights
from tests.reference.documents import begins_after, loss_mask_of, sight_of

EOD, STEPS, BATCH, LENGTH = 3, 3, 8, 12
RECIPE = (
    f"--train-iters {STEPS} --lr 1e-3 --clip-grad 0.5 --micro-batch-size 2 --global-batch-size {BATCH} "
    "--residual-mode ladder --qk-layernorm"
).split()
HYBRID = "--ladder-layers 1,2"
ALL = "--reset-position-ids --reset-attention-mask --eod-mask-loss"


class Numbers:
    """Samples computed from their numbers; counts the requested ones."""

    name, seq_length = "numbers", LENGTH

    def __init__(self) -> None:
        self.requested = 0

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        self.requested += len(numbers)
        rows = [np.random.default_rng(number).integers(0, 101, LENGTH + 1) for number in numbers.tolist()]
        tokens = np.stack(rows)
        tokens[tokens % 4 == 0] = EOD
        return SampleRows(tokens, None)


def train(argv: list[str], weights: Weights) -> tuple[list[tuple[float, ...]], Pieces, bool, Evaluation]:
    """Return losses and gradient norm of every step, final weights, whether this rank read, and an evaluation."""
    trainer = dataclasses.replace(build_trainer_here(argv, weights), eod_id=EOD)
    source, history = Numbers(), []
    batches = sample_batches(trainer, source, consumed_samples=0)
    for iteration in range(1, STEPS + 1):
        result = train_step(trainer, next(batches), iteration)
        history.append((result.loss, result.gradient_norm, *result.extra_losses.values()))
    batches.close()
    assert batches.consumed_samples == STEPS * BATCH
    pieces = weight_pieces(trainer)
    return history, pieces, source.requested > 0, evaluate(trainer, sample_batches(trainer, Numbers(), 0), 1)


def expected_batches(flags: str) -> list[list[MicroBatch]]:
    source, steps = Numbers(), []
    for step in range(STEPS):
        both = torch.from_numpy(source.samples(np.arange(step * BATCH, (step + 1) * BATCH)).tokens)
        tokens, labels = both[:, :-1], both[:, 1:]
        mask = loss_mask_of(tokens, EOD) if "--eod-mask-loss" in flags else torch.ones(BATCH, LENGTH)
        assert 0.1 < (tokens == EOD).float().mean() < 0.5
        sight: Sight = sight_of(
            begins_after(tokens, EOD), "--reset-position-ids" in flags, "--reset-attention-mask" in flags
        )
        steps.append([(tokens, labels, mask, sight)])
    return steps


@pytest.mark.parametrize(
    ("layout", "words", "flags", "readers"),
    usual_share(
        [
            ("1x1x1", f"{HYBRID} --recompute-granularity full", "--reset-position-ids", [0]),
            ("2x1x1", f"{HYBRID} --sequence-parallel --recompute-granularity full", ALL, [0]),
            ("2x2x1", HYBRID, ALL, [0, 2]),
            ("1x2x1", HYBRID, ALL, [0, 1]),
            ("1x1x2", "--residual-mode parallel --zero-stage 3", ALL, [0, 1]),
            ("2x1x1", f"{HYBRID} --no-tp-overlap", ALL, [0]),
            ("2x1x1", f"{LATENT} --residual-mode ladder --attention-output-gate --no-qk-layernorm", ALL, [0]),
            ("1x4x1", f"{HYBRID} --num-layers 5", "--eod-mask-loss", [0, 1, 2, 3]),
            ("2x1x1", f"{DELTA} --sequence-parallel --recompute-granularity full", ALL, [0]),
            ("2x2x1", f"{DELTA} {HYBRID} --zero-stage 0", ALL, [0, 2]),
            ("2x2x1", f"{HYBRID} --mtp-num-layers 1 --mtp-depths 2", ALL, [0, 2]),
            ("1x1x2", f"{DELTA} --mtp-num-layers 1", "--eod-mask-loss", [0, 1]),
            ("1x1x2", "--mtp-num-layers 1", "--reset-attention-mask", [0, 1]),
            ("1x1x2", f"{DELTA} --zero-stage 3", ALL, [0, 1]),
            ("1x1x2", f"{DELTA} --zero-stage 2", "--eod-mask-loss", [0, 1]),
        ],
        2,
    ),
)
def test_steps_equal_those_of_a_plain_model(
    gloo_pools: GlooPools, layout: str, words: str, flags: str, readers: list[int]
) -> None:
    world, argv = launch_of(layout, words, flags)
    argv = [*RECIPE, *argv]
    losses = with_drafting_loss if "--mtp-num-layers" in argv else with_extra_losses
    weights, _, expected, final = plain_steps(argv, world, losses, expected_batches(flags))
    results = gloo_pools(world).run(train, argv, weights)
    check_outcome([(history, pieces) for history, pieces, *_ in results], expected, final)
    assert [rank for rank, (_, _, reads, _) in enumerate(results) if reads] == readers
    assert all(evaluation == results[0][-1] for *_, evaluation in results)


def read_invalid_tokens(argv: list[str]) -> str:
    """Return the error after the reading rank has found a token id that the model lacks."""

    class Invalid(Numbers):
        def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
            return SampleRows(super().samples(numbers).tokens + 100, None)

    trainer = dataclasses.replace(build_trainer_here(argv), eod_id=EOD)
    try:
        next(sample_batches(trainer, Invalid(), 0))
    except UserError as error:
        return str(error)
    return "no error"


def test_all_ranks_of_a_stage_get_the_readers_error(gloo_pools: GlooPools) -> None:
    errors = gloo_pools(2).run(read_invalid_tokens, [*RECIPE, "--tensor-model-parallel-size", "2"])
    assert errors[0] == errors[1] and "numbers: holds token id" in errors[0]
