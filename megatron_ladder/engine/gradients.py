"""Norm, clipping and validity of the gradient: the same functions in every layout.

The engine provides pieces: contiguous parts of a parameter's gradient that this rank holds after the reduction over the
ranks with the same parameter and other samples. Each element of the model's gradient counts once, even if several ranks
hold it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_ladder.comm.copies import to_device
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import Section, parameter_sections, split_interval


class GradientPiece(NamedTuple):
    """A contiguous part of one local parameter's gradient."""

    sections: Sequence[Section]
    shape: Sequence[int]
    """Shape of the local parameter."""
    start: int
    """Index of the first element, in the parameter's row-major order."""
    gradient: Tensor
    """The elements, in the storage that the optimizer reads; any shape."""
    owned: bool
    """Whether this rank, of all ranks over which the gradient was reduced and that hold the same piece, counts it."""

    def parts(self) -> Iterator[tuple[Section, Tensor]]:
        """Iterate over the sections in the piece and their elements, flat."""
        for section, _, begin, length in split_interval(self.sections, self.shape, self.start, self.gradient.numel()):
            yield section, self.gradient.reshape(-1).narrow(0, begin, length)


def gradient_norm(
    pieces: Iterable[GradientPiece], world: CommGroup, device: torch.device, extra_sums: Tensor
) -> tuple[float, list[float]]:
    """Return the norm of the whole model's gradient, and `extra_sums` [n] (fp64, on `device`) summed over ranks.

    Every rank must call it, and gets the same result. Squares are added in fp64, because millions of squares of very
    different size would lose digits in fp32. The norm is not finite if any rank's copy of any element is not, counted
    or not, so a single corrupt copy is detected too.
    """
    parts, counts = [], []
    for piece in pieces:
        for section, elements in piece.parts():
            parts.append(elements)
            counts.append(float(piece.owned and section.counted))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        norms = torch._foreach_norm(parts, dtype=torch.promote_types(parts[0].dtype, torch.float32))
        # Gradients of an offloaded optimizer are in host memory, which no GPU collective can read.
        squares = to_device(torch.stack(norms), device).double().square()
        # Zero times infinity or NaN is NaN, so copies that do not count still make the sum invalid.
        total = (squares * to_device(torch.tensor(counts, dtype=torch.float64), device)).sum()
    square, *sums = world.all_reduce(torch.cat([total.reshape(1), extra_sums])).tolist()
    return math.sqrt(square), sums


def locate_bad_gradient(pieces: Iterable[GradientPiece], model: nn.Module, world: CommGroup) -> dict[str, Any]:
    """Return on all ranks the lowest one with a gradient that is not finite, and the parameter; `{}` if none."""
    bad = {section.name for piece in pieces for section, elements in piece.parts() if not elements.isfinite().all()}
    order = (section.name for _, sections in parameter_sections(model) for section in sections)
    names = world.gather_objects(next((name for name in order if name in bad), None))
    found = ({"rank": rank, "parameter": name} for rank, name in enumerate(names) if name is not None)
    located: dict[str, Any] = world.broadcast_object(next(found, {}))
    return located


def clip_gradients(pieces: Iterable[GradientPiece], norm: float, highest: float) -> None:
    """Scale the gradient in place so that its norm is at most `highest`; 0 disables clipping."""
    gradients = [piece.gradient for piece in pieces]
    if gradients and 0.0 < highest < norm:
        torch._foreach_mul_(gradients, highest / norm)
