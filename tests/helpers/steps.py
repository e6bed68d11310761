"""Training steps on the ranks of a pool, compared with AdamW on a plain model, and states handed to other trainers."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.optimizers import MOMENTS
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.config.run import RunConfig
from megatron_ladder.engine.optimizer import learning_rate
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces
from tests.helpers.training import (
    TeacherInMemory,
    build_trainer_here,
    load_trainer,
    own_batches,
    run_of,
    save_trainer,
    weight_pieces,
)
from tests.reference import (
    LossAndGradients,
    MicroBatch,
    ReferenceConfig,
    Routed,
    Sight,
    Weights,
    make_weights,
    reference_gradients,
    reference_logits,
    reference_training,
)
from tests.reference.mtp import confirmed_drafts, drafting_gradients

Batch = tuple[Tensor, Tensor, Tensor]
History = list[tuple[float, ...]]
"""Loss, gradient norm and extra losses of every step."""
STEPS = 3
RECIPE = f"--train-iters {STEPS} --lr 1e-2 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2".split()
LATENT = (
    "--num-key-value-heads 1 --kv-lora-rank 16 --qk-nope-head-dim 8 --qk-rope-head-dim 4 --v-head-dim 6 "
    "--norm-epsilon 1e-3"
)
"""Latent attention, added to the sizes of the helpers' models."""
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 3 --linear-key-head-dim 6 "
    "--linear-value-head-dim 4 --linear-num-key-heads 2 --linear-num-value-heads 4"
)
"""Gated DeltaNet in two of three layers."""
GENTLE_RECIPE = [*RECIPE, "--lr", "1e-3", "--global-batch-size", "8"]


def launch_of(layout: str, *words: str) -> tuple[int, list[str]]:
    """Return the number of ranks of a layout, such as 2x1x4 for TP 2, PP 1 and DP 4, and the flags of a run in it."""
    tensor, stages, data = map(int, layout.split("x"))
    sizes = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages}"
    return tensor * stages * data, [word for flags in (*words, sizes) for word in flags.split()]


def steps_of_batches(steps: int, micro_batches: int, samples: int = 2, tokens: int = 12) -> list[list[Batch]]:
    """Masks differ from micro-batch to micro-batch, so their mean losses may not simply be averaged."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(steps):
        made.append([])
        for index in range(micro_batches):
            ids = torch.randint(0, 101, (samples, tokens + 1), generator=generator)
            mask = (torch.rand(samples, tokens, generator=generator) < 0.2 + 0.2 * index).float()
            made[-1].append((ids[:, :-1], ids[:, 1:], mask))
    return made


def take_steps(trainer: Trainer, batches: list[list[Batch]], first: int = 1) -> History:
    """On each rank: take a step with each batch, from iteration `first` on."""
    history = []
    for iteration, batch in enumerate(batches, start=first):
        result = train_step(trainer, own_batches(trainer, batch), iteration)
        history.append((result.loss, result.gradient_norm, *result.extra_losses.values()))
    return history


def train(
    argv: list[str], weights: Weights | None, batches: list[list[Batch]], teacher: TeacherInMemory | None = None
) -> tuple[History, Pieces]:
    """On each rank: what happens in every step, and the final weights."""
    trainer = build_trainer_here(argv, weights, teacher=teacher)
    return take_steps(trainer, batches), weight_pieces(trainer)


def with_extra_losses(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    targets: float,
    all_tokens: float,
    *sight: Sight,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross entropy, z-loss and balancing losses separately, and the gradients of their sum."""
    loss, gradients = reference_gradients(weights, config, tokens, labels, mask, targets, all_tokens, *sight)
    return _separate(loss, weights, config, tokens, mask, targets, all_tokens, *sight), gradients


def _separate(
    loss: Tensor,
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    mask: Tensor,
    targets: float,
    all_tokens: float,
    *sight: Sight,
) -> Tensor:
    """Return cross entropy, z-loss and balancing losses, whose sum is `loss`."""
    record: list[Routed] = []
    logits = reference_logits(weights, config, tokens, *sight, record=record)
    sums = []
    if config.z_loss_coeff:
        sums.append(config.z_loss_coeff * (logits.logsumexp(-1).square() * mask).sum() / targets)
    if config.moe_aux_loss_coeff:
        sums.append(sum(routed.auxiliary_loss for routed in record) / all_tokens)
    if config.moe_z_loss_coeff:
        sums.append(sum(routed.z_loss for routed in record) / all_tokens)
    return torch.stack([loss - sum(sums), *sums])


