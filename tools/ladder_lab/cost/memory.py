"""Memory of one GPU in training: weights, gradients, optimizer state, activations.

The counts follow the allocations of `engine/sharded.py` (ZeRO 1) and of DeepSpeed's optimizers. With D data-parallel
ranks, the bytes per parameter of the GPU (those of its tensor- and pipeline-parallel share) are below. If E
expert-parallel ranks divide the experts, D is T D / E for these.

    precision, ZeRO    weights   gradients   optimizer
    fp32, 0            4         4           8
    fp32, 1            4         4           8 / D          both moments; the weights are their own masters
    fp32, 2            4         4 / D       12 / D         masters and both moments
    fp32, 3            4 / D     4 / D       12 / D
                       ZeRO 2 on one data-parallel rank is run as ZeRO 1
    bf16, 1            2         4           12 / D
    bf16, 2            2         4 / D       12 / D
    bf16, 3            2 / D     4 / D       12 / D

This is with two moments, of AdamW. Muon has no second moment of the matrices of the layers: 4 bytes (/ D) less for each
of their elements.

Activations that autograd keeps for backward, in numbers, for T = s b tokens and t tensor-parallel ranks:

    sub-block          its input and the output of its norm         2 T h   (T h / t each with sequence parallelism)
    attention          queries and keys after rotary embedding,
                       q k v projected, the heads' output                            T d (3 Hq + 3 Hkv) / t
    latent attention   latents and rotated key, the normed latents, whole on every rank
                       queries and keys, keys and values expanded, the heads' output; queries projected if they
                       have no latent; values and output again if they are padded to the width of keys
    output gate        the gate, its sigmoid, and the gated output                   3 T d Hq / t
    MLP                gate and up, silu(gate), their product       4 T f / t
    experts            gate and up of k experts a token             2 T k f / t   (whole experts: a quarter more)
    divided experts    received rows, and their gate and up         R (h + 2 f), R = T k / t x imbalance
    recomputed         only its input                               T h
    head               the stream and the gradient of its norm: 2 T h; in fp32 the weight's gradient: V h / t

The loss has the logits of one chunk of c tokens at a time, at most 12 bytes for each of c V / t: the logits, their fp32
copy and softmax, and the gradient of the previous chunk's.

While backward runs through routed experts, it needs 9 k f / t + k h numbers for each token; with whole experts, whose
rows no host counts, 9 k f + k h; with divided ones, 9 f + 3 h for each received row. Gated DeltaNet keeps its
projections and its output; backward recomputes the rest in fp32, about ten times as many numbers as the projections, in
one layer at a time.

Stage i of a pipeline of p stages holds those of min(p - i, micro-batches) micro-batches at once. The outputs that cross
a cut with the stream are kept with it. Under a pass, up to four more states and gradients arrive, are read or are sent.

Captured passes (`engine/graph.py`) have separate memory for each micro-batch that a chunk ever has in flight, also for
what a pass needs at once, such as the activations of a recomputed layer, and static states and gradients of each chunk.
The chunks of a stage have most micro-batches in flight at different times, but keep the memory.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ladder_lab.cost.layout import Layout, first_group, pipeline_ranges, stage_chunks
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.blueprint.specs import Branch, TensorSpec, padded_vocab_size
from megatron_ladder.blueprint.tensors import (
    embedding_tensor,
    final_norm_tensor,
    kept_expert_rows,
    layer_tensors,
    loss_chunk_tokens,
)
from megatron_ladder.blueprint.wiring import BranchKind, WiredSubBlock, plan_reads

Precision = Literal["fp32", "bf16"]
FP32_BYTES = 4
NUMBER_BYTES = {"fp32": FP32_BYTES, "bf16": 2}
"""Size of one weight or activation."""
LOSS_BYTES = 12
"""Bytes of each logit that exists at once."""
EXPERT_WIDTHS = 9
"""Numbers of each sorted row that exist at once in the backward of routed experts, in widths of an expert."""
ROW_STREAMS = 3
"""Numbers of each received row that exist at once in that backward, in widths of the stream."""
RESERVED_BYTES = 4e9
"""Assumed size of the CUDA context, the buffers of NCCL, DeepSpeed's bucket of 5e8 numbers, and fragmentation."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. Activations are those kept for backward, and temporary ones of one sub-block and the loss."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations


