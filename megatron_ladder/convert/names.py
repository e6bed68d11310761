"""The tensors of a model as files name and cut them: Hugging Face names, and each rank's slices of a checkpoint.

A checkpoint has no layout, so any cut would be valid. The one here is that of training: a rank that resumes in the same
layout opens only its own file.
"""

import re
from collections.abc import Iterator

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.partition import uniform_partition
from megatron_ladder.blueprint.tensors import TensorSpec, model_tensors
from megatron_ladder.checkpoint.boxes import Box

_PARTS = (
    ("embedding.", "model.embed_tokens."),
    ("final_norm.", "model.norm."),
    ("layers.", "model.layers."),
    (".attention_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attention.", ".self_attn."),
)
"""Canonical part of a name, and the part in transformers' Llama, Mistral, Qwen2 and Qwen3; the rest is the same."""
_LAYER = re.compile(r"layers\.(\d+)\.")


def hf_name(name: str) -> str:
    """Return the name of a canonical tensor in a Hugging Face directory."""
    for ours, theirs in _PARTS:
        name = name.replace(ours, theirs)
    return name


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by canonical name, in the order in which the model computes with them."""
    return {tensor.name: tensor.shape for tensor in model_tensors(config)}


def stage_of(name: str, config: ModelConfig, stages: int) -> int:
    """Return the pipeline stage that holds a canonical tensor, with layers shared out evenly."""
    match = _LAYER.match(name)
    if match is None:
        return 0 if name.startswith("embedding.") else stages - 1
    ranges = uniform_partition(config.num_layers, stages)
    return next(stage for stage, layers in enumerate(ranges) if int(match[1]) in layers)


def rank_slices(tensor: TensorSpec, tensor_parallel: int) -> Iterator[tuple[int, Box]]:
    """Yield each tensor-parallel rank that writes a slice of a canonical tensor, with the slice.

    Of ranks that hold the same slice, the first writes it.
    """
    for rank in range(0, tensor_parallel, tensor.replicas(tensor_parallel)):
        start, length = tensor.slice_of(rank, tensor_parallel)
        if length > 0:
            cut = tensor.sharded_dim or 0
            offset = tuple(start if dim == cut else 0 for dim in range(len(tensor.shape)))
            extent = tuple(length if dim == cut else size for dim, size in enumerate(tensor.shape))
            yield rank, Box(offset, extent)
