"""Measures the inputs of the step-time model on this machine: seconds of sub-blocks, of the head, and of a collective.

Sub-blocks are timed inside whole passes of a model whose reduces do nothing, so that their weights come from memory as
in the predicted passes. The head is the rest of a pass: embedding, head, sampling, loss. The processor time of one
collective is the time that a pass over a wire without latency takes longer than a pass without reduces, divided by the
number of reduces.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.lab.bench.variants import Variant
from megatron_ladder.lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.sub_block import SubBlock


class StageClock(Protocol):
    """Measures the time between two points of a program on the processor that does the work."""

    def mark(self) -> Any:
        """Mark this point."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the time from one mark to a later one."""


class _HostClock:
    """For work that is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class _CudaClock:
    """For work that a GPU's current stream does after its call has returned."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream())
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3


def clock_of(device: torch.device) -> StageClock:
    """Return the clock for a device's work."""
    return _CudaClock() if device.type == "cuda" else _HostClock()


@dataclass(frozen=True)
class Calibration:
    """Times of one set of modules: those with two norms per layer, or those with one."""

    forward: tuple[float, ...]
    """Seconds of the sub-blocks of one layer, in order."""
    backward: tuple[float, ...]
    """The same, backward; zeros without training."""
    weight_gradient: tuple[float, ...]
    """The part of `backward` that the input's gradient does not need: the column-parallel weight's gradient."""
    pass_seconds: float
    """One whole pass without reduces."""
    layers: int

    @property
    def head(self) -> float:
        """Seconds of a pass outside of its sub-blocks."""
        return max(0.0, self.pass_seconds - self.layers * sum(self.forward + self.backward))

    @property
    def sub_block(self) -> float:
        """Mean forward seconds of a sub-block: the unit `c` of interconnect times."""
        return sum(self.forward) / len(self.forward)

    def predict(self, variant: Variant, reduce_seconds: float, wire: WireModel) -> float:
        """Return the seconds of one pass of a variant when every all-reduce takes `reduce_seconds` on the wire."""
        training = any(self.backward)
        wiring = WIRINGS[variant.residual_mode]
        late = [variant.options.tp_overlap and kind in wiring.late for kind in wiring.sub_blocks]
        times = list(zip(self.forward, self.backward, self.weight_gradient, late, strict=True)) * self.layers
        # A desynchronised interval has one reduce, at its end in forward and at its beginning in backward.
        interval = max(1, variant.desync_interval)
        steps = [
            SubBlockTime(
                forward_seconds=sum(forward),
                reduce_seconds=reduce_seconds,
                staleness=variant.residual_staleness if reads_late[0] else 0,
                dgrad_seconds=sum(backward) - weight_gradient[0],
                wgrad_seconds=weight_gradient[0],
            )
            for forward, backward, weight_gradient, reads_late in (
                tuple(zip(*times[start : start + interval], strict=True)) for start in range(0, len(times), interval)
            )
        ]
        total = forward_seconds(steps, wire, head_seconds=self.head)
        if training:
            mirrored = variant.options.tp_overlap and variant.options.mirrored_backward and not variant.desync_interval
            total += backward_seconds(steps, wire, launch_before_wgrad=mirrored, wait_at_once=not mirrored)
        return total


@dataclass(frozen=True)
class Prediction:
    """The step-time model with this machine's calibration."""

    by_modules: dict[bool, Calibration]
    """For the modules with two norms per layer (False) and with one (True)."""
    wire: WireModel
    always_waiting: int
    """Reduces of a pass that no wiring hides: those of embedding, head and loss."""

    def seconds(self, variant: Variant, alpha: float) -> float:
        """Return the seconds of one pass when every all-reduce takes `alpha` seconds on the wire."""
        calibration = self.by_modules[variant.one_norm]
        if variant.without_reduces:
            return calibration.pass_seconds
        cost = self.wire.launch_seconds + self.wire.finish_seconds
        return calibration.predict(variant, alpha, self.wire) + self.always_waiting * (alpha + cost)


class ForwardTimer:
    """Times every sub-block of a model inside its passes while it is attached."""

    def __init__(self, model: LanguageModel, clock: StageClock) -> None:
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        per_layer = len(model.stack.sub_blocks()) // model.config.num_layers
        self._spans: list[list[tuple[Any, Any]]] = [[] for _ in range(per_layer)]
        for number, step in enumerate(model.stack.sub_blocks()):
            self._attach(step, self._spans[number % per_layer])

    def _attach(self, step: SubBlock, spans: list[tuple[Any, Any]]) -> None:
        began: list[Any] = [None]

        def begin(*_: object) -> None:
            began[0] = self._clock.mark()

        def end(*_: object) -> None:
            spans.append((began[0], self._clock.mark()))

        assert isinstance(step.body, nn.Module)
        self._handles += [step.norm.register_forward_pre_hook(begin), step.body.register_forward_hook(end)]

    def finish(self) -> tuple[float, ...]:
        """Detach the timer and return the median seconds of each sub-block of a layer."""
        for handle in self._handles:
            handle.remove()
        return tuple(statistics.median(self._clock.seconds(*span) for span in spans) for spans in self._spans)


def time_backward(
    model: LanguageModel, hidden_states: Tensor, rounds: int, clock: StageClock
) -> tuple[tuple[float, ...], ...]:
    """Return the median seconds of each sub-block's backward in a layer, and of its column-parallel weight's gradient.

    Args:
        hidden_states: [s, b, h], any values.
    """
    steps = model.stack.sub_blocks()
    per_layer = len(steps) // model.config.num_layers
    sequence, batch, _ = hidden_states.shape
    context = model.training_context(hidden_states.new_zeros(batch, sequence, dtype=torch.int64))
    backward: list[list[float]] = [[] for _ in range(per_layer)]
    weight_gradient: list[list[float]] = [[] for _ in range(per_layer)]
    for _ in range(rounds):
        for number, step in enumerate(steps):
            leaf = hidden_states.detach().requires_grad_()
            partial = step.partial_sum(leaf, context)
            gradient = torch.ones_like(partial)
            backward[number % per_layer].append(_seconds(lambda: partial.backward(gradient), clock))  # noqa: B023
            weight_gradient[number % per_layer].append(_time_weight_gradient(step, leaf.detach(), clock))
    return tuple(map(statistics.median, backward)), tuple(map(statistics.median, weight_gradient))


def _time_weight_gradient(step: SubBlock, x: Tensor, clock: StageClock) -> float:
    """Time the product of the input with the output's gradient, for the first matrix of the sub-block."""
    assert isinstance(step.body, nn.Module)
    weight = next(parameter for parameter in step.body.parameters() if parameter.shape[-1] == x.shape[-1])
    rows = x.flatten(0, 1)
    gradient = rows.new_ones(rows.shape[0], weight.shape[0])
    return _seconds(lambda: gradient.t() @ rows, clock)


def _seconds(run: Callable[[], object], clock: StageClock) -> float:
    began = clock.mark()
    run()
    return clock.seconds(began, clock.mark())


def collective_cost(without: Sequence[float], with_reduces: Sequence[float], collectives: int) -> float:
    """Return the processor's seconds for one collective, from paired times of passes over a wire without latency."""
    paired = [b - a for a, b in zip(without, with_reduces, strict=True)]
    return max(0.0, statistics.median(paired) / collectives)