class _LayerNumbers(NamedTuple):
    """Numbers of one layer on a tensor-parallel rank."""

    parameters: int
    moments: int
    """Numbers in the optimizer's moments of them."""
    expert_parameters: int
    """Those of the parameters that other ranks hold than the rest."""
    expert_moments: int
    activations: float
    """Numbers per token that a rank keeps inside the sub-blocks."""
    temporary: float
    """Numbers per token that exist at once while backward runs through routed experts; other sub-blocks need few."""
    recomputed: int
    """Numbers per token, in fp32, that exist at once while backward recomputes a mixer's."""


@lru_cache(maxsize=256)
def _numbers_of_layers(model: ModelConfig, layout: Layout) -> list[_LayerNumbers]:
    """Return the numbers of each layer in a layout; see `Layout.of_ranks`."""
    numbers: list[_LayerNumbers] = []
    for layer in layer_tensors(model, layout.divides_experts):
        branches = [branch for sub_block in layer for branch in sub_block.branches]
        tensors = [tensor for sub_block in layer for tensor in sub_block.tensors]
        routed = [tensor for tensor in tensors if layout.divides_experts and tensor.expert_dim is not None]
        numbers.append(
            _LayerNumbers(
                sum(map(layout.numel, tensors)),
                sum(_moments(tensor, layout) for tensor in tensors),
                sum(map(layout.numel, routed)),
                sum(_moments(tensor, layout) for tensor in routed),
                sum(_kept_inside(branch, layout) for branch in branches),
                max(_temporary(branch, layout) for branch in branches),
                max(branch.mixer.recomputed_numbers(layout.tensor) if branch.mixer else 0 for branch in branches),
            )
        )
    return numbers


def _moments(tensor: TensorSpec, layout: Layout) -> int:
    """Return how many numbers an optimizer keeps of a rank's part of a tensor."""
    return len(optimizer_kind(layout.optimizer).moments_of(tensor.role)) * layout.numel(tensor)


def _kept_inside(branch: Branch, layout: Layout) -> float:
    """Return the numbers per token that a rank keeps for backward inside a branch."""
    ranks = layout.tensor
    if branch.kind is BranchKind.EXPERTS and layout.divides_experts:
        widths = sum(matrix.weight.width(1) for matrix in branch.inputs.values())
        return (widths + branch.router["weight"].shape[1] + 1) * branch.experts_per_token * layout.row_share
    if branch.kind is BranchKind.EXPERTS:
        parts = 1 if layout.whole_experts else ranks
        rows = kept_expert_rows(ranks) if layout.whole_experts else 1.0
        return sum(matrix.weight.width(parts) for matrix in branch.inputs.values()) * branch.experts_per_token * rows
    kept = sum(matrix.weight.width(ranks) for matrix in (*branch.inputs.values(), branch.output))
    if branch.kind is BranchKind.MLP:
        # The gate after SiLU.
        return kept + branch.inputs["gate"].weight.width(ranks)
    return kept + (branch.mixer.kept_numbers(ranks) if branch.mixer else 0)


def _temporary(branch: Branch, layout: Layout) -> float:
    """Return the numbers per token of the gradients and products of all sorted rows, also of those of other ranks."""
    if branch.kind is not BranchKind.EXPERTS:
        return 0.0
    whole = layout.whole_experts or layout.divides_experts
    expert = branch.inputs["gate"].weight.width(1 if whole else layout.tensor)
    hidden_size = branch.router["weight"].shape[1]
    if layout.divides_experts:
        row = EXPERT_WIDTHS * expert + ROW_STREAMS * hidden_size
        return branch.experts_per_token * layout.row_share * row
    return branch.experts_per_token * (EXPERT_WIDTHS * expert + hidden_size)


def _numbers_of_stage(model: ModelConfig, layout: Layout, stage: int) -> list[_LayerNumbers]:
    numbers = _numbers_of_layers(model, layout.of_ranks)
    return [numbers[layer] for layers in stage_chunks(model, layout, stage) for layer in layers]


def _passes_ahead(layout: Layout, stage: int, micro_batches: int) -> int:
    """Return how many forward passes of single chunks a stage runs before forward and backward alternate."""
    ahead = layout.pipeline - stage - 1
    if layout.chunks > 1:
        ahead = 2 * ahead + (layout.chunks - 1) * first_group(layout, micro_batches)
    return min(ahead, layout.chunks * micro_batches)


