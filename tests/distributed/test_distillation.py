"""Distillation over tensor-parallel ranks and in training steps, compared with torch on whole logits."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.parallel.layout import Placement
from megatron_ladder.parallel.vocabulary import SoftTargets, Targets, VocabParallelHead
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of
from tests.helpers.steps import RECIPE, check_outcome, plain_steps, train
from tests.helpers.training import TeacherInMemory, run_of
from tests.reference import (
    LossAndGradients,
    ReferenceConfig,
    Weights,
    make_weights,
    reference_logits,
    reference_loss,
)


class Model(NamedTuple):
    """An output head and what it multiplies."""

    hidden_states: Tensor
    matrix: Tensor
    soft_cap: float | None

    def logits(self) -> Tensor:
        logits = self.hidden_states @ self.matrix.t()
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class Settings(NamedTuple):
    weight: float
    temperature: float
    z_loss_coeff: float = 0.0


def random_model(words: int, width: int, soft_cap: float | None, seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    x, matrix = (torch.randn(*shape, width, generator=generator).double() for shape in ((50, 3), (words,)))
    return Model(x, matrix, soft_cap)


def sharded_losses(
    ranks: int, student: Model, teacher: Model, labels: Tensor, weights: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """On each rank: return the losses, and the gradients of the input and of this rank's words."""
    place, heads = Placement(mesh_of(ranks), torch.float64, torch.device("cpu")), []
    for model in (student, teacher):
        tensor = TensorSpec("head", tuple(model.matrix.shape), sharded_dim=0, padded=True)
        head = VocabParallelHead(tensor, place, model.soft_cap)
        with torch.no_grad():
            # Padding must not matter, whatever it contains.
            head.weight.fill_(1e3)[: head.valid] = model.matrix[head.start : head.start + head.valid]
        heads.append(head)
    own, theirs = heads
    soft = SoftTargets(teacher.hidden_states, theirs, settings.weight, settings.temperature)
    x = student.hidden_states.requires_grad_()
    losses = own(x, Targets(labels, weights, settings.z_loss_coeff, soft=soft))
    losses[0].backward()
    assert x.grad is not None and own.weight.grad is not None and theirs.weight.grad is None
    assert not own.weight.grad[own.valid :].any()
    return losses.detach(), x.grad, own.weight.grad[: own.valid]


@pytest.mark.parametrize(
    ("ranks", "words", "caps", "settings"),
    [
        (2, 301, (None, None), Settings(0.3, 2.0)),
        (1, 301, (2.0, 5.0), Settings(1.0, 0.5)),
        (2, 301, (None, 3.0), Settings(0.3, 3.0, z_loss_coeff=0.02)),
        (2, 120, (3.0, None), Settings(1.0, 0.25, z_loss_coeff=0.02)),
    ],
    ids=["", "capped", "z-loss", "one rank's"],
)
def test_loss_and_gradients_equal_autograd_in_float64(
    gloo_pools: GlooPools, ranks: int, words: int, caps: tuple[float | None, float | None], settings: Settings
) -> None:
    student, teacher = random_model(words, 8, caps[0], seed=2), random_model(words, 12, caps[1], seed=3)
    labels = torch.randint(0, words, (50, 3), generator=torch.Generator().manual_seed(4))
    weights = torch.rand(50, 3, generator=torch.Generator().manual_seed(5)).double()
    weights = weights.masked_fill(weights < 0.3, 0.0)
    arguments = student, teacher, labels, weights, settings
    results = gloo_pools(ranks).run(sharded_losses, ranks, *arguments)

    student.hidden_states.requires_grad_(), student.matrix.requires_grad_()
    z, u, (weight, temperature, z_loss_coeff) = student.logits(), teacher.logits(), settings
    loss = (F.cross_entropy(z.transpose(1, 2), labels, reduction="none") * weights).sum()
    p, log_q = (u / temperature).softmax(-1), (z / temperature).log_softmax(-1)
    distance = (temperature**2 * F.kl_div(log_q, p, reduction="none").sum(-1) * weights).sum()
    z_loss = z_loss_coeff * (z.logsumexp(-1).square() * weights).sum()
    ((1 - weight) * loss + weight * distance + z_loss).backward()
    expected = torch.stack((loss, z_loss, distance) if z_loss_coeff else (loss, distance)).detach()
    for losses, gradient, _ in results:
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        torch.testing.assert_close(gradient, student.hidden_states.grad, rtol=1e-10, atol=1e-12)
    of_words = torch.cat([words for *_, words in results])
    torch.testing.assert_close(of_words, student.matrix.grad, rtol=1e-10, atol=1e-12)


