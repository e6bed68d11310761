"""Compiled operations in one process, where the norm adds the output before it."""

import importlib.util
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

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


@pytest.mark.parametrize(("name", "recompute", "additions"), [("standard", 0, 5), ("ladder", 3, 0)])
def test_the_norm_adds_the_output_before_it(name: str, recompute: int, additions: int) -> None:
    """The first of six sub-blocks reads the embedding only; in a ladder, outputs arrive during the sub-block before."""
    add_norm = Mock(wraps=Operations().add_norm)
    options = StackOptions(recompute_layers=recompute, operations=replace(Operations(), add_norm=add_norm))
    model = LanguageModel(tiny_config(**MODELS[name]), ProcessMesh.single(), options, seed=1)
    tokens = torch.arange(24).view(2, 12)
    model(tokens, tokens.flip(1))
    assert add_norm.call_count == additions


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
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda program: program if program in programs else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *given: name == "triton" or find(name, *given))
    monkeypatch.setattr(sysconfig, "get_path", lambda *given: str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert select_operations("auto", "auto", cpu)[1] == "torch"
    assert select_operations("auto", "auto", cuda)[1] == "torch, compiled"
    assert select_operations("torch", "auto", cuda)[1] == "torch, compiled"
    assert select_operations("torch", "false", cuda)[1] == "torch"
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(UserError, match="--norm-implementation apex: .* not installed .* unrelated"):
        select_operations("apex", "auto", cuda)

    def problem(device: torch.device) -> str:
        (message,) = errors_of(require_compiler, "flag", device)
        assert message.startswith("--flag: ") and message.endswith(", or leave --flag out")
        return message.removeprefix("--flag: ").removesuffix(", or leave --flag out")

    programs -= {"gcc"}
    require_compiler("flag", cpu)
    assert problem(cuda) == "no C compiler was found (gcc, clang or $CC): install one"
    assert select_operations("torch", "auto", cuda)[1] == f"torch (not compiled: {problem(cuda)})"
    monkeypatch.setenv("CC", "g++")
    require_compiler("flag", cuda)
    (tmp_path / "Python.h").unlink()
    assert problem(cuda) == problem(cpu) and problem(cpu).startswith(f"{tmp_path}/Python.h is missing: install ")
