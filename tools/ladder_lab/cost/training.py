"""Time of a training step in a layout and a wiring, split by cause.

A product takes the longer of its operations, at the share of the peak that products reach, and of the traffic of its
matrix through memory, so no step is faster than this traffic and the optimizer's. In each micro-batch, forward and
backward read the matrix in bf16, and its gradient is added to a sum in fp32:

    matrix         its product adds to the sum: 8 bytes per parameter
    experts        their products write the gradients of all of them in bf16, which are then added: 2 + 10 bytes
    embedding      so is its gradient: 12 bytes
    head           as a matrix, but for every chunk of the loss

A sub-block also moves the stream through memory `STREAM_PASSES` times in forward, and twice as often in backward. With
recomputation the forward pass is repeated. Where passes are not captured, the host launches kernels for as long as
`HOST_SECONDS` for each branch, during which the device computes.

If expert-parallel ranks divide the experts, the layers follow the schedule of `divided_experts.py`, and each rank
computes and receives as many rows as the fullest. Otherwise, they follow that of `links.py`, which the benchmark is
compared with. On a serial wire, the reduce before a late sub-block overlaps with it, and in backward all reduces
overlap with the gradients of the weights; with DeepSpeed, which takes every gradient at once, with those of the
column-parallel weights (q, k, v; gate, up). The reduces of embedding and head are exposed in every wiring, and so is
that of the gradients of latents or key heads that several ranks hold, once per step.

A pipeline of p stages and m micro-batches takes the sum of all stages once and then m - 1 times the slowest one. With v
chunks of layers per stage, it fills and empties in a v-th of the time, and sends v times as often. Messages run under
passes, as `engine/schedule.py` starts them. `_waiting_seconds` describes when a rank waits for them.

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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from ladder_lab.cost.all_to_all import ALL_TO_ALLS, AllToAll, all_to_all_seconds
from ladder_lab.cost.divided_experts import PassTime, Schedule, pass_times
from ladder_lab.cost.layout import Layout, first_group, stage_chunks
from ladder_lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds, join_intervals
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.memory import (
    FP32_BYTES,
    NUMBER_BYTES,
    stage_expert_parameters,
    stage_parameters,
    state_bytes,
    stream_bytes,
    unlike_stages,
)
from ladder_lab.cost.placement import placement
from ladder_lab.cost.traffic import ends_bytes, gathered_bytes, partial_gradient_bytes
from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import Branch, TensorSpec
from megatron_ladder.blueprint.tensors import (
    SubBlockTensors,
    embedding_tensor,
    head_tensor,
    layer_tensors,
    loss_chunk_tokens,
)

FLOPS_SHARE = 0.58
"""Share of the peak that products reach, fitted to prefill of the runs in machines.py."""
STREAM_PASSES = 5.5
"""Times that a sub-block moves its stream through memory in forward, by the same fit."""
BF16_BYTES = NUMBER_BYTES["bf16"]
ADD_BYTES = 2 * FP32_BYTES
"""Bytes of reading and writing a sum in fp32."""
UPDATE_BYTES = 34
"""Bytes that the norm of the gradient and AdamW read and write per parameter: the gradient twice, master copy, two
moments, and the weight."""
GROUPED_CAPABILITIES = (9, 10)
"""Major capabilities of the GPUs for which torch has a kernel for the products of all experts."""
HOST_SECONDS = 2.3e-3
"""Time in which the host launches forward and backward of one branch: 73 ms for 16 layers of two branches, measured on
the host of one H200 (docs/gpu.md)."""
HOST_RECOMPUTED = 1.5
"""Its growth with recomputation: 71 instead of 48 kernels of a layer (tools/host_time.py --case train)."""
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

    A collective takes `reduce_factor` times as long as the machine's.
    """

    model: ModelConfig
    machine: Machine
    layout: Layout
    """Its stages do not matter here."""
    sequence: int
    reduce_factor: float = 1.0
    all_to_all: AllToAll = ALL_TO_ALLS["nccl"]
    schedule: Schedule = Schedule()
    """That of divided experts."""

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
        divides = self.layout.divides_experts
        sub_block = self._divided_sub_block if divides else self._sub_block
        return [tuple(map(sub_block, layer)) for layer in layer_tensors(self.model, divides)]

    @cached_property
    def all_to_all_seconds(self) -> float:
        """Time of an all-to-all of the tokens of a micro-batch."""
        layout = self.layout
        tokens = layout.imbalance * self.tokens / layout.tensor
        row_bytes = BF16_BYTES * self.model.hidden_size
        return self.reduce_factor * max(
            all_to_all_seconds(self.all_to_all, self.machine, self.model, tokens, row_bytes, spread)
            for spread in placement(layout, self.machine.per_box).experts
        )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence * self.layout.micro_batch

    def moving(self, num_bytes: float) -> float:
        """Return the seconds in which so many bytes are read or written."""
        return num_bytes / self.machine.gpu.memory_bytes_per_second

    def product(self, operations: float, num_bytes: float) -> float:
        """Return the seconds of a product that reads or writes so many bytes of its matrix."""
        return max(operations / (FLOPS_SHARE * self.machine.gpu.peak_flops), self.moving(num_bytes))

    def _products(self, weights: Iterable[TensorSpec], branch: Branch) -> tuple[float, float]:
        """Return the seconds of the forward products with matrices of a branch, and of their gradients."""
        layout = self.layout
        forward = gradients = 0.0
        for weight in weights:
            numbers = layout.numel(weight)
            is_stack = weight.expert_dim is not None
            # Those of all ranks that send their tokens here.
            tokens = self.tokens * (layout.row_share * layout.experts if is_stack and layout.divides_experts else 1.0)
            share = branch.share_in_use(tokens) if is_stack else 1.0
            rows = tokens * (branch.experts_per_token / branch.experts if is_stack else 1.0)
            operations = 2 * rows * numbers
            forward += self.product(operations, BF16_BYTES * numbers * share)
            if is_stack:
                gradients += self.product(operations, BF16_BYTES * numbers)
                gradients += self.moving((BF16_BYTES + ADD_BYTES) * numbers)
            else:
                gradients += self.product(operations, ADD_BYTES * numbers)
        return forward, gradients

    def _sub_block(self, sub_block: SubBlockTensors) -> SubBlockTime:
        layout = self.layout
        streams = self.moving(STREAM_PASSES * self.stream_bytes)
        others = streams / (layout.tensor if layout.sequence_parallel else 1)
        products = wgrad = inner_wgrad = 0.0
        for branch in sub_block.branches:
            others += self._mixing(branch)
            inputs = [matrix.weight for matrix in branch.inputs.values()]
            of_inputs = self._products(inputs, branch)
            of_others = self._products((matrix for matrix in branch.matrices if matrix not in inputs), branch)
            products += of_inputs[0] + of_others[0]
            wgrad += of_inputs[1]
            inner_wgrad += of_others[1]
        forward = products + others
        dgrad = products + 2 * others + (forward if layout.recompute else 0.0)
        if layout.zero < 2:
            wgrad += inner_wgrad
        else:
            dgrad += inner_wgrad
        wired = sub_block.wired
        shares_input = wired.shares_input and not layout.recompute
        return SubBlockTime(forward, self.reduce_seconds, wired.missing, dgrad, wgrad, wired.joins_next, shares_input)

    def _mixing(self, branch: Branch) -> float:
        """Return the seconds of a token mixer apart from its matrices."""
        if branch.mixer is None:
            return 0.0
        # A flash kernel skips masked scores.
        seen = branch.mixer.causal_positions(self.sequence)
        return self.product(branch.mixer.flops(self.tokens, seen) / self.layout.tensor, 0)

    def _divided_sub_block(self, sub_block: SubBlockTensors) -> SubBlockTime:
        """Return the times of a sub-block of a model with divided experts."""
        layout, wired = self.layout, sub_block.wired
        others = self.moving(STREAM_PASSES * self.stream_bytes) / layout.tensor
        products = projection = wgrad = output_wgrad = 0.0
        for branch in sub_block.branches:
            others += self._mixing(branch)
            output = self._products([branch.output.weight], branch)
            rest = self._products((matrix for matrix in branch.matrices if matrix is not branch.output.weight), branch)
            products += output[0] + rest[0]
            projection += 0.0 if wired.moves_tokens else output[0]
            output_wgrad += output[1]
            wgrad += rest[1]
        gather = 0.0 if wired.shares_input and not layout.recompute else self.reduce_seconds / 2
        times = SubBlockTime(
            products + others,
            self.reduce_seconds / 2,
            wired.missing,
            products + 2 * others,
            wgrad,
            wired.joins_next,
            read_seconds=gather,
            output_seconds=projection,
            output_wgrad_seconds=output_wgrad,
        )
        if not wired.moves_tokens:
            return times
        moving = self.all_to_all_seconds
        return replace(times, reduce_seconds=moving, read_seconds=moving, moves_tokens=True)

    @property
    def sample_flops(self) -> int:
        """Model FLOPs of training on one sample."""
        return _sample_flops(self.model, self.sequence)

    @cached_property
    def wire(self) -> WireModel:
        """A serial wire, like one NCCL communicator."""
        return WireModel(serial=True, contention=self.machine.contention_of(self.stream_bytes))

    @cached_property
    def _first_equal(self) -> list[int]:
        """For each layer the first one with the same times."""
        return [*map(self.layers.index, self.layers)]

    @cached_property
    def _passes(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """The times of the stages so far; equal ones are simulated once."""
        return {}

    def passes(self, layers: range) -> tuple[float, float]:
        """Return the seconds of forward and backward of a range of layers: computing alone, and with reduces."""
        key = tuple(self._first_equal[layers.start : layers.stop])
        if key not in self._passes:
            self._passes[key] = self._simulate(layers)
        return self._passes[key]

    @property
    def waits_for_choices(self) -> bool:
        """Whether the host waits in a pass until experts are chosen, as `reads_on_host` in `parallel/products.py`."""
        if self.layout.divides_experts:
            # It reads how many tokens arrive.
            return True
        widths = self.model.hidden_size, self.model.moe_ffn_hidden_size // self.layout.tensor
        has_kernel = self.machine.gpu.capability in GROUPED_CAPABILITIES and not any(width % 8 for width in widths)
        return self.model.num_experts > 0 and not has_kernel

    def host_seconds(self, layers: range) -> float:
        """Return the seconds in which the host launches forward and backward of a range of layers."""
        of_layers = layer_tensors(self.model, self.layout.divides_experts)[layers.start : layers.stop]
        branches = sum(len(sub_block.branches) for sub_block in chain.from_iterable(of_layers))
        return branches * HOST_SECONDS * (HOST_RECOMPUTED if self.layout.recompute else 1.0)

    def pass_times(self, layers: range) -> tuple[PassTime, PassTime]:
        """Return the times of forward and backward of a range of layers with divided experts."""
        steps = [*chain.from_iterable(self.layers[layers.start : layers.stop])]
        return pass_times(steps, self.wire, self.token_contention, self.schedule, self.layout.recompute)

    @property
    def token_contention(self) -> float:
        """The share of the overlap with an all-to-all that is given back."""
        contention = self.all_to_all.contention
        return self.machine.contention if contention is None else contention

    def _simulate(self, layers: range) -> tuple[float, float]:
        steps: Sequence[SubBlockTime] = [*chain.from_iterable(self.layers[layers.start : layers.stop])]
        compute = sum(step.forward_seconds + step.dgrad_seconds + step.wgrad_seconds for step in steps)
        if self.layout.divides_experts:
            compute += sum(step.output_wgrad_seconds for step in steps)
            compute += sum(step.forward_seconds for step in steps) if self.layout.recompute else 0.0
            return compute, sum(each.seconds for each in self.pass_times(layers))
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


@lru_cache(maxsize=256)
def _sample_flops(model: ModelConfig, sequence: int) -> int:
    return ModelFlops(model, sequence).training


def step_time(times: LayerTime, layout: Layout, global_batch: int) -> StepTime:
    """Return the time of one step of `global_batch` samples, a multiple of data-parallel ranks x micro-batch."""
    micro_batches = global_batch // (layout.data * layout.micro_batch)
    stages = [_stage_seconds(times, layout, stage) for stage in range(layout.pipeline)]
    compute, slowest = max(stages, key=lambda stage: stage[1])
    filling = (sum(total for _, total in stages) - slowest) / layout.chunks
    message = _message_seconds(times, layout)
    # The GPU that holds most.
    unlike = unlike_stages(times.model, layout.pipeline, layout.chunks, layout.experts)
    parameters = max(stage_parameters(times.model, layout, stage) for stage in unlike)
    of_experts = max(stage_expert_parameters(times.model, layout, stage) for stage in unlike)
    updated = (parameters - of_experts) / layout.data + of_experts / layout.expert_data
    update = times.moving(UPDATE_BYTES * (updated if layout.zero else parameters))
    return StepTime(
        compute=micro_batches * compute + update,
        exposed_tensor=micro_batches * (slowest - compute) + _partial_gradients_seconds(times, layout),
        bubble=filling + _waiting_seconds(layout, micro_batches, slowest, message) + _ends_seconds(times, layout),
        exposed_data=_exposed_data(times, layout, parameters, micro_batches, slowest),
    )


def _partial_gradients_seconds(times: LayerTime, layout: Layout) -> float:
    """Return the seconds of the sum of the gradients of which several tensor-parallel ranks have parts."""
    return max(_replica_seconds(times, layout, stage) for stage in range(layout.pipeline))


def _replica_seconds(times: LayerTime, layout: Layout, stage: int) -> float:
    seconds = 0.0
    for replicas, num_bytes in partial_gradient_bytes(times.model, layout, stage).items():
        sharing = replace(layout, tensor=replicas, data=layout.data * layout.tensor // replicas)
        spreads = placement(sharing, times.machine.per_box).tensor
        seconds += times.reduce_factor * times.machine.all_reduce_seconds(num_bytes, spreads)
    return seconds


def _message_seconds(times: LayerTime, layout: Layout) -> float:
    """Return the seconds of the longest message between two stages: those of an all-reduce of two ranks."""
    if layout.pipeline == 1:
        return 0.0
    cuts = range(layout.pipeline * layout.chunks - 1)
    state = max(state_bytes(times.model, layout, times.sequence, stage) for stage in cuts)
    return times.machine.all_reduce_seconds(state, placement(layout, times.machine.per_box).following)


def _waiting_seconds(layout: Layout, micro_batches: int, slowest: float, message: float) -> float:
    """Return the seconds in which the slowest rank waits, apart from those in which the pipeline fills and empties.

    One message per cut and direction is exposed at first. Then a rank sends one message at a time, each under a pass,
    and the longer of the two counts. Each of two ranks has an end of the model, which sends nothing. With one chunk, p
    micro-batches are in flight, so each adds a p-th of the messages of a round trip. With several chunks, a rank
    continues with the next one when the first micro-batch of a group has passed all ranks.
    """
    stages, chunks = layout.pipeline, layout.chunks
    forward = slowest / chunks * (1 / 4 if layout.recompute else 1 / 3)
    passes = [forward, slowest / chunks - forward]
    exposed = sum(max(0.0, message - seconds) for seconds in passes)
    if stages == 2:
        exposed *= 1 - 1 / (2 * chunks)
    round_trip = 2 * (stages - 1) * message
    if chunks == 1:
        return round_trip + (micro_batches - 1) * max(exposed, round_trip / stages)
    group = first_group(layout, micro_batches)
    turns = (stages * (seconds + message) - group * max(seconds, message) for seconds in passes)
    late = sum(max(0.0, seconds) for seconds in turns)
    return round_trip + micro_batches * chunks * exposed + (chunks - 1) * late


def _ends_seconds(times: LayerTime, layout: Layout) -> float:
    """Return the seconds of the sum of a tied embedding's gradient over the ends of a pipeline."""
    shared = ends_bytes(times.model, layout)
    if not shared:
        return 0.0
    return times.machine.all_reduce_seconds(shared, placement(layout, times.machine.per_box).ends)


def _stage_seconds(times: LayerTime, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the seconds of one micro-batch on one stage as `LayerTime.passes` does, with embedding and head."""
    chunks = stage_chunks(times.model, layout, stage)
    compute, total = (sum(seconds) for seconds in zip(*map(times.passes, chunks), strict=True))
    if stage == 0:
        numbers = embedding_tensor(times.model).local_numel(layout.tensor)
        embedding = times.moving((2 * BF16_BYTES + ADD_BYTES) * numbers)
        compute += embedding
        total += embedding + times.reduce_seconds
    if stage == layout.pipeline - 1:
        head = _head_seconds(times)
        compute += head
        total += head + times.reduce_seconds
    if layout.is_captured and not times.waits_for_choices:
        return compute, total
    host = sum(map(times.host_seconds, chunks))
    return max(compute, host), max(total, host)


def _head_seconds(times: LayerTime) -> float:
    """Return the seconds of the head's products in forward and backward, and of the loss."""
    numbers = head_tensor(times.model).local_numel(times.layout.tensor)
    operations = 2 * times.tokens * numbers
    chunks = math.ceil(times.tokens / loss_chunk_tokens(times.tokens))
    products = 2 * times.product(operations, chunks * BF16_BYTES * numbers)
    gradient = times.product(operations, chunks * ADD_BYTES * numbers)
    # Logits, exponentials and their gradient in fp32, each written and read.
    logits = times.tokens * numbers / times.model.hidden_size
    return products + gradient + times.moving(6 * FP32_BYTES * logits)


def _exposed_data(times: LayerTime, layout: Layout, parameters: int, micro_batches: int, pass_seconds: float) -> float:
    """Return the exposed data-parallel time as described at the top of this file."""
    machine = times.machine
    gathered = gathered_bytes(layout)
    spreads = placement(layout, machine.per_box)
    of_experts = max(stage_expert_parameters(times.model, layout, stage) for stage in range(layout.pipeline))
    families = [
        (parameters - of_experts, layout.data, spreads.data),
        (of_experts, layout.expert_data, spreads.experts_data),
    ]

    def around(bytes_per_parameter: float, collectives: int = 1) -> float:
        return sum(
            collectives * machine.gather_seconds(bytes_per_parameter * count / collectives, spread)
            for count, ranks, spread in families
            if ranks > 1 and count
        )

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
    """Return the model FLOPs of a step (see `ModelFlops`) relative to the peak of all GPUs in so many seconds."""
    return times.sample_flops * global_batch / (seconds * layout.gpus * times.machine.gpu.peak_flops)
