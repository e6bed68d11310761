"""Muon in all layouts, compared with `torch.optim.Muon` on a plain model."""

import pytest
import torch
from torch import Tensor

from tests.helpers.pool import GlooPools
from tests.helpers.steps import (
    DELTA,
    LATENT,
    RECIPE,
    STEPS,
    Batch,
    History,
    check_outcome,
    steps_of_batches,
    torch_steps,
    train,
)
from tests.helpers.training import run_of
from tests.reference import ReferenceConfig, Weights, make_weights, reference_loss

MUON = [*RECIPE, *"--lr 1e-2 --global-batch-size 8 --optimizer muon".split()]


def torch_training(
    argv: list[str], world: int, weights: Weights, batches: list[list[Batch]]
) -> tuple[History, dict[str, Tensor]]:
    """Train a plain model with torch's optimizers; return what happens in every step, and the weights."""
    run = run_of(argv, world)
    options = run.optimizer
    # Every expert has a matrix.
    parts = {name: weight.unbind() if weight.ndim == 3 else [weight] for name, weight in weights.items()}
    current = {name: [torch.nn.Parameter(one.clone()) for one in of_name] for name, of_name in parts.items()}

    def whole() -> dict[str, Tensor]:
        return {name: torch.stack(of) if weights[name].ndim == 3 else of[0] for name, of in current.items()}

    def loss_of(tokens: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return reference_loss(whole(), ReferenceConfig.like(run.model), tokens, labels, mask, 1.0)

    matrices = [(name, one) for name, of in current.items() for one in of if one.ndim == 2 and "_conv." not in name]
    others = [one for name, of in current.items() for one in of if one.ndim == 1 or "_conv." in name]
    muon = torch.optim.Muon(
        [one for name, one in matrices if name.startswith("layers.")],
        weight_decay=0.1,
        momentum=options.muon_momentum,
        nesterov=options.muon_nesterov,
        ns_steps=options.muon_ns_steps,
        adjust_lr_fn=options.muon_scale_mode,
    )
    vocabulary = [one for name, one in matrices if not name.startswith("layers.")]
    groups = [{"params": vocabulary, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    history = torch_steps(run, batches, loss_of, [muon, torch.optim.AdamW(groups, betas=(0.9, 0.95))])
    return history, {name: weight.detach() for name, weight in whole().items()}


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
        (4, "--zero-stage 1 --num-experts 4 --moe-ffn-hidden-size 40 --expert-model-parallel-size 2"),
        (4, f"{LATENT} --zero-stage 1 --tensor-model-parallel-size 2 --q-lora-rank 12 --attention-output-gate"),
        (2, "--zero-stage 2 --num-experts 3 --moe-shared-expert-intermediate-size 16"),
        (4, f"{DELTA} --zero-stage 1 --tensor-model-parallel-size 4 --attention-output-gate"),
        pytest.param(2, f"{DELTA} --zero-stage 2 --residual-mode ladder", marks=pytest.mark.slow),
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
