"""The optimizer's state: fp32 masters, moments and gradients, by parameter and element; norm and clipping of gradients.

Every class of optimizer that shards its state over data-parallel ranks flattens and divides the parameters in another
way. Each class maps the parts of local parameters (`Span`) to its tensors; this needs no communication.
`ShardedOptimizer` implements ZeRO 0 and 1, and `engine/deepspeed.py` the other stages. Every save checks that each
weight is its rounded master (`checkpoint/saving.py`).

A step's gradients are sums over the data-parallel ranks. Tensor-parallel ranks that hold the same weight, and use it on
their own heads, positions or experts, then sum their parts of them: each those elements that its optimizer owns.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.checkpoint.optimizer_state import OptimizerState, Span
from megatron_ladder.comm.group import CommGroup, to_device
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.parallel.layout import Section, parameter_sections, split_interval, state_sections

GROUP_MOMENTS = "moments"
"""Key of a parameter group: the names of the moments of its parameters."""
Gradients = Iterable[tuple[Span, Tensor]]
"""Spans with their elements of the gradient, in the storage that the optimizer reads; any shape."""


class ZeroOptimizer(OptimizerState, ABC):
    """A rank's optimizer, which updates this rank's part of the parameters. All ranks call its methods alike.

    A training step runs its passes inside `reducing`, may change the gradients in `gradients()`, and ends with `step`
    or `discard_gradients`.

    Attributes:
        base: torch's optimizer; to be set before the first step.
        finishes_steps: whether `step` waits for all weights, for a caller that reads them after every step.
        steps: the number of steps that have updated weights.
    """

    base: torch.optim.Optimizer
    finishes_steps = False

    def __init__(self, model: nn.Module, is_first_copy: bool) -> None:
        """`is_first_copy`: whether this is the first of the data-parallel ranks."""
        self._model = model
        self._is_first_copy = is_first_copy
        self._sections = {id(parameter): sections for parameter, sections in parameter_sections(model)}
        self.steps = 0

    @abstractmethod
    def freeze(self, frozen: Collection[nn.Parameter]) -> None:
        """Change neither these parameters nor their moments from the next step on, and all others."""

    @abstractmethod
    def reducing(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context of this many forward and backward passes, at whose end gradients are reduced.

        Gradients are those of the scaled losses, summed over all tokens of all data-parallel ranks.
        """

    @abstractmethod
    def step(self) -> None:
        """Update the weights with the reduced gradients.

        Other ranks' parts of the weights may arrive later, at the latest under the next forward pass.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """End a step that updates nothing: neither weights, moments nor the optimizer's step count change."""

    @abstractmethod
    def finish_step(self) -> None:
        """Wait for the weights of the last step, for readers other than the model's forward pass."""

    def _spans_in(
        self,
        group: Mapping[str, Any],
        parameters: Sequence[nn.Parameter],
        offsets: Sequence[int],
        master: Tensor,
        low: int,
        owned: bool,
    ) -> Iterator[Span]:
        """Yield the spans in a part of a flat vector, from its element `low` on, whose fp32 values are `master`.

        The parameters of the vector begin at `offsets` and belong to the parameter group `group`.
        """
        moments = group[GROUP_MOMENTS]
        high = low + master.numel()
        for parameter, offset in zip(parameters, offsets, strict=True):
            first = max(offset, low)
            last = min(offset + parameter.numel(), high)
            if first < last:
                weight = parameter.detach().view(-1).narrow(0, first - offset, last - first)
                sections = self._sections[id(parameter)]
                yield Span(sections, parameter.shape, first - offset, weight, master, first - low, owned, moments)

    def states(self) -> Iterator[Span]:
        for state, sections in state_sections(self._model):
            yield Span(sections, state.shape, 0, state.view(-1), state, 0, self._is_first_copy, ())

    def gradients(self) -> list[tuple[Span, Tensor]]:
        """Return `Gradients` of the spans that train before a step, reduced over the ranks with the same parameter and
        other samples."""
        return [
            (span, span.flat_master.grad.view(-1).narrow(0, span.offset, span.length))
            for span in self.spans()
            if span.flat_master.grad is not None
        ]

    def moment(self, span: Span, which: str) -> Tensor:
        state = self.base.state[span.flat_master]
        if which not in state:
            state[which] = torch.zeros_like(span.flat_master, memory_format=torch.preserve_format).detach()
            self._count_steps(span.flat_master)
        return state[which].view(-1).narrow(0, span.offset, span.length)

    def steps_taken(self) -> int:
        return self.steps

    def set_steps_taken(self, steps: int) -> None:
        self.steps = steps
        if not isinstance(self.base, torch.optim.AdamW):
            for group in self.base.param_groups:
                group["step"] = steps
        # ZeRO-3 registers the tensors that the optimizer updates with it only during a step.
        for flat_master in {id(span.flat_master): span.flat_master for span in self.spans()}.values():
            self._count_steps(flat_master)

    def _count_steps(self, flat_master: Tensor) -> None:
        """Make the number of steps that of a tensor with moments, which AdamW treats as fully initialised."""
        state = self.base.state.get(flat_master)
        if state and isinstance(self.base, torch.optim.AdamW):
            # The fused kernel requires the count on the device.
            device = flat_master.device if self.base.defaults["fused"] else torch.device("cpu")
            state["step"] = torch.tensor(float(self.steps), device=device)

    def adopt_weights(self) -> None:
        """Make weights that were changed since the last step their own masters; the other masters stay precise."""
        for span in self.spans():
            weight = span.weight.to(span.master.device)
            span.master.copy_(torch.where(span.master.to(weight.dtype) == weight, span.master, weight))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.base.param_groups:
            group["lr"] = learning_rate


