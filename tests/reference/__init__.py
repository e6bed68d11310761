"""An independent model and optimizer in plain arithmetic, which tests compare the package with."""

from tests.reference.adamw import LossAndGradients, MicroBatch, reference_training
from tests.reference.experts import Routed
from tests.reference.model import (
    ReferenceConfig,
    Sight,
    Weights,
    greedy_continuation,
    inverse_frequencies,
    make_weights,
    reference_gradients,
    reference_logits,
    reference_loss,
    weight_shapes,
)

__all__ = [
    "LossAndGradients",
    "MicroBatch",
    "ReferenceConfig",
    "Routed",
    "Sight",
    "Weights",
    "greedy_continuation",
    "inverse_frequencies",
    "make_weights",
    "reference_gradients",
    "reference_logits",
    "reference_loss",
    "reference_training",
    "weight_shapes",
]
