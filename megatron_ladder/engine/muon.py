"""Muon for the matrices of the layers and AdamW for all other parameters, however the ranks share them.

Muon (https://kellerjordan.github.io/posts/muon/) moves a matrix by its orthogonalised momentum, for which it needs the
whole matrix. A rank holds slices of matrices (tensor parallelism), or intervals of slices (ZeRO). So one rank, the
owner, computes the update of a matrix:

    all ranks   update the momentum of the elements that they hold, and send them to the owner
    owner       assembles the matrix, orthogonalises it, and returns its elements to the ranks that hold them
    all ranks   update the elements

A round of two all-to-alls handles one matrix per rank, so that ranks orthogonalise different matrices at the same time
and need memory for one matrix. Matrices of similar cost share a round.

A matrix is a canonical tensor: the projections q, k, v, gate and up are separate matrices, also where one parameter
holds slices of several. This is Moonlight's choice (arXiv 2502.16982), and Megatron's default for q, k and v. Both also
move the router's matrix as all others. The matrix of each expert is separate, too; the ranks divide the stack of a
layer's experts among them, and an owner orthogonalises all matrices of its part together.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.blueprint.specs import Role
from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine.state import GROUP_MOMENTS
from megatron_ladder.parallel.layout import split_interval

_MOMENTS = optimizer_kind("muon").moments_of(Role.MATRIX)
(_MOMENTUM,) = _MOMENTS
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial whose iteration moves all singular values close to 1 in a few steps."""
_EPSILON = 1e-7


def _orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return U S V^T of a matrix U D V^T, or of each of a stack of matrices, in its dtype.

    Newton-Schulz steps move the singular values S near 1.
    """
    a, b, c = _COEFFICIENTS
    multiply = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = multiply(wide, multiply(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


def _update_scale(shape: Sequence[int], mode: Literal["match_rms_adamw", "original"]) -> float:
    """Return the factor of an orthogonalised update of this shape, as `torch.optim.Muon` adjusts its learning rate."""
    rows, columns = shape[-2:]
    return 0.2 * math.sqrt(max(rows, columns)) if mode == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


class _Piece(NamedTuple):
    """An interval of a rank's slice of a matrix, or of a part of a stack of matrices."""

    name: str
    shape: tuple[int, ...]
    """Shape of the matrix, or of the part."""
    held: Box
    """The slice."""
    start: int
    length: int
    sent: bool
    """Whether the owner uses this copy, of all copies of these elements."""


