"""Training steps of mixtures of experts, compared with AdamW written out on a plain model."""

import functools
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.engine import build
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces
from tests.helpers.steps import RECIPE, Batch, History, plain_steps, train
from tests.reference import ReferenceConfig, Routed, Weights, reference_gradients, reference_logits

GENTLE_RECIPE = [*RECIPE, "--lr", "1e-3", "--global-batch-size", "8"]
QWEN = "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --qk-layernorm --moe-aux-loss-coeff 0.05"
GLM = (
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 24 --moe-layers 1,2 "
    "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01"
)
SPARSE = "--num-experts 64 --moe-router-topk 1 --moe-router-unnormalized --moe-ffn-hidden-size 8"
"""More experts than tokens of a micro-batch."""


def with_balancing_losses(
    weights: Weights, config: ReferenceConfig, tokens: Tensor, labels: Tensor, loss_mask: Tensor, total: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross entropy and balancing losses separately, and the gradients of their sum."""
    loss, gradients = reference_gradients(weights, config, tokens, labels, loss_mask, total)
    record: list[Routed] = []
    reference_logits(weights, config, tokens, record=record)
    sums = []
    if config.moe_aux_loss_coeff:
        sums.append(sum(routed.auxiliary_loss for routed in record) / total)
    if config.moe_z_loss_coeff:
        sums.append(sum(routed.z_loss for routed in record) / total)
    return torch.stack([loss - sum(sums), *sums]), gradients


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, f"{GLM} --zero-stage 0"),
        (2, f"{SPARSE} --zero-stage 1"),
        (2, f"{SPARSE} --zero-stage 3 --residual-mode parallel"),
        (4, f"{GLM} --zero-stage 1 --tensor-model-parallel-size 2 --residual-mode farskip --expert-sharding experts"),
        (4, f"{QWEN} --zero-stage 2 --tensor-model-parallel-size 2 --residual-mode ladder --tie-embeddings"),
        (4, f"{GLM} --zero-stage 3 --tensor-model-parallel-size 2 --residual-mode shortcut"),
        (4, f"{GLM} --zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel --residual-mode farskip"),
        (4, f"{QWEN} --zero-stage 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        (
            4,
            f"{QWEN} --zero-stage 3 --tensor-model-parallel-size 2 --residual-mode longcat --expert-sharding experts "
            "--recompute-granularity full --sequence-parallel",
        ),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, world: int, words: str) -> None:
    """Loss, balancing losses and gradient norm of every step, and the final weights and biases."""
    argv = [*GENTLE_RECIPE, *words.split()]
    weights, batches, expected, final = plain_steps(argv, world, with_balancing_losses)
    results = gloo_pools(world).run(train, argv, weights, batches)
    for history, _ in results:
        assert history == [pytest.approx(of_step, rel=1e-6) for of_step in expected]
    assert_pieces([pieces for _, pieces in results], final, 2e-4)
    copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, offset, values in (piece for _, pieces in results for piece in pieces):
        assert torch.equal(copies.setdefault((name, offset), values), values), f"the ranks' copies of {name} differ"


def train_in_float64(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> tuple[History, Pieces]:
    """On each rank: `train`, with weights, gradients and moments in float64, which no flag offers."""
    model = functools.partial(LanguageModel, dtype=torch.float64)
    with mock.patch.multiple(build, LanguageModel=model, compute_dtype=lambda run: torch.float64):
        return train(argv, weights, batches)


@pytest.mark.parametrize(
    ("world", "samples", "words"),
    [
        (1, 8, ""),
        (2, 1, ""),
        (2, 2, "--tensor-model-parallel-size 2"),
        (4, 2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"),
        (4, 4, "--tensor-model-parallel-size 4 --expert-sharding experts"),
    ],
)
def test_balancing_depends_on_no_layout(gloo_pools: GlooPools, world: int, samples: int, words: str) -> None:
    """Balancing losses, gradient norms, biases and weights in float64: TP, DP, accumulation and recomputation.

    Biases are fp32 always, and their sums with this rate are exact.
    """
    argv = [*GENTLE_RECIPE, *f"{GLM} --moe-router-bias-update-rate 0.0625 --residual-mode farskip {words}".split()]
    argv += ["--zero-stage", "1", "--micro-batch-size", str(samples)]
    weights, batches, expected, final = plain_steps(argv, world, with_balancing_losses, torch.float64)
    parts = [[torch.cat(part) for part in zip(*batch, strict=True)] for batch in batches]
    cut = [list(zip(*(part.split(samples) for part in step), strict=True)) for step in parts]
    results = gloo_pools(world).run(train_in_float64, argv, weights, cut)
    assert_pieces([pieces for _, pieces in results], final, 1e-10)
    for history, _ in results:
        assert [of_step[1:] for of_step in history] == [pytest.approx(of_step[1:], rel=1e-10) for of_step in expected]
