"""What the entry point registers, and which models and settings are rejected."""

import ast
import importlib
import operator
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase
from unittest.mock import Mock, patch

import pytest

from vllm_plugin.tests.models import PLAIN

PLUGIN = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("model", ["llama", *PLAIN])
def test_models_of_vllm_are_unaffected_by_the_plugin(
    model: str, models: Path, references: Any, one: Any, plain: Any
) -> None:
    from vllm_plugin.tests import engines

    for tokens, _ in (*one(engines.tokens, models / model, {}), *plain(engines.tokens, models / model, {})):
        assert tokens == references[model]
    assert plain(registered_types) == [(False, False)]
    assert one(registered_types) == [(True, True)]


def registered_types() -> tuple[bool, bool]:
    """Return whether vLLM knows the model, and whether transformers knows its configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm import ModelRegistry

    return "MegatronLadderForCausalLM" in ModelRegistry.get_supported_archs(), "megatron_ladder" in CONFIG_MAPPING


def test_another_version_of_vllm_is_rejected(plain: Any) -> None:
    ((messages, known),) = plain(register_with_version, "0.33.1")
    (message,) = messages
    assert "supports vLLM 0.32, but this is vLLM 0.33.1" in message and "run: pip install 'vllm==0.32.*'" in message
    assert known == (False, False)


def register_with_version(version: str) -> tuple[list[str], tuple[bool, bool]]:
    """Return what the plugin logs in another version of vLLM, and `registered_types`."""
    import vllm
    from megatron_ladder_vllm import register

    log = "vllm.plugins.megatron_ladder"
    with patch.object(vllm, "__version__", version), TestCase().assertLogs(log) as logged:
        register()
    return [record.getMessage() for record in logged.records], registered_types()


_DRAFT = {"model": "llama", "num_speculative_tokens": 2}
_HEAD = {"method": "mtp", "num_speculative_tokens": 1}
_OTHER = {"model": "head-soft-cap"}
_LAYERWISE = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"use_layerwise": True},
}
_PCIE = {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}
_TF32 = {"VLLM_FLOAT32_MATMUL_PRECISION": "high"}
_SHORT = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
REJECTED: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    ("desync", {}, {}, "residual_mode 'desync': the plugin cannot serve this wiring"),
    ("lanes", {}, {}, "--tensor-parallel-size 1: the model has 2 lanes .*: use 2"),
    ("lanes", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size 2: .*: use 1"),
    ("delta-ladder", {"tensor_parallel_size": 4}, {}, "--tensor-parallel-size 4: .* 2 key heads .*: use a divisor"),
    ("delta-ladder", {"dtype": "float16"}, {}, "--dtype torch.float16: on a CPU, .* use --dtype bfloat16"),
    ("experts-ladder", {"data_parallel_size": 2}, {}, "--data-parallel-size 2: .* 6 experts; use 1"),
    ("experts-ladder", {"hf_overrides": {"swiglu_limit": 5.0}}, {}, "swiglu_limit 5.0, .* the activation of gpt-oss"),
    ("experts-ladder", {}, _TF32, "VLLM_FLOAT32_MATMUL_PRECISION=high: the router would choose other experts"),
    (
        "ladder",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {},
        "--decode-context-parallel-size 2: its collectives .*; use 1",
    ),
    (
        "ladder",
        {"prefill_context_parallel_size": 2},
        {},
        "--prefill-context-parallel-size 2: its collectives .*; use 1",
    ),
    ("ladder", {"enable_dbo": True}, {}, "--enable-dbo or --ubatch-size: two halves of a batch"),
    ("ladder", {"enable_lora": True, "fully_sharded_loras": True}, {}, "--fully-sharded-loras: its collectives"),
    ("ladder", {"runner": "pooling"}, {}, "--runner pooling: .* use --runner generate"),
    (
        "ladder",
        {"kv_transfer_config": _LAYERWISE},
        {},
        "--kv-transfer-config LMCacheConnectorV1: .* use_layerwise false",
    ),
    ("ladder", {"speculative_config": _DRAFT | {"method": "eagle3"}}, {}, "--speculative-config method eagle3: .* use"),
    ("ladder", {"speculative_config": _DRAFT | {"method": "draft_model"}}, _PCIE, "PCIE_IPC=1: .* draft model"),
    ("ladder", {"speculative_config": _HEAD}, {}, "method mtp: the model has no drafting head .* without --drop-mtp"),
    ("head-ladder", {"speculative_config": _HEAD | _OTHER}, {}, "model .*: a drafting head drafts for its own model"),
    ("head-ladder", {"speculative_config": _HEAD, "pipeline_parallel_size": 2}, {}, "size 2: drafting heads .*; use 1"),
    (
        "head-delta-ladder",
        {"speculative_config": _HEAD, "enable_prefix_caching": True, "dtype": "bfloat16"},
        {},
        "--speculative-config with --enable-prefix-caching: .*; use --no-enable-prefix-caching",
    ),
    (
        "ladder",
        {"compilation_config": {"splitting_ops": ["vllm::unified_attention"]}},
        {},
        "splitting_ops: .*; omit it",
    ),
    ("ladder", {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {}, "PIECEWISE: .* FULL_DECODE_ONLY"),
    (
        "ladder",
        {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
        {},
        "FULL_AND_PIECEWISE: .* or use FULL",
    ),
    ("latent-farskip", {"enable_lora": True}, {}, "--enable-lora: .* adapters of kv_b_proj; merge them"),
    ("yarn", {"hf_overrides": {"rope_parameters": _SHORT}}, {}, "--max-model-len 128: .* has 64 positions"),
    ("ladder", {"hf_overrides": {"overlap_all_reduces": 0}}, {}, "overlap_all_reduces 0: expected true or false"),
]


@pytest.mark.parametrize(
    ("model", "options", "variables", "message"),
    REJECTED,
    ids=[f"{row[0]}-{list({**row[1], **row[2]})}" for row in REJECTED],
)
def test_rejections_name_the_cause_before_weights_are_read(
    model: str, options: dict[str, Any], variables: dict[str, str], message: str, models: Path, one: Any, tmp_path: Path
) -> None:
    draft = options.get("speculative_config", {})
    for name in {model, draft.get("model", model)}:
        (tmp_path / name).mkdir()
        shutil.copy(models / name / "config.json", tmp_path / name)
    if "model" in draft:
        options = options | {"speculative_config": draft | {"model": str(tmp_path / draft["model"])}}
    ((found, seconds),) = one(rejection, tmp_path / model, options, variables)
    assert re.search(message, found)
    assert seconds < 20


def rejection(folder: Path, options: dict[str, Any], variables: dict[str, str]) -> tuple[str, float]:
    """Return why vLLM's programs cannot make the configuration of an engine, and the seconds until they say so."""
    from vllm import envs

    began = time.monotonic()
    envs.disable_envs_cache()
    with patch.dict(os.environ, variables), pytest.raises(ValueError) as raised:
        engine_arguments(folder, options).create_engine_config()
    envs.disable_envs_cache()
    return str(raised.value), time.monotonic() - began