def with_drafting_loss(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    *batch: Any,
    total_drafting_targets: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross entropy, the loss and the share of confirmed predictions of each depth of the drafting head, and
    balancing losses separately, and all gradients."""
    total = {"total_drafting_targets": total_drafting_targets}
    (whole, of_experts, *of_head), gradients = drafting_gradients(weights, config, tokens, labels, *batch, **total)
    loss, *balancing = _separate(whole, weights, config, tokens, *batch)
    mask, _, _, *sight = batch
    confirmed = confirmed_drafts(weights, config, tokens, mask, *sight) / total_drafting_targets
    of_depths = itertools.chain.from_iterable(zip(of_head, confirmed, strict=True))
    return torch.stack([loss, *of_depths, *(one + of_experts for one in balancing)]), gradients


def plain_steps(
    argv: list[str],
    world: int,
    gradients_of: LossAndGradients = with_extra_losses,
    batches: Sequence[Sequence[MicroBatch]] | None = None,
) -> tuple[Weights, Any, History, dict[str, Tensor]]:
    """Return initial weights, batches, and what a plain model in one process makes of them, in fp64.

    That is what happens in every step, and the final weights.
    """
    run = run_of(argv, world)
    config = ReferenceConfig.like(run.model, run.training)
    weights = make_weights(config, seed=1, dtype=torch.float32)
    if config.mtp_num_layers:
        # Few likely words: otherwise, head and model would hardly ever agree.
        weights["embedding.weight" if config.tie_embeddings else "lm_head.weight"][::32] *= 4
    batches = steps_of_batches(STEPS, 4) if batches is None else batches
    expected, final = reference_training(
        {name: weight.double() for name, weight in weights.items()},
        config,
        batches,
        partial(learning_rate, run.optimizer, run.training.train_iters),
        (0.9, 0.95),
        1e-8,
        0.1,
        0.5,
        no_decay=lambda name: name.endswith(("norm.weight", ".bias", "_conv.weight", ".A_log", ".dt_bias")),
        gradients_of=gradients_of,
    )
    return weights, batches, expected, final


def torch_steps(
    run: RunConfig,
    batches: Sequence[Sequence[Batch]],
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> History:
    """Train with torch's optimizers; `loss_of` returns the sum of a micro-batch's losses."""
    groups, history = [group for optimizer in optimizers for group in optimizer.param_groups], []
    parameters = [parameter for group in groups for parameter in group["params"]]
    for iteration, batch in enumerate(batches, start=1):
        loss = torch.stack([loss_of(*micro_batch) for micro_batch in batch]).sum() / sum(b[2].sum() for b in batch)
        loss.backward()
        history.append((loss.item(), float(torch.nn.utils.clip_grad_norm_(parameters, 0.5))))
        for group in groups:
            group["lr"] = learning_rate(run.optimizer, run.training.train_iters, iteration)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return history


def check_outcome(
    results: list[tuple[History, Pieces]],
    expected: History,
    final: dict[str, Tensor],
    slack: float = 1.0,
    tolerance: float = 1e-5,
) -> None:
    """Compare what `train` returned on all ranks with `plain_steps`; `slack` multiplies the tolerances.

    Args:
        tolerance: of the history.
    """
    assert any(norm > 0.5 for _, norm, *_ in expected), "nothing was clipped, so clipping is not tested"
    for history, _ in results:
        for found, wanted in zip(history, expected, strict=True):
            assert found == pytest.approx(wanted, rel=slack * tolerance)
    assert_pieces([pieces for _, pieces in results], final, slack * 2e-4)


def interrupted(argv: list[str], batches: list[list[Batch]], save: Path, stop: int) -> tuple[History, Pieces]:
    """On each rank: the first `stop` steps in one trainer, saved; the others in a fresh one that loads."""
    trainer = build_trainer_here(argv)
    history = take_steps(trainer, batches[:stop])
    save_trainer(trainer, save, stop)
    # Another seed: nothing of the fresh trainer's own weights may be left after loading.
    fresh = build_trainer_here([*argv, "--seed", "99"])
    load_trainer(fresh, save)
    return history + take_steps(fresh, batches[stop:], stop + 1), weight_pieces(fresh)


def check_resume(gloo_pools: GlooPools, tmp_path: Path, argv: list[str], world: int) -> None:
    batches = steps_of_batches(STEPS, 4)
    whole = gloo_pools(world).run(train, argv, None, batches)
    check_same(whole, gloo_pools(world).run(interrupted, argv, batches, tmp_path / "save", STEPS - 1))


def check_same(results: Sequence[tuple[Any, Pieces]], others: Sequence[tuple[Any, Pieces]]) -> None:
    """Assert that on every rank, two trainings have bitwise the same history and the same final weights."""
    for (history, pieces), (other_history, other_pieces) in zip(results, others, strict=True):
        assert history == other_history
        for (name, _, values), (_, _, other_values) in zip(pieces, other_pieces, strict=True):
            assert torch.equal(values, other_values), name


def pass_on(argv: list[str], load: str | None, save: str, steps: int) -> int:
    """On each rank: loads a checkpoint, takes steps, and saves; returns the steps that AdamW then knows of."""
    trainer = build_trainer_here(argv if load is None else [*argv, "--seed", "99"])
    if load is not None:
        load_trainer(trainer, Path(load))
    training = trainer.run.training
    take_steps(trainer, steps_of_batches(steps, 4, training.micro_batch_size, training.seq_length))
    save_trainer(trainer, Path(save), 1)
    return trainer.engine.optimizer.steps_taken()


def everything(save: Path) -> dict[tuple[str, str], Tensor]:
    """All weights and moments of the checkpoint in a folder, whole."""
    checkpoint = Checkpoint.open(save)
    values = {}
    for kind in ("weight", *MOMENTS):
        for name, stored in checkpoint.stored(kind).items():
            shape = stored.shape
            values[name, kind] = torch.empty(shape)
            checkpoint.read(name, kind, Box.whole(shape), values[name, kind])
    return values
