"""Which steps are left out: numbers that are not finite, and losses that leap.

A step that is left out changes no weight, no moment and no count of the optimizer. Only the place in the data moves
on, so that the next step sees other samples. Every rank decides alike, from numbers that were reduced over all.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.config.training import ReliabilityConfig
from megatron_ladder.engine.gradients import GradientPiece, first_bad_parameter
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.parallel.layout import parameter_sections


class Finding(NamedTuple):
    """What is wrong with a step."""

    kind: Literal["bad numbers", "loss spike", "overflow"]
    skipped: bool
    """Whether its update was left out."""
    text: str
    details: Mapping[str, Any] = {}
    """For the record: JSON-able."""


class Guard:
    """Judges each step by its loss and the norm of its gradient, before the update."""

    def __init__(self, config: ReliabilityConfig | None = None) -> None:
        self._config = config or ReliabilityConfig()
        self._losses: deque[float] = deque(maxlen=self._config.loss_spike_window)
        self._bad_in_a_row = 0

    def judge(self, loss: float, norm: float) -> Literal["bad numbers", "loss spike"] | None:
        """What is wrong with a step of this loss and gradient norm; to be called once for each step."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._bad_in_a_row += 1
            return "bad numbers"
        self._bad_in_a_row = 0
        if self._config.loss_spike_factor is None:
            return None
        is_spike = len(self._losses) == self._losses.maxlen and loss > self.highest_loss()
        # A spike counts from now on: losses that stay high become the rule within half a window.
        self._losses.append(loss)
        return "loss spike" if is_spike else None

    def highest_loss(self) -> float:
        """The loss above which the next one is a spike."""
        assert self._config.loss_spike_factor is not None
        return self._config.loss_spike_factor * statistics.median(self._losses)

    @property
    def skips_spikes(self) -> bool:
        """Whether the update of a spike is left out."""
        return self._config.skip_loss_spikes

    def end_if_hopeless(self, finding: Finding | None) -> None:
        """Raises BadNumbersError after as many bad steps in a row as --max-consecutive-bad-steps says."""
        if finding is not None and self._bad_in_a_row >= self._config.max_consecutive_bad_steps:
            raise BadNumbersError(
                f"{finding.text}: {self._bad_in_a_row} in a row, as many as --max-consecutive-bad-steps allows"
            )

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to decide as this one would; JSON-able."""
        return {"bad_in_a_row": self._bad_in_a_row, "losses": list(self._losses)}

    def set_state(self, stored: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave; nothing is known of a run that stored nothing."""
        self._bad_in_a_row = int(stored.get("bad_in_a_row", 0))
        self._losses.extend(map(float, stored.get("losses", ())))


@contextmanager
def without_update(optimizer: torch.optim.Optimizer, pieces: Iterable[GradientPiece]) -> Iterator[None]:
    """Inside it the engine's step does all but update: it clears gradients and counts its own calls.

    Args:
        optimizer: the one that the engine wraps.
        pieces: the gradient, which is zeroed, so that the engine's own look at it finds nothing to object to.
    """
    for piece in pieces:
        piece.gradient.zero_()
    # An attribute of the object hides the class's method.
    vars(optimizer)["step"] = lambda closure=None: None
    try:
        yield
    finally:
        del vars(optimizer)["step"]


def locate_bad_gradient(pieces: Sequence[GradientPiece], model: nn.Module, world: CommGroup) -> dict[str, Any]:
    """The lowest rank with a gradient that is not finite and its first such parameter, in the model's order.

    Every rank must call it and gets the same; `{}` where all gradients are finite.
    """
    order = [section.name for _, sections in parameter_sections(model) for section in sections]
    names = world.gather_objects(first_bad_parameter(pieces, order))
    found = next(((rank, name) for rank, name in enumerate(names) if name is not None), None)
    found = world.broadcast_object(found)
    return {} if found is None else {"rank": found[0], "parameter": found[1]}
