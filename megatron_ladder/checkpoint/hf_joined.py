"""Tensors of Hugging Face directories that have the rows of several canonical tensors.

Queries and output gates of Qwen3.5 alternate head by head, so `q_proj` has as many groups as heads:

    rows    [ queries of head 0 | gates of head 0 | queries of head 1 | gates of head 1 | ...
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.blueprint.tensors import layer_tensors, mtp_tensors
from megatron_ladder.checkpoint.hf_types import TYPES
from megatron_ladder.checkpoint.stored_weights import RowsPlace


def mtp_replacements(model: ModelConfig, model_type: str) -> tuple[tuple[str, str], ...]:
    """Return what to replace in the names of a layer after the last one; nothing without a drafting head."""
    names = TYPES[model_type].mtp
    return names.replacements(model.num_layers) if names is not None and model.mtp_num_layers else ()


def replaced(name: str, replacements: Sequence[tuple[str, str]]) -> str:
    """Return a name with all replacements, one after another."""
    for before, after in replacements:
        name = name.replace(before, after)
    return name


class JoinedRows(NamedTuple):
    """A tensor of a directory, and those whose rows it has."""

    name: str
    parts: tuple[TensorSpec, ...]
    groups: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the directory, where a filter of a convolution has one input."""
        rows, sizes = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1:]
        return (rows, 1, *sizes) if self.parts[0].role is Role.CONVOLUTION else (rows, *sizes)

    def place_of(self, spec: TensorSpec) -> RowsPlace:
        """Return the place of the rows of a part."""
        counts = [part.shape[0] // self.groups for part in self.parts]
        index = self.parts.index(spec)
        return RowsPlace(sum(counts[:index]), counts[index], sum(counts), self.groups, spec.shape)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor with the rows of the parts."""
        return torch.cat([tensor.unflatten(0, (self.groups, -1)) for tensor in tensors], dim=1).reshape(self.shape)


def joined_tensors(model: ModelConfig, model_type: str) -> dict[str, JoinedRows]:
    """Return the tensors of a type that have the rows of several, by the canonical name of each of these."""
    row = TYPES[model_type]
    found: dict[str, JoinedRows] = {}
    mtp = mtp_tensors(model)
    layers = [*layer_tensors(model), *([] if mtp is None else [mtp.sub_blocks])]
    for layer, sub_blocks in enumerate(layers):
        is_linear = layer in model.linear_attention_layers
        module = "linear_attn" if is_linear else "self_attn"
        for branch in (branch for sub_block in sub_blocks for branch in sub_block.branches if branch.mixer is not None):
            specs = {spec.name: spec for spec in branch.tensors}
            prefix = branch.output.weight.name.removesuffix("o_proj.weight")
            for joined in row.linear_tensors if is_linear else row.attention_tensors:
                groups = getattr(model, joined.groups) if joined.groups else 1
                parts = tuple(specs[prefix + part] for part in joined.parts)
                name = f"model.{prefix.replace('attention', module)}{joined.stored}"
                rows = JoinedRows(replaced(name, mtp_replacements(model, model_type)), parts, groups)
                found |= {part.name: rows for part in parts}
    return found
