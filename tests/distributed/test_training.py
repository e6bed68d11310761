"""Whole optimizer steps with DeepSpeed in every layout, compared with a plain AdamW on a plain model."""

from pathlib import Path

import pytest
import torch

from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.activations import ActivationMeter
from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, STEPS, Batch, check_resume, check_steps, steps_of_batches, train
from tests.helpers.training import (
    build_trainer_here,
    own_batches,
    run_of,
)
from tests.reference import ReferenceConfig, Weights, make_weights, reference_loss

LADDER = "--residual-mode ladder --ladder-layers 2 --qk-layernorm --add-attention-output-bias"
DESYNC = "--residual-mode desync --add-attention-output-bias --desync-interval"
"""Norm weights of every rank count in the gradient norm and do not decay, although they are rows of a matrix."""


@pytest.mark.parametrize("zero_stage", ["0", "1"])
@pytest.mark.parametrize(
    ("tensor_parallel", "data_parallel", "wiring"),
    [(4, 1, LADDER), (2, 1, f"{DESYNC} 2"), (2, 2, f"{DESYNC} 4"), (4, 1, f"{DESYNC} 2")],
)
def test_steps_equal_a_plain_model(
    gloo_pools: GlooPools, tensor_parallel: int, data_parallel: int, wiring: str, zero_stage: str
) -> None:
    """`test_zero.py` has more layouts and stages."""
    layout = f"--tensor-model-parallel-size {tensor_parallel} --zero-stage {zero_stage} --global-batch-size 8"
    check_steps(gloo_pools, [*RECIPE, *layout.split(), *wiring.split()], tensor_parallel * data_parallel)


@pytest.mark.parametrize("recompute", [[], ["--recompute-granularity", "full"]], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("data_parallel", "zero_stage"), [(1, "0"), (2, "1")])
def test_sequence_parallel_steps_equal_a_plain_model(
    gloo_pools: GlooPools, data_parallel: int, zero_stage: str, recompute: list[str]
) -> None:
    argv = [
        *RECIPE,
        "--tensor-model-parallel-size",
        "2",
        "--zero-stage",
        zero_stage,
        "--sequence-parallel",
        *recompute,
        "--residual-mode",
        "ladder",
        "--ladder-layers",
        "2",
        "--global-batch-size",
        "8",
        "--qk-layernorm",
        "--add-attention-output-bias",
    ]
    check_steps(gloo_pools, argv, 2 * data_parallel)


def kept_for_backward(argv: list[str], batches: list[list[Batch]]) -> int:
    """On each rank: return the bytes that one forward pass keeps, on the rank with the most."""
    trainer = build_trainer_here(argv)
    meter = ActivationMeter(trainer.model)
    train_step(trainer, own_batches(trainer, batches[0]), 1)
    assert meter.kept_bytes is not None
    return meter.kept_bytes


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("mode", ["standard", "ladder", "ladder-parallel"])
def test_sequence_parallelism_keeps_less_memory(gloo_pools: GlooPools, mode: str, recompute: bool) -> None:
    """A sub-block keeps only a slice of the stream and of the normed stream, or with recomputation of the stream."""
    argv = [*RECIPE, "--tensor-model-parallel-size", "2", "--global-batch-size", "2", "--residual-mode", mode]
    argv += ["--recompute-granularity", "full"] if recompute else []
    batches = steps_of_batches(1, 1)
    whole, *_ = gloo_pools(2).run(kept_for_backward, argv, batches)
    cut, *_ = gloo_pools(2).run(kept_for_backward, [*argv, "--sequence-parallel"], batches)
    stream = 12 * 2 * 32 * 4
    sub_blocks = 3 if mode == "ladder-parallel" else 6
    # Half of each. The first norm of `standard` reads the output of the embedding, which is kept in either case.
    assert whole - cut >= sub_blocks * (1 if recompute else 2) * stream / 2


def test_bf16_follows_fp32(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, "--tensor-model-parallel-size", "2", "--global-batch-size", "8", "--residual-mode", "ladder"]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 4).model), seed=1, dtype=torch.float32)
    batches = steps_of_batches(STEPS, 4)
    plain = gloo_pools(4).run(train, argv, weights, batches)[0][0]
    half = gloo_pools(4).run(train, [*argv, "--bf16"], weights, batches)[0][0]
    for (found, _), (wanted, _) in zip(half, plain, strict=True):
        assert found == pytest.approx(wanted, rel=2e-2)
        assert found != wanted


@pytest.mark.parametrize(("world", "precision"), [(2, "--zero-stage 0"), (4, "--zero-stage 1"), (4, "--bf16")])
def test_desync_resumes_bitwise(gloo_pools: GlooPools, tmp_path: Path, world: int, precision: str) -> None:
    argv = [*RECIPE, *precision.split(), *"--tensor-model-parallel-size 2 --global-batch-size 8".split()]
    check_resume(gloo_pools, tmp_path, [*argv, "--residual-mode", "desync", "--desync-interval", "4"], world)


def mean_loss(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> float:
    """On each rank: return the loss of the evaluation."""
    trainer = build_trainer_here(argv, weights)
    return evaluate(trainer, iter([own_batches(trainer, batch) for batch in batches]), len(batches))


def test_evaluation_is_the_mean_over_tokens(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, "--tensor-model-parallel-size", "2", "--global-batch-size", "8"]
    config = ReferenceConfig.like(run_of(argv, 4).model)
    weights = make_weights(config, seed=1, dtype=torch.float32)
    batches = steps_of_batches(2, 4)
    tokens, labels, mask = (torch.cat(parts) for parts in zip(*(b for step in batches for b in step), strict=True))
    expected = reference_loss(weights, config, tokens, labels, mask)
    assert gloo_pools(4).run(mean_loss, argv, weights, batches) == pytest.approx([float(expected)] * 4, rel=1e-5)
