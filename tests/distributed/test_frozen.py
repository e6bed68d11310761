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
    DELTA,
    LATENT,
    RECIPE,
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

Schedule = Mapping[str, range]
"""The steps in which parameters whose names begin like this are frozen."""
FROZEN: Schedule = {
    "layers.0.": range(2, 9),
    "layers.2.": range(3, 9),
    "embedding.weight": range(2, 9),
    "final_norm.weight": range(1, 9),
    "lm_head.weight": range(2, 9),
}
THAWED: Schedule = {
    "layers.0.": range(2, 4),
    "layers.1.": range(3, 4),
    "layers.2.": range(4, 5),
    "embedding.weight": range(1, 4),
    "final_norm.weight": range(1, 5),
    "lm_head.weight": range(2, 3),
}
"""All train in the last two of six steps, and nothing below the last layer in the third one."""
AFTER_ONE, AFTER_ALL = "after_one", "after_all"


def is_frozen(schedule: Schedule, name: str, step: int) -> bool:
    return any(name.startswith(start) and step in steps for start, steps in schedule.items())


def train_frozen(
    argv: list[str], weights: Weights, batches: list[list[Batch]], schedule: Schedule, save: Path
) -> tuple[History, Pieces]:
    """On each rank: take the steps with frozen parameters, and save after the first step and after the last one.

    A tied embedding is frozen on the first stage only.
    """
    trainer, history = build_trainer_here(argv, weights), History()
    for step, batch in enumerate(batches, start=1):
        for name, parameter in trainer.model.named_parameters():
            freezes = trainer.model.is_first or parameter is not trainer.model.tied_weight
            parameter.requires_grad_(not (freezes and is_frozen(schedule, name.removeprefix("stack."), step)))
        trainer.engine.follow_frozen()
        history += take_steps(trainer, [batch], step)
        if step in (1, len(batches)):
            trainer.engine.optimizer.finish_step()
            save_trainer(trainer, save / (AFTER_ONE if step == 1 else AFTER_ALL), step)
    return history, weight_pieces(trainer)


