"""What the DeepSpeed engine holds: fp32 masters, Adam's moments and gradients, by parameter and element.

DeepSpeed flattens parameters and cuts them over data-parallel ranks, each of its optimizer classes in its own way.
One adapter per class says which run of which local parameter lies where; nothing is communicated for it, and nothing
else in this package reads those classes' attributes. They are private to DeepSpeed, so its version is pinned, an
unknown class is an error, and every save checks that masters and weights agree (`check_masters`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ladder.optim.gradients import GradientPiece
from megatron_ladder.parallel.layout import Section, parameter_sections

MOMENTS = ("exp_avg", "exp_avg_sq")


class Span(NamedTuple):
    """A run of one local parameter that this rank's optimizer updates."""

    parameter: nn.Parameter
    sections: Sequence[Section]
    """What the parameter is made of."""
    start: int
    """First element, in the parameter's row-major order."""
    weight: Tensor
    """The elements that the model computes with, flat."""
    flat_master: Tensor
    """The optimizer's own fp32 tensor that holds the run, and the key of its moments."""
    offset: int
    """Where the run begins in it."""
    owned: bool
    """Whether this rank saves and counts it, among data-parallel ranks that hold the same run."""

    @property
    def length(self) -> int:
        """Elements."""
        return self.weight.numel()

    @property
    def master(self) -> Tensor:
        """The fp32 values, flat."""
        return self.flat_master.detach().view(-1).narrow(0, self.offset, self.length)


class EngineState(ABC):
    """The state of one engine's optimizer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._sections = {
            id(parameter): sections for parameter, sections in parameter_sections(engine.module)
        }

    @property
    @abstractmethod
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed wraps."""

    @abstractmethod
    def spans(self) -> Iterator[Span]:
        """Every run that this rank updates, in the same order at every call."""

    @abstractmethod
    def gradients(self) -> Iterator[Tensor]:
        """The gradient of each run of `spans`, in the storage that the next step reads.

        They are there from the last backward of a step until the step.
        """

    @abstractmethod
    def masters_changed(self) -> None:
        """Brings the model's weights up to date with masters that were written; all ranks must call it."""

    def gradient_pieces(self) -> list[GradientPiece]:
        """The gradient that this rank holds, reduced over data-parallel ranks."""
        return [
            GradientPiece(span.sections, span.parameter.shape, span.start, gradient, span.owned)
            for span, gradient in zip(self.spans(), self.gradients(), strict=True)
        ]

    def moment(self, span: Span, which: str) -> Tensor:
        """The run's part of `exp_avg` or `exp_avg_sq`, flat; made as zeros if no step was taken yet."""
        state = self.base.state[span.flat_master]
        if which not in state:
            state[which] = torch.zeros_like(span.flat_master, memory_format=torch.preserve_format).detach()
        moment: Tensor = state[which]
        return moment.view(-1).narrow(0, span.offset, span.length)

    def steps_taken(self) -> int:
        """Optimizer steps since the beginning of the run."""
        for group in self.base.param_groups:
            if "step" in group:
                return int(group["step"])
            for parameter in group["params"]:
                if "step" in self.base.state[parameter]:
                    return int(self.base.state[parameter]["step"])
        return 0

    def set_steps_taken(self, steps: int) -> None:
        """Tells AdamW how many steps its moments have seen, for its bias correction."""
        for group in self.base.param_groups:
            if type(self.base) is not torch.optim.AdamW:
                group["step"] = steps
                continue
            for parameter in group["params"]:
                # AdamW reads the count from a tensor; its fused kernel wants it on the device.
                device = parameter.device if group["fused"] else torch.device("cpu")
                self.base.state[parameter]["step"] = torch.tensor(float(steps), device=device)

    def set_learning_rate(self, learning_rate: float) -> None:
        """For the next step."""
        for group in self.base.param_groups:
            group["lr"] = learning_rate

    def check_masters(self) -> None:
        """Raises RuntimeError if a weight is not the rounded master: the adapter does not fit the engine then."""
        for span in self.spans():
            if not torch.equal(span.master.to(span.weight.dtype), span.weight):
                raise RuntimeError(f"the fp32 master of {span.sections[0].name} is not the model's weight")


