"""Norm, clipping and health of the gradient, the same function in every layout.

The engine's optimizer hands out pieces: runs of a parameter's gradient that this rank holds after the reduction over
data-parallel ranks. Each element of the model's gradient counts once, however often it is held.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import Section, split_interval


class GradientPiece(NamedTuple):
    """A run of one local parameter's gradient."""

    sections: Sequence[Section]
    """What the parameter is made of."""
    shape: Sequence[int]
    """The local parameter's shape."""
    start: int
    """First element, in the parameter's row-major order."""
    gradient: Tensor
    """The elements, in the storage that the optimizer will read; any shape."""
    owned: bool
    """Whether this rank counts it, among data-parallel ranks that hold the same run."""


def gradient_norm(
    pieces: Iterable[GradientPiece], world: CommGroup, device: torch.device, riders: Tensor | None = None
) -> tuple[float, list[float]]:
    """The Euclidean norm of the whole model's gradient; every rank must call this and gets the same numbers.

    Squares are added in fp64, since millions of them of very different size would lose digits in fp32. It is not finite
    if any rank's copy of any element is not, counted or not: nothing else would notice a copy that went wrong alone.

    Args:
        riders: numbers [n] of this rank in fp64 on `device`, which travel in the same collective.

    Returns:
        The norm, and the sums of the riders over all ranks.
    """
    norms, counts = [], []
    for piece in pieces:
        for part in split_interval(piece.sections, piece.shape, piece.start, piece.gradient.numel()):
            run = piece.gradient.reshape(-1).narrow(0, part.begin, part.length)
            norms.append(torch.linalg.vector_norm(run, dtype=torch.float32))
            counts.append(float(piece.owned and part.section.counted))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        # Gradients of an offloaded optimizer are in the host's memory, where no GPU collective reaches.
        squares = torch.stack(norms).to(device).double().square()
        # Zero times what is not finite is not a number.
        total = (squares * torch.tensor(counts, dtype=torch.float64, device=device)).sum()
    packed = total.reshape(1) if riders is None else torch.cat([total.reshape(1), riders])
    square, *sums = world.all_reduce(packed).tolist()
    return math.sqrt(square), sums


def first_bad_parameter(pieces: Iterable[GradientPiece], order: Sequence[str]) -> str | None:
    """The parameter, by its canonical name, whose gradient on this rank is not finite; the first one in `order`."""
    bad = {
        part.section.name
        for piece in pieces
        for part in split_interval(piece.sections, piece.shape, piece.start, piece.gradient.numel())
        if not piece.gradient.reshape(-1).narrow(0, part.begin, part.length).isfinite().all()
    }
    return next((name for name in order if name in bad), None)


def clip_gradients(pieces: Iterable[GradientPiece], norm: float, highest: float) -> None:
    """Scales the gradient in place so that its norm is at most `highest`; 0 leaves it as it is."""
    if 0.0 < highest < norm:
        for piece in pieces:
            piece.gradient.mul_(highest / norm)
