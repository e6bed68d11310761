"""Bytes that each rank sends in a training step, by kind, inside its box and to other boxes.

    tensor     each micro-batch: an all-reduce of the stream for each output in forward and each input in backward, one
               for the embedding, and one for the head. With sequence parallelism, each is a reduce-scatter and an
               all-gather, and backward gathers the inputs again. Once per step, ranks that hold the same matrices of
               latents or key and value heads all-reduce their gradients, 4 bytes per number; from ZeRO 1 on, each
               data-parallel rank only those of its part
    experts    each micro-batch and layer with divided experts: four all-to-alls, of a row [h] for each choice of this
               rank's tokens, with its weight where tokens travel forward and back: dispatch and combine, and those of
               their gradients; recomputation dispatches again
    pipeline   each micro-batch and chunk, forward to the next stage and backward to the previous one: the stream, and
               the outputs that the first sub-block behind the cut misses, unreduced
    data       bytes per parameter of a GPU, w in its precision (bf16: 2):
               ZeRO 0    once a step: all-reduce of 4
               ZeRO 1    once a step: reduce-scatter of 4, all-gather of w
               ZeRO 2    each micro-batch: all-reduce of 4 (DeepSpeed's); once a step: all-gather of w
               ZeRO 3    each micro-batch: all-gather of w, up to twice; reduce-scatter of 4
               parameters of divided experts over the ranks that hold the same ones
    ends       once a step, if the embedding is tied and a pipeline holds it twice: all-reduce of its gradient, 4

A rank of a ring of n sends (n - 1) / n of the bytes of a gather (or reduce-scatter), and twice that for an all-reduce;
of an all-to-all, it sends as much if all choices are as likely.
Left out are collectives of a few numbers (losses, norms, counts of tokens, routers).
"""

from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from ladder_lab.cost.layout import Layout, stage_chunks
from ladder_lab.cost.memory import (
    FP32_BYTES,
    NUMBER_BYTES,
    Precision,
    stage_expert_parameters,
    stage_parameters,
    state_bytes,
    stream_bytes,
    wired_layers,
)
from ladder_lab.cost.placement import crosses, rank_groups
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import embedding_tensor, layer_tensors


class Sent(NamedTuple):
    """Bytes by where the group is that they are sent in."""

    inside: float
    across: float


class GatheredBytes(NamedTuple):
    """Bytes of the data-parallel gathers and reduce-scatters of one parameter, by the table above."""

    gradients: int
    """Once a step, or in each micro-batch from ZeRO 2 on."""
    weights: int
    """Once a step, or in each micro-batch with ZeRO 3."""


def gathered_bytes(layout: Layout, precision: Precision = "bf16") -> GatheredBytes:
    """Return the data-parallel bytes per parameter; an all-reduce is two gathers."""
    gradients = FP32_BYTES * (2 if layout.zero in (0, 2) else 1)
    gathers = {0: 0, 3: 2}.get(layout.zero, 1)
    return GatheredBytes(gradients, gathers * NUMBER_BYTES[precision])


def ends_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of the gradient that first and last stage sum; 0 if they share no matrix."""
    shares = model.tie_embeddings and layout.pipeline > 1
    return FP32_BYTES * embedding_tensor(model).local_numel(layout.tensor) if shares else 0


def _tensor_gathers(model: ModelConfig, layout: Layout, stage: int) -> int:
    """Return how many times a micro-batch gathers or reduce-scatters the stream in a stage."""
    wired = wired_layers(model, layout.divides_experts)
    layers = chain.from_iterable(stage_chunks(model, layout, stage))
    sub_blocks = [sub_block for layer in layers for sub_block in wired[layer] if not sub_block.moves_tokens]
    # The embedding and the head.
    borders = (0, layout.pipeline - 1).count(stage)
    if model.desync_interval:
        return 2 * borders + 4 * -(-len(sub_blocks) // model.desync_interval)
    outputs = sum(not sub_block.joins_next for sub_block in sub_blocks)
    inputs = sum(layout.recompute or not sub_block.shares_input for sub_block in sub_blocks)
    if layout.sequence_parallel:
        # The gradients of outputs that were reduced together are gathered one by one.
        return 2 * borders + outputs + len(sub_blocks) + 3 * inputs
    return 2 * (borders + outputs + inputs)


def _token_bytes(model: ModelConfig, layout: Layout, stage: int, sequence: int, precision: Precision) -> float:
    """Return the bytes of the all-to-alls of a micro-batch in a stage."""
    wired = wired_layers(model, layout.divides_experts)
    layers = chain.from_iterable(stage_chunks(model, layout, stage))
    count = sum(sub_block.moves_tokens for layer in layers for sub_block in wired[layer])
    rows = sequence * layout.micro_batch / layout.tensor * model.moe_router_topk
    dispatches = 3 if layout.recompute else 2
    widths = dispatches * (model.hidden_size + 1) + 2 * model.hidden_size
    return count * rows * widths * NUMBER_BYTES[precision]


@lru_cache(maxsize=256)
def _replicated_numbers(model: ModelConfig, ranks: int) -> list[Counter[int]]:
    """Return the numbers of each layer's latents or key and value heads that several ranks hold, by these ranks."""
    of_layers: list[Counter[int]] = []
    for sub_blocks in layer_tensors(model):
        numbers = Counter[int]()
        for tensor in chain.from_iterable(sub_block.tensors for sub_block in sub_blocks):
            if tensor.heads and tensor.replicas(ranks) > 1:
                numbers[tensor.replicas(ranks)] += tensor.local_numel(ranks)
        of_layers.append(numbers)
    return of_layers


