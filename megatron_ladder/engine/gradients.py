"""Norm, clipping and validity of the gradient: the same functions in every layout.

The engine provides pieces: contiguous parts of a parameter's gradient that this rank holds after the reduction over
data-parallel ranks. Each element of the model's gradient counts once, even if several ranks hold it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import Section, split_interval


class GradientPiece(NamedTuple):
    """A contiguous part of one local parameter's gradient."""

    sections: Sequence[Section]
    """The sections of the parameter."""
    shape: Sequence[int]
    """Shape of the local parameter."""
    start: int
    """Index of the first element, in the parameter's row-major order."""
    gradient: Tensor
    """The elements, in the storage that the optimizer reads; any shape."""
    owned: bool
    """Whether this rank, of all data-parallel ranks that hold the same piece, counts it."""


def gradient_norm(
    pieces: Iterable[GradientPiece], world: CommGroup, device: torch.device, extra_sums: Tensor | None = None
) -> tuple[float, list[float]]:
    """Return the Euclidean norm of the whole model's gradient, equal on every rank; every rank must call this.

    Squares are added in fp64, because millions of squares of very different size would lose digits in fp32. The norm
    is not finite if any rank's copy of any element is not, counted or not, so a single corrupt copy is detected too.

    Args:
        extra_sums: numbers [n] of this rank in fp64 on `device`, to be summed in the same collective.

    Returns:
        The norm, and the extra numbers summed over all ranks.
    """
    norms, counts = [], []
    for piece in pieces:
        for part in split_interval(piece.sections, piece.shape, piece.start, piece.gradient.numel()):
            elements = piece.gradient.reshape(-1).narrow(0, part.begin, part.length)
            norms.append(torch.linalg.vector_norm(elements, dtype=torch.float32))
            counts.append(float(piece.owned and part.section.counted))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        # Gradients of an offloaded optimizer are in host memory, which no GPU collective can read.
        squares = torch.stack(norms).to(device).double().square()
        # Zero times infinity or NaN is NaN, so copies that do not count still make the sum invalid.
        total = (squares * torch.tensor(counts, dtype=torch.float64, device=device)).sum()
    packed = total.reshape(1) if extra_sums is None else torch.cat([total.reshape(1), extra_sums])
    square, *sums = world.all_reduce(packed).tolist()
    return math.sqrt(square), sums


def first_bad_parameter(pieces: Iterable[GradientPiece], order: Sequence[str]) -> str | None:
    """Return the first parameter in `order` (canonical names) whose gradient on this rank is not finite."""
    bad = {
        part.section.name
        for piece in pieces
        for part in split_interval(piece.sections, piece.shape, piece.start, piece.gradient.numel())
        if not piece.gradient.reshape(-1).narrow(0, part.begin, part.length).isfinite().all()
    }
    return next((name for name in order if name in bad), None)


def clip_gradients(pieces: Iterable[GradientPiece], norm: float, highest: float) -> None:
    """Scale the gradient in place so that its norm is at most `highest`; 0 disables clipping."""
    if 0.0 < highest < norm:
        for piece in pieces:
            piece.gradient.mul_(highest / norm)
