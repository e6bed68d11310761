"""The learning rate as a pure function of the iteration.

Formulas and names are those of Megatron-LM's `OptimizerParamScheduler.get_lr`. One thing differs: the rate of
an iteration is the one its own step is taken with, so the first step of a warm-up is not wasted on a rate of
zero (Megatron sets the rate after a step, from the number of steps done).
"""

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up, then decay: constant, linear, cosine, inverse-square-root or WSD (warm-up, stable, decay).

    Its values are checked where the command line is; see `config`.
    """

    lr: float
    """The highest rate, reached at the end of the warm-up."""
    decay_iters: int
    """The iteration at which `min_lr` is reached; it holds after it (but for `constant`)."""
    min_lr: float = 0.0
    """The lowest rate after the warm-up."""
    decay_style: DecayStyle = "cosine"
    """How the rate goes from `lr` to `min_lr`."""
    warmup_iters: int = 0
    """Iterations over which the rate rises linearly from `warmup_init` to `lr`."""
    warmup_init: float = 0.0
    """The rate from which the warm-up starts, at iteration 0, in which no step is taken."""
    wsd_decay_iters: int = 0
    """WSD: the last iterations up to `decay_iters`, in which the rate falls."""
    wsd_decay_style: WsdDecayStyle = "exponential"
    """WSD: how it falls."""

    def at(self, iteration: int) -> float:
        """The learning rate of the step of an iteration, the first of which is 1."""
        if iteration <= self.warmup_iters and self.warmup_iters > 0:
            if iteration == self.warmup_iters:
                return self.lr
            return self.warmup_init + (self.lr - self.warmup_init) * iteration / self.warmup_iters
        if self.decay_style == "constant":
            return self.lr
        if iteration > self.decay_iters:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_iters, 1) / max(iteration, 1)))
        return self.min_lr + self._share(iteration) * (self.lr - self.min_lr)

    def _share(self, iteration: int) -> float:
        """What is left of the way from `min_lr` to `lr`: 1 at the beginning of the decay, 0 at its end."""
        if self.decay_style != "WSD":
            done = (iteration - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
            return 1.0 - done if self.decay_style == "linear" else _cosine(done)
        stable_iters = self.decay_iters - self.wsd_decay_iters
        if iteration <= stable_iters:
            return 1.0
        done = (iteration - stable_iters) / self.wsd_decay_iters
        match self.wsd_decay_style:
            case "exponential":
                return 2.0 * math.pow(0.5, done) - 1.0
            case "linear":
                return 1.0 - done
            case "cosine":
                return _cosine(done)
            case "minus_sqrt":
                return 1.0 - math.sqrt(done)


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))