def partial_gradient_bytes(model: ModelConfig, layout: Layout, stage: int) -> dict[int, float]:
    """Return the bytes of the gradients that so many neighbouring ranks of a stage sum in a step.

    Parts of data-parallel ranks may contain more or fewer of them; this is the mean.
    """
    of_layers = _replicated_numbers(model, layout.tensor)
    numbers = Counter[int]()
    for layer in chain.from_iterable(stage_chunks(model, layout, stage)):
        numbers.update(of_layers[layer])
    parts = layout.data if layout.zero else 1
    return {ranks: FP32_BYTES * count / parts for ranks, count in numbers.items()}


def rank_traffic(
    model: ModelConfig,
    layout: Layout,
    sequence: int,
    micro_batches: int,
    per_box: int,
    rank: int,
    precision: Precision = "bf16",
) -> dict[str, Sent]:
    """Return the bytes that a rank sends in a step, by the kinds above, in boxes of `per_box` ranks."""
    stage = rank // (layout.tensor * layout.data)
    groups = rank_groups(layout, rank)
    stream = stream_bytes(model, layout, sequence, precision)
    of_tensor = micro_batches * stream * _tensor_gathers(model, layout, stage)
    tensor = _sent(groups.tensor, _share(groups.tensor) * of_tensor, per_box)
    for replicas, num_bytes in partial_gradient_bytes(model, layout, stage).items():
        sharing = range(rank - rank % replicas, rank - rank % replicas + replicas)
        tensor = _plus(tensor, _sent(sharing, _share(sharing) * 2 * num_bytes, per_box))
    gathered = gathered_bytes(layout, precision)
    per_parameter = gathered.gradients * (micro_batches if layout.zero >= 2 else 1)
    per_parameter += gathered.weights * (micro_batches if layout.zero == 3 else 1)
    of_experts = stage_expert_parameters(model, layout, stage)
    of_others = stage_parameters(model, layout, stage) - of_experts
    tokens = micro_batches * _token_bytes(model, layout, stage, sequence, precision)
    data = _plus(
        _sent(groups.data, _share(groups.data) * per_parameter * of_others, per_box),
        _sent(groups.experts_data, _share(groups.experts_data) * per_parameter * of_experts, per_box),
    )
    sent = {
        "tensor": tensor,
        "experts": _sent(groups.experts, _share(groups.experts) * tokens, per_box),
        "data": data,
        "ends": _sent(groups.ends, _share(groups.ends) * 2 * ends_bytes(model, layout), per_box),
    }
    forward_state = 0.0
    backward_state = 0.0
    for chunk in range(stage, layout.pipeline * layout.chunks, layout.pipeline):
        if chunk < layout.pipeline * layout.chunks - 1:
            forward_state += state_bytes(model, layout, sequence, chunk, precision)
        if chunk > 0:
            backward_state += state_bytes(model, layout, sequence, chunk - 1, precision)
    forward = _sent(groups.following, micro_batches * forward_state, per_box)
    backward = _sent(groups.previous, micro_batches * backward_state, per_box)
    return sent | {"pipeline": _plus(forward, backward)}


def _plus(one: Sent, other: Sent) -> Sent:
    return Sent(one.inside + other.inside, one.across + other.across)


def _share(group: range) -> float:
    """Return the share of a gather's bytes that each rank of a ring sends."""
    return (len(group) - 1) / len(group)


def _sent(group: range, num_bytes: float, per_box: int) -> Sent:
    return Sent(0.0, num_bytes) if crosses(group, per_box) else Sent(num_bytes, 0.0)
