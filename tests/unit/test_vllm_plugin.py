"""The parts of the vLLM plugin and of its tests that work without vLLM; vllm_plugin/test.sh tests the rest."""

import ast
import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from megatron_ladder.blueprint.wiring import RESIDUAL_MODES
from megatron_ladder.convert.hf_module import CONFIGURATION
from megatron_ladder.convert.hf_module.configuration_megatron_ladder import MegatronLadderConfig
from tests.helpers.commands import REPOSITORY_ROOT
from vllm_plugin.tests import models

# They run here as well.
from vllm_plugin.tests.test_benchmark import test_wirings_without_their_experts_are_refused  # noqa: F401

PLUGIN = REPOSITORY_ROOT / "vllm_plugin"
FILES = sorted((*PLUGIN.glob("*.py"), *PLUGIN.glob("megatron_ladder_vllm/*.py"), *PLUGIN.glob("tests/*.py")))
OURS = ("ladder_lab", "megatron_ladder", "tests", "vllm_plugin")


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def defined(module: str) -> set[str]:
    """Return the names at the top of a module of this repository, and the modules in it, without importing it."""
    if module.endswith(f".{CONFIGURATION}"):
        module = f"megatron_ladder.convert.hf_module.{CONFIGURATION}"
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    names = {path.stem for folder in spec.submodule_search_locations or () for path in Path(folder).glob("*")}
    if module == "vllm_plugin.megatron_ladder_vllm":
        # Copied by its setup.py, so absent in a clone until then.
        names.add(CONFIGURATION)
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body if spec.origin else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return names


def missing_names(path: Path) -> Iterator[str]:
    """Yield what a file of the plugin imports from this repository, or reads from such a module, and is not there."""
    modules: dict[str, str] = {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").replace("_vllm", "").split(".")[0] in OURS:
            module = (node.module or "").replace("megatron_ladder_vllm", "vllm_plugin.megatron_ladder_vllm")
            names = defined(module)
            yield from (f"{path.name}: {module}.{alias.name}" for alias in node.names if alias.name not in names)
            modules |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if is_module(module) and node.attr not in defined(module):
                yield f"{path.name}: {module}.{node.attr}"


def is_module(name: str) -> bool:
    parent, _, stem = name.rpartition(".")
    spec = importlib.util.find_spec(parent)
    return (
        any((Path(folder) / f"{stem}.py").exists() for folder in spec.submodule_search_locations or ())
        if spec
        else False
    )


def test_all_that_the_plugin_and_its_tests_import_from_this_repository_exists() -> None:
    assert len(FILES) > 15
    assert [name for path in FILES for name in missing_names(path)] == []


def test_the_plugin_reads_keys_that_the_configuration_has() -> None:
    config = MegatronLadderConfig()
    read = {
        node.attr
        for path in (PLUGIN / "megatron_ladder_vllm").glob("[dim]*.py")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config"
    }
    assert len(read) > 20
    assert [name for name in sorted(read) if not hasattr(config, name)] == []


def test_the_plugin_is_tested_with_every_wiring() -> None:
    tested = {changes.get("residual_mode", "standard") for changes in (models.WIRINGS | models.EXPERTS).values()}
    assert tested == {*RESIDUAL_MODES} - {"desync"}


@pytest.mark.long
def test_the_models_and_references_of_the_tests_of_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "WIRINGS", {name: models.WIRINGS[name] for name in ("standard", "ladder", "hybrid")})
    monkeypatch.setattr(models, "EXPERTS", {"experts-farskip": models.EXPERTS["experts-farskip"]})
    monkeypatch.setattr(models, "VARIANTS", {})
    monkeypatch.setattr(models, "EXPERT_VARIANTS", {})
    monkeypatch.setattr(models, "PLAIN", {"hy3": models.PLAIN["hy3"]})
    monkeypatch.setattr(models, "HEADS", ("experts-farskip",))
    monkeypatch.setattr(models, "HEADS_OF_VLLM", {"delta-ladder": models.WIRINGS["ladder"]})
    monkeypatch.setattr(models, "make_prompts", lambda: [[3, 1, 4]])
    models.write_everything(tmp_path)
    references = json.loads((tmp_path / "references.json").read_text())
    assert references["standard"] == references["llama"]
    assert {len(tokens) for (tokens,) in references.values()} == {models.NEW_TOKENS}
    assert len({tuple(tokens) for (tokens,) in references.values()}) == len(references) - 1
    drafts = json.loads((tmp_path / "drafts.json").read_text())
    assert {name: len(of_model) for name, (of_model,) in drafts.items()} == dict.fromkeys(
        ("experts-farskip", "delta-ladder"), models.NEW_TOKENS + 2
    )
    heads = [f"head-{name}" for name in (*drafts, "delta-ladder-ours")]
    for name in (*references, *heads, "desync", "standard-int8", "llama-int8"):
        assert (tmp_path / name / "model.safetensors").is_file()
    for name in models.ADAPTED:
        assert (tmp_path / f"adapter-{name}" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "ladder" / "tokenizer.json").is_file()


def test_sums_of_no_tokens_in_flight_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers without elements all have the address 0."""
    vllm = MagicMock()
    vllm.forward_context.in_piecewise_cudagraph.return_value = False
    names = ("distributed.parallel_state", "forward_context", "model_executor.layers.layernorm", "utils.torch_utils")
    for name in names:
        parts = ["vllm", *name.split(".")]
        module = vllm
        for depth, part in enumerate(parts, start=1):
            module = module if depth == 1 else getattr(module, part)
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), module)
    spec = importlib.util.spec_from_file_location("in_flight", PLUGIN / "megatron_ladder_vllm" / "in_flight.py")
    assert spec is not None and spec.loader is not None
    in_flight = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(in_flight)
    reduces, waited = in_flight.AllReduces(MagicMock()), list[int]()

    def launch(partial: torch.Tensor) -> tuple[torch.Tensor, MagicMock]:
        number = partial.numel()
        return 2 * partial, MagicMock(wait=lambda: waited.append(number))

    reduces.transport = launch
    buffers = [reduces.start(torch.ones(tokens, 3)) for tokens in (0, 2, 0, 1)]
    for buffer in buffers:
        reduces.wait(buffer)
    assert waited == [6, 3] and [buffer.shape[0] for buffer in buffers] == [0, 2, 0, 1]
