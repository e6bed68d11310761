"""The canonical tensors that a local parameter consists of.

A parameter of a parallel layer holds slices of one or several canonical tensors (`in_proj.weight` of attention holds
rows of `q_proj.weight`, `k_proj.weight` and `v_proj.weight`). Its `Section`s describe them. Initialisation, gradient
norm, checkpoints and conversion read the sections; nothing else knows how a parameter was sharded.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.parallel.products import LinearFunction, linear


@dataclass(frozen=True)
class Section:
    """The part of a local parameter that belongs to one canonical tensor.

    Along `dim`, elements `[local_start, local_start + length)` of the parameter are elements `[start, start + length)`
    of the canonical tensor; the other dimensions are whole. Padding rows of the vocabulary belong to no section.
    """

    tensor: TensorSpec
    start: int
    """First element in the canonical tensor."""
    length: int
    """Elements along `dim`."""
    local_start: int = 0
    """First element in the local parameter."""
    counted: bool = True
    """Whether this rank's copy counts in norms and is saved, among tensor-parallel ranks that hold the same slice."""
    is_partial: bool = False
    """Whether each of the tensor-parallel ranks that hold the same slice gets only a part of its gradient."""

    @staticmethod
    def of(tensor: TensorSpec, group: CommGroup, local_start: int = 0, is_partial: bool = False) -> "Section":
        """Return the section of a canonical tensor that a rank of a group holds.

        Ranks that hold the same key heads use them for different queries, so their gradients are always partial.
        """
        replicas = tensor.replicas(group.size)
        counted = group.rank % replicas == 0
        is_partial = replicas > 1 and (is_partial or tensor.heads is not None)
        return Section(tensor, *tensor.slice_of(group.rank, group.size), local_start, counted, is_partial)

    @property
    def name(self) -> str:
        """Canonical name, `layers.7.attention.q_proj.weight`."""
        return self.tensor.name

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return self.tensor.sharded_dim or 0

    @property
    def box(self) -> Box:
        """The elements of the canonical tensor."""
        shape = self.tensor.shape
        offset = tuple(self.start if i == self.dim else 0 for i in range(len(shape)))
        return Box(offset, tuple(self.length if i == self.dim else size for i, size in enumerate(shape)))

    def view(self, parameter: Tensor) -> Tensor:
        """Return the section of the local parameter (or of a tensor of its shape)."""
        return parameter.narrow(self.dim, self.local_start, self.length)


def split_interval(
    sections: Sequence[Section], shape: Sequence[int], start: int, length: int
) -> Iterator[tuple[Section, int, int, int]]:
    """Yield the parts of elements `start` to `start + length` of a parameter of this shape that belong to its sections.

    For optimizers that flatten parameters and partition them at any element. Padding belongs to no part.

    Yields:
        The section, the part's first element in the row-major order of the section, its first element counted from
        `start`, and its number of elements.

    Raises:
        ValueError: a section covers a part of every row, so that its elements are not contiguous.
    """
    row = math.prod(shape[1:])
    for section in sections:
        if section.dim == 0:
            first, count = section.local_start * row, section.length * row
        elif len(sections) == 1 and section.length == shape[section.dim]:
            first, count = 0, math.prod(shape)
        else:
            raise ValueError(f"{section.name} is not contiguous in a parameter of shape {tuple(shape)}")
        low, high = max(start, first), min(start + length, first + count)
        if low < high:
            yield section, low - first, low - start, high - low


SHARDED_MARKS = ("model_parallel", "tensor_model_parallel")
"""Attributes that mark a parameter for DeepSpeed as sharded over the tensor-parallel ranks."""


@dataclass(frozen=True)
class Placement:
    """Where parallel layers hold their parameters, and how they multiply with them."""

    mesh: ProcessMesh
    dtype: torch.dtype
    device: torch.device
    linear: LinearFunction = linear


