"""An independent model and optimizer in plain arithmetic, which tests compare the package with."""

from tests.reference.adamw import LossAndGradients, MicroBatch, reference_training
from tests.reference.experts import Routed
from tests.reference.model import (
    ReferenceConfig,
    Sight,
    Weights,
    greedy_continuation,
    make_weights,
    reference_gradients,
    reference_logits,
    reference_loss,
)

__all__ = [
    "LossAndGradients",
    "MicroBatch",
    "ReferenceConfig",
    "Routed",
    "Sight",
    "Weights",
    "greedy_continuation",
    "make_weights",
    "reference_gradients",
    "reference_logits",
    "reference_loss",
    "reference_training",
]
