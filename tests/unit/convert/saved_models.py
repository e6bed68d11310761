"""Small models built and saved by transformers, and the command line under test."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_ladder.cli.convert_checkpoint import main

SIZES = {
    "vocab_size": 301, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
"""No layout divides the vocabulary; at T = 4 there are fewer key-value heads than ranks."""
MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


def save_model(path: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Save a random model, including random norms and biases."""
    config, model, own = MODELS[kind]
    shard_size = changes.pop("max_shard_size", "50GB")
    torch.manual_seed(0)
    built: PreTrainedModel = model(config(**{**SIZES, **own, **changes}))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    built = built.to(dtype).eval()
    built.save_pretrained(path, max_shard_size=shard_size)
    return built


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory with the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert equal names, element types, shapes and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def convert(*words: object) -> None:
    """Run the tool in this process."""
    main([str(word) for word in words])