class ParallelModule(nn.Module):
    """A module that describes its parameters by sections.

    Attributes:
        group: ranks that hold different slices of the parameters.
        data: ranks that hold the same slices, over which the gradients are summed.
    """

    def __init__(self, place: Placement, routed: bool = False) -> None:
        """`routed`: the parameters are those of routed experts, which expert-parallel ranks divide if there are any."""
        super().__init__()
        mesh = place.mesh
        self.group = mesh.tensor
        self.data = mesh.data
        if routed and mesh.experts.size > 1:
            self.group = mesh.experts
            self.data = mesh.experts_data
        self.sections: dict[str, tuple[Section, ...]] = {}

    def allocate(self, device: torch.device) -> None:
        """Allocate parameters that were created on the meta device on this one; they stay uninitialised."""
        for attribute, described in self.named_parameters(recurse=False):
            parameter = nn.Parameter(torch.empty_like(described, device=device))
            for mark in SHARDED_MARKS:
                setattr(parameter, mark, getattr(described, mark))
            self.register_parameter(attribute, parameter)
        for attribute, tensor in self.named_buffers(recurse=False):
            setattr(self, attribute, torch.zeros_like(tensor, device=device))

    def add_state(self, attribute: str, tensor: TensorSpec, place: Placement) -> None:
        """Register a tensor in fp32 that checkpoints hold, but no gradient trains; it is whole on every rank."""
        self.register_buffer(attribute, torch.zeros(tensor.shape, device=place.device))
        self.sections[attribute] = (Section.of(tensor, self.group),)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep states in fp32 where the parameters are converted."""
        before = {name: getattr(self, name) for name in self.sections if name in self._buffers}
        super()._apply(fn, recurse)
        for name, state in before.items():
            setattr(self, name, state.to(getattr(self, name).device))
        return self

    def add_parameter(
        self, attribute: str, tensors: Sequence[TensorSpec], place: Placement, is_partial: bool = False
    ) -> None:
        """Register an uninitialised parameter that holds the rank's slices of canonical tensors, or None without any.

        The slices follow one another along the sharded dimension, which is that of the first tensor. `is_partial` is
        that of their sections.
        """
        if not tensors:
            self.register_parameter(attribute, None)
            return
        sections, start = [], 0
        for tensor in tensors:
            sections.append(Section.of(tensor, self.group, start, is_partial))
            start += tensor.width(self.group.size)
        shape, dim = list(tensors[0].shape), tensors[0].sharded_dim
        shape[dim or 0] = start
        parameter = nn.Parameter(torch.empty(shape, dtype=place.dtype, device=place.device))
        for mark in SHARDED_MARKS:
            setattr(parameter, mark, dim is not None)
        self.register_parameter(attribute, parameter)
        self.sections[attribute] = tuple(section for section in sections if section.length > 0)


def parameter_sections(model: nn.Module, recurse: bool = True) -> Iterator[tuple[nn.Parameter, tuple[Section, ...]]]:
    """Yield every parameter of the model once, with its sections; without `recurse`, not those of its children."""
    for module in model.modules() if recurse else [model]:
        if isinstance(module, ParallelModule):
            for attribute, parameter in module.named_parameters(recurse=False):
                yield parameter, module.sections[attribute]


def data_groups(model: nn.Module) -> dict[nn.Parameter, CommGroup]:
    """Return the group over which the gradient of each parameter of the model is summed."""
    modules = (module for module in model.modules() if isinstance(module, ParallelModule))
    return {parameter: module.data for module in modules for parameter in module.parameters(recurse=False)}


def state_sections(model: nn.Module, recurse: bool = True) -> Iterator[tuple[Tensor, tuple[Section, ...]]]:
    """Yield every tensor that checkpoints hold and no gradient trains, with its section; see `parameter_sections`."""
    for module in model.modules() if recurse else [model]:
        if isinstance(module, ParallelModule):
            for attribute, state in module.named_buffers(recurse=False):
                if attribute in module.sections:
                    yield state, module.sections[attribute]


def has_padding(parameter: Tensor, sections: Sequence[Section]) -> bool:
    """Return whether some elements of the local parameter belong to no section."""
    return sum(section.box.numel for section in sections) < parameter.numel()


def initialize(model: nn.Module, seed: int, recurse: bool = True) -> None:
    """Fill all parameters such that the model does not depend on how it is sharded.

    Each block of a canonical tensor along its sharded dimension (a head, 64 rows, 64 words of the vocabulary)
    has a separate generator, seeded by (seed, canonical name, block), so that a rank draws only what it holds.
    Padding stays zero. Without `recurse`, the parameters of the module's children are left out.
    """
    with torch.no_grad():
        for parameter, sections in parameter_sections(model, recurse):
            parameter.zero_()
            for section in sections:
                _initialize_section(section.view(parameter), section, seed)


def _initialize_section(values: Tensor, section: Section, seed: int) -> None:
    tensor, dim = section.tensor, section.dim
    if tensor.std == 0.0 and tensor.log_of is None:
        values.fill_(tensor.mean)
        return
    if tensor.expert_dim is not None:
        # Each expert is a matrix by itself, whichever dimension of the stack is sharded.
        start, length = (section.start, section.length) if dim else (0, tensor.shape[tensor.expert_dim])
        of_one = replace(tensor, shape=tensor.shape[1:], sharded_dim=tensor.expert_dim - 1, expert_dim=None)
        for expert, matrix in enumerate(values, start=0 if dim else section.start):
            one = replace(of_one, name=f"{tensor.name}/{expert}")
            _initialize_section(matrix, Section(one, start, length), seed)
        return
    stop = section.start + section.length
    for block in range(section.start // tensor.block, -(-stop // tensor.block)):
        start = block * tensor.block
        shape = list(tensor.shape)
        shape[dim] = min(tensor.block, shape[dim] - start)
        digest = hashlib.sha256(f"{seed}/{tensor.name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        drawn = torch.empty(shape)
        if tensor.log_of is None:
            drawn.normal_(tensor.mean, tensor.std, generator=generator)
        else:
            drawn.uniform_(*tensor.log_of, generator=generator).log_()
        first, last = max(start, section.start), min(start + shape[dim], stop)
        drawn = drawn.narrow(dim, first - start, last - first)
        values.narrow(dim, first - section.start, last - first).copy_(drawn)
