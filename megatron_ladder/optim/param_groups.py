"""Which parameters decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices decay; norms and biases, of one dimension or one row, do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.numel() > parameter.shape[-1]]
    vectors = [parameter for parameter in model.parameters() if parameter.numel() == parameter.shape[-1]]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
