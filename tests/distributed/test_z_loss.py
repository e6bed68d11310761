"""The z-loss over tensor-parallel ranks and in training steps, compared with autograd on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.parallel.vocabulary import Targets, VocabParallelHead
from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of
from tests.helpers.steps import RECIPE, Batch, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, Weights, make_weights
from tests.reference.model import reference_logits

COEFFICIENT = 0.02


def sharded_gradients(x: Tensor, matrix: Tensor, targets: Targets, cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """On each of two ranks: return loss and z-loss, the gradients of the input and of this rank's words."""
    mesh, device = mesh_of(2), torch.device("cpu")
    tensor = TensorSpec("head", tuple(matrix.shape), sharded_dim=0, padded=True)
    head = VocabParallelHead(tensor, mesh.tensor, mesh.stream, x.dtype, device, soft_cap=cap)
    with torch.no_grad():
        # Padding must not matter, whatever it contains.
        head.weight.fill_(1e3)[: head.valid] = matrix[head.start : head.start + head.valid]
    both = head(x.requires_grad_(), targets)
    both[0].backward()
    assert x.grad is not None and head.weight.grad is not None and not head.weight.grad[head.valid :].any()
    return both.detach(), x.grad, head.weight.grad[: head.valid]


@pytest.mark.parametrize(("words", "cap"), [(301, None), (301, 2.0), (120, None)], ids=["", "capped", "one rank's"])
def test_gradients_equal_autograd_in_float64(gloo_pools: GlooPools, words: int, cap: float | None) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 3, 8, generator=generator, dtype=torch.float64)
    matrix = torch.randn(words, 8, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, words, (50, 3), generator=generator)
    weights = torch.rand(50, 3, generator=generator, dtype=torch.float64)
    logits = x.requires_grad_() @ matrix.t()
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    loss = (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * weights).sum()
    z_loss = COEFFICIENT * (logits.logsumexp(-1).square() * weights).sum()
    (loss + z_loss).backward()
    targets = Targets(labels, weights, COEFFICIENT)
    results = gloo_pools(2).run(sharded_gradients, x.detach(), matrix.detach(), targets, cap)
    for both, gradient, _ in results:
        torch.testing.assert_close(both, torch.stack((loss, z_loss)).detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, x.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([words for *_, words in results]), matrix.grad, rtol=1e-10, atol=1e-12)


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
