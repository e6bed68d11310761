"""Pipeline stages: whole steps compared with a plain model, checkpoints across layouts, logging."""

import contextlib
import io

import pytest
import torch

from megatron_ladder.data.loader import Sources
from megatron_ladder.train.log import RunLog, banner
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import Batch, check_steps, loss_of, steps_of_batches, train
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, Weights, make_weights, reference_loss

STEPS = 3
RECIPE = (
    f"--train-iters {STEPS} --lr 1e-3 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2 --global-batch-size 8 "
    "--qk-layernorm --add-attention-output-bias"
).split()

Layout = tuple[int, int, int]
"""Tensor-, pipeline- and data-parallel size."""

LAYOUTS: list[Layout] = [(1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
# With two stages, the first one has layers 0 and 1 of the three.
WIRINGS = {
    "standard": "",
    "ladder": "--residual-mode ladder",
    "hybrid-cut-inside": "--residual-mode ladder --ladder-layers 1,2",
    "hybrid-cut-at-the-border": "--residual-mode ladder --ladder-layers 2",
}


def layout_flags(layout: Layout) -> list[str]:
    return f"--tensor-model-parallel-size {layout[0]} --pipeline-model-parallel-size {layout[1]}".split()


def world_of(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


def check_stages(gloo_pools: GlooPools, layout: Layout, flags: str) -> None:
    check_steps(gloo_pools, [*RECIPE, *layout_flags(layout), *flags.split()], world_of(layout))


def grid() -> list[object]:
    """Return all combinations; without --slow, every pair of layout and stage, and of wiring and stage, occurs."""
    return [
        pytest.param(
            layout,
            flags,
            str(zero),
            id=f"{'x'.join(map(str, layout))}-{name}-zero{zero}",
            marks=[] if column == (2 * row % 4 + zero) ^ (row // 2) else pytest.mark.slow,
        )
        for row, layout in enumerate(LAYOUTS)
        for column, (name, flags) in enumerate(WIRINGS.items())
        for zero in (0, 1)
    ]


@pytest.mark.parametrize(("layout", "flags", "zero"), grid())
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, layout: Layout, flags: str, zero: str) -> None:
    check_stages(gloo_pools, layout, f"{flags} --zero-stage {zero}")


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ((2, 2, 2), "--residual-mode parallel --zero-stage 0"),
        # Outputs pass through stages of one layer that neither read nor compute them.
        ((2, 4, 1), "--residual-mode ladder-parallel --residual-staleness 3 --num-layers 5"),
        ((2, 2, 1), "--residual-mode desync --desync-interval 4 --zero-stage 0"),
        ((1, 2, 2), "--residual-mode ladder --tie-embeddings --zero-stage 0"),
        ((1, 4, 1), "--residual-mode ladder --tie-embeddings --num-layers 6 --pipeline-partition parameters"),
        ((2, 2, 1), "--residual-mode ladder --recompute-granularity full --recompute-num-layers 2"),
        ((2, 2, 1), "--residual-mode ladder --no-tp-overlap"),
        ((2, 2, 1), "--residual-mode ladder --sequence-parallel --qk-layernorm"),
        ((2, 2, 1), "--residual-mode ladder --residual-staleness 3 --lanes 2"),
    ],
)
def test_more_wirings_and_features_equal_a_plain_model(gloo_pools: GlooPools, layout: Layout, flags: str) -> None:
    check_stages(gloo_pools, layout, flags)


def test_bf16_follows_fp32(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, *layout_flags((2, 2, 1)), "--residual-mode", "ladder", "--tie-embeddings"]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 4).model), seed=1, dtype=torch.float32)
    batches = steps_of_batches(STEPS, 4)
    plain = gloo_pools(4).run(train, argv, weights, batches)[0][0]
    half = gloo_pools(4).run(train, [*argv, "--bf16"], weights, batches)[0][0]
    for found, wanted in zip(half, plain, strict=True):
        assert found == pytest.approx(wanted, rel=2e-2)
        assert found != wanted


def evaluated(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> tuple[float, list[float]]:
    """On each rank: return the loss of an evaluation, and losses of steps with evaluations between them."""
    trainer = build_trainer_here(argv, weights)
    own = [own_batches(trainer, batch) for batch in batches]
    before = evaluate(trainer, iter(own), len(own))
    losses = []
    for iteration, batch in enumerate(own, start=1):
        losses.append(loss_of(trainer, train_step(trainer, batch, iteration).loss_sum))
        evaluate(trainer, iter(own), 1)
    return before, losses


def test_evaluation_is_the_mean_over_tokens_and_affects_no_step(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, *layout_flags((1, 2, 2)), "--residual-mode", "ladder"]
    config = ReferenceConfig.like(run_of(argv, 4).model)
    weights = make_weights(config, seed=1, dtype=torch.float32)
    batches = steps_of_batches(2, 4)
    tokens, labels, mask = (torch.cat(parts) for parts in zip(*(b for step in batches for b in step), strict=True))
    expected = float(reference_loss(weights, config, tokens, labels, mask))
    results = gloo_pools(4).run(evaluated, argv, weights, batches)
    undisturbed = [loss for loss, _ in gloo_pools(4).run(train, argv, weights, batches)[0][0]]
    for before, losses in results:
        assert before == pytest.approx(expected, rel=1e-5)
        assert losses == undisturbed


def logged(argv: list[str], weights: Weights, batch: list[Batch]) -> tuple[str, float, str]:
    """On each rank: return a step's log line, this rank's part of the loss, and the banner."""
    trainer = build_trainer_here(argv, weights)
    printing = contextlib.redirect_stdout(io.StringIO())
    with printing as printed, RunLog(trainer, 1, RunRecord(None)) as log:
        result = train_step(trainer, own_batches(trainer, batch), 1)
        log.training(1, result.loss, result)
    return printed.getvalue(), result.loss_sum.item(), banner(trainer, Sources(None, {}))


def test_only_rank_0_logs_the_loss_of_the_last_stage(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, *layout_flags((2, 2, 1))]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 4).model), seed=1, dtype=torch.float32)
    results = gloo_pools(4).run(logged, argv, weights, steps_of_batches(1, 4)[0])
    lines, losses, banners = zip(*results, strict=True)
    assert lines[1:] == ("", "", "") and losses[0] == 0.0 and losses[-1] > 1
    assert lines[0].count("\n") == 1 and f"| lm loss {losses[-1]:.4f} |" in lines[0]
    # Four micro-batches need five slots to pass two stages, and one slot of each stage is idle.
    assert "layers 0-1, 2; the pipeline idles 20% of a step with 4 accumulation steps" in banners[0]
