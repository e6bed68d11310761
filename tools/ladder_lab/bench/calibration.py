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
from ladder_lab.cost.divided_experts import Schedule, pass_times
from ladder_lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds, join_intervals
from ladder_lab.link.link import Message, WireTimes
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import Branch, Matrix
from megatron_ladder.blueprint.tensors import layer_tensors
from megatron_ladder.blueprint.wiring import SubBlockKind
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.sub_block import SubBlock


class DeviceClock:
    """Measures the time between two points of a program on the processor that does the work.

    A CPU has done its work when a call returns, and `seconds` reads its clock. A GPU's current stream does it later, so
    its points are events.
    """

    def __init__(self, device: torch.device, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds_of_cpu = seconds

    def mark(self) -> Any:
        """Mark this point."""
        if not self._on_gpu:
            return self._seconds_of_cpu()
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


class Computation(NamedTuple):
    """What a sub-block computes; sub-blocks of one computation take the same time."""

    kind: SubBlockKind
    mixer: str = ""
    """The name of its token mixer, if the model has several mixers."""

    @property
    def name(self) -> str:
        """The mixer, or the kind."""
        return self.mixer or self.kind.value


def _computations(config: ModelConfig, divides_experts: bool = False) -> list[Computation]:
    """Return what the sub-blocks of all layers compute, in order; see `layer_tensors`."""
    mixers = [config.mixer_of(layer).name for layer in range(config.num_layers)]
    has_several = len({*mixers}) > 1
    kinds = [
        (layer, tensors.wired.kind)
        for layer, sub_blocks in enumerate(layer_tensors(config, divides_experts))
        for tensors in sub_blocks
    ]
    return [Computation(kind, mixers[layer] if has_several and kind.has_mixer else "") for layer, kind in kinds]


class SubBlockSeconds(NamedTuple):
    """Seconds of a sub-block."""

    forward: float
    backward: float = 0.0
    """Zero without training."""
    weight_gradient: float = 0.0
    """The part of backward that the input's gradient does not need: the column-parallel weight's gradient."""
    output_projection: float = 0.0
    """The time of the row-parallel product, which is also that of each of its two gradients."""


@dataclass(frozen=True)
class Calibration:
    """Seconds of every computation of sub-blocks, and of a whole pass without reduces."""

    by_computation: Mapping[Computation, SubBlockSeconds]
    pass_seconds: float
    shape: ModelConfig
    """The model, in a wiring with these computations."""
    divides_experts: bool = False
    """Whether expert-parallel ranks compute its routed experts."""

    @property
    def _computations(self) -> list[Computation]:
        return _computations(self.shape, self.divides_experts)

    @property
    def _layers(self) -> list[SubBlockSeconds]:
        return [self.by_computation[computation] for computation in self._computations]

    @property
    def head(self) -> float:
        """Seconds of a pass outside of its sub-blocks."""
        return max(0.0, self.pass_seconds - sum(layer.forward + layer.backward for layer in self._layers))

    @property
    def sub_block(self) -> float:
        """Mean forward seconds of a sub-block: the unit `c` of interconnect times."""
        return sum(layer.forward for layer in self._layers) / len(self._layers)

    @property
    def attention(self) -> float:
        """Mean forward seconds of a softmax attention, or of a mixer in a model without one: the unit `a`."""
        linear = {self.shape.mixer_of(layer).name for layer in self.shape.linear_attention_layers}
        mixers = [computation for computation in self._computations if computation.kind.has_mixer]
        softmax = [computation for computation in mixers if computation.mixer not in linear]
        return statistics.mean(self.by_computation[computation].forward for computation in softmax or mixers)

    def predict(self, variant: Variant, reduce_seconds: float, wire: WireModel) -> float:
        """Return the seconds of one pass of a variant when every all-reduce takes `reduce_seconds` on the wire.

        If expert-parallel ranks compute the routed experts, those are the seconds of every all-to-all.
        """
        if self.divides_experts:
            return self._predict_divided(variant, reduce_seconds, wire)
        blocks = []
        config = variant.wiring.of(self.shape, ranks=2)
        sub_blocks = itertools.chain(*config.wired_layers)
        for computation, sub_block in zip(_computations(config), sub_blocks, strict=True):
            seconds = self.by_computation[computation]
            missing = sub_block.missing if variant.tp_overlap else ()
            late = seconds.weight_gradient + seconds.output_projection * variant.late_weight_gradients
            blocks.append(
                SubBlockTime(
                    seconds.forward,
                    reduce_seconds,
                    missing,
                    seconds.backward - late,
                    late,
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

    def _predict_divided(self, variant: Variant, exchange_seconds: float, wire: WireModel) -> float:
        config = variant.wiring.of(self.shape, ranks=2)
        sub_blocks = [tensors.wired for layer in layer_tensors(config, divides_experts=True) for tensors in layer]
        blocks = []
        for computation, sub_block in zip(_computations(config, divides_experts=True), sub_blocks, strict=True):
            seconds = self.by_computation[computation]
            on_wire = exchange_seconds if sub_block.moves_tokens else 0.0
            projection = seconds.output_projection
            blocks.append(
                SubBlockTime(
                    seconds.forward,
                    on_wire,
                    sub_block.missing if variant.tp_overlap else (),
                    seconds.backward - seconds.weight_gradient - projection,
                    seconds.weight_gradient,
                    sub_block.joins_next,
                    sub_block.shares_input,
                    read_seconds=on_wire,
                    moves_tokens=sub_block.moves_tokens,
                    output_seconds=projection,
                    output_wgrad_seconds=projection,
                )
            )
        schedule = Schedule(reads_ahead=variant.tp_overlap, late_weight_gradients=variant.late_weight_gradients)
        forward, backward = pass_times(blocks, wire, wire.contention, schedule, recompute=False)
        trains = any(layer.backward for layer in self._layers)
        return self.head + forward.seconds + (backward.seconds if trains else 0.0)


@dataclass(frozen=True)
class Prediction:
    """The step-time model with this machine's calibrations, by the name of the variant without reduces.

    `message` is the sum of a sub-block's output, or the dispatch of tokens to experts. `always_waiting` counts the
    collectives of a pass that no wiring hides: those of embedding, head and loss.
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


class _Span(NamedTuple):
    """When a sub-block began and ended, and bodies that ran in the middle of it."""

    began: Any
    ended: Any
    inside: list[tuple[Any, Any]]
    captured: bool

    def seconds(self, clock: DeviceClock) -> float:
        """Return the time of this sub-block alone."""
        return clock.seconds(self.began, self.ended) - sum(clock.seconds(*span) for span in self.inside)


def time_forward(model: LanguageModel, clock: DeviceClock) -> Callable[[], dict[Computation, SubBlockSeconds]]:
    """Time sub-blocks inside passes until the returned function is called, which gives medians by computation."""
    spans: dict[Computation, list[_Span]] = {}
    handles: list[RemovableHandle] = []
    running: list[list[tuple[Any, Any]]] = []
    """For each body that runs, those that have run inside of it."""

    def attach(step: SubBlock, timed: list[_Span]) -> None:
        began: list[Any] = [None]

        def begin(*_: object) -> None:
            began[0] = clock.mark()

        def enter(*_: object) -> None:
            running.append([])

        def end(*_: object) -> None:
            ended = clock.mark()
            timed.append(_Span(began[0], ended, running.pop(), clock.captures()))
            if running:
                running[-1].append((began[0], ended))

        assert isinstance(step.body, nn.Module)
        # A shared reading is part of the first sub-block's time. Tokens that are sent ahead are normed ahead.
        begins_at_body = step.shares_input or model.stack.divides_experts
        begins = step.body.register_forward_pre_hook if begins_at_body else step.norm.register_forward_pre_hook
        enters = step.body.register_forward_pre_hook
        handles.extend([begins(begin), enters(enter), step.body.register_forward_hook(end)])

    def finish() -> dict[Computation, SubBlockSeconds]:
        for handle in handles:
            handle.remove()
        # If a step was captured, passes are its replays.
        chosen = {key: [span for span in timed if span.captured] or timed for key, timed in spans.items()}
        return {
            key: SubBlockSeconds(statistics.median(span.seconds(clock) for span in timed))
            for key, timed in chosen.items()
        }

    computations = _computations(model.config, model.stack.divides_experts)
    for computation, step in zip(computations, model.stack.sub_blocks(), strict=True):
        attach(step, spans.setdefault(computation, []))
    return finish


def _used_vectors(matrix: Matrix, branch: Branch, ranks: int, width: int) -> int:
    """Return how many vectors of this width a rank multiplies of a matrix, or of those of a token's experts."""
    return matrix.weight.local_numel(ranks) // width * branch.experts_per_token // branch.experts


def time_backward(
    model: LanguageModel, hidden_states: Tensor, rounds: int, clock: DeviceClock
) -> dict[Computation, SubBlockSeconds]:
    """Return the median seconds of each computation's backward and of its products, without those of forward.

    `hidden_states` are any values of shape [s, b, h].
    """
    sequence, batch, width = hidden_states.shape
    divides = model.stack.divides_experts
    computations = _computations(model.config, divides)
    sub_blocks = dict(zip(computations, itertools.chain(*layer_tensors(model.config, divides)), strict=True))
    columns = Counter[Computation]()
    output_rows = Counter[Computation]()
    for computation, sub_block in sub_blocks.items():
        for branch in sub_block.branches:
            for matrix in branch.inputs.values():
                columns[computation] += _used_vectors(matrix, branch, model.group.size, width)
            output_rows[computation] += _used_vectors(branch.output, branch, model.group.size, width)
    context = model.training_context(hidden_states.new_zeros(batch, sequence, dtype=torch.int64))
    rows = hidden_states.flatten(0, 1)
    measured: dict[Computation, list[SubBlockSeconds]] = {}

    def time_product(count: int) -> float:
        # The product of the output's gradient and the input.
        gradient = rows.new_ones(rows.shape[0], count).t()
        return clock.time(functools.partial(torch.matmul, gradient, rows))

    for computation, step in [*zip(computations, model.stack.sub_blocks(), strict=True)] * rounds:
        (partial, _, _), _ = step.compute(hidden_states.detach().requires_grad_(), context)
        seconds = SubBlockSeconds(
            0.0,
            clock.time(functools.partial(partial.backward, torch.ones_like(partial))),
            time_product(columns[computation]),
            time_product(output_rows[computation]),
        )
        measured.setdefault(computation, []).append(seconds)
    return {key: SubBlockSeconds(*map(statistics.median, zip(*every, strict=True))) for key, every in measured.items()}
