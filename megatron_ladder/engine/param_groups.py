"""Which parameters decay."""

import math
from typing import Any

from torch import nn

from megatron_ladder.parallel.layout import whole_shape


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices decay; norms and biases, of one dimension or one row, do not."""
    shapes = [(parameter, whole_shape(parameter)) for parameter in model.parameters()]
    matrices = [parameter for parameter, shape in shapes if math.prod(shape) > shape[-1]]
    vectors = [parameter for parameter, shape in shapes if math.prod(shape) == shape[-1]]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