def _parts(gradients: Gradients) -> Iterator[tuple[Span, Section, Tensor]]:
    """Iterate over spans, the sections in them, and the sections' elements, flat."""
    for span, gradient in gradients:
        for section, _, begin, length in split_interval(span.sections, span.shape, span.start, gradient.numel()):
            yield span, section, gradient.reshape(-1).narrow(0, begin, length)


def sum_partial_gradients(gradients: Gradients, mesh: ProcessMesh, device: torch.device) -> None:
    """Sum in place the gradients of which tensor-parallel ranks have parts, over the ranks that hold the same slice.

    Every rank must call it, once per step. These ranks have equal spans, because their parameters have equal shapes.
    """
    parts_by_group: dict[CommGroup, list[Tensor]] = {}
    for _, section, elements in _parts(gradients):
        if section.is_partial:
            replicas = section.tensor.replicas(mesh.tensor.size)
            group = mesh.tensor if replicas == mesh.tensor.size else mesh.head_replicas[replicas]
            parts_by_group.setdefault(group, []).append(elements)
    for group, parts in parts_by_group.items():
        sums = group.all_reduce(to_device(torch.cat(parts), device)).split([part.numel() for part in parts])
        torch._foreach_copy_(parts, sums)


def gradient_norm(
    gradients: Gradients, world: CommGroup, device: torch.device, extra_sums: Tensor
) -> tuple[float, list[float]]:
    """Return the norm of the whole model's gradient, and `extra_sums` [n] (fp64, on `device`) summed over ranks.

    Every rank must call it, and gets the same result. Each element counts once, even if several ranks hold it. Squares
    are added in fp64, because millions of squares of very different size would lose digits in fp32. The norm is not
    finite if any rank's copy of any element is not, counted or not, so a single corrupt copy is detected too.
    """
    parts: list[Tensor] = []
    counts: list[float] = []
    for span, section, elements in _parts(gradients):
        parts.append(elements)
        counts.append(float(span.owned and section.counted))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        norms = torch._foreach_norm(parts, dtype=torch.promote_types(parts[0].dtype, torch.float32))
        # Gradients of an offloaded optimizer are in host memory, which no GPU collective can read.
        squares = to_device(torch.stack(norms), device).double().square()
        # Zero times infinity or NaN is NaN, so copies that do not count still make the sum invalid.
        total = (squares * to_device(torch.tensor(counts, dtype=torch.float64), device)).sum()
    square, *sums = world.all_reduce(torch.cat([total.reshape(1), extra_sums])).tolist()
    return math.sqrt(square), sums


def locate_bad_gradient(gradients: Gradients, model: nn.Module, world: CommGroup) -> dict[str, Any]:
    """Return on all ranks the lowest one with a gradient that is not finite, and the parameter; `{}` if none."""
    bad = {section.name for _, section, elements in _parts(gradients) if not elements.isfinite().all()}
    order = (section.name for _, sections in parameter_sections(model) for section in sections)
    names = world.gather_objects(next((name for name in order if name in bad), None))
    locations = ({"rank": rank, "parameter": name} for rank, name in enumerate(names) if name is not None)
    lowest: dict[str, Any] = world.broadcast_object(next(locations, {}))
    return lowest


def clip_gradients(gradients: Gradients, norm: float, highest: float) -> None:
    """Scale the gradient in place so that its norm is at most `highest`; 0 disables clipping."""
    tensors = [gradient for _, gradient in gradients]
    if tensors and 0.0 < highest < norm:
        torch._foreach_mul_(tensors, highest / norm)
