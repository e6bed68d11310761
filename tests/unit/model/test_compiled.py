"""Compiled operations in one process, where the norm adds the output before it."""

import importlib.util
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations, compile_operations, require_compiler, select_operations
from megatron_ladder.model.stack import StackOptions
from tests.helpers.runs import errors_of
from tests.unit.generate.tiny_model import MODELS, PROMPTS, reference_of, tiny_config, tiny_engine, tiny_model

BACKEND = "aot_eager"


def counting(operations: Operations, counted: list[int]) -> Operations:
    """Collects the widths of what norms add."""

    def counting_add_norm(x: Tensor, output: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        counted.append(output.shape[-1])
        return operations.add_norm(x, output, weight, epsilon)

    return replace(operations, add_norm=counting_add_norm)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes", "recompute", "additions"),
    [
        # The first of six sub-blocks reads the embedding only.
        ("standard", {}, 0, 5),
        ("ladder", {"qk_layernorm": True}, 3, 0),
    ],
)
def test_gradients_equal_those_of_the_uncompiled_model(
    name: str, changes: dict[str, Any], recompute: int, additions: int
) -> None:
    torch.compiler.reset()
    config = tiny_config(**(MODELS[name] | changes))
    counted: list[int] = []
    compiled = counting(compile_operations(Operations(), BACKEND), counted)
    models = [
        LanguageModel(
            config,
            ProcessMesh.single(),
            StackOptions(recompute_layers=recompute, operations=operations),
            dtype=torch.float64,
            seed=1,
        )
        for operations in (Operations(), compiled)
    ]
    tokens = torch.arange(24).view(2, 12)
    losses = [model(tokens, tokens.flip(1)) for model in models]
    assert counted == [config.hidden_size] * additions
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for loss in losses:
        loss.backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-11 * a.grad.abs().max()


@pytest.mark.long
def test_generation_equals_that_of_the_uncompiled_model() -> None:
    torch.compiler.reset()
    config = tiny_config(**MODELS["hybrid"])
    weights, _ = reference_of(config)
    requests = [GenerationRequest(prompt, 6, SamplingParameters(temperature=0.0)) for prompt in PROMPTS]
    model = tiny_model(config, weights, operations=compile_operations(Operations(), BACKEND))
    compiled = GenerationEngine(model, ProcessMesh.single())
    plain = tiny_engine(config, weights)
    assert [g.ids for g in compiled.generate(requests)] == [g.ids for g in plain.generate(requests)]


def test_kernels_do_not_depend_on_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose measurements differ would round differently."""
    torch.compiler.reset()
    settings: list[dict[str, Any]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any], **_: Any) -> Any:
        settings.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", record)
    operations, x = compile_operations(Operations()), torch.ones(2, 4)
    operations.norm(x, torch.ones(4), 1e-5)
    operations.add_norm(x, x, torch.ones(4), 1e-5)
    operations.swiglu(x)
    assert settings == [{"deterministic": True}] * 3


def test_sub_blocks_are_compiled_on_cuda_where_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    programs = {"gcc", "g++"}
    find: Any = importlib.util.find_spec
    installed: Any = {"triton": True}
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda program: program if program in programs else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *given: installed.get(name) or find(name, *given))
    monkeypatch.setattr(sysconfig, "get_path", lambda *given: str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert select_operations("auto", "auto", cpu)[1] == "torch"
    assert select_operations("auto", "auto", cuda)[1] == "torch, compiled"
    assert select_operations("torch", "auto", cuda)[1] == "torch, compiled"
    assert select_operations("torch", "false", cuda)[1] == "torch"
    with pytest.raises(UserError, match="--norm-implementation apex"):
        select_operations("apex", "auto", cuda)

    def problem(device: torch.device) -> str:
        (message,) = errors_of(require_compiler, "--flag", device)
        assert message.startswith("--flag: ") and message.endswith(", or leave --flag out")
        return message.removeprefix("--flag: ").removesuffix(", or leave --flag out")

    programs -= {"gcc"}
    require_compiler("--flag", cpu)
    assert problem(cuda) == "no C compiler was found (gcc, clang or $CC): install one"
    assert select_operations("torch", "auto", cuda)[1] == f"torch (not compiled: {problem(cuda)})"
    monkeypatch.setenv("CC", "g++")
    require_compiler("--flag", cuda)
    (tmp_path / "Python.h").unlink()
    assert problem(cuda) == problem(cpu) and problem(cpu).startswith(f"{tmp_path}/Python.h is missing: install ")
