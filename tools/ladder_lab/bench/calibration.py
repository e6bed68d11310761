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
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ladder_lab.bench.variants import Variant, bound_of
from ladder_lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds, join_intervals
from ladder_lab.link.link import Message, WireTimes
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import layer_tensors
from megatron_ladder.blueprint.wiring import SubBlockKind
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


class SubBlockSeconds(NamedTuple):
    """Seconds of one kind of sub-block."""

    forward: float
    backward: float = 0.0
    """Zero without training."""
    weight_gradient: float = 0.0
    """The part of backward that the input's gradient does not need: the column-parallel weight's gradient."""


@dataclass(frozen=True)
class Calibration:
    """Seconds of every kind of sub-block, and of a whole pass without reduces."""

    kinds: Mapping[SubBlockKind, SubBlockSeconds]
    pass_seconds: float
    shape: ModelConfig
    """The model, in a wiring with these kinds."""

    @property
    def _layers(self) -> list[SubBlockSeconds]:
        return [self.kinds[kind] for of_layer in self.shape.layer_kinds for kind in of_layer]

    @property
    def head(self) -> float:
        """Seconds of a pass outside of its sub-blocks."""
        return max(0.0, self.pass_seconds - sum(layer.forward + layer.backward for layer in self._layers))

    @property
    def sub_block(self) -> float:
        """Mean forward seconds of a sub-block: the unit `c` of interconnect times."""
        return sum(layer.forward for layer in self._layers) / len(self._layers)

    def predict(self, variant: Variant, reduce_seconds: float, wire: WireModel) -> float:
        """Return the seconds of one pass of a variant when every all-reduce takes `reduce_seconds` on the wire."""
        blocks = []
        for sub_block in itertools.chain(*variant.wiring.of(self.shape, ranks=2).wired_layers):
            forward, backward, weight_gradient = self.kinds[sub_block.kind]
            missing = sub_block.missing if variant.tp_overlap else ()
            blocks.append(
                SubBlockTime(
                    forward,
                    reduce_seconds,
                    missing,
                    backward - weight_gradient,
                    weight_gradient,
                    sub_block.joins_next and variant.tp_overlap,
                    sub_block.shares_input and variant.tp_overlap,
                )
            )
        steps = join_intervals(blocks, variant.wiring.desync_interval)
        total = forward_seconds(steps, wire, head_seconds=self.head)
        if any(layer.backward for layer in self._layers):
            mirrored = variant.tp_overlap and variant.mirrored_backward and not variant.wiring.desync_interval
            total += backward_seconds(steps, wire, launch_before_wgrad=mirrored, wait_at_once=not mirrored)
        return total


@dataclass(frozen=True)
class Prediction:
    """The step-time model with this machine's calibrations, by the name of the variant without reduces.

    `message` is the sum of a sub-block's output. `always_waiting` counts the collectives of a pass that no wiring
    hides: those of embedding, head and loss.
    """

    by_bound: dict[str, Calibration]
    wire: WireModel
    message: Message
    always_waiting: Mapping[Message, int]

    def seconds(self, variant: Variant, times: WireTimes) -> float:
        """Return the seconds of one pass when collectives take these times on the wire."""
        calibration = self.by_bound[bound_of(variant).name]
        if variant.without_reduces:
            return calibration.pass_seconds
        cost = self.wire.launch_seconds + self.wire.finish_seconds
        waiting = sum(count * (times(message) + cost) for message, count in self.always_waiting.items())
        return calibration.predict(variant, times(self.message), self.wire) + waiting


def time_forward(model: LanguageModel, clock: DeviceClock) -> Callable[[], dict[SubBlockKind, SubBlockSeconds]]:
    """Time sub-blocks inside passes until the returned function is called, which gives the medians of each kind."""
    # When a sub-block began and ended, and whether it was captured.
    spans: dict[SubBlockKind, list[tuple[Any, Any, bool]]] = {}
    handles: list[RemovableHandle] = []

    def attach(step: SubBlock, kind_spans: list[tuple[Any, Any, bool]]) -> None:
        began: list[Any] = [None]

        def begin(*_: object) -> None:
            began[0] = clock.mark()

        def end(*_: object) -> None:
            kind_spans.append((began[0], clock.mark(), clock.captures()))

        assert isinstance(step.body, nn.Module)
        # A shared reading is part of the first sub-block's time.
        begins = step.body.register_forward_pre_hook if step.shares_input else step.norm.register_forward_pre_hook
        handles.extend([begins(begin), step.body.register_forward_hook(end)])

    def finish() -> dict[SubBlockKind, SubBlockSeconds]:
        for handle in handles:
            handle.remove()
        # If a step was captured, passes are its replays.
        chosen = {kind: [span for span in kind_spans if span[2]] or kind_spans for kind, kind_spans in spans.items()}
        return {
            kind: SubBlockSeconds(statistics.median(clock.seconds(began, ended) for began, ended, _ in kind_spans))
            for kind, kind_spans in chosen.items()
        }

    for step in model.stack.sub_blocks():
        attach(step, spans.setdefault(step.wired.kind, []))
    return finish


def time_backward(
    model: LanguageModel, hidden_states: Tensor, rounds: int, clock: DeviceClock
) -> dict[SubBlockKind, tuple[float, float]]:
    """Return the median seconds of each kind's backward, and of the gradient of its column-parallel weight.

    `hidden_states` are any values of shape [s, b, h].
    """
    sequence, batch, width = hidden_states.shape
    sub_blocks = {sub_block.wired.kind: sub_block for sub_block in itertools.chain(*layer_tensors(model.config))}
    columns = Counter[SubBlockKind]()
    for kind, sub_block in sub_blocks.items():
        for branch in sub_block.branches:
            for matrix in branch.inputs.values():
                numbers = matrix.weight.local_numel(model.group.size) // width
                columns[kind] += numbers * branch.experts_per_token // branch.experts
    context = model.training_context(hidden_states.new_zeros(batch, sequence, dtype=torch.int64))
    rows = hidden_states.flatten(0, 1)
    backward: dict[SubBlockKind, list[float]] = {}
    weight_gradient: dict[SubBlockKind, list[float]] = {}
    for step in [*model.stack.sub_blocks()] * rounds:
        (partial, _, _), _ = step.compute(hidden_states.detach().requires_grad_(), context)
        seconds = clock.time(functools.partial(partial.backward, torch.ones_like(partial)))
        backward.setdefault(step.wired.kind, []).append(seconds)
        # The product of the output's gradient and the input.
        gradient = rows.new_ones(rows.shape[0], columns[step.wired.kind]).t()
        seconds = clock.time(functools.partial(torch.matmul, gradient, rows))
        weight_gradient.setdefault(step.wired.kind, []).append(seconds)
    medians = {kind: statistics.median(seconds) for kind, seconds in backward.items()}
    return {kind: (median, statistics.median(weight_gradient[kind])) for kind, median in medians.items()}
