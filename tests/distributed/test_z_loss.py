"""The z-loss over tensor-parallel ranks and in training steps, compared with autograd on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, Batch, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, Weights, make_weights
from tests.reference.model import reference_logits

COEFFICIENT = 0.02


def step_and_evaluate(
    argv: list[str], weights: Weights, batches: list[list[Batch]]
) -> tuple[float, float, float, float]:
    """On each rank: return validation loss, and loss, z-loss and gradient norm of one step."""
    trainer = build_trainer_here(argv, weights)
    micro_batches = own_batches(trainer, batches[0])
    validation = evaluate(trainer, iter([micro_batches]), 1)
    result = train_step(trainer, micro_batches, 1)
    return validation, result.loss, result.extra_losses["z loss"], result.gradient_norm


@pytest.mark.parametrize(
    ("world", "words"),
    [(2, "--zero-stage 0"), (4, "--zero-stage 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")],
)
def test_a_step_has_the_gradient_of_the_z_loss_and_reports_it_separately(
    gloo_pools: GlooPools, world: int, words: str
) -> None:
    argv = [*RECIPE, *words.split(), "--global-batch-size", "8", "--z-loss-coeff", str(COEFFICIENT)]
    config = ReferenceConfig.like(run_of(argv, world).model)
    weights = make_weights(config, seed=1, dtype=torch.float32)
    batches = steps_of_batches(1, 4)
    leaves = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    tokens, labels, mask = (torch.cat(parts) for parts in zip(*batches[0], strict=True))
    logits, share = reference_logits(leaves, config, tokens), mask.double() / mask.double().sum()
    loss = (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * share).sum()
    z_loss = COEFFICIENT * (logits.logsumexp(-1).square() * share).sum()
    (loss + z_loss).backward()
    norm = torch.stack([leaf.grad.square().sum() for leaf in leaves.values() if leaf.grad is not None]).sum().sqrt()
    expected = (loss.item(), loss.item(), z_loss.item(), norm.item())
    for found in gloo_pools(world).run(step_and_evaluate, argv, weights, batches):
        assert found == pytest.approx(expected, rel=1e-5)
