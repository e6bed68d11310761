"""NVIDIA's apex is recognised by its contents, not by its name."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine.optimizer import Updates, build_optimizer
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.errors import UserError
from megatron_ladder.model.operations import Operations, find_in_apex, select_operations

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def unrelated_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a stand-in for the unrelated PyPI package apex: it imports, but lacks NVIDIA's modules."""
    for name in ("apex", "apex.optimizers", "apex.normalization", "apex.normalization.fused_layer_norm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_unrelated_package_is_reported(unrelated_apex: None) -> None:
    found, reason = find_in_apex("apex.optimizers", "FusedAdam", "amp_C", CUDA)
    assert found is None and "it is not NVIDIA's" in reason
    with pytest.raises(UserError, match="--norm-implementation apex: .* not NVIDIA's.*use --norm-implementation torch"):
        select_operations("apex", "false", CUDA)
    operations, description = select_operations("auto", "false", CUDA)
    assert operations == Operations() and "not NVIDIA's" in description


def test_apex_is_never_used_on_a_cpu(unrelated_apex: None) -> None:
    group = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.1}]
    optimizer, description = build_optimizer(group, OptimizerConfig(lr=0.1), Updates(CPU))
    assert type(optimizer) is torch.optim.AdamW and description == "AdamW by torch"
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95) and optimizer.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(UserError, match="CUDA device"):
        build_optimizer(group, OptimizerConfig(lr=0.1, optimizer_implementation="apex"), Updates(CPU))


def test_a_resumed_apex_continues_the_step_count_of_its_groups() -> None:
    apex = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    model: Any = torch.nn.Module()
    optimizer = ShardedOptimizer(model, [{"params": []}], ProcessMesh.single(), torch.float32, bucket_numbers=1)
    optimizer.base = apex
    optimizer.set_steps_taken(7)
    assert apex.param_groups[0]["step"] == optimizer.steps_taken() == 7