TEACHERS = {
    "narrow": "--num-layers 2 --hidden-size 24 --ffn-hidden-size 40 --num-key-value-heads 1 --logit-soft-cap 4",
    "ladder": "--residual-mode ladder --tie-embeddings --norm-epsilon 1e-3",
    "desync": "--residual-mode desync --desync-interval 4 --tensor-model-parallel-size 2",
    "lanes": "--residual-mode ladder --lanes 2",
    "experts": "--residual-mode farskip --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-enable-expert-bias",
}
WEIGHT, TEMPERATURE = 0.7, 2.0


def teacher_of(kind: str) -> TeacherInMemory:
    config = run_of([*RECIPE, *TEACHERS[kind].split()], 2).model
    return TeacherInMemory(config, make_weights(ReferenceConfig.like(config), seed=7, dtype=torch.float32))


def distilled(teacher: TeacherInMemory) -> LossAndGradients:
    """Return a function as `reference_gradients`, of the cross entropy and the distillation loss."""

    def gradients_of(
        weights: Weights, config: ReferenceConfig, tokens: Tensor, labels: Tensor, mask: Tensor, total: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        loss = reference_loss(leaves, config, tokens, labels, mask, total)
        z = reference_logits(leaves, config, tokens)
        u = reference_logits(teacher.weights, ReferenceConfig.like(teacher.config), tokens)
        p, log_q = (u / TEMPERATURE).softmax(-1), (z / TEMPERATURE).log_softmax(-1)
        distance = TEMPERATURE**2 * (F.kl_div(log_q, p, reduction="none").sum(-1) * mask).sum() / total
        gradients = torch.autograd.grad((1 - WEIGHT) * loss + WEIGHT * distance, list(leaves.values()))
        return torch.stack((loss, distance)).detach(), dict(zip(leaves, gradients, strict=True))

    return gradients_of


@pytest.mark.parametrize(
    ("tensor_parallel", "data_parallel", "teacher", "words"),
    [
        (1, 1, "narrow", "--zero-stage 0"),
        (1, 2, "ladder", "--zero-stage 2 --recompute-granularity full"),
        (1, 4, "narrow", "--zero-stage 1 --offload-optimizer cpu"),
        (2, 1, "narrow", "--zero-stage 0 --sequence-parallel --recompute-granularity full"),
        (2, 2, "narrow", "--zero-stage 1 --logit-soft-cap 20"),
        (2, 2, "desync", "--zero-stage 3 --recompute-granularity full"),
        (2, 1, "lanes", "--zero-stage 0 --sequence-parallel"),
        (2, 1, "experts", "--zero-stage 1 --num-experts 6 --moe-ffn-hidden-size 24 --expert-sharding experts"),
    ],
)
def test_steps_equal_a_plain_model(
    gloo_pools: GlooPools, tensor_parallel: int, data_parallel: int, teacher: str, words: str
) -> None:
    words += f" --tensor-model-parallel-size {tensor_parallel} --global-batch-size 8 --residual-mode ladder"
    words += f" --ladder-layers 2 --distill-from teacher --distill-weight {WEIGHT} --distill-temperature {TEMPERATURE}"
    argv = [*RECIPE, *words.split()]
    world, taught_by = tensor_parallel * data_parallel, teacher_of(teacher)
    weights, batches, expected, final = plain_steps(argv, world, distilled(taught_by))
    check_outcome(gloo_pools(world).run(train, argv, weights, batches, taught_by), expected, final)
