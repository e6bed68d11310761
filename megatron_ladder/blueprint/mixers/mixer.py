"""What a token mixer declares about itself.

A mixer is the part of a layer in which tokens meet: one column-parallel product of the normed stream, work on this
rank's heads, one row-parallel product whose output is a partial sum. Wirings need nothing else of it. In generation it
keeps states of earlier tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.flags import Check

if TYPE_CHECKING:
    from megatron_ladder.blueprint.model import ModelConfig


class StateKind(Enum):
    """How the size of a state depends on the sequence."""

    GROWS = "grows"
    """One entry for each position."""
    WINDOW = "window"
    """One entry for each of the newest positions."""
    FIXED = "fixed"
    """One entry, whatever the length."""


@dataclass(frozen=True)
class StateSpec:
    """What a rank keeps of one sequence, in generation, for one mixer."""

    name: str
    shape: tuple[int, ...]
    """Heads, and the shape of an entry of each head."""
    kind: StateKind
    window: int = 0
    """The newest positions that have entries."""
    is_fp32: bool = False
    """Whether it is kept in fp32 if the model computes in a narrower type."""

    def entries(self, positions: float) -> float:
        """Return the entries of each head for sequences of up to so many positions."""
        match self.kind:
            case StateKind.GROWS:
                return positions
            case StateKind.WINDOW:
                return min(self.window, positions)
            case StateKind.FIXED:
                return 1

    def bytes(self, positions: float, element_size: int) -> float:
        """Return the bytes for a sequence of up to so many positions, in a model with elements of this size."""
        size = max(element_size, 4) if self.is_fp32 else element_size
        return math.prod(self.shape) * self.entries(positions) * size

    def shape_for(self, positions: int) -> tuple[int, ...]:
        """Return the shape for a sequence of up to so many positions: [heads, entries, ...], and [heads, ...] with one.

        Only a state that is `FIXED` has no dimension of entries.
        """
        heads, *entry = self.shape
        entries = [] if self.kind is StateKind.FIXED else [int(self.entries(positions))]
        return heads, *entries, *entry


@dataclass(frozen=True)
class Mixer(ABC):
    """The description of the mixer of some layers, from which tensors, states and costs follow."""

    config: "ModelConfig"
    checks: ClassVar[Sequence[Check]] = ()
    """Checks of the values of a model that concern it."""
    is_exported: ClassVar[bool] = False
    """Whether the code in exported directories computes it."""
    repeats_states: ClassVar[bool] = False
    """Whether programs without fused kernels copy its states for each query head, and write its scores to memory."""

    @classmethod
    @abstractmethod
    def of(cls, config: "ModelConfig", layer: int) -> "Mixer | None":
        """Return the mixer of a layer; None if the layer has another one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, for readers; different mixers of a model have different names."""

    @abstractmethod
    def branch(self, name: str) -> Branch:
        """Return its tensors, whose names begin with `name`."""

    @abstractmethod
    def states(self, parts: int) -> Sequence[StateSpec]:
        """Return what generation keeps for each of so many parts of the heads, of ranks and lanes."""

    @abstractmethod
    def flops(self, tokens: int, positions: float) -> float:
        """Return the floating-point operations of all heads between input and output products.

        Each of the tokens has so many positions before it, its own included. A multiply-add is two operations.
        """

    @abstractmethod
    def kept_numbers(self, ranks: int) -> int:
        """Return how many numbers of each token one of so many ranks keeps for backward between the two products.

        The projections, and the input of the output product, are not among them.
        """

    def recomputed_numbers(self, ranks: int) -> int:
        """Return how many fp32 numbers of each token one of so many ranks has at once while backward recomputes them.

        They exist in one layer at a time.
        """
        return 0

    def decode_flops(self, positions: float) -> float:
        """Return the operations for one token, as generation computes it."""
        return self.flops(1, positions)

    def causal_positions(self, length: int) -> float:
        """Return the mean number of positions that the tokens of a sequence see, where a kernel skips the others."""
        return length / 2
