"""The contract between checkpoints and the training engine: the optimizer state that a rank holds.

`engine/state.py` implements it. Checkpoints read and write the state span by span, without communication.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.optimizers import MOMENTS
from megatron_ladder.parallel.layout import Section, split_interval


class Piece(NamedTuple):
    """A box of a canonical tensor, in memory."""

    name: str
    kind: str
    shape: Sequence[int]
    """Shape of the whole tensor."""
    box: Box
    tensor: Tensor
    """The elements, [*box.extent], contiguous."""


class Span(NamedTuple):
    """A contiguous part of one local parameter that this rank's optimizer updates."""

    sections: Sequence[Section]
    """The sections of the parameter."""
    shape: Sequence[int]
    """Shape of the whole local parameter; under ZeRO-3 the parameter itself is empty between uses."""
    start: int
    """Index of the first element, in the parameter's row-major order."""
    weight: Tensor
    """The elements that the model computes with, flat."""
    flat_master: Tensor
    """The optimizer's fp32 tensor that contains the span; the key of its moments."""
    offset: int
    """Index of the span's first element in `flat_master`."""
    owned: bool
    """Whether this rank, of all data-parallel ranks that hold the same span, saves and counts it."""
    moments: tuple[str, ...] = MOMENTS
    """The names of the moments that the optimizer keeps of its elements."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.weight.numel()

    def pieces(self, state: "OptimizerState", moments: bool = True, only_counted: bool = False) -> Iterator[Piece]:
        """Iterate over views of the span's masters and moments; padding belongs to no piece.

        `only_counted` leaves out sections that another rank saves.
        """
        flat = {"weight": self.master} | {which: state.moment(self, which) for which in self.moments if moments}
        for section, start, begin, length in split_interval(self.sections, self.shape, self.start, self.length):
            for box, position in section.box.cut(start, length) if section.counted or not only_counted else ():
                for kind, values in flat.items():
                    elements = values.narrow(0, begin + position, box.numel).view(box.extent)
                    yield Piece(section.name, kind, section.tensor.shape, box, elements)

    @property
    def master(self) -> Tensor:
        """The fp32 values, flat."""
        return self.flat_master.detach().view(-1).narrow(0, self.offset, self.length)


class OptimizerState(Protocol):
    """Masters, moments and counters of an optimizer, as checkpoints read and write them."""

    def spans(self) -> Iterator[Span]:
        """Iterate over all spans that this rank updates, in the same order at every call."""

    def states(self) -> Iterator[Span]:
        """Iterate over spans without moments: tensors of the model that checkpoints hold, but no optimizer updates."""

    def moment(self, span: Span, which: str) -> Tensor:
        """Return the span's part of one of its moments, flat; zeros before the first step."""

    def steps_taken(self) -> int:
        """Return the number of optimizer steps since the start of the run."""

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps, which AdamW needs for its bias correction."""

    def copy_masters_to_weights(self) -> None:
        """Update the model's weights from masters that were overwritten; every rank must call it."""
