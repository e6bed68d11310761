"""Training steps with the z-loss, compared with autograd on whole logits."""

import pytest
import torch
from torch import Tensor

from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, check_outcome, plain_steps, train
from tests.reference import ReferenceConfig, Weights, reference_logits, reference_loss

COEFFICIENT = 0.02


def gradients_with_z_loss(
    weights: Weights, config: ReferenceConfig, tokens: Tensor, labels: Tensor, mask: Tensor, total: float
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    loss = reference_loss(leaves, config, tokens, labels, mask, total)
    squares = reference_logits(leaves, config, tokens).logsumexp(-1).square()
    z_loss = COEFFICIENT * (squares * mask).sum() / total
    gradients = torch.autograd.grad(loss + z_loss, list(leaves.values()))
    return torch.stack((loss, z_loss)).detach(), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize(
    ("world", "words"),
    [(2, "--zero-stage 0"), (4, "--zero-stage 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")],
)
def test_a_step_has_the_gradient_of_the_z_loss_and_reports_it_separately(
    gloo_pools: GlooPools, world: int, words: str
) -> None:
    argv = [*RECIPE, *words.split(), "--global-batch-size", "8", "--z-loss-coeff", str(COEFFICIENT)]
    weights, batches, expected, final = plain_steps(argv, world, gradients_with_z_loss)
    check_outcome(gloo_pools(world).run(train, argv, weights, batches), expected, final)
