"""Roles of tensors, compared with the groups, the moments and the checkpoints of trainers with Muon."""

import math
import re
from pathlib import Path

import pytest

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.memory import _stage_moments
from megatron_ladder.blueprint.specs import Role
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.convert.training_checkpoint import open_training_checkpoint
from megatron_ladder.engine.optimizer import parameter_groups
from megatron_ladder.errors import UserError
from megatron_ladder.parallel.layout import parameter_sections
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import DELTA, LATENT, RECIPE, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, save_trainer

BIASES = "--add-qkv-bias --add-attention-output-bias --add-mlp-bias --qk-layernorm"
EXPERTS = (
    "--num-experts 3 --moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
)


def role_by_name(name: str) -> Role:
    if name.endswith(".expert_bias"):
        return Role.STATE
    if name.endswith("_conv.weight"):
        return Role.CONVOLUTION
    if re.search(r"norm\.weight$|\.bias$|\.A_log$|\.dt_bias$", name):
        return Role.VECTOR
    return Role.EMBEDDING if name in ("embedding.weight", "lm_head.weight") else Role.MATRIX


def treatment_of(role: Role, weight_decay: float) -> tuple[float, bool]:
    """Return the weight decay of a role, and whether Muon updates it."""
    return {
        Role.MATRIX: (weight_decay, True),
        Role.EMBEDDING: (weight_decay, False),
        Role.CONVOLUTION: (0.0, False),
        Role.VECTOR: (0.0, False),
    }[role]


def train_and_save(argv: list[str], save: Path) -> dict[str, tuple[float, bool]]:
    """On each rank: take a step and save; return how the optimizer treats each trained tensor."""
    trainer = build_trainer_here(argv)
    (batch,) = steps_of_batches(1, 4)
    train_step(trainer, own_batches(trainer, batch), 1)
    trainer.engine.optimizer.finish_step()
    save_trainer(trainer, save, 1)
    names = {
        parameter: [section.name for section in sections] for parameter, sections in parameter_sections(trainer.model)
    }
    return {
        name: (group["weight_decay"], group["moments"] == ("exp_avg",))
        for group in parameter_groups(trainer.model, trainer.run.optimizer)
        for parameter in group["params"]
        for name in names[parameter]
    }


@pytest.mark.parametrize(
    "words",
    [
        BIASES,
        f"{LATENT} --q-lora-rank 12 --attention-output-gate --tie-embeddings",
        EXPERTS,
        f"{DELTA} --tensor-model-parallel-size 2",
        "--residual-mode desync --desync-interval 2 --tensor-model-parallel-size 2",
    ],
)
def test_trainers_treat_tensors_by_their_roles(
    gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    argv = [*RECIPE, *f"--global-batch-size 8 --optimizer muon --weight-decay 0.1 {words}".split()]
    treatments, _ = gloo_pools(2).run(train_and_save, argv, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = checkpoint.model()
    roles = {tensor.name: tensor.role for tensor in model_tensors(model)}
    assert roles == {name: role_by_name(name) for name in roles}
    trained = {name for name, role in roles.items() if role is not Role.STATE}
    assert treatments == {name: treatment_of(roles[name], 0.1) for name in trained}
    # The moments that the optimizer keeps.
    assert checkpoint.stored("exp_avg").keys() == trained
    adamw = {name for name in trained if roles[name] is not Role.MATRIX}
    assert checkpoint.stored("exp_avg_sq").keys() == adamw
    # The planner's count of them.
    stored = [checkpoint.stored(which) for which in ("exp_avg", "exp_avg_sq")]
    padding = sum(tensor.local_numel(1) - tensor.numel for tensor in model_tensors(model))
    numbers = sum(math.prod(tensor.shape) for moment in stored for tensor in moment.values())
    assert _stage_moments(model, Layout(optimizer="muon"), 0) == numbers + 2 * padding
    # What conversion expects in a checkpoint.
    with pytest.raises(UserError, match="exp_avg_sq of .*_proj.weight: found no such tensor"):
        open_training_checkpoint(tmp_path)
    monkeypatch.setattr(Checkpoint, "optimizer", "muon")
    assert open_training_checkpoint(tmp_path).model == model