def engine_arguments(folder: Path, options: dict[str, Any]) -> Any:
    """Return the arguments of an engine, as a command line gives them."""
    from vllm.config import CompilationConfig, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    classes = {"compilation_config": CompilationConfig, "kv_transfer_config": KVTransferConfig}
    typed = {name: classes[name](**value) if name in classes else value for name, value in options.items()}
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128, **typed)


@pytest.mark.parametrize(
    ("options", "flash_attention", "graphs"),
    [
        ({"dtype": "bfloat16"}, 3, "FULL"),
        ({"dtype": "bfloat16"}, 2, "FULL_DECODE_ONLY"),
        ({"dtype": "float32"}, 3, "FULL_DECODE_ONLY"),
        ({"dtype": "bfloat16", "attention_backend": "TRITON_ATTN"}, 3, "FULL_DECODE_ONLY"),
        ({"dtype": "bfloat16", "compilation_config": {"cudagraph_mode": "NONE"}}, 3, "NONE"),
        ({"dtype": "bfloat16", "optimization_level": 0}, 3, None),
    ],
)
def test_graphs_contain_whole_steps(
    options: dict[str, Any], flash_attention: int, graphs: str | None, models: Path, one: Any
) -> None:
    assert one(selected_graphs, models / "ladder", options, flash_attention) == [(graphs, [])]


@pytest.mark.parametrize("model", ["cached-latents", "delta-ladder"])
def test_graphs_of_other_caches_contain_decode_steps(model: str, models: Path, one: Any) -> None:
    assert one(selected_graphs, models / model, {"dtype": "bfloat16"}, 3) == [("FULL_DECODE_ONLY", [])]


@pytest.mark.parametrize(
    ("model", "on_cpu", "variables", "expected"),
    [
        ("ladder", False, {}, (False, 32)),
        ("latent-farskip", True, {}, (False, 32)),
        ("latent-farskip", False, {}, (True, 48)),
        ("latent-farskip", False, {"VLLM_MLA_DISABLE": "1"}, (False, 32)),
        ("latent-ladder", True, {}, (False, 64)),
    ],
)
def test_latents_are_cached_where_there_are_kernels(
    model: str, on_cpu: bool, variables: dict[str, str], expected: tuple[bool, int], models: Path, one: Any
) -> None:
    assert one(cached_widths, models / model, on_cpu, variables) == [expected]


