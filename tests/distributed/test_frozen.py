"""Parameters without `requires_grad` in all layouts, compared with torch's optimizers on a plain model."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_ladder.config.run import RunConfig
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces
from tests.helpers.steps import (
    LATENT,
    RECIPE,
    STEPS,
    Batch,
    History,
    check_outcome,
    everything,
    launch_of,
    steps_of_batches,
    take_steps,
    torch_steps,
)
from tests.helpers.training import build_trainer_here, run_of, save_trainer, weight_pieces
from tests.reference import ReferenceConfig, Weights, make_weights, reference_loss

FROZEN_FROM = {"layers.0.": 2, "layers.2.": 3, "embedding.weight": 2, "final_norm.weight": 1, "lm_head.weight": 2}
"""The first step in which parameters with these names are frozen."""
AFTER_ONE, AFTER_ALL = "after_one", "after_all"


def is_frozen(name: str, step: int) -> bool:
    return any(name.startswith(start) and step >= first for start, first in FROZEN_FROM.items())


def train_frozen(argv: list[str], weights: Weights, batches: list[list[Batch]], save: Path) -> tuple[History, Pieces]:
    """On each rank: take the steps with frozen parameters, and save after the first step and after the last one.

    A tied embedding is frozen on the first stage only.
    """
    trainer, history = build_trainer_here(argv, weights), History()
    for step, batch in enumerate(batches, start=1):
        for name, parameter in trainer.model.named_parameters():
            freezes = trainer.model.is_first or parameter is not trainer.model.tied_weight
            parameter.requires_grad_(not (freezes and is_frozen(name.removeprefix("stack."), step)))
        with trainer.engine.keeping_frozen():
            history += take_steps(trainer, [batch], step)
        if step in (1, len(batches)):
            trainer.engine.optimizer.finish_step()
            save_trainer(trainer, save / (AFTER_ONE if step == 1 else AFTER_ALL), step)
    return history, weight_pieces(trainer)


def train_with_torch(
    run: RunConfig, weights: Weights, batches: list[list[Batch]]
) -> tuple[History, Mapping[str, Tensor]]:
    """Train a plain model; return what happens in every step, and the weights."""
    config, parameters = (
        ReferenceConfig.like(run.model),
        {name: nn.Parameter(one.clone()) for name, one in weights.items()},
    )
    passes, of_step = 0, len(batches[0])

    def loss_of(tokens: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        nonlocal passes
        for name, parameter in parameters.items():
            parameter.requires_grad_(not is_frozen(name, passes // of_step + 1))
        passes += 1
        return reference_loss(parameters, config, tokens, labels, mask, 1.0)

    matrices = {name: one for name, one in parameters.items() if one.ndim > 1}
    vectors = [one for one in parameters.values() if one.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = []
    if run.optimizer.optimizer == "muon":
        of_layers = [name for name in matrices if name.startswith("layers.")]
        muon = {"weight_decay": 0.1, "momentum": run.optimizer.muon_momentum, "ns_steps": run.optimizer.muon_ns_steps}
        optimizers.append(
            torch.optim.Muon([matrices.pop(name) for name in of_layers], adjust_lr_fn="match_rms_adamw", **muon)
        )
    groups = [{"params": [*matrices.values()], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    history = torch_steps(run, batches, loss_of, optimizers)
    return history, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("2x1x2", "--zero-stage 0"),
        ("1x1x2", "--zero-stage 1"),
        ("2x1x2", "--zero-stage 2 --residual-mode ladder"),
        ("1x1x2", "--zero-stage 3"),
        ("1x1x2", "--zero-stage 2 --offload-optimizer cpu"),
        ("1x1x2", "--zero-stage 3 --offload-optimizer cpu"),
        ("2x2x1", "--zero-stage 0 --residual-mode ladder --qk-layernorm"),
        ("1x2x2", "--zero-stage 1 --residual-mode ladder --tie-embeddings"),
        ("2x1x1", "--zero-stage 1 --sequence-parallel --residual-mode ladder --recompute-granularity full"),
        ("1x1x2", "--zero-stage 0 --optimizer muon"),
        ("2x1x2", "--zero-stage 1 --optimizer muon --residual-mode ladder"),
        ("1x1x2", "--zero-stage 2 --optimizer muon"),
        ("2x1x2", f"{LATENT} --zero-stage 1 --residual-mode ladder --q-lora-rank 12 --attention-output-gate"),
    ],
)
def test_frozen_parameters_stay_as_they_are(
    gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str, words: str
) -> None:
    # torch's Muon orthogonalises in bf16.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    world, argv = launch_of(layout, words, "--global-batch-size 8")
    argv, batches = [*RECIPE, *argv], steps_of_batches(STEPS, 4)
    run = run_of(argv, world)
    weights = make_weights(ReferenceConfig.like(run.model), seed=1, dtype=torch.float32)
    expected, final = train_with_torch(run, weights, batches)
    results = gloo_pools(world).run(train_frozen, argv, weights, batches, tmp_path)
    check_outcome(results, expected, dict(final))
    after_one, after_all = everything(tmp_path / AFTER_ONE), everything(tmp_path / AFTER_ALL)
    assert after_one.keys() == after_all.keys()
    for (name, kind), values in after_one.items():
        assert torch.equal(values, after_all[name, kind]) == is_frozen(name, 2), (name, kind)
        if kind == "weight" and is_frozen(name, 1):
            assert torch.equal(values, weights[name])


def own_backward(words: str, frozen: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """On each rank: return the gradients of a model with and without frozen parameters, by name."""
    trainer = build_trainer_here([*RECIPE, *words.split()])
    model, ((tokens, labels, mask),) = trainer.model, steps_of_batches(1, 1)[0]
    found = []
    for pattern in (frozen, "$^"):
        # Not through the engine, which collects gradients elsewhere.
        model = LanguageModel(trainer.run.model, trainer.mesh, trainer.model.stack.options, seed=1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(pattern, name))
        model(tokens, labels, mask).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return found[0], found[1]


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, "--residual-mode ladder --lanes 2"),
        (2, "--residual-mode ladder --qk-layernorm --tensor-model-parallel-size 2"),
        (2, "--residual-mode ladder --sequence-parallel --tensor-model-parallel-size 2"),
        (
            2,
            "--residual-mode farskip --num-experts 4 --moe-ffn-hidden-size 8 --tensor-model-parallel-size 2 "
            "--moe-shared-expert-intermediate-size 8",
        ),
        (2, f"{LATENT} --residual-mode ladder --q-lora-rank 12 --add-qkv-bias --tensor-model-parallel-size 2"),
        (2, "--residual-mode standard --add-mlp-bias --tie-embeddings --tensor-model-parallel-size 2"),
    ],
)
@pytest.mark.parametrize("frozen", ["embedding", "norm", r"layers\.(0|2)\.", "bodies", "final_norm|lm_head"])
def test_a_callers_backward_leaves_out_frozen_parameters(
    gloo_pools: GlooPools, world: int, words: str, frozen: str
) -> None:
    for found, whole in gloo_pools(world).run(own_backward, words, frozen):
        for name, gradient in whole.items():
            if re.search(frozen, name):
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], gradient, msg=name)