def _pieces(span: Span, ranks: int) -> Iterator[tuple[_Piece, int]]:
    """Yield the pieces of a span, each with its first element, in the span; so many ranks divide a stack."""
    for section, start, begin, length in split_interval(span.sections, span.shape, span.start, span.length):
        offset, extent = section.box.offset, section.box.extent
        count = section.tensor.shape[0]
        size = count if section.tensor.expert_dim is None else -(-count // ranks)
        numbers = math.prod(extent[1:])
        for first in range(0, count, size):
            low, high = max(first, offset[0]), min(first + size, count, offset[0] + extent[0])
            skipped = (low - offset[0]) * numbers
            stop = min(start + length, skipped + (high - low) * numbers)
            if (at := max(start, skipped)) < stop:
                held = Box((low - first, *offset[1:]), (high - low, *extent[1:]))
                shape = (min(size, count - first), *section.tensor.shape[1:])
                is_sent = span.owned and section.counted
                name = f"{section.name} from {first}"
                yield _Piece(name, shape, held, at - skipped, stop - at, is_sent), begin + at - start


def _regions(matrix: Tensor, pieces: Sequence[_Piece], elements: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of the whole matrix and of the elements of its pieces that correspond to each other."""
    for piece, values in zip(pieces, elements.split([piece.length for piece in pieces]), strict=True):
        for box, begin in piece.held.cut(piece.start, piece.length):
            yield matrix[box.slices()], values.narrow(0, begin, box.numel).view(box.extent)


class _HeldPiece(NamedTuple):
    """A piece that this rank holds, in the optimizer's tensors."""

    piece: _Piece
    flat_master: Tensor
    offset: int

    def of(self, values: Tensor) -> Tensor:
        """Return the piece's elements of a tensor with the layout of `flat_master`, flat."""
        return values.view(-1).narrow(0, self.offset, self.piece.length)


class _Round(NamedTuple):
    """At most one matrix per rank."""

    held: Sequence[Sequence[_HeldPiece]]
    """This rank's pieces of each rank's matrix."""
    assembled: Sequence[Sequence[_Piece]]
    """Each rank's pieces of the matrix that this rank owns; empty lists if it owns none."""


def _is_orthogonal(group: Mapping[str, Any]) -> bool:
    return bool(group[GROUP_MOMENTS] == _MOMENTS)


class MuonWithAdamW(torch.optim.AdamW):
    """Updates groups with the moments of matrices with Muon, and the others with AdamW.

    In a half-precision run, matrices are orthogonalised in bf16, like in `torch.optim.Muon`, otherwise in fp32.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], config: OptimizerConfig, dtype: torch.dtype, **adamw: Any
    ) -> None:
        """`dtype` is that of the orthogonalisation; `adamw` are the arguments of torch's AdamW."""
        super().__init__(list(groups), **adamw)
        self._config = config
        self._dtype = dtype
        self._world = CommGroup.alone()
        self._rounds: list[_Round] = []
        self._nothing = torch.empty(0, dtype=dtype, device=groups[0]["params"][0].device)

    def distribute(self, spans: Iterable[Span], world: CommGroup) -> None:
        """Assign matrices to owners; all ranks must call this before the first step, and when the groups have changed.

        `spans` include all that this rank's optimizer updates.
        """
        updated = {id(tensor) for group in self.param_groups if _is_orthogonal(group) for tensor in group["params"]}
        held: dict[str, list[_HeldPiece]] = {}
        for span in spans:
            if id(span.flat_master) in updated:
                for piece, begin in _pieces(span, world.size):
                    part = _HeldPiece(piece, span.flat_master, span.offset + begin)
                    held.setdefault(piece.name, []).append(part)
        pieces = {name: [part.piece for part in parts] for name, parts in held.items()}
        everyone: list[dict[str, list[_Piece]]] = world.broadcast_object(world.gather_objects(pieces))
        shapes = {name: parts[0].shape for of_rank in everyone for name, parts in of_rank.items()}
        by_cost = sorted(shapes, key=lambda name: (-math.prod(shapes[name]) * min(shapes[name][-2:]), name))
        # In the last round, some ranks may own no matrix.
        by_cost += [""] * (-len(by_cost) % world.size)
        self._world = world
        self._rounds = []
        for first in range(0, len(by_cost), world.size):
            names = by_cost[first : first + world.size]
            assembled = [of_rank.get(names[world.rank], []) for of_rank in everyone]
            self._rounds.append(_Round([held.get(name, []) for name in names], assembled))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; all ranks must call this alike."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not _is_orthogonal(group)]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if _is_orthogonal(group):
                self._step_matrices(group)

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        for flat_master in group["params"]:
            state = self.state[flat_master]
            if _MOMENTUM not in state:
                state[_MOMENTUM] = torch.zeros_like(flat_master)
                state["step"] = torch.zeros(())
            state["step"] += 1
            state[_MOMENTUM].lerp_(flat_master.grad, 1 - self._config.muon_momentum)
            flat_master.mul_(1 - group["lr"] * group["weight_decay"])
        for matrices in self._rounds:
            self._update(matrices, group["lr"])

    def _update(self, matrices: _Round, learning_rate: float) -> None:
        # Send directions to the owners.
        outgoing = []
        for parts in matrices.held:
            directions = [self._direction(part).to(self._dtype) for part in parts if part.piece.sent]
            outgoing.append(torch.cat([self._nothing, *directions]))
        sizes = [sum(piece.length for piece in pieces if piece.sent) for pieces in matrices.assembled]
        received = self._world.all_to_all(outgoing, sizes)
        # Send orthogonalised updates back.
        returned = self._orthogonalized(matrices.assembled, received)
        sizes = [sum(part.piece.length for part in parts) for parts in matrices.held]
        for parts, elements in zip(matrices.held, self._world.all_to_all(returned, sizes), strict=True):
            updates = elements.split([part.piece.length for part in parts])
            for part, update in zip(parts, updates, strict=True):
                scale = _update_scale(part.piece.shape, self._config.muon_scale_mode)
                part.of(part.flat_master).add_(update, alpha=-learning_rate * scale)

    def _direction(self, part: _HeldPiece) -> Tensor:
        momentum = part.of(self.state[part.flat_master][_MOMENTUM])
        if not self._config.muon_nesterov:
            return momentum
        assert part.flat_master.grad is not None
        return part.of(part.flat_master.grad).lerp(momentum, self._config.muon_momentum)

    def _orthogonalized(self, assembled: Sequence[Sequence[_Piece]], received: Sequence[Tensor]) -> list[Tensor]:
        """Return what each rank gets back of this rank's matrix, from what each rank has sent of it."""
        some = next((piece for pieces in assembled for piece in pieces), None)
        if some is None:
            return list(received)
        matrix = self._nothing.new_empty(some.shape)
        for pieces, elements in zip(assembled, received, strict=True):
            for whole, part in _regions(matrix, [piece for piece in pieces if piece.sent], elements):
                whole.copy_(part)
        matrix = _orthogonalize(matrix, self._config.muon_ns_steps)
        returned = [self._nothing.new_empty(sum(piece.length for piece in pieces)) for pieces in assembled]
        for pieces, elements in zip(assembled, returned, strict=True):
            for whole, part in _regions(matrix, pieces, elements):
                part.copy_(whole)
        return returned
