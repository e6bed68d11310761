"""What the step-time model needs to know of this machine: seconds of sub-blocks, of the head, and of a collective.

Sub-blocks are timed where they stand, inside whole passes of a model whose reduces do nothing, so that their weights
come from memory as they do in the passes that are predicted. What a pass takes besides its sub-blocks (embedding,
head, sampling, the loss) is the head. The processor's cost of one collective is what a pass over a wire of no latency
takes longer than one without reduces, shared out over its reduces.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron_ladder.lab.bench.clocks import Clock
from megatron_ladder.lab.bench.variants import Variant
from megatron_ladder.lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.sub_block import SubBlock


@dataclass(frozen=True)
class Calibration:
    """Of one set of modules: those with two norms a layer, or those with one."""

    forward: tuple[float, ...]
    """Seconds of the sub-blocks of one layer, in order."""
    backward: tuple[float, ...]
    """The same, backward; zeros without training."""
    weight_gradient: tuple[float, ...]
    """Of those, the gradient of the column-parallel weight, which the input's gradient does not wait for."""
    pass_seconds: float
    """One whole pass without reduces."""
    layers: int

    @property
    def head(self) -> float:
        """What a pass takes besides its sub-blocks."""
        return max(0.0, self.pass_seconds - self.layers * sum(self.forward + self.backward))

    @property
    def sub_block(self) -> float:
        """Mean forward seconds of a sub-block: the unit `c` of interconnect times."""
        return sum(self.forward) / len(self.forward)

    def predict(self, variant: Variant, reduce_seconds: float, wire: WireModel) -> float:
        """Seconds of one pass of a variant, if every all-reduce takes `reduce_seconds` on the wire."""
        training = any(self.backward)
        late = variant.residual_mode in ("ladder", "ladder-parallel")
        staleness = variant.residual_staleness if late and variant.options.tp_overlap else 0
        times = list(zip(self.forward, self.backward, self.weight_gradient, strict=True)) * self.layers
        # A desynchronised interval ends forward, and begins backward, in the one reduce that it has.
        interval = max(1, variant.desync_interval)
        steps = [
            SubBlockTime(
                forward_seconds=sum(forward),
                reduce_seconds=reduce_seconds,
                staleness=staleness,
                dgrad_seconds=sum(backward) - weight_gradient[0],
                wgrad_seconds=weight_gradient[0],
            )
            for forward, backward, weight_gradient in (
                tuple(zip(*times[start : start + interval], strict=True)) for start in range(0, len(times), interval)
            )
        ]
        total = forward_seconds(steps, wire, head_seconds=self.head)
        if training:
            mirrored = (
                variant.options.tp_overlap and variant.options.mirrored_backward and not variant.desync_interval
            )
            total += backward_seconds(steps, wire, launch_before_wgrad=mirrored, wait_at_once=not mirrored)
        return total


class ForwardTimer:
    """Times every sub-block of a model inside its passes, as long as it is attached."""

    def __init__(self, model: LanguageModel, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[list[tuple[Any, Any]]] = []
        self._handles: list[RemovableHandle] = []
        per_layer = len(model.stack.sub_blocks()) // model.config.num_layers
        for number, step in enumerate(model.stack.sub_blocks()):
            if number < per_layer:
                self._spans.append([])
            self._attach(step, self._spans[number % per_layer])

    def _attach(self, step: SubBlock, spans: list[tuple[Any, Any]]) -> None:
        began: list[Any] = [None]

        def begin(*_: object) -> None:
            began[0] = self._clock.mark()

        def end(*_: object) -> None:
            spans.append((began[0], self._clock.mark()))

        self._handles += [step.norm.register_forward_pre_hook(begin), step.body.register_forward_hook(end)]

    def finish(self) -> tuple[float, ...]:
        """Median seconds of each sub-block of a layer; the timer is taken off."""
        for handle in self._handles:
            handle.remove()
        return tuple(statistics.median(self._clock.seconds(*span) for span in spans) for spans in self._spans)


def time_backward(
    model: LanguageModel, hidden_states: Tensor, rounds: int, clock: Clock
) -> tuple[tuple[float, ...], ...]:
    """Median seconds of each sub-block's backward in a layer, and of the column-parallel weight's gradient in it.

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
            partial = step.unreduced(leaf, context)
            gradient = torch.ones_like(partial)
            backward[number % per_layer].append(_seconds(lambda: partial.backward(gradient), clock))  # noqa: B023
            weight_gradient[number % per_layer].append(_time_weight_gradient(step, leaf.detach(), clock))
    return tuple(map(statistics.median, backward)), tuple(map(statistics.median, weight_gradient))


def _time_weight_gradient(step: SubBlock, x: Tensor, clock: Clock) -> float:
    """The product of the input with the output's gradient, for the first matrix of the sub-block."""
    weight = next(parameter for parameter in step.body.parameters() if parameter.shape[-1] == x.shape[-1])
    rows = x.flatten(0, 1)
    gradient = rows.new_ones(rows.shape[0], weight.shape[0])
    return _seconds(lambda: gradient.t() @ rows, clock)


def _seconds(run: Callable[[], object], clock: Clock) -> float:
    began = clock.mark()
    run()
    return clock.seconds(began, clock.mark())


def collective_cost(without: Sequence[float], with_reduces: Sequence[float], collectives: int) -> float:
    """The processor's seconds for one collective, from paired times of passes over a wire of no latency."""
    paired = [b - a for a, b in zip(without, with_reduces, strict=True)]
    return max(0.0, statistics.median(paired) / collectives)
