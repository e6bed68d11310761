"""Time of a training step in a layout and a wiring, split by cause.

A sub-block computes its matrix products at the share of the peak that products reach, and moves the stream through
memory `STREAM_PASSES` times. Backward takes twice as long; with recomputation the forward pass is repeated. The layers
follow the schedule of `links.py`, which the benchmark is compared with. On a serial wire, the reduce before a late
sub-block overlaps with it, and in backward all reduces overlap with the gradients of the column-parallel weights (q, k,
v; gate, up), which take as long as their products in forward. The reduces of embedding and head are exposed in every
wiring, and so is that of the gradients of latents or key heads that several ranks hold, once per step.

A pipeline of p stages and m micro-batches takes the sum of all stages once and then m - 1 times the slowest one. With v
chunks of layers per stage, it fills and empties in a v-th of the time, and sends v times as often.

`traffic.py` lists the bytes that ranks exchange, and `placement.py` the groups that cross from box to box. Of the
data-parallel gathers and reduce-scatters,

    ZeRO 1    those of a step run under its last backward pass (gradients) and the next forward pass (weights)
    ZeRO 2    gradients run under each backward pass; the gather of the weights is exposed
    ZeRO 3    layer by layer, under both passes

The sum of the gradient of a tied embedding, over the ends of a pipeline, is exposed.

A collective that overlaps with computation is exposed by as much as it takes longer, and gives back its share of
contention.

A desync interval is one sub-block with one exposed reduce in each pass: at its end in forward, its start in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from ladder_lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds, join_intervals
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.memory import FP32_BYTES, Layout, stage_chunks, stage_parameters
from ladder_lab.cost.placement import placement
from ladder_lab.cost.traffic import (
    ends_bytes,
    gathered_bytes,
    partial_gradient_bytes,
    state_bytes,
    stream_bytes,
)
from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.blueprint.tensors import SubBlockTensors, layer_tensors, padded_vocab_size

FLOPS_SHARE = 0.58
"""Share of the peak that products reach, fitted to prefill of the runs in machines.py."""
STREAM_PASSES = 5.5
"""Times that a sub-block moves its stream through memory in forward, by the same fit."""
UPDATE_BYTES = 28
"""Bytes that AdamW reads and writes per parameter: gradient, master copy, two moments, and the weight."""
GATHERED_AGAIN = 1.5
"""Bytes of a sub-block's backward relative to an all-reduce with sequence parallelism: it gathers its input again."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by cause.

    Computing includes recomputation and the optimizer; exposed tensor-parallel time, the compute time lost to overlap;
    the bubble of idle pipeline stages, the sends between them and the sum over their ends.
    """

    compute: float
    exposed_tensor: float
    bubble: float
    exposed_data: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.compute + self.exposed_tensor + self.bubble + self.exposed_data


@dataclass(frozen=True)
class LayerTime:
    """The time of layers of one wiring on one tensor-parallel group, for a micro-batch.

    An all-reduce takes `reduce_factor` times as long as the machine's.
    """

    model: ModelConfig
    machine: Machine
    layout: Layout
    """Its stages and ZeRO stage do not matter here."""
    sequence: int
    reduce_factor: float = 1.0

    @property
    def stream_bytes(self) -> int:
        """Bytes of the reduced tensor."""
        return stream_bytes(self.model, self.layout, self.sequence)

    @cached_property
    def reduce_seconds(self) -> float:
        """Time of one all-reduce, or of the reduce-scatter and all-gather that replace it."""
        spreads = placement(self.layout, self.machine.per_box).tensor
        return self.reduce_factor * self.machine.all_reduce_seconds(self.stream_bytes, spreads)

    @cached_property
    def layers(self) -> list[tuple[SubBlockTime, ...]]:
        """The sub-blocks of each layer."""
        layout = self.layout
        rate = self.machine.gpu.peak_flops * FLOPS_SHARE
        streams = STREAM_PASSES * self.stream_bytes / self.machine.gpu.memory_bytes_per_second
        if layout.sequence_parallel:
            streams /= layout.tensor
        tokens = self.sequence * layout.micro_batch

        def time_of(sub_block: SubBlockTensors) -> SubBlockTime:
            # A flash kernel skips the masked half of the scores.
            products = (
                branch.weights_per_token(layout.tensor) + self.sequence * branch.score_width / 2 / layout.tensor
                for branch in sub_block.branches
            )
            flops = 2 * sum(products)
            inputs = sum(
                matrix.weight.local_numel(layout.tensor) * branch.experts_per_token / branch.experts
                for branch in sub_block.branches
                for matrix in branch.inputs
            )
            forward = tokens * flops / rate + streams
            wgrad = tokens * 2 * inputs / rate
            dgrad = forward * (3 if layout.recompute else 2) - wgrad
            wired = sub_block.wired
            shares_reading = wired.shares_reading and not layout.recompute
            return SubBlockTime(
                forward, self.reduce_seconds, wired.missing, dgrad, wgrad, wired.joins_next, shares_reading
            )

        return [tuple(map(time_of, layer)) for layer in layer_tensors(self.model)]

    @cached_property
    def wire(self) -> WireModel:
        """A serial wire, like one NCCL communicator."""
        return WireModel(serial=True, contention=self.machine.contention_of(self.stream_bytes))

    @cached_property
    def _passes(self) -> dict[tuple[tuple[SubBlockTime, ...], ...], tuple[float, float]]:
        """The times of the stages so far; equal ones are simulated once."""
        return {}

    def passes(self, layers: range) -> tuple[float, float]:
        """Return the seconds of forward and backward of a range of layers: computing alone, and with reduces."""
        key = tuple(self.layers[layers.start : layers.stop])
        if key not in self._passes:
            self._passes[key] = self._simulate([*chain.from_iterable(key)])
        return self._passes[key]

    def _simulate(self, steps: Sequence[SubBlockTime]) -> tuple[float, float]:
        compute = sum(step.forward_seconds + step.dgrad_seconds + step.wgrad_seconds for step in steps)
        if self.layout.tensor == 1:
            return compute, compute
        interval = self.model.desync_interval
        steps = join_intervals(steps, interval)
        forward = forward_seconds(steps, self.wire)
        if self.layout.sequence_parallel:
            steps = [replace(step, reduce_seconds=GATHERED_AGAIN * step.reduce_seconds) for step in steps]
        at_once = interval > 0
        backward = backward_seconds(steps, self.wire, launch_before_wgrad=not at_once, wait_at_once=at_once)
        return compute, forward + backward


def step_time(times: LayerTime, layout: Layout, global_batch: int) -> StepTime:
    """Return the time of one step of `global_batch` samples, a multiple of data-parallel ranks x micro-batch."""
    micro_batches = global_batch // (layout.data * layout.micro_batch)
    stages = [_stage_seconds(times, layout, stage) for stage in range(layout.pipeline)]
    compute, slowest = max(stages, key=lambda stage: stage[1])
    exchanging = _exchange_seconds(times, layout, micro_batches)
    # Too few micro-batches do not keep all stages busy until the next chunk begins.
    missing = (layout.chunks - 1) * max(0, layout.pipeline - micro_batches)
    # The GPU that holds most.
    parameters = max(stage_parameters(times.model, layout, stage) for stage in range(layout.pipeline))
    update = UPDATE_BYTES * parameters / layout.data / times.machine.gpu.memory_bytes_per_second
    return StepTime(
        compute=micro_batches * compute + update,
        exposed_tensor=micro_batches * (slowest - compute) + _partial_gradients_seconds(times, layout),
        bubble=(sum(total for _, total in stages) + (missing - 1) * slowest) / layout.chunks + exchanging,
        exposed_data=_exposed_data(times, layout, parameters, micro_batches, slowest),
    )


def _partial_gradients_seconds(times: LayerTime, layout: Layout) -> float:
    """Return the seconds of the sum of the gradients of which several tensor-parallel ranks have parts."""
    num_bytes = max(partial_gradient_bytes(times.model, layout, stage) for stage in range(layout.pipeline))
    if num_bytes == 0:
        return 0.0
    replicas = key_value_replicas(times.model, layout.tensor)
    sharing = replace(layout, tensor=replicas, data=layout.data * layout.tensor // replicas)
    spreads = placement(sharing, times.machine.per_box).tensor
    return times.reduce_factor * times.machine.all_reduce_seconds(num_bytes, spreads)


def _exchange_seconds(times: LayerTime, layout: Layout, micro_batches: int) -> float:
    """Return the seconds of sends between stages, and of the sum of a tied embedding's gradient over the ends."""
    if layout.pipeline == 1:
        return 0.0
    machine = times.machine
    groups = placement(layout, machine.per_box)
    cuts = range(layout.pipeline * layout.chunks - 1)
    state = max(state_bytes(times.model, layout, times.sequence, stage) for stage in cuts)
    slots = micro_batches + layout.pipeline - 1 + (layout.chunks - 1) * max(micro_batches, layout.pipeline)
    # A send takes as long as the all-reduce of two ranks.
    sending = 2 * slots * machine.all_reduce_seconds(state, groups.following)
    shared = ends_bytes(times.model, layout)
    return sending + (machine.all_reduce_seconds(shared, groups.ends) if shared else 0.0)