class PlainState(EngineState):
    """ZeRO-0 in fp32: torch's optimizer on the parameters themselves, the same on every data-parallel rank."""

    @property
    def base(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.engine.optimizer
        return optimizer

    def spans(self) -> Iterator[Span]:
        owned = dist.get_rank(self.engine.seq_data_parallel_group) == 0
        for group in self.base.param_groups:
            for parameter in group["params"]:
                sections = self._sections[id(parameter)]
                yield Span(parameter, sections, 0, parameter.detach().view(-1), parameter, 0, owned)

    def gradients(self) -> Iterator[Tensor]:
        for span in self.spans():
            assert span.parameter.grad is not None
            yield span.parameter.grad

    def masters_changed(self) -> None:
        return


class _FlatGroup(NamedTuple):
    """Parameters that lie in one flat vector, of which this rank holds a partition."""

    parameters: Sequence[nn.Parameter]
    offsets: Sequence[int]
    """Where each begins in the vector."""
    flat_master: Tensor
    """This rank's partition, fp32."""


class FlatState(EngineState):
    """ZeRO-1: parameters are flattened group by group, and each data-parallel rank updates one partition of each."""

    @property
    def base(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return optimizer

    @abstractmethod
    def groups(self) -> Iterator[_FlatGroup]:
        """The groups, in the optimizer's order."""

    def spans(self) -> Iterator[Span]:
        for index, (parameters, offsets, flat_master) in enumerate(self.groups()):
            low = dist.get_rank(self.engine.optimizer.real_dp_process_group[index]) * flat_master.numel()
            high = low + flat_master.numel()
            for parameter, offset in zip(parameters, offsets, strict=True):
                first, last = max(offset, low), min(offset + parameter.numel(), high)
                if first < last:
                    weight = parameter.detach().view(-1).narrow(0, first - offset, last - first)
                    sections = self._sections[id(parameter)]
                    yield Span(parameter, sections, first - offset, weight, flat_master, first - low, owned=True)

    def masters_changed(self) -> None:
        self.engine.optimizer.update_lp_params()


class Bf16State(FlatState):
    """ZeRO-1 in bf16 with fp32 gradient accumulation (`BF16_Optimizer`)."""

    def groups(self) -> Iterator[_FlatGroup]:
        optimizer = self.engine.optimizer
        for parameters, flat_master in zip(
            optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True
        ):
            yield _FlatGroup(parameters, _packed_offsets(parameters), flat_master)

    def gradients(self) -> Iterator[Tensor]:
        optimizer = self.engine.optimizer
        masters, gradients = optimizer.fp32_groups_flat_partition, optimizer.fp32_groups_gradient_flat_partition
        of_master = {id(master): gradient for master, gradient in zip(masters, gradients, strict=True)}
        for span in self.spans():
            yield of_master[id(span.flat_master)].narrow(0, span.offset, span.length)


class Zero1State(FlatState):
    """ZeRO-1 in fp32 (`DeepSpeedZeroOptimizer`)."""

    def groups(self) -> Iterator[_FlatGroup]:
        optimizer = self.engine.optimizer
        for parameters, offsets, flat_master in zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.single_partition_of_fp32_groups,
            strict=True,
        ):
            yield _FlatGroup(parameters, offsets, flat_master)

    def gradients(self) -> Iterator[Tensor]:
        optimizer = self.engine.optimizer
        lying: dict[tuple[int, int], Tensor] = {}
        for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
            position = 0
            for part in optimizer.averaged_gradients[index]:
                lying[id(master), position] = part
                position += part.numel()
        for span in self.spans():
            gradient = lying.get((id(span.flat_master), span.offset))
            if gradient is None or gradient.numel() != span.length:
                raise RuntimeError(f"the engine holds no gradient of {span.sections[0].name} at element {span.offset}")
            yield gradient


STATES: dict[str, type[EngineState]] = {
    "AdamW": PlainState,
    "FusedAdam": PlainState,
    "BF16_Optimizer": Bf16State,
    "DeepSpeedZeroOptimizer": Zero1State,
}
"""The adapter for each class that `engine.optimizer` can be."""


def engine_state(engine: Any) -> EngineState:
    """The adapter that fits the engine; raises RuntimeError for an optimizer class that none was written for."""
    name = type(engine.optimizer).__name__
    if name not in STATES:
        raise RuntimeError(f"no adapter reads the state of DeepSpeed's {name}")
    return STATES[name](engine)


def _packed_offsets(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Where each parameter begins when they lie one after another."""
    offsets, position = [], 0
    for parameter in parameters:
        offsets.append(position)
        position += parameter.numel()
    return offsets
