"""Measures the inputs of the step-time model on this machine: seconds of sub-blocks, of the head, and of a collective.

Sub-blocks are timed inside whole passes of a model whose reduces do nothing, so that their weights come from memory as
in the predicted passes. The head is the rest of a pass: embedding, head, sampling, loss. The processor time of one
collective is the time that a pass over a wire without latency takes longer than a pass without reduces, divided by the
number of reduces.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ladder_lab.bench.variants import Variant
from ladder_lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds
from megatron_ladder.blueprint.wiring import WIRINGS, limit_to_unseen
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.sub_block import SubBlock


class DeviceClock:
    """Measures the time between two points of a program on the processor that does the work.

    A CPU has done its work when a call returns. A GPU's current stream does it later, so its points are events.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Mark this point."""
        if not self._on_gpu:
            return time.perf_counter()
        # In a captured step, only an external event gets a time: that of the latest replay.
        event = torch.cuda.Event(enable_timing=True, external=self.captures())
        event.record(torch.cuda.current_stream())
        return event

    def captures(self) -> bool:
        """Return whether the current stream is captured into a graph."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the time from one mark to a later one."""
        if not self._on_gpu:
            return ended - began
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3

    def time(self, run: Callable[[], object]) -> float:
        """Return the time that a call takes."""
        began = self.mark()
        run()
        return self.seconds(began, self.mark())


@dataclass(frozen=True)
class Calibration:
    """Seconds of each sub-block of a layer, and of a whole pass without reduces, for layers with one norm or with two.

    `backward` is zero without training. `weight_gradient` is its part that the input's gradient does not need: the
    column-parallel weight's gradient.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    pass_seconds: float
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
        named, wiring = variant.wiring, WIRINGS[variant.wiring.mode]
        first_late = self.layers - self.layers // 2 if named.upper_half else 0
        times = [
            (*seconds, variant.tp_overlap and kind in wiring.late and layer >= first_late)
            for layer in range(self.layers)
            for kind, *seconds in zip(wiring.sub_blocks, self.forward, self.backward, self.weight_gradient, strict=True)
        ]
        # A desynchronised interval has one reduce, at its end in forward and at its beginning in backward.
        interval = max(1, named.desync_interval)
        intervals = [tuple(zip(*times[at : at + interval], strict=True)) for at in range(0, len(times), interval)]
        late = range(1, named.staleness + 1)
        missing_of_intervals = limit_to_unseen(late if reads_late[0] else () for *_, reads_late in intervals)
        steps = [
            SubBlockTime(
                forward_seconds=sum(forward),
                reduce_seconds=reduce_seconds,
                missing=missing,
                dgrad_seconds=sum(backward) - weight_gradient[0],
                wgrad_seconds=weight_gradient[0],
            )
            for (forward, backward, weight_gradient, _), missing in zip(intervals, missing_of_intervals, strict=True)
        ]
        total = forward_seconds(steps, wire, head_seconds=self.head)
        if any(self.backward):
            mirrored = variant.tp_overlap and variant.mirrored_backward and not named.desync_interval
            total += backward_seconds(steps, wire, launch_before_wgrad=mirrored, wait_at_once=not mirrored)
        return total


@dataclass(frozen=True)
class Prediction:
    """The step-time model with this machine's calibrations of layers with two norms (False) and with one (True).

    `always_waiting` is the number of a pass's reduces that no wiring hides: those of embedding, head and loss.
    """

    by_modules: dict[bool, Calibration]
    wire: WireModel
    always_waiting: int

    def seconds(self, variant: Variant, alpha: float) -> float:
        """Return the seconds of one pass when every all-reduce takes `alpha` seconds on the wire."""
        calibration = self.by_modules[variant.one_norm]
        if variant.without_reduces:
            return calibration.pass_seconds
        cost = self.wire.launch_seconds + self.wire.finish_seconds
        return calibration.predict(variant, alpha, self.wire) + self.always_waiting * (alpha + cost)


class _Span(NamedTuple):
    """The marks of a sub-block in a pass."""

    began: Any
    ended: Any
    captured: bool


def time_forward(model: LanguageModel, clock: DeviceClock) -> Callable[[], tuple[float, ...]]:
    """Time sub-blocks inside passes until the returned function is called, which gives the medians of one layer."""
    steps = model.stack.sub_blocks()
    spans: list[list[_Span]] = [[] for _ in range(len(steps) // model.config.num_layers)]
    handles: list[RemovableHandle] = []

    def attach(step: SubBlock, own: list[_Span]) -> None:
        began: list[Any] = [None]

        def begin(*_: object) -> None:
            began[0] = clock.mark()

        def end(*_: object) -> None:
            own.append(_Span(began[0], clock.mark(), clock.captures()))

        assert isinstance(step.body, nn.Module)
        handles.extend([step.norm.register_forward_pre_hook(begin), step.body.register_forward_hook(end)])

    def finish() -> tuple[float, ...]:
        for handle in handles:
            handle.remove()
        # If a step was captured, passes are its replays.
        chosen = ([span for span in own if span.captured] or own for own in spans)
        return tuple(statistics.median(clock.seconds(span.began, span.ended) for span in own) for own in chosen)

    for step, own in zip(steps, itertools.cycle(spans), strict=False):
        attach(step, own)
    return finish


def time_backward(
    model: LanguageModel, hidden_states: Tensor, rounds: int, clock: DeviceClock
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the median seconds of each sub-block's backward in a layer, and of its column-parallel weight's gradient.

    `hidden_states` are any values of shape [s, b, h].
    """
    steps = model.stack.sub_blocks()
    per_layer = len(steps) // model.config.num_layers
    sequence, batch, width = hidden_states.shape
    context = model.training_context(hidden_states.new_zeros(batch, sequence, dtype=torch.int64))
    rows = hidden_states.flatten(0, 1)
    backward: list[list[float]] = [[] for _ in range(per_layer)]
    weight_gradient: list[list[float]] = [[] for _ in range(per_layer)]
    for number, step in [*enumerate(steps)] * rounds:
        partial, _ = step.partial_sum(hidden_states.detach().requires_grad_(), context)
        backward[number % per_layer].append(clock.time(functools.partial(partial.backward, torch.ones_like(partial))))
        # The product of the output's gradient and the input, for the first matrix of the sub-block.
        assert isinstance(step.body, nn.Module)
        weight = next(parameter for parameter in step.body.parameters() if parameter.shape[-1] == width)
        gradient = rows.new_ones(rows.shape[0], weight.shape[0]).t()
        weight_gradient[number % per_layer].append(clock.time(functools.partial(torch.matmul, gradient, rows)))
    return tuple(map(statistics.median, backward)), tuple(map(statistics.median, weight_gradient))


def collective_cost(without: Sequence[float], with_reduces: Sequence[float], collectives: int) -> float:
    """Return the processor's seconds for one collective, from paired times of passes over a wire without latency."""
    return max(0.0, statistics.median(b - a for a, b in zip(without, with_reduces, strict=True)) / collectives)