def _passes_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches a stage keeps for backward, as passes over all its chunks."""
    ahead = _passes_ahead(layout, stage, micro_batches)
    return min(ahead + 1, layout.chunks * micro_batches) / layout.chunks


def _graph_slots(layout: Layout, stage: int, micro_batches: int) -> list[int]:
    """Return how many micro-batches each chunk of a stage has in flight at most."""
    # Further groups repeat the third one.
    further = min(2, micro_batches // layout.pipeline - 1)
    groups = (first_group(layout, micro_batches), *[layout.pipeline] * further)
    return _most_in_flight(groups, layout.chunks, _passes_ahead(layout, stage, micro_batches))


@lru_cache(maxsize=4096)
def _most_in_flight(groups: Sequence[int], chunks: int, ahead: int) -> list[int]:
    forward = [chunk for size in groups for chunk in range(chunks) for _ in range(size)]
    backward = [chunk for size in groups for chunk in reversed(range(chunks)) for _ in range(size)]
    in_flight = Counter(forward[:ahead])
    most = in_flight.copy()
    for begins, ends in zip(forward[ahead:], backward, strict=False):
        in_flight[begins] += 1
        most |= in_flight
        in_flight[ends] -= 1
    return [most[chunk] for chunk in range(chunks)]


def stream_bytes(model: ModelConfig, layout: Layout, sequence: int, precision: Precision = "bf16") -> int:
    """Return the bytes of the whole residual stream of a micro-batch."""
    return sequence * layout.micro_batch * model.hidden_size * NUMBER_BYTES[precision]


@lru_cache(maxsize=256)
def wired_layers(model: ModelConfig, divides_experts: bool) -> list[list[WiredSubBlock]]:
    """Return the sub-blocks of every layer, or those of a model whose experts are divided."""
    return [[sub_block.wired for sub_block in layer] for layer in layer_tensors(model, divides_experts)]


@lru_cache(maxsize=256)
def _outputs_at_cuts(model: ModelConfig, layout: Layout) -> list[tuple[int, int]]:
    """Return how many outputs cross a pipeline cut before each layer: partial sums, and complete ones."""
    wired = wired_layers(model, layout.divides_experts)
    plan = plan_reads(wired)
    at_cuts = []
    for read in itertools.accumulate(map(len, wired[:-1]), initial=0):
        missing = plan.missing(read)
        complete = sum(output in plan.complete for output in missing)
        at_cuts.append((len(missing) - complete, complete))
    return at_cuts


def state_bytes(model: ModelConfig, layout: Layout, sequence: int, cut: int, precision: Precision = "bf16") -> float:
    """Return the bytes that cross a cut of the layers in a micro-batch, from one rank to one, in each direction.

    Cut i is behind stage i; with several chunks, the next ones follow.
    """
    ranges = pipeline_ranges(model.num_layers, layout.pipeline * layout.chunks)
    partial, complete = _outputs_at_cuts(model, layout.of_ranks)[ranges[cut + 1].start]
    # Partial sums cross unreduced, so each rank sends the whole of them.
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    return stream_bytes(model, layout, sequence, precision) * (share * (1 + complete) + partial)


def stage_parameters(model: ModelConfig, layout: Layout, stage: int) -> int:
    """Return the parameters of one rank of a stage.

    The first stage has the embedding, and the last one the head, even if its matrix is tied to the embedding.
    """
    ends = sum(tensor.local_numel(layout.tensor) for tensor in _end_tensors(model, layout, stage))
    return ends + sum(layer.parameters for layer in _numbers_of_stage(model, layout, stage))


def stage_expert_parameters(model: ModelConfig, layout: Layout, stage: int) -> int:
    """Return how many of these are those of divided experts, whose data-parallel ranks are others."""
    return sum(layer.expert_parameters for layer in _numbers_of_stage(model, layout, stage))


def _stage_moments(model: ModelConfig, layout: Layout, stage: int) -> int:
    """Return how many numbers the optimizer keeps of the parameters of one rank of a stage."""
    ends = sum(_moments(tensor, layout) for tensor in _end_tensors(model, layout, stage))
    return ends + sum(layer.moments for layer in _numbers_of_stage(model, layout, stage))


def _end_tensors(model: ModelConfig, layout: Layout, stage: int) -> list[TensorSpec]:
    """Return the tensors of a stage outside of its layers."""
    is_first = stage == 0
    is_last = stage == layout.pipeline - 1
    tensors = [embedding_tensor(model)] if is_first else []
    if is_last:
        tensors.append(final_norm_tensor(model))
    if is_last and not (model.tie_embeddings and is_first):
        tensors.append(embedding_tensor(model))
    return tensors


def _state_bytes(parameters: int, moments: int, layout: Layout, precision: Precision) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state by the table at the top of this file."""
    share = 1 / layout.data
    if layout.data == 1 and layout.zero == 2:
        layout = replace(layout, zero=1)
    weights = NUMBER_BYTES[precision] * parameters * (share if layout.zero >= 3 else 1)
    gradients = FP32_BYTES * parameters * (share if layout.zero >= 2 else 1)
    share = 1 if layout.zero == 0 else share
    has_masters = layout.zero >= 2 or precision == "bf16"
    optimizer = FP32_BYTES * share * (moments + (parameters if has_masters else 0))
    return weights, gradients, optimizer


