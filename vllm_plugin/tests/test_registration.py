"""What the entry point registers, and which models and settings are rejected."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_models_of_vllm_are_unaffected_by_the_plugin(
    model: str, models: Path, references: Any, here: Any, plain: Any
) -> None:
    from vllm_plugin.tests import engines

    for tokens, _ in (here(engines.tokens, models / model, {}), *plain.run(engines.tokens, models / model, {})):
        assert tokens == references[model]
    assert plain.run(registered_types) == [(False, False)]
    assert here(registered_types) == (True, True)


def registered_types() -> tuple[bool, bool]:
    """Return whether vLLM knows the model, and whether transformers knows its configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm import ModelRegistry

    return "MegatronLadderForCausalLM" in ModelRegistry.get_supported_archs(), "megatron_ladder" in CONFIG_MAPPING


def test_another_version_of_vllm_is_rejected(plain: Any) -> None:
    ((messages, known),) = plain.run(register_with_version, "0.33.1")
    (message,) = messages
    assert "supports vLLM 0.32, but this is vLLM 0.33.1" in message and "install vllm==0.32.*" in message
    assert known == (False, False)


def register_with_version(version: str) -> tuple[list[str], tuple[bool, bool]]:
    """Return what the plugin logs in another version of vLLM, and `registered_types`."""
    import vllm
    from megatron_ladder_vllm import register

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log, actual = logging.getLogger("vllm.plugins.megatron_ladder"), vllm.__version__
    log.addHandler(handler)
    vllm.__version__ = version
    try:
        register()
    finally:
        vllm.__version__ = actual
        log.removeHandler(handler)
    return messages, registered_types()


def test_desync_is_rejected_by_name(models: Path, here: Any) -> None:
    with pytest.raises(ValueError, match="residual_mode 'desync': the plugin cannot serve this wiring"):
        here(engine_config, models / "desync", None)


def test_every_lane_needs_a_rank(models: Path, here: Any) -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size 1: the model has 2 lanes .*: use 2"):
        here(engine_config, models / "lanes", None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ladder_layers": 2, "lanes": 2}, "--pipeline-parallel-size 2: .* 2 lanes .*: use 1"),
        ({"num_experts": 8, "expert_layers": [1]}, "--data-parallel-size 2: .* 8 experts; use 1"),
    ],
)
def test_lanes_cannot_be_staged_and_experts_not_replicated(keys: dict[str, Any], message: str) -> None:
    from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig
    from megatron_ladder_vllm.deployment import DeploymentRules

    model = SimpleNamespace(hf_config=MegatronLadderConfig(**keys))
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    config: Any = SimpleNamespace(model_config=model, parallel_config=parallel)
    with pytest.raises(ValueError, match=message):
        DeploymentRules.verify_and_update_config(config)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_piecewise_graphs_are_rejected(mode: str, models: Path, here: Any) -> None:
    with pytest.raises(ValueError, match=f"cudagraph_mode {mode}: .* use FULL_DECODE_ONLY"):
        here(engine_config, models / "ladder", mode)


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


def engine_config(folder: Path, graphs: str | None) -> Any:
    """Return the configuration of an engine, as vLLM's programs make it."""
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128)
    if graphs is not None:
        arguments.compilation_config = CompilationConfig(cudagraph_mode=graphs)
    return arguments.create_engine_config()


def test_full_graphs_are_the_default(models: Path) -> None:
    from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig
    from megatron_ladder_vllm.deployment import DeploymentRules
    from vllm.config import CompilationConfig, CUDAGraphMode

    compilation = CompilationConfig()
    model = SimpleNamespace(hf_config=MegatronLadderConfig())
    config: Any = SimpleNamespace(compilation_config=compilation, model_config=model, parallel_config=None)
    DeploymentRules.verify_and_update_config(config)
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
