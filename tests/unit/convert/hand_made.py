"""A Hugging Face directory built by hand, so that any part of it can be made invalid."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHAPES: dict[str, list[int]] = {
    name: list(weight.shape)
    for name, weight in AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).state_dict().items()
}


def zeros(shapes: Mapping[str, Sequence[int]] = SHAPES, dtype: torch.dtype = torch.bfloat16) -> bytes:
    """Return a file of weights that are zero."""
    return save({name: torch.zeros(*shape, dtype=dtype) for name, shape in shapes.items()})


def write_directory(path: Path, config: dict[str, Any] | str | None = None, weights: bytes | None = None) -> Path:
    """Write config.json and model.safetensors; the defaults are valid."""
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG if config is None else config
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "model.safetensors").write_bytes(zeros() if weights is None else weights)
    return path


def write_sharded(path: Path, listed: dict[str, str], stored: dict[str, list[int]]) -> Path:
    """Write a directory of two files that agree with their index but for what it lists, or the first file stores."""
    write_directory(path)
    (path / "model.safetensors").unlink()
    names = list(SHAPES)
    halves = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for more, (file, held) in zip((stored, {}), halves.items(), strict=True):
        (path / file).write_bytes(zeros({name: SHAPES[name] for name in held} | more))
    index = {name: file for file, held in halves.items() for name in held} | listed
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path
