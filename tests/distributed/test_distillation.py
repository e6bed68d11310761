"""Distillation in training steps of many layouts, compared with torch on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.config.sections import TrainingConfig
from tests.helpers.pool import GlooPools
from tests.helpers.steps import (
    DELTA,
    LATENT,
    RECIPE,
    STEPS,
    check_outcome,
    launch_of,
    plain_steps,
    steps_of_batches,
    train,
)
from tests.helpers.training import TeacherInMemory, run_of
from tests.reference import (
    LossAndGradients,
    ReferenceConfig,
    Weights,
    make_weights,
    reference_logits,
    reference_loss,
)

STUDENT = (
    "--global-batch-size 8 --vocab-size 301 --residual-mode ladder --ladder-layers 2 "
    "--distill-from teacher --distill-weight 0.7 --distill-temperature 2"
)
TEACHERS = {
    "narrow": "--num-layers 2 --hidden-size 24 --ffn-hidden-size 40 --num-key-value-heads 1 --logit-soft-cap 4",
    "ladder": "--residual-mode ladder --tie-embeddings --norm-epsilon 1e-3",
    "desync": "--residual-mode desync --desync-interval 4 --tensor-model-parallel-size 2",
    "lanes": "--residual-mode ladder --lanes 2",
    "latent": f"{LATENT} --q-lora-rank 12 --attention-output-gate",
    "delta": f"{DELTA} --linear-num-value-heads 8 --attention-output-gate --apply-layernorm-1p",
    "experts": "--residual-mode farskip --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-enable-expert-bias",
}


def teacher_of(kind: str, vocab_size: int) -> TeacherInMemory:
    config = run_of([*RECIPE, *TEACHERS[kind].split(), "--vocab-size", str(vocab_size)], 2).model
    return TeacherInMemory(config, make_weights(ReferenceConfig.like(config), seed=7, dtype=torch.float32))


def distilled(teacher: TeacherInMemory, training: TrainingConfig) -> LossAndGradients:
    """Return a function as `reference_gradients`, of the cross entropy, the z-loss and the distillation loss."""
    weight, temperature = training.distill_weight, training.distill_temperature

    def gradients_of(
        weights: Weights,
        config: ReferenceConfig,
        tokens: Tensor,
        labels: Tensor,
        mask: Tensor,
        total: float,
        all_tokens: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        both = reference_loss(leaves, config, tokens, labels, mask, total, all_tokens)
        z = reference_logits(leaves, config, tokens)
        u = reference_logits(teacher.weights, ReferenceConfig.like(teacher.config), tokens)
        p, log_q = (u / temperature).softmax(-1), (z / temperature).log_softmax(-1)
        distance = temperature**2 * (F.kl_div(log_q, p, reduction="none").sum(-1) * mask).sum() / total
        z_loss = config.z_loss_coeff * (z.logsumexp(-1).square() * mask).sum() / total
        loss = both - z_loss
        gradients = torch.autograd.grad((1 - weight) * loss + weight * distance + z_loss, list(leaves.values()))
        losses = (loss, z_loss, distance) if config.z_loss_coeff else (loss, distance)
        return torch.stack(losses).detach(), dict(zip(leaves, gradients, strict=True))

    return gradients_of


@pytest.mark.parametrize(
    ("layout", "teacher", "words"),
    [
        ("1x1x1", "narrow", "--zero-stage 0 --distill-weight 1 --distill-temperature 0.5 --z-loss-coeff 0.1"),
        ("1x1x2", "ladder", "--zero-stage 2 --recompute-granularity full --logit-soft-cap 3"),
        ("1x1x4", "narrow", "--zero-stage 1 --offload-optimizer cpu"),
        ("2x1x1", "narrow", "--zero-stage 0 --sequence-parallel --recompute-granularity full --z-loss-coeff 0.02"),
        ("2x1x2", "narrow", "--zero-stage 1 --logit-soft-cap 20"),
        ("2x1x2", "desync", "--zero-stage 3 --recompute-granularity full --distill-weight 0.3 --distill-temperature 3"),
        # One rank has all words.
        ("2x1x1", "lanes", "--sequence-parallel --vocab-size 101 --distill-temperature 0.25 --z-loss-coeff 0.02"),
        pytest.param(
            "2x1x2",
            "latent",
            f"{LATENT} --zero-stage 1 --attention-output-gate --lr 1e-3",
            marks=pytest.mark.slow,
        ),
        ("2x1x1", "delta", f"{DELTA} --zero-stage 1"),
        pytest.param("1x1x2", "delta", f"{DELTA} --zero-stage 3", marks=pytest.mark.slow),
        ("1x1x4", "experts", "--zero-stage 1 --num-experts 6 --moe-ffn-hidden-size 24 --expert-model-parallel-size 2"),
        ("2x1x1", "experts", "--zero-stage 1 --num-experts 6 --moe-ffn-hidden-size 24 --expert-sharding experts"),
        ("1x1x2", "lanes", "--zero-stage 1 --num-experts 4 --expert-model-parallel-size 2"),
        ("2x1x1", "desync", "--distill-weight 0.3 --num-experts 4 --expert-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, layout: str, teacher: str, words: str) -> None:
    world, argv = launch_of(layout, STUDENT, words)
    argv = [*RECIPE, *argv]
    run = run_of(argv, world)
    taught_by = teacher_of(teacher, run.model.vocab_size)
    # The logits of a longer micro-batch are computed in two chunks.
    batches = steps_of_batches(STEPS, 4, tokens=40 if teacher == "desync" else 12)
    weights, _, expected, final = plain_steps(argv, world, distilled(taught_by, run.training), batches)
    check_outcome(gloo_pools(world).run(train, argv, weights, batches, taught_by), expected, final)