def _layers_activation_bytes(
    model: ModelConfig, layout: Layout, stage: int, tokens: int, precision: Precision
) -> float:
    """Return what a stage's layers keep of a micro-batch. A stream that several sub-blocks read is kept once.

    Norms keep only their input, as that of torch does on CUDA.
    """
    wired = wired_layers(model, layout.divides_experts)
    streams = 0
    sub_blocks = 0
    for layers in stage_chunks(model, layout, stage):
        _, *further = itertools.chain.from_iterable(_new_streams(model, layout.of_ranks)[layers.start : layers.stop])
        sub_blocks += 1 + len(further)
        streams += 1 + sum(further)
    size = NUMBER_BYTES[precision]
    stream = tokens * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    inputs = streams * stream * size
    if layout.recompute:
        return inputs
    # The router keeps the normed stream of divided experts apart.
    routers = sum(
        sub_block.moves_tokens
        for layers in stage_chunks(model, layout, stage)
        for sub_block in itertools.chain.from_iterable(wired[layers.start : layers.stop])
    )
    norms = (sub_blocks + routers) * stream * size
    inner = sum(layer.activations for layer in _numbers_of_stage(model, layout, stage))
    return inputs + norms + tokens * inner * size


def _cuts_of_stage(layout: Layout, stage: int) -> tuple[list[int], list[int]]:
    """Return the cuts before and behind the chunks of a stage, numbered as in `state_bytes`."""
    count = layout.pipeline * layout.chunks
    chunks = range(stage, count, layout.pipeline)
    return [chunk - 1 for chunk in chunks if chunk > 0], [chunk for chunk in chunks if chunk < count - 1]


def _entered_bytes(model: ModelConfig, layout: Layout, stage: int, sequence: int, precision: Precision) -> float:
    """Return the bytes of the outputs that enter a stage's chunks in a micro-batch, and are kept with the stream."""
    before, _ = _cuts_of_stage(layout, stage)
    stream = stream_bytes(model, layout, sequence, precision) / (layout.tensor if layout.sequence_parallel else 1)
    return sum(state_bytes(model, layout, sequence, cut, precision) - stream for cut in before)


def _messages_bytes(model: ModelConfig, layout: Layout, stage: int, sequence: int, precision: Precision) -> float:
    """Return what a stage holds of messages, without the states that have entered its passes.

    Under a backward pass, the next state and the next gradient arrive, and the result of the pass before is being sent.
    The pass itself reads a gradient. Graphs read and write static states and gradients of each chunk.
    """
    before, behind = (
        [state_bytes(model, layout, sequence, cut, precision) for cut in cuts] for cuts in _cuts_of_stage(layout, stage)
    )
    largest = [max(sizes, default=0.0) for sizes in (before, behind)]
    messages = largest[0] + 2 * largest[1] + max(largest)
    return messages + (sum(before) + 2 * sum(behind) if layout.is_captured else 0.0)


@lru_cache(maxsize=256)
def _new_streams(model: ModelConfig, layout: Layout) -> list[list[bool]]:
    """Return for each layer and sub-block whether it is the first to read its stream."""
    wired = wired_layers(model, layout.divides_experts)
    plan = plan_reads(wired)
    reads = itertools.count()
    return [[len(plan.arriving(next(reads))) > 0 for _ in sub_blocks] for sub_blocks in wired]


def _head_activation_bytes(model: ModelConfig, layout: Layout, tokens: int, precision: Precision) -> float:
    """Return the bytes that final norm, output head and loss keep. The head's input is whole on every rank."""
    size = NUMBER_BYTES[precision]
    cut = layout.tensor if layout.sequence_parallel else 1
    stream = tokens * model.hidden_size * (size + size / cut)
    return stream + FP32_BYTES * embedding_tensor(model).local_numel(layout.tensor)


