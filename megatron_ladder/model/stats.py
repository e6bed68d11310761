"""What passes return besides a state: losses, and the loads of experts."""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")


class PassStats(NamedTuple):
    """Sums of a training pass over the tokens of its micro-batch; equal on all tensor-parallel ranks.

    They are those of a body, of some sub-blocks, or of a pipeline stage. A body that is recomputed counts once.
    """

    losses: Mapping[str, Tensor] = MappingProxyType({})
    """Scalars by name, which the loss of a state's backward does not contain."""
    loads: Mapping[int, Tensor] = MappingProxyType({})
    """How many tokens, without padding, chose each expert, [E] int64, by number of the layer."""
    most_rows: Tensor | None = None
    """The most rows that an expert needs of this rank, a scalar, where their number is limited; not equal on ranks."""

    def detached(self) -> "PassStats":
        """Return the sums without their graphs."""
        return self._replace(losses={name: loss.detach() for name, loss in self.losses.items()})

    def plus(self, other: "PassStats") -> "PassStats":
        """Return the sums of both, and the most rows of either."""
        most_rows = [stats.most_rows for stats in (self, other) if stats.most_rows is not None]
        return PassStats(
            _sum_by_key(self.losses, other.losses),
            _sum_by_key(self.loads, other.loads),
            functools.reduce(torch.maximum, most_rows) if most_rows else None,
        )


def _sum_by_key(first: Mapping[Key, Tensor], second: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
    return {**first, **{key: first[key] + value if key in first else value for key, value in second.items()}}


class StepStats:
    """The sums of a rank's passes of a step, on its device, zero for what other pipeline stages compute.

    Sums are added in place, so captured passes add to the same tensors in every step.

    Attributes:
        loss: that of the targets, with its factor; a scalar.
        losses: those of the passes, by name, [n] fp64.
        loads: those of the passes, by layer with experts, [layers, E] int64.
        most_rows: the most rows of all passes, a scalar, int64.
    """

    def __init__(
        self, names: Sequence[str], layers: Sequence[int], experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Start at zero; `names` are those of all losses of the model, and `layers` all its layers with experts."""
        self.loss = torch.zeros((), dtype=dtype, device=device)
        self.losses = torch.zeros(len(names), dtype=torch.float64, device=device)
        self.loads = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        self.most_rows = torch.zeros((), dtype=torch.int64, device=device)
        self._losses = dict(zip(names, self.losses.unbind(), strict=True))
        self._loads = dict(zip(layers, self.loads.unbind(), strict=True))

    def add(self, stats: PassStats) -> None:
        """Add the sums of a pass."""
        for name, loss in stats.losses.items():
            self._losses[name] += loss
        for layer, loads in stats.loads.items():
            self._loads[layer] += loads
        if stats.most_rows is not None:
            torch.maximum(self.most_rows, stats.most_rows, out=self.most_rows)

    def clear(self) -> None:
        """Start again at zero."""
        for total in (self.loss, self.losses, self.loads, self.most_rows):
            total.zero_()
