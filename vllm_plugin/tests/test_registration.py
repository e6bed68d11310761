"""What the entry point registers, and which models and settings are rejected."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import pytest


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
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
    assert "supports vLLM 0.32, but this is vLLM 0.33.1" in message and "install vllm==0.32.*" in message
    assert known == (False, False)


def register_with_version(version: str) -> tuple[list[str], tuple[bool, bool]]:
    """Return what the plugin logs in another version of vLLM, and `registered_types`."""
    import vllm
    from megatron_ladder_vllm import register

    log = "vllm.plugins.megatron_ladder"
    with patch.object(vllm, "__version__", version), TestCase().assertLogs(log) as logged:
        register()
    return [record.getMessage() for record in logged.records], registered_types()


@pytest.mark.parametrize(
    ("model", "graphs", "message"),
    [
        ("desync", None, "residual_mode 'desync': the plugin cannot serve this wiring"),
        ("lanes", None, "--tensor-parallel-size 1: the model has 2 lanes .*: use 2"),
        ("ladder", "PIECEWISE", "cudagraph_mode PIECEWISE: .* use FULL_DECODE_ONLY"),
        ("ladder", "FULL_AND_PIECEWISE", "cudagraph_mode FULL_AND_PIECEWISE: .* use FULL_DECODE_ONLY"),
    ],
)
def test_rejections_name_the_cause(model: str, graphs: str | None, message: str, models: Path, one: Any) -> None:
    (found,) = one(rejection, models / model, graphs)
    assert re.search(message, found)


def rejection(folder: Path, graphs: str | None) -> str:
    """Return why vLLM's programs cannot make the configuration of an engine."""
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128)
    if graphs is not None:
        arguments.compilation_config = CompilationConfig(cudagraph_mode=graphs)
    try:
        arguments.create_engine_config()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ladder_layers": 2, "lanes": 2}, "--pipeline-parallel-size 2: .* 2 lanes .*: use 1"),
        ({"num_experts": 8, "expert_layers": [1]}, "--data-parallel-size 2: .* 8 experts; use 1"),
    ],
)
def test_lanes_cannot_be_staged_and_experts_not_replicated(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verified(keys)


def test_full_graphs_are_the_default() -> None:
    from vllm.config import CUDAGraphMode

    assert verified({}).cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


def verified(keys: dict[str, Any]) -> Any:
    """Return how a model with these keys is compiled for two ranks, stages and replicas."""
    from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig
    from megatron_ladder_vllm.deployment import DeploymentRules
    from vllm.config import CompilationConfig

    model = SimpleNamespace(hf_config=MegatronLadderConfig(**keys))
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    config: Any = SimpleNamespace(model_config=model, parallel_config=parallel, compilation_config=CompilationConfig())
    DeploymentRules.verify_and_update_config(config)
    return config.compilation_config


def test_a_fallback_to_piecewise_graphs_is_rejected() -> None:
    """vLLM falls back after it has seen the attention backend and the connectors."""
    import torch
    from megatron_ladder_vllm.in_flight import AllReduces
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context

    group: Any = SimpleNamespace(unique_name="none", device=torch.device("cpu"), device_group=None)
    context: Any = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    with override_forward_context(context), pytest.raises(RuntimeError, match='"cudagraph_mode": "NONE"'):
        AllReduces(group).start(torch.ones(2, 4))
