"""Weights of a checkpoint into a model of any layout."""

import torch
from torch import nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.parallel.layout import has_padding, parameter_sections


def stored_model(checkpoint: Checkpoint) -> ModelConfig:
    """The model that a checkpoint holds, its wiring included; raises UserError if it cannot be read."""
    return ModelConfig.from_dict(checkpoint.manifest["model"], source=str(checkpoint.directory / "manifest.json"))


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fills this rank's parameters, reading only the bytes of their slices; padding becomes zero.

    Raises:
        UserError: a tensor is missing or of another shape; the file and the tensor are named.
    """
    for parameter, sections in parameter_sections(model):
        if has_padding(parameter, sections):
            parameter.zero_()
        for section in sections:
            checkpoint.read(section.name, "weight", section.offset, section.extent, out=section.view(parameter))
