"""The optimizer's state: fp32 masters, moments and gradients, by parameter and element; norm and clipping of gradients.

Every class of optimizer that shards its state over data-parallel ranks flattens and divides the parameters in another
way. One adapter per class maps the parts of local parameters (`Span`) to the optimizer's tensors; this needs no
communication. No other code reads the attributes of DeepSpeed's classes. They are private to DeepSpeed, so its version
is pinned, an unknown class is an error, and every save checks that each weight is its rounded master
(`checkpoint/saving.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ladder.checkpoint.optimizer_state import MOMENTS, OptimizerState, Span
from megatron_ladder.comm.group import CommGroup, to_device
from megatron_ladder.engine.muon import MOMENTUM, ORTHOGONAL
from megatron_ladder.parallel.layout import Section, parameter_sections, split_interval, state_sections

Gradients = Iterable[tuple[Span, Tensor]]
"""Spans with their elements of the gradient, in the storage that the optimizer reads; any shape."""


class EngineState(OptimizerState, ABC):
    """The state of one engine's optimizer."""

    def __init__(self, engine: Any) -> None:
        """`engine` is DeepSpeed's."""
        self._engine = engine
        self._sections = {id(parameter): sections for parameter, sections in parameter_sections(engine.module)}
        self._frozen: Collection[Sequence[Section]] = ()
        """The sections of the parameters that no step changes."""

    @contextmanager
    def keeping(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Freeze parameters inside the block: their gradients are zero, steps change neither them nor their moments.

        Masters of several parameters share a tensor, which the optimizer updates as a whole, so their values are copied
        back after its update, before any weights are made from masters.
        """
        self._frozen = {self._sections[id(parameter)] for parameter in parameters}
        spans = [span for span in self.spans() if span.sections in self._frozen]
        copies: list[list[tuple[Tensor, Tensor]]] = []

        def copy(*_: object) -> None:
            # ZeRO-3 updates one tensor after another.
            updated = {id(tensor) for group in self.base.param_groups for tensor in group["params"]}
            frozen = [span for span in spans if id(span.flat_master) in updated]
            values = [
                value for span in frozen for value in (span.master, *map(partial(self.moment, span), span.moments))
            ]
            copies.append([(value, value.clone()) for value in values])

        def copy_back(*_: object) -> None:
            for value, earlier in copies.pop():
                value.copy_(earlier)

        hooks = [self.base.register_step_pre_hook(copy), self.base.register_step_post_hook(copy_back)]
        try:
            yield
        finally:
            self._frozen = ()
            for hook in hooks:
                hook.remove()

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed wraps."""
        return self._engine.optimizer.optimizer

    def states(self) -> Iterator[Span]:
        owned = dist.get_rank(self._engine.seq_data_parallel_group) == 0
        for state, sections in state_sections(self._engine.module):
            yield Span(sections, state.shape, 0, state.view(-1), state, 0, owned, ())

    def gradients(self) -> list[tuple[Span, Tensor]]:
        """Return `Gradients` of all spans before a step, reduced over the ranks with the same parameter and other
        samples."""
        if self._is_offloaded:
            from deepspeed.accelerator import get_accelerator

            # DeepSpeed does not wait for its copies to page-locked host memory.
            get_accelerator().synchronize()
        gradients = list(zip(self.spans(), self._gradients(), strict=True))
        for span, gradient in gradients:
            if span.sections in self._frozen:
                gradient.zero_()
        return gradients

    def _gradients(self) -> Iterator[Tensor]:
        """Iterate over the gradients of `spans`; by default they are those of the masters."""
        for span in self.spans():
            assert span.flat_master.grad is not None
            yield span.flat_master.grad.view(-1).narrow(0, span.offset, span.length)

    def moment(self, span: Span, which: str) -> Tensor:
        state = self.base.state[span.flat_master]
        if which not in state:
            state[which] = torch.zeros_like(span.flat_master, memory_format=torch.preserve_format).detach()
            if isinstance(self.base, torch.optim.AdamW):
                # AdamW treats any non-empty state as fully initialized.
                state.setdefault("step", self._step_count(span.flat_master, 0))
        return state[which].view(-1).narrow(0, span.offset, span.length)

    def steps_taken(self) -> int:
        counters = [*self.base.param_groups, *(self.base.state[flat_master] for flat_master in self._flat_masters())]
        return next((int(counter["step"]) for counter in counters if "step" in counter), 0)

    def set_steps_taken(self, steps: int) -> None:
        if not isinstance(self.base, torch.optim.AdamW):
            for group in self.base.param_groups:
                group["step"] = steps
            return
        for flat_master in self._flat_masters():
            self.base.state[flat_master]["step"] = self._step_count(flat_master, steps)

    def _step_count(self, flat_master: Tensor, steps: int) -> Tensor:
        """Return the count as AdamW stores it: a tensor, which its fused kernel requires on the device."""
        device = flat_master.device if self.base.defaults["fused"] else torch.device("cpu")
        return torch.tensor(float(steps), device=device)

    def _flat_masters(self) -> list[Tensor]:
        """Return the tensors that the optimizer updates; ZeRO-3 registers them with it only during a step."""
        return list({id(span.flat_master): span.flat_master for span in self.spans()}.values())

    def adopt_weights(self) -> None:
        """Make weights that were changed since the last step their own masters; the other masters stay precise."""
        for span in self.spans():
            weight = span.weight.to(span.master.device)
            span.master.copy_(torch.where(span.master.to(weight.dtype) == weight, span.master, weight))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.base.param_groups:
            group["lr"] = learning_rate

    @property
    def _is_offloaded(self) -> bool:
        """Whether gradients, masters and moments are in host memory."""
        optimizer = self._engine.optimizer
        return any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer"))


class _PlainState(EngineState):
    """ZeRO-0 in fp32: torch's optimizer updates the parameters themselves, equally on every data-parallel rank."""

    @property
    def base(self) -> torch.optim.Optimizer:
        return self._engine.optimizer

    def spans(self) -> Iterator[Span]:
        owned = dist.get_rank(self._engine.seq_data_parallel_group) == 0
        for group in self.base.param_groups:
            for parameter in group["params"]:
                sections = self._sections[id(parameter)]
                weight, moments = parameter.detach().view(-1), _moments(group)
                yield Span(sections, parameter.shape, 0, weight, parameter, 0, owned, moments)

    def copy_masters_to_weights(self) -> None:
        return


class _FlatState(EngineState):
    """ZeRO-1 and 2: parameters are flattened, and each data-parallel rank updates a part of each flat vector."""

    @abstractmethod
    def vectors(self) -> Iterator[tuple[Mapping[str, Any], Sequence[nn.Parameter], Sequence[int], Tensor, int]]:
        """Yield for each flat vector its parameter group, its parameters, their starts, and this rank's part, fp32,
        with the number of the part."""

    def spans(self) -> Iterator[Span]:
        for group, parameters, offsets, flat_master, part in self.vectors():
            low = part * flat_master.numel()
            high = low + flat_master.numel()
            for parameter, offset in zip(parameters, offsets, strict=True):
                first, last = max(offset, low), min(offset + parameter.numel(), high)
                if first < last:
                    weight = parameter.detach().view(-1).narrow(0, first - offset, last - first)
                    sections, start = self._sections[id(parameter)], first - offset
                    yield Span(
                        sections, parameter.shape, start, weight, flat_master, first - low, True, _moments(group)
                    )


class _ShardedState(_FlatState):
    """ZeRO-1 (`ShardedOptimizer`)."""

    def vectors(self) -> Iterator[tuple[Mapping[str, Any], Sequence[nn.Parameter], Sequence[int], Tensor, int]]:
        groups = {id(master): group for group in self.base.param_groups for master in group["params"]}
        for bucket in self._engine.optimizer.buckets:
            part = bucket.reduce_over.rank
            yield groups[id(bucket.master)], bucket.parameters, bucket.offsets, bucket.master, part

    def copy_masters_to_weights(self) -> None:
        self._engine.optimizer.start_gather()


class _ZeroState(_FlatState):
    """ZeRO-2 (`DeepSpeedZeroOptimizer`), and ZeRO-1 and 2 with the optimizer offloaded."""

    def vectors(self) -> Iterator[tuple[Mapping[str, Any], Sequence[nn.Parameter], Sequence[int], Tensor, int]]:
        optimizer = self._engine.optimizer
        parameters, offsets = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
        masters, part = optimizer.single_partition_of_fp32_groups, dist.get_rank(self._engine.seq_data_parallel_group)
        return zip(self.base.param_groups, parameters, offsets, masters, [part] * len(masters), strict=True)

    def copy_masters_to_weights(self) -> None:
        self._engine.optimizer.update_lp_params()

    def _gradients(self) -> Iterator[Tensor]:
        optimizer = self._engine.optimizer
        if self._is_offloaded:
            yield from super()._gradients()
            return
        found: dict[tuple[int, int], Tensor] = {}
        for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
            parts = optimizer.averaged_gradients[index]
            starts = accumulate((part.numel() for part in parts), initial=0)
            found |= {(id(master), start): part for start, part in zip(starts, parts, strict=False)}
        for span in self.spans():
            gradient = found.get((id(span.flat_master), span.offset))
            if gradient is None or gradient.numel() != span.length:
                raise RuntimeError(
                    f"DeepSpeed has no gradient of {span.sections[0].name} at element {span.offset} of the partition"
                )
            yield gradient


class _Zero3State(EngineState):
    """ZeRO-3: each parameter is divided into equal parts, the last one padded; a rank's parts are concatenated."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # The norm is known, and DeepSpeed neither clips by it nor scales by it.
        engine.optimizer._get_norm_groups = lambda: [torch.zeros(())]

    def _parts(self) -> Iterator[tuple[int, int, Span]]:
        """Iterate over subgroup, index within it, and this rank's span, leaving out parts that are only padding."""
        optimizer = self._engine.optimizer
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        for subgroup, (parameters, flat_master) in enumerate(groups):
            offset = 0
            for index, parameter in enumerate(parameters):
                part: Any = parameter
                size = part.partition_numel()
                start = dist.get_rank(part.ds_process_group) * size
                length = min(size, part.ds_numel - start)
                if length > 0:
                    weight = part.ds_tensor.detach().view(-1).narrow(0, 0, length)
                    sections = self._sections[id(parameter)]
                    span = Span(sections, part.ds_shape, start, weight, flat_master, offset, owned=True)
                    yield subgroup, index, span
                offset += size

    def spans(self) -> Iterator[Span]:
        for _, _, span in self._parts():
            yield span

    def _gradients(self) -> Iterator[Tensor]:
        if self._is_offloaded:
            yield from super()._gradients()
            return
        for subgroup, index, span in self._parts():
            yield self._engine.optimizer.averaged_gradients[subgroup][index].narrow(0, 0, span.length)

    def copy_masters_to_weights(self) -> None:
        optimizer = self._engine.optimizer
        # Releases gathered copies, which would be out of date; each parameter is gathered again before its next use.
        optimizer._partition_all_parameters()
        for subgroup in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(subgroup)


def _moments(group: Mapping[str, Any]) -> tuple[str, ...]:
    return (MOMENTUM,) if group.get(ORTHOGONAL) else MOMENTS


_STATES: dict[str, type[EngineState]] = {
    "AdamW": _PlainState,
    "MuonWithAdamW": _PlainState,
    "FusedAdam": _PlainState,
    "ShardedOptimizer": _ShardedState,
    "DeepSpeedZeroOptimizer": _ZeroState,
    "DeepSpeedZeroOptimizer_Stage3": _Zero3State,
}
"""The adapter for each possible class of `engine.optimizer`."""


def engine_state(engine: Any) -> EngineState:
    """Return the adapter for DeepSpeed's engine; raise RuntimeError if its optimizer class is unknown."""
    name = type(engine.optimizer).__name__
    if name not in _STATES:
        raise RuntimeError(f"no adapter can read the state of DeepSpeed's {name}")
    return _STATES[name](engine)


def _parts(gradients: Gradients) -> Iterator[tuple[Span, Section, Tensor]]:
    """Iterate over spans, the sections in them, and the sections' elements, flat."""
    for span, gradient in gradients:
        for section, _, begin, length in split_interval(span.sections, span.shape, span.start, gradient.numel()):
            yield span, section, gradient.reshape(-1).narrow(0, begin, length)


def gradient_norm(
    gradients: Gradients, world: CommGroup, device: torch.device, extra_sums: Tensor
) -> tuple[float, list[float]]:
    """Return the norm of the whole model's gradient, and `extra_sums` [n] (fp64, on `device`) summed over ranks.

    Every rank must call it, and gets the same result. Each element counts once, even if several ranks hold it. Squares
    are added in fp64, because millions of squares of very different size would lose digits in fp32. The norm is not
    finite if any rank's copy of any element is not, counted or not, so a single corrupt copy is detected too.
    """
    parts, counts = [], []
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
    found = ({"rank": rank, "parameter": name} for rank, name in enumerate(names) if name is not None)
    located: dict[str, Any] = world.broadcast_object(next(found, {}))
    return located


def clip_gradients(gradients: Gradients, norm: float, highest: float) -> None:
    """Scale the gradient in place so that its norm is at most `highest`; 0 disables clipping."""
    tensors = [gradient for _, gradient in gradients]
    if tensors and 0.0 < highest < norm:
        torch._foreach_mul_(tensors, highest / norm)