def stage_memory(
    model: ModelConfig, layout: Layout, stage: int, sequence: int, micro_batches: int, precision: Precision = "bf16"
) -> Memory:
    size = NUMBER_BYTES[precision]
    tokens = sequence * layout.micro_batch
    parameters = stage_parameters(model, layout, stage)
    moments = _stage_moments(model, layout, stage)
    numbers = _numbers_of_stage(model, layout, stage)
    of_experts = stage_expert_parameters(model, layout, stage)
    moments_of_experts = sum(layer.expert_moments for layer in numbers)
    others = _state_bytes(parameters - of_experts, moments - moments_of_experts, layout, precision)
    of_divided = _state_bytes(of_experts, moments_of_experts, replace(layout, data=layout.expert_data), precision)
    weights, gradients, optimizer = map(sum, zip(others, of_divided, strict=True))
    activations = _layers_activation_bytes(model, layout, stage, tokens, precision)
    activations += _entered_bytes(model, layout, stage, sequence, precision)
    kept = _passes_in_flight(layout, stage, micro_batches)
    # How often what a pass needs at once is allocated, by chunk.
    pools = [1]
    if layout.is_captured:
        pools = _graph_slots(layout, stage, micro_batches)
        kept = sum(pools) / layout.chunks
    activations = kept * activations + _messages_bytes(model, layout, stage, sequence, precision)
    if layout.recompute:
        activations += sum(pools) * tokens * size * max(layer.activations for layer in numbers)
    temporary = tokens * max(max(size * layer.temporary, FP32_BYTES * layer.recomputed) for layer in numbers)
    activations += sum(pools) * temporary
    if stage == layout.pipeline - 1:
        rows = padded_vocab_size(model.vocab_size, layout.tensor) // layout.tensor
        # Backward of the layers begins when the loss is done.
        loss = max(0.0, LOSS_BYTES * loss_chunk_tokens(tokens) * rows - temporary)
        activations += pools[-1] * (loss + _head_activation_bytes(model, layout, tokens, precision))
    if layout.zero >= 3:
        weights += 2 * size * max(layer.parameters for layer in numbers)
    return Memory(weights, gradients, optimizer, activations)


@lru_cache(maxsize=16)
def _numbers_of_model(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters of a model, and how many of them are those of routed experts."""
    tensors = [tensor for layer in layer_tensors(model) for sub_block in layer for tensor in sub_block.tensors]
    routed = sum(tensor.numel for tensor in tensors if tensor.expert_dim is not None)
    return sum(tensor.numel for tensor in tensors) + embedding_tensor(model).numel, routed


def least_bytes(model: ModelConfig, layout: Layout) -> float:
    """Return a lower bound of the fullest GPU's memory with ZeRO 1, in bf16: the mean of what stages allocate."""
    total, routed = _numbers_of_model(model)
    local = (total - routed) / layout.tensor + routed / (layout.experts if layout.divides_experts else layout.tensor)
    moments = min(len(kept) for kept in optimizer_kind(layout.optimizer).moments.values())
    masters = FP32_BYTES * (1 + moments) * total / layout.gpus
    return (NUMBER_BYTES["bf16"] + FP32_BYTES) * local / layout.pipeline + masters


@lru_cache(maxsize=256)
def unlike_stages(model: ModelConfig, pipeline: int, chunks: int, experts: int = 1) -> list[int]:
    """Return the first stage of each kind of stages, which has most micro-batches in flight, and the last stage."""
    layout = Layout(pipeline=pipeline, chunks=chunks, experts=experts)
    first: dict[object, int] = {}
    for stage in range(pipeline):
        cuts = tuple(state_bytes(model, layout, 1, cut) for cuts in _cuts_of_stage(layout, stage) for cut in cuts)
        layers = itertools.chain.from_iterable(stage_chunks(model, layout, stage))
        streams = tuple(tuple(_new_streams(model, layout.of_ranks)[layer]) for layer in layers)
        kind = stage == 0, cuts, streams, tuple(_numbers_of_stage(model, layout, stage))
        first.setdefault(kind, stage)
    return sorted({*first.values(), pipeline - 1})


def worst_memory(model: ModelConfig, layout: Layout, sequence: int, micro_batches: int) -> Memory:
    """Return the memory of the fullest GPU, in bf16."""
    stages = unlike_stages(model, layout.pipeline, layout.chunks, layout.experts)
    memories = [stage_memory(model, layout, stage, sequence, micro_batches) for stage in stages]
    return max(memories, key=lambda memory: memory.total)
