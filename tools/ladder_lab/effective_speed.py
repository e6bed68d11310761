"""Effective speed: throughput over standard's, times the compute that standard needs for the same loss.

A wiring pays where its effective speed is above 1. Imports no torch.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingLaw:
    """Loss = `limit` + constant x compute^-`exponent`, in nats per token."""

    exponent: float
    limit: float
    source: str

    def effective_speed(self, standard_loss: float, loss: float, speedup: float) -> float:
        """Return the effective speed of a wiring; NaN if a loss is infinite or not above the limit.

        Args:
            standard_loss: the loss of standard after as many tokens.
            speedup: throughput over standard's.
        """
        if not all(self.limit < value < math.inf for value in (standard_loss, loss)):
            return math.nan
        compute = ((standard_loss - self.limit) / (loss - self.limit)) ** (1 / self.exponent)
        return compute * speedup

    def affordable_loss(self, standard_loss: float, speedup: float) -> float:
        """Return how far the loss may be above standard's at an effective speed of 1."""
        return (standard_loss - self.limit) * (speedup**self.exponent - 1)

    def __str__(self) -> str:
        return f"alpha {self.exponent:.3g} and L_inf {self.limit:.3g}, {self.source}"


PUBLISHED = ScalingLaw(0.0941, 1.6, "as published by Marin")
