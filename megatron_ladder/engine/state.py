"""What the DeepSpeed engine holds: fp32 masters, Adam's moments and gradients, by parameter and element.

DeepSpeed flattens parameters and cuts them over data-parallel ranks, each of its optimizer classes in its own way.
One adapter per class says which run of which local parameter lies where; nothing is communicated for it, and nothing
else in this package reads those classes' attributes. They are private to DeepSpeed, so its version is pinned, an
unknown class is an error, and every save checks that the masters, rounded, are the weights (`checkpoint/saving.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.engine.gradients import GradientPiece
from megatron_ladder.parallel.layout import parameter_sections

LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's dynamic loss scaler knows of its past."""


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
    def copy_masters_to_weights(self) -> None:
        """Brings the model's weights up to date with masters that were written; all ranks must call it."""

    def gradient_pieces(self) -> list[GradientPiece]:
        """The gradient that this rank holds, reduced over data-parallel ranks, times `loss_scale`."""
        return [
            GradientPiece(span.sections, span.shape, span.start, gradient, span.owned)
            for span, gradient in zip(self.spans(), self.gradients(), strict=True)
        ]

    def moment(self, span: Span, which: str) -> Tensor:
        """The run's part of `exp_avg` or `exp_avg_sq`, flat; made as zeros if no step was taken yet."""
        state = self.base.state[span.flat_master]
        if which not in state:
            state[which] = torch.zeros_like(span.flat_master, memory_format=torch.preserve_format).detach()
            if type(self.base) is torch.optim.AdamW:
                # It takes a state that has anything for one that has everything.
                state.setdefault("step", self._step_count(span.flat_master, 0))
        moment: Tensor = state[which]
        return moment.view(-1).narrow(0, span.offset, span.length)

    def steps_taken(self) -> int:
        """Optimizer steps since the beginning of the run."""
        for group in self.base.param_groups:
            if "step" in group:
                return int(group["step"])
        for flat_master in self._flat_masters():
            if "step" in self.base.state[flat_master]:
                return int(self.base.state[flat_master]["step"])
        return 0

    def set_steps_taken(self, steps: int) -> None:
        """Tells AdamW how many steps its moments have seen, for its bias correction."""
        if type(self.base) is not torch.optim.AdamW:
            for group in self.base.param_groups:
                group["step"] = steps
            return
        for flat_master in self._flat_masters():
            self.base.state[flat_master]["step"] = self._step_count(flat_master, steps)

    def _step_count(self, flat_master: Tensor, steps: int) -> Tensor:
        """As AdamW reads it: a tensor, which its fused kernel wants on the device."""
        device = flat_master.device if self.base.defaults["fused"] else torch.device("cpu")
        return torch.tensor(float(steps), device=device)

    def _flat_masters(self) -> list[Tensor]:
        """The tensors that the optimizer updates; ZeRO-3 shows them to it only within a step."""
        return list({id(span.flat_master): span.flat_master for span in self.spans()}.values())

    def set_learning_rate(self, learning_rate: float) -> None:
        """For the next step."""
        for group in self.base.param_groups:
            group["lr"] = learning_rate

    @property
    def loss_scale(self) -> float:
        """What the loss, and so every gradient until the step, is multiplied by; 1 but for fp16."""
        return float(self.engine.optimizer.loss_scale) if self.engine.fp16_enabled() else 1.0

    def can_lower_loss_scale(self) -> bool:
        """Whether a gradient that is not finite may be due to the loss scale alone."""
        scaler: Any = getattr(self.engine.optimizer, "loss_scaler", None)
        return bool(getattr(scaler, "dynamic", False)) and self.loss_scale > scaler.min_scale

    def overflowed(self) -> bool:
        """Whether the last step was left out, because a scaled fp16 gradient was not finite."""
        return self.engine.fp16_enabled() and bool(self.engine.optimizer.overflow)

    def loss_scaler(self) -> dict[str, float]:
        """The state of fp16's dynamic loss scaling; nothing where the scale is constant."""
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        return {name: getattr(scaler, name) for name in LOSS_SCALER if hasattr(scaler, name)}

    def set_loss_scaler(self, stored: Mapping[str, float]) -> None:
        """Continues loss scaling where it was saved, if this run scales dynamically as well."""
        for name in self.loss_scaler():
            if name in stored:
                setattr(self.engine.optimizer.loss_scaler, name, stored[name])


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
                yield Span(sections, parameter.shape, 0, parameter.detach().view(-1), parameter, 0, owned)

    def gradients(self) -> Iterator[Tensor]:
        for span in self.spans():
            assert span.flat_master.grad is not None
            yield span.flat_master.grad

    def copy_masters_to_weights(self) -> None:
        return


class _FlatGroup(NamedTuple):
    """Parameters that lie in one flat vector, of which this rank holds a partition."""

    parameters: Sequence[nn.Parameter]
    offsets: Sequence[int]
    """Where each begins in the vector."""
    flat_master: Tensor
    """This rank's partition, fp32."""


class FlatState(EngineState):
    """ZeRO-1 and 2: parameters are flattened group by group; each data-parallel rank updates a partition of each."""

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
                    yield Span(sections, parameter.shape, first - offset, weight, flat_master, first - low, owned=True)

    def copy_masters_to_weights(self) -> None:
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


class ZeroState(FlatState):
    """ZeRO-1 in fp32 and fp16, ZeRO-2 (`DeepSpeedZeroOptimizer`), and both with the optimizer offloaded."""

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
        if optimizer.cpu_offload:
            for span in self.spans():
                assert span.flat_master.grad is not None
                yield span.flat_master.grad.narrow(0, span.offset, span.length)
            return
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


class Zero3State(EngineState):
    """ZeRO-3: each parameter is cut in equal parts, the last one padded, and a rank's parts lie one after another."""

    @property
    def base(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return optimizer

    def _parts(self) -> Iterator[tuple[int, int, Span]]:
        """Subgroup, place in it, and the run that this rank holds, where it is not all padding."""
        optimizer = self.engine.optimizer
        for index, (parameters, flat_master) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        ):
            offset = 0
            for place, parameter in enumerate(parameters):
                part: Any = parameter
                size = part.partition_numel()
                start = dist.get_rank(part.ds_process_group) * size
                length = min(size, part.ds_numel - start)
                if length > 0:
                    weight = part.ds_tensor.detach().view(-1).narrow(0, 0, length)
                    sections = self._sections[id(parameter)]
                    span = Span(sections, part.ds_shape, start, weight, flat_master, offset, owned=True)
                    yield index, place, span
                offset += size

    def spans(self) -> Iterator[Span]:
        for _, _, span in self._parts():
            yield span

    def gradients(self) -> Iterator[Tensor]:
        optimizer = self.engine.optimizer
        for index, place, span in self._parts():
            if optimizer.offload_optimizer:
                assert span.flat_master.grad is not None
                yield span.flat_master.grad.narrow(0, span.offset, span.length)
            else:
                yield optimizer.averaged_gradients[index][place].narrow(0, 0, span.length)

    def copy_masters_to_weights(self) -> None:
        optimizer = self.engine.optimizer
        # Copies gathered before would outlive their parts; each parameter is gathered anew before its next use.
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)


STATES: dict[str, type[EngineState]] = {
    "AdamW": PlainState,
    "FusedAdam": PlainState,
    "BF16_Optimizer": Bf16State,
    "DeepSpeedZeroOptimizer": ZeroState,
    "DeepSpeedZeroOptimizer_Stage3": Zero3State,
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
