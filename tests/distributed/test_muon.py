"""Muon in all layouts, compared with `torch.optim.Muon` on a plain model."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_ladder.engine.optimizer import learning_rate
from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, STEPS, Batch, check_outcome, steps_of_batches, train
from tests.helpers.training import run_of
from tests.reference import ReferenceConfig, Weights, make_weights
from tests.reference.model import reference_gradients

MUON = [*RECIPE, *"--lr 1e-2 --global-batch-size 8 --optimizer muon".split()]


def torch_training(
    argv: list[str], world: int, weights: Weights, batches: list[list[Batch]]
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train a plain model with torch's optimizers; return loss and gradient norm of every step, and the weights."""
    run = run_of(argv, world)
    rate, options = partial(learning_rate, run.optimizer, run.training.train_iters), run.optimizer
    current = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    hidden = [weight for name, weight in current.items() if name.startswith("layers.") and weight.ndim == 2]
    stacks = [weight for weight in current.values() if weight.ndim == 3]
    of_stacks = [[torch.nn.Parameter(matrix) for matrix in stack.detach()] for stack in stacks]
    hidden += [matrix for matrices in of_stacks for matrix in matrices]
    vocabulary = [weight for name, weight in current.items() if not name.startswith("layers.") and weight.ndim == 2]
    vectors = [weight for weight in current.values() if weight.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            hidden,
            weight_decay=0.1,
            momentum=options.muon_momentum,
            nesterov=options.muon_nesterov,
            ns_steps=options.muon_ns_steps,
            adjust_lr_fn=options.muon_scale_mode,
        ),
        torch.optim.AdamW(
            [{"params": vocabulary, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
        ),
    ]
    history = []
    for iteration, batch in enumerate(batches, start=1):
        tokens = sum(float(mask.sum()) for _, _, mask in batch)
        loss = 0.0
        for weight in current.values():
            weight.grad = torch.zeros_like(weight)
        for micro_batch in batch:
            part, gradients = reference_gradients(current, ReferenceConfig.like(run.model), *micro_batch, tokens)
            loss += float(part)
            for name, gradient in gradients.items():
                current[name].grad += gradient
        history.append((loss, float(torch.nn.utils.clip_grad_norm_(current.values(), 0.5))))
        for stack, matrices in zip(stacks, of_stacks, strict=True):
            assert stack.grad is not None
            for matrix, gradient in zip(matrices, stack.grad, strict=True):
                matrix.grad = gradient
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(iteration)
            optimizer.step()
    return history, {name: weight.detach() for name, weight in current.items()}


@pytest.mark.parametrize(
    ("world", "words"),
    [
        pytest.param(
            *(4, "--zero-stage 0 --tensor-model-parallel-size 2 --residual-mode ladder --add-attention-output-bias"),
            marks=pytest.mark.slow,
        ),
        (4, "--zero-stage 1 --tensor-model-parallel-size 4 --muon-scale-mode original --no-muon-nesterov"),
        pytest.param(
            *(4, "--zero-stage 1 --tensor-model-parallel-size 2 --residual-mode ladder-parallel --qk-layernorm"),
            marks=pytest.mark.slow,
        ),
        (4, "--zero-stage 1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --tie-embeddings"),
        (2, "--zero-stage 2 --muon-ns-steps 3 --muon-momentum 0.8"),
        (4, "--zero-stage 1 --tensor-model-parallel-size 2 --num-experts 5 --moe-ffn-hidden-size 40"),
        (2, "--zero-stage 0 --tensor-model-parallel-size 2 --num-experts 6 --expert-sharding experts"),
        (2, "--zero-stage 2 --num-experts 3 --moe-shared-expert-intermediate-size 16"),
    ],
)
def test_steps_equal_torch_muon(gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch, world: int, words: str) -> None:
    """torch's Muon orthogonalises in bf16; without that cast it is exact, and so is the comparison."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    argv = [*MUON, *words.split()]
    weights = make_weights(ReferenceConfig.like(run_of(argv, world).model), seed=1, dtype=torch.float32)
    batches = steps_of_batches(STEPS, 4)
    expected, final = torch_training(argv, world, weights, batches)
    check_outcome(gloo_pools(world).run(train, argv, weights, batches), expected, final)