def cached_widths(folder: Path, on_cpu: bool, variables: dict[str, str]) -> tuple[bool, int]:
    """Return whether vLLM caches latents, and the width of what it caches."""
    from megatron_ladder_vllm import deployment
    from vllm import envs

    envs.disable_envs_cache()
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: not on_cpu)
    with patch.dict(os.environ, variables), patch.object(deployment, "current_platform", platform):
        config = engine_arguments(folder, {}).create_model_config()
        found = config.use_mla, config.get_head_size()
    envs.disable_envs_cache()
    return found


def selected_graphs(folder: Path, options: dict[str, Any], flash_attention: int) -> tuple[str | None, list[str]]:
    """Return the mode of CUDA graphs, and where a graph ends, that the plugin selects on a GPU.

    `flash_attention` is the newest version for the GPU.
    """
    from megatron_ladder_vllm import deployment

    selected: list[Any] = []
    rules = deployment.DeploymentRules.verify_and_update_config

    def record(vllm_config: Any) -> None:
        rules(vllm_config)
        selected.append(vllm_config.compilation_config)
        mode = selected[0].cudagraph_mode
        selected[:] = [(None if mode is None else mode.name, selected[0].splitting_ops)]

    with (
        patch.object(deployment.DeploymentRules, "verify_and_update_config", record),
        patch.object(deployment, "current_platform", SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)),
        patch("vllm.v1.attention.backends.fa_utils.get_flash_attn_version", lambda **_: flash_attention),
    ):
        engine_arguments(folder, options).create_engine_config()
    (found,) = selected
    return found


def test_the_page_of_the_plugin_lists_what_it_uses_of_vllm() -> None:
    imported = set[tuple[str, str]]()
    for path in (PLUGIN / "megatron_ladder_vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                imported.update((node.module, alias.name) for alias in node.names)
    rows = re.findall(r"^\| `(vllm[\w.]*)` \| (.*?) \|", (PLUGIN / "README.md").read_text(), re.MULTILINE)
    listed = [(module, name) for module, names in rows for name in re.findall(r"`(.*?)`", names)]
    for module, name in listed:
        assert operator.attrgetter(name)(importlib.import_module(module)) is not None
    assert {(module, name.partition(".")[0]) for module, name in listed} == imported


@pytest.mark.parametrize("tokens", [1, 3])
def test_vllm_never_falls_back_to_piecewise_graphs(tokens: int) -> None:
    """vLLM falls back when it has seen what the attention backend can; it is asked for steps of so many tokens."""
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    resolved = {}
    for support in set(AttentionCGSupport) - {AttentionCGSupport.NEVER}:
        config = CompilationConfig(mode=3, cudagraph_mode="FULL", splitting_ops=[])
        resolved[support] = config.resolve_cudagraph_mode_and_sizes(support, "", tokens, use_v2_model_runner=True)
    assert len(resolved) == 3
    assert resolved.pop(AttentionCGSupport.ALWAYS) == CUDAGraphMode.FULL
    assert resolved[AttentionCGSupport.UNIFORM_BATCH] == CUDAGraphMode.FULL_DECODE_ONLY
    assert set(resolved.values()) <= {CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE}


def test_attention_without_full_graphs_is_rejected_before_weights_are_read(
    models: Path, one: Any, tmp_path: Path
) -> None:
    shutil.copy(models / "ladder" / "config.json", tmp_path)
    ((found, seconds),) = one(captured_on_cpu, tmp_path)
    assert re.search("attention backend CPU_ATTN: it has no full CUDA graphs, .* pass --compilation-config", found)
    assert seconds < 20


def captured_on_cpu(folder: Path) -> tuple[str, float]:
    """Return why an engine whose steps are captured cannot start on a CPU, whose attention has no graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform

    from vllm_plugin.tests import engines

    update = CpuPlatform.check_and_update_config

    def update_and_capture(_platform: Any, vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL

    began = time.monotonic()
    with patch.object(CpuPlatform, "check_and_update_config", update_and_capture), pytest.raises(ValueError) as raised:
        engines.build(folder)
    return str(raised.value), time.monotonic() - began


def test_a_fallback_to_piecewise_graphs_is_rejected() -> None:
    """vLLM falls back after it has seen the attention backend and the connectors."""
    import torch
    from megatron_ladder_vllm.in_flight import AllReduces
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context

    group: Any = Mock(device=torch.device("cpu"), unique_name="none")
    context: Any = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    with override_forward_context(context), pytest.raises(RuntimeError, match='"cudagraph_mode": "NONE"'):
        AllReduces(group).start(torch.ones(2, 4))
