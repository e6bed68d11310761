"""Detection of bad steps: numbers that are not finite, batches without targets, and spikes of the loss.

A skipped step changes no weight, no moment and no step count of the optimizer. Only the position in the data advances,
so the next step sees other samples. All ranks decide alike, because they decide from reduced numbers.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from megatron_ladder.config.sections import ReliabilityConfig
from megatron_ladder.errors import BadNumbersError, Problem

_Kind = Literal["bad numbers", "no targets", "loss spike"]


class Finding(NamedTuple):
    """A problem of a step."""

    kind: _Kind
    skipped: bool
    text: str
    details: Mapping[str, Any] = {}
    """JSON-able fields for the record."""


class Guard:
    """Judges each step by its loss and gradient norm, before the update."""

    def __init__(self, config: ReliabilityConfig | None = None) -> None:
        self._config = config or ReliabilityConfig()
        self.skips_spikes = self._config.skip_loss_spikes
        self._losses: deque[float] = deque(maxlen=self._config.loss_spike_window)
        self._bad_in_a_row = 0

    def judge(self, loss: float, norm: float, has_targets: bool = True) -> _Kind | None:
        """Return what is wrong with a step of this loss and gradient norm; call it exactly once per step."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._bad_in_a_row += 1
            return "bad numbers"
        self._bad_in_a_row = 0
        if not has_targets:
            return "no targets"
        factor = self._config.loss_spike_factor
        if factor is None:
            return None
        is_full = len(self._losses) == self._losses.maxlen
        is_spike = is_full and loss > factor * statistics.median(self._losses)
        # A spike enters the window too, so losses that stay high become normal within half a window.
        self._losses.append(loss)
        return "loss spike" if is_spike else None

    def stop_if_hopeless(self, finding: Finding | None) -> None:
        """Raise BadNumbersError after --max-consecutive-bad-steps bad steps in a row."""
        if finding is not None and self._bad_in_a_row >= self._config.max_consecutive_bad_steps:
            allowed = Problem({}, "as many as {max_consecutive_bad_steps} allows")
            raise BadNumbersError(f"{finding.text}: {self._bad_in_a_row} in a row, {allowed}")

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state that a resumed run needs to make the same decisions."""
        return {"bad_in_a_row": self._bad_in_a_row, "losses": list(self._losses)}

    def set_state(self, stored: Mapping[str, Any]) -> None:
        """Restore what `state` returned; old checkpoints stored nothing."""
        self._bad_in_a_row = int(stored.get("bad_in_a_row", 0))
        self._losses.extend(map(float, stored.get("losses", ())))
