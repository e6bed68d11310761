"""Tiny models, and Hugging Face directories of the same weights written without the converter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.small_files import hf_config, module_files
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections, state_sections
from tests.helpers.hugging_face import hf_name
from tests.helpers.sharded import small_model

VOCAB = 61
EXPERTS: dict[str, Any] = {"num_experts": 6, "moe_ffn_hidden_size": 20, "moe_layers": (1, 2)}
GLM = EXPERTS | {
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 3,
    "moe_router_group_topk": 2,
    "rotary_percent": 0.5,
    "qk_layernorm": True,
}


def tiny_config(**changes: Any) -> ModelConfig:
    """Return a model of six layers with two query heads per key head."""
    return small_model(**({"num_layers": 6, "vocab_size": VOCAB} | changes))


def random_model(config: ModelConfig) -> LanguageModel:
    """Return our model with weights large enough that every sub-block matters."""
    model = LanguageModel(config, ProcessMesh.single())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
        for state, _ in state_sections(model):
            state.copy_(torch.randn(state.shape, generator=generator) * 0.15)
    return model


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return canonical weights by transformers' names, which has one tensor for each matrix of an expert."""
    found = {}
    for name, weight in weights.items():
        for expert, matrix in enumerate(weight if ".experts." in name else [weight]):
            found[hf_name(name).replace(".experts.", f".experts.{expert}.")] = matrix.clone()
    return found


def write_hf(model: LanguageModel, folder: Path) -> None:
    """Write a Hugging Face directory of the model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model.config, dtype="float32")))
    for name, content in module_files(model.config).items():
        (folder / name).write_bytes(content)
    every = (*parameter_sections(model), *state_sections(model))
    tensors = split_experts({one.name: one.view(tensor).detach() for tensor, sections in every for one in sections})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def opened(folder: Path, **options: Any) -> Any:
    """Open a directory as a user does; every weight must be in it."""
    module, report = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return module.eval()