def count_frozen(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count a step of the parameters that AdamW leaves out for lack of a gradient, too."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is None and not state:
                moments = {which: torch.zeros_like(parameter.detach()) for which in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.zeros(()), **moments)
            if parameter.grad is None:
                state["step"] += 1


def train_with_torch(
    run: RunConfig, weights: Weights, batches: list[list[Batch]], schedule: Schedule
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
            parameter.requires_grad_(not is_frozen(schedule, name, passes // of_step + 1))
        passes += 1
        return reference_loss(parameters, config, tokens, labels, mask, 1.0)

    matrices = {name: one for name, one in parameters.items() if one.ndim > 1 and "_conv." not in name}
    others = [one for name, one in parameters.items() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = []
    if run.optimizer.optimizer == "muon":
        of_layers = [name for name in matrices if name.startswith("layers.")]
        muon = {"weight_decay": 0.1, "momentum": run.optimizer.muon_momentum, "ns_steps": run.optimizer.muon_ns_steps}
        optimizers.append(
            torch.optim.Muon([matrices.pop(name) for name in of_layers], adjust_lr_fn="match_rms_adamw", **muon)
        )
    groups = [{"params": [*matrices.values()], "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    optimizers[-1].register_step_pre_hook(count_frozen)
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
        ("2x1x2", f"{DELTA} --zero-stage 1 --residual-mode ladder --optimizer muon"),
        pytest.param("1x1x2", f"{DELTA} --zero-stage 3 --residual-mode ladder", marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_stay_as_they_are(
    gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str, words: str
) -> None:
    weights = check_schedule(gloo_pools, monkeypatch, tmp_path, layout, words, FROZEN)
    after_one, after_all = everything(tmp_path / AFTER_ONE), everything(tmp_path / AFTER_ALL)
    assert after_one.keys() == after_all.keys()
    for (name, kind), values in after_one.items():
        assert torch.equal(values, after_all[name, kind]) == is_frozen(FROZEN, name, 2), (name, kind)
        if kind == "weight" and is_frozen(FROZEN, name, 1):
            assert torch.equal(values, weights[name])


@pytest.mark.parametrize("bucket_numbers", [1, 100_000_000])
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("1x1x4", "--zero-stage 1"),
        ("2x1x2", "--zero-stage 0 --residual-mode ladder --sequence-parallel --recompute-granularity full"),
        ("1x1x2", "--zero-stage 2"),
        ("2x1x2", "--zero-stage 1 --optimizer muon"),
        ("2x2x1", "--zero-stage 1 --residual-mode ladder --qk-layernorm"),
        ("1x2x2", "--zero-stage 1 --residual-mode ladder --tie-embeddings"),
        ("1x1x4", "--zero-stage 1 --residual-mode ladder --num-experts 4 --expert-model-parallel-size 2"),
        ("1x3x1", "--zero-stage 0 --residual-mode ladder"),
        ("1x2x1", "--zero-stage 0 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    ],
)
def test_thawed_parameters_train_on_with_their_moments(
    gloo_pools: GlooPools,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    layout: str,
    words: str,
    bucket_numbers: int,
) -> None:
    config = tmp_path / "buckets.json"
    config.write_text(f'{{"zero_optimization": {{"reduce_bucket_size": {bucket_numbers}}}}}')
    words = f"{words} --train-iters 6 --deepspeed_config {config}"
    check_schedule(gloo_pools, monkeypatch, tmp_path, layout, words, THAWED)


def check_schedule(
    gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch, save: Path, layout: str, words: str, schedule: Schedule
) -> Weights:
    """Compare a run with a plain model that has the same parameters frozen in each step; return the initial weights."""
    # torch's Muon orthogonalises in bf16.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    world, argv = launch_of(layout, words, "--global-batch-size 8")
    argv = [*RECIPE, *argv]
    run = run_of(argv, world)
    batches = steps_of_batches(run.training.train_iters, 4)
    weights = make_weights(ReferenceConfig.like(run.model), seed=1, dtype=torch.float32)
    expected, final = train_with_torch(run, weights, batches, schedule)
    results = gloo_pools(world).run(train_frozen, argv, weights, batches, schedule, save)
    check_outcome(results, expected, dict(final))
    return weights


def gradient_bytes(argv: list[str], frozen: str) -> tuple[int, int, int]:
    """On each rank: the bytes of gradients before and after parameters are frozen, and how many still train."""
    trainer = build_trainer_here(argv)
    optimizer = trainer.engine.optimizer

    def held() -> int:
        storages = [gradient.untyped_storage() for _, gradient in optimizer._sums.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    everything_trains = held()
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    trainer.engine.follow_frozen()
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    return everything_trains, held(), trained


@pytest.mark.parametrize("words", ["--zero-stage 0", "--zero-stage 1", "--zero-stage 1 --bf16 --optimizer muon"])
@pytest.mark.parametrize("frozen", [r"embedding|layers\.[0-3]\.", r"embedding|layers\.[0246]\."])
def test_frozen_parameters_need_no_memory_for_gradients(gloo_pools: GlooPools, words: str, frozen: str) -> None:
    """Half of eight layers, the lower or every other; one rank, and two that share a bucket."""
    for ranks in (1, 2):
        argv = [*RECIPE, *f"--num-layers 8 --global-batch-size 4 {words}".split()]
        for before, after, trained in gloo_pools(ranks).run(gradient_bytes, argv, frozen):
            # Buckets are padded.
            assert 0 <= after - 4 * trained <= 4 * 20 * ranks
            assert 0.45 * before < after < 0.55 * before


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
        (2, f"{DELTA} --residual-mode ladder --tensor-model-parallel-size 2"),
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