def _stage_seconds(times: LayerTime, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the seconds of one micro-batch on one stage as `LayerTime.passes` does, with embedding and head."""
    passes = [times.passes(layers) for layers in stage_chunks(times.model, layout, stage)]
    compute, total = (sum(seconds) for seconds in zip(*passes, strict=True))
    if stage == 0:
        total += times.reduce_seconds
    if stage == layout.pipeline - 1:
        rate = times.machine.gpu.peak_flops * FLOPS_SHARE * layout.tensor
        head = 3 * ModelFlops(times.model, times.sequence).head * layout.micro_batch / rate
        rows = padded_vocab_size(times.model.vocab_size, layout.tensor) // layout.tensor
        logits = times.sequence * layout.micro_batch * rows
        # Logits, exponentials and their gradient in fp32, each written and read.
        head += 6 * FP32_BYTES * logits / times.machine.gpu.memory_bytes_per_second
        compute += head
        total += head + times.reduce_seconds
    return compute, total


def _exposed_data(times: LayerTime, layout: Layout, parameters: int, micro_batches: int, pass_seconds: float) -> float:
    """Return the exposed data-parallel time as described at the top of this file."""
    if layout.data == 1:
        return 0.0
    machine = times.machine
    gathered = gathered_bytes(layout)
    spreads = placement(layout, machine.per_box).data

    def around(bytes_per_parameter: float, collectives: int = 1) -> float:
        share = bytes_per_parameter * parameters / collectives
        return collectives * machine.gather_seconds(share, spreads)

    def exposed(reduce: float, compute: float) -> float:
        return max(0.0, reduce - compute) + machine.contention_of(parameters) * min(reduce, compute)

    forward, backward = pass_seconds / 3, pass_seconds * 2 / 3
    if layout.zero == 2:
        return around(gathered.weights) + micro_batches * exposed(around(gathered.gradients), backward)
    if layout.zero == 3:
        layers = times.model.num_layers
        return micro_batches * exposed(around(gathered.weights + gathered.gradients, 3 * layers), pass_seconds)
    return exposed(around(gathered.gradients), backward) + exposed(around(gathered.weights), forward)


def model_flop_utilisation(times: LayerTime, layout: Layout, global_batch: int, seconds: float) -> float:
    """Return the model FLOPs of a step relative to the peak of all GPUs in so many seconds."""
    flops = ModelFlops(times.model, times.sequence).training * global_batch
    return flops / (seconds * layout.gpus * times.machine.gpu.peak_flops)
