"""Time and memory of generation on a GPU and an interconnect.

The constants are those of a fit to 170 runs published by the authors of arXiv 2501.06589. The engine is one of today:
the output head is cut over the ranks, prefill computes the logits of the last position alone, and CUDA graphs are
assumed, so that no launch is visible. Attention is one of

    fused       reads the keys and values of each position in use once, and writes no scores to memory
    expanded    the authors' program: reads keys and values for each query head, which costs as many times more as
                query heads share them, and in prefill moves its scores through memory `SCORE_PASSES` times

A sub-block of a decode step reads its matrices and the states of its mixer, or computes its products if that takes
longer, and has kernels that cost the same whatever its size. States of fixed size are also written. The rates scale
with a GPU's memory and peak; the constants of kernels are those of an H100 and are assumed to hold for all GPUs.

With latent attention, a decode step multiplies the queries and the outputs of the heads by the matrix that expands
latents. This takes as many products as expanding the latent of one token. Scores are products with whole latents.
Prefill expands latents.

A step that drafts K tokens computes K + 1 positions of the model for each sequence, which read matrices and states
once, and K passes of the drafting head, each with a layer of the model's own kind, its all-reduces and the output head.
It gives the accepted length of tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.links import MICROSECOND, SubBlockTime, WireModel, forward_seconds, join_intervals
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.placement import placement
from megatron_ladder.blueprint.mixers.mixer import Mixer, StateKind
from megatron_ladder.blueprint.model import ModelConfig, mixer_states, mtp_states
from megatron_ladder.blueprint.specs import Branch, Role
from megatron_ladder.blueprint.tensors import SubBlockTensors, head_tensor, layer_tensors, model_tensors, mtp_tensors
from megatron_ladder.blueprint.wiring import BranchKind

BYTES = 2
"""Size of a bf16 number: activations, states, embedding and head."""


@dataclass(frozen=True)
class Fitted:
    """Constants of decoding: one set for batch 1, one for larger batches."""

    rate: float
    """Share of the memory's rate that weights are read at."""
    floor: float
    """Kernels of a layer whatever its size, us."""
    glue: Mapping[str, float]
    """Adds and norms of a layer that reads at once, late, or has one norm, us."""


SINGLE = Fitted(0.923, 32.1, {"standard": 2.1, "ladder": 4.7, "parallel": -4.9})
BATCH = Fitted(0.876, 45.9, {"standard": 7.1, "ladder": 7.5, "parallel": -2.4})
FLOOR_GROWTH = 3.3
"""Growth of the floor with each doubling of the batch beyond 4, us."""
ATTENTION_FLOOR = 0.625
"""Share of the floor that is the attention's."""
EXPERTS_FLOOR = 65.0
"""Kernels that routed experts have beyond those of an MLP, us: scores, choice, permutation, grouped products, sum. It
is fitted to public measurements of SGLang on eight B200, with one-shot all-reduces (docs/plan_measurements.csv)."""
TOKEN = 146.0
"""A token beyond layers and head, us."""
SAMPLE = 4.0
"""Its growth per sample of the batch, us."""
FLOPS_SHARE = 0.62
"""Share of the peak that products reach."""
STREAM_PASSES = 5.9
"""Times that a sub-block of prefill moves the stream through memory."""
PREFILL_FLOOR = 109.0
"""Kernels of a layer in prefill, us."""
SCORE_PASSES = 44.0
"""Times that expanded attention moves its scores [query heads, s, s] through memory in prefill, in bf16: the median of
the 20 published runs without all-reduces and pipelines, from 36 to 69."""
Attention = Literal["fused", "expanded"]


@dataclass(frozen=True)
class InferenceRequest:
    """A batch of equal prompts, on `ranks` tensor-parallel GPUs."""

    model: ModelConfig
    """With its wiring."""
    machine: Machine
    ranks: int
    batch: int
    prompt: int
    new_tokens: int
    weight_bits: float = 16
    """Bits of a number in the matrices of the layers."""
    reduce_factor: float = 1.0
    """An all-reduce takes so many times as long as the machine's; 0 leaves all of them out."""
    attention: Attention = "fused"
    """How attention is computed, unless it has latents: then it is always fused."""
    draft_tokens: int = 0
    """Tokens that the drafting head of the model proposes in each decode step."""
    accepted_length: float = 1.0
    """Tokens that a decode step gives on average, 1 to `draft_tokens` + 1."""

    @property
    def step_tokens(self) -> int:
        """Tokens that the model processes in a decode step."""
        return self.batch * (self.draft_tokens + 1)

    def expands(self, mixer: Mixer) -> bool:
        """Return whether a mixer reads keys and values for each query head, and writes scores."""
        return self.attention == "expanded" and mixer.repeats_states

    def reduce_seconds(self, tokens: int) -> float:
        """Return the time of an all-reduce of the stream of so many tokens."""
        spreads = placement(Layout(tensor=self.ranks), self.machine.per_box).tensor
        return self.reduce_factor * self.machine.all_reduce_seconds(BYTES * tokens * self.model.hidden_size, spreads)


@dataclass(frozen=True)
class InferenceTimes:
    """Seconds of prefill, which gives the first token, and of decoding the others."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.prefill + self.decode


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of one GPU."""

    weights: float
    cache: float
    """The states of token mixers, such as keys and values, of all sequences."""

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.cache


def inference_memory(request: InferenceRequest) -> InferenceMemory:
    """Return what a GPU holds at the last token, without activations, CUDA and NCCL."""
    weights = 0.0
    for tensor in model_tensors(request.model):
        number_bytes = request.weight_bits / 8 if tensor.role is Role.MATRIX else BYTES
        weights += tensor.local_numel(request.ranks) * number_bytes
    return InferenceMemory(weights, request.batch * _sequence_bytes(request, request.prompt + request.new_tokens))


def _sequence_bytes(request: InferenceRequest, positions: float) -> float:
    """Return the bytes of the states of a sequence, as `States.allocate` makes them.

    With drafts, these are also states of the head, fixed states after each token of a step, and room for these tokens
    in windows.
    """
    drafts = request.draft_tokens
    of_head = mtp_states(request.model, request.ranks) if drafts else []
    total = 0.0
    for spec in chain(*mixer_states(request.model, request.ranks), *of_head):
        copies = drafts + 2 if drafts and spec.kind is StateKind.FIXED else 1
        total += copies * replace(spec, window=spec.window + drafts).bytes(positions, BYTES)
    return total


def predict_inference(request: InferenceRequest) -> InferenceTimes:
    """Return the seconds of prefill, which gives the first token, and of decoding the others."""
    # The mean of all steps: attention covers the prompt and half of the new tokens.
    positions = request.prompt + request.new_tokens / 2
    step = _decode_pass_seconds(request, layer_tensors(request.model), positions)
    if request.draft_tokens:
        step += request.draft_tokens * _draft_seconds(request, positions)
    prefill = _pass_seconds(
        request,
        layer_tensors(request.model),
        request.batch * request.prompt,
        lambda tensors, _: _prefill_seconds(request, tensors),
    )
    return InferenceTimes(prefill, (request.new_tokens - 1) / request.accepted_length * step)


def _draft_seconds(request: InferenceRequest, positions: float) -> float:
    """Return the time of a pass of the drafting head for one token of each sequence."""
    head = mtp_tensors(request.model)
    assert head is not None
    one = replace(request, draft_tokens=0)
    projection = head.eh_proj.local_numel(request.ranks) * request.weight_bits / 8 / _read_rate(request)
    return projection + _decode_pass_seconds(one, [head.sub_blocks], positions)


def _decode_pass_seconds(
    request: InferenceRequest, layers: Sequence[Sequence[SubBlockTensors]], positions: float
) -> float:
    return _pass_seconds(
        request,
        layers,
        request.step_tokens,
        lambda sub_block, sub_blocks: _decode_seconds(request, sub_block, sub_blocks, positions),
    )


def _pass_seconds(
    request: InferenceRequest,
    layers: Sequence[Sequence[SubBlockTensors]],
    tokens: int,
    seconds_of: Callable[[SubBlockTensors, int], float],
) -> float:
    """Return the time of a forward pass of so many tokens through layers and output head.

    `seconds_of`: (sub-block, sub-blocks of its layer) -> seconds.
    """
    reduce = request.reduce_seconds(tokens)
    steps = [
        SubBlockTime(
            seconds_of(sub_block, len(sub_blocks)),
            reduce,
            sub_block.wired.missing,
            joins_next=sub_block.wired.joins_next,
        )
        for sub_blocks in layers
        for sub_block in sub_blocks
    ]
    contention = request.machine.contention_of(BYTES * tokens * request.model.hidden_size) if reduce else 0.0
    head = head_tensor(request.model).local_numel(request.ranks) * BYTES / _read_rate(request)
    outside = (TOKEN + SAMPLE * request.batch) * MICROSECOND
    # The all-reduce of the embedding, and the gather of the logits, whose latency is about the same.
    return 2 * reduce + forward_seconds(
        join_intervals(steps, request.model.desync_interval), WireModel(contention=contention), head + outside
    )


def _constants(request: InferenceRequest) -> Fitted:
    return SINGLE if request.batch == 1 else BATCH


def _read_rate(request: InferenceRequest) -> float:
    return _constants(request).rate * request.machine.gpu.memory_bytes_per_second


def _state_bytes(request: InferenceRequest, mixer: Mixer, positions: float) -> float:
    """Return the bytes of a mixer's states that a decode step of one sequence moves on one rank.

    If expanded, there is a copy for each query head.
    """
    model = request.model
    copies = model.num_attention_heads / max(model.num_key_value_heads, request.ranks) if request.expands(mixer) else 1
    # With drafts, a fixed state is written after each token, and that after the last accepted one is copied. Of the
    # other states, few entries are written.
    of_fixed = request.draft_tokens + 4 if request.draft_tokens else 2
    moved = (
        spec.bytes(positions, BYTES) * (of_fixed if spec.kind is StateKind.FIXED else 1)
        for spec in mixer.states(request.ranks)
    )
    return copies * sum(moved)


def _decode_seconds(request: InferenceRequest, sub_block: SubBlockTensors, sub_blocks: int, positions: float) -> float:
    """Return the time of one sub-block in a decode step; a layer has `sub_blocks`."""
    constants = _constants(request)
    rate = _read_rate(request)
    floor = constants.floor + (FLOOR_GROWTH * math.log2(request.batch / 4) if request.batch > 4 else 0.0)
    kind = "ladder" if sub_block.wired.missing else "standard"
    if sub_blocks == 1:
        kind = "parallel"
    seconds = constants.glue[kind] * MICROSECOND / sub_blocks
    for branch in sub_block.branches:
        reading = _weights_read(branch, request.step_tokens, request.ranks) * request.weight_bits / 8 / rate
        flops = 2 * branch.weights_per_token(request.ranks) * request.step_tokens
        computing = flops / (FLOPS_SHARE * request.machine.gpu.peak_flops)
        kernels = _share_of_floor(branch) * floor + (EXPERTS_FLOOR if branch.experts > 1 else 0.0)
        seconds += max(reading, computing) + kernels * MICROSECOND
        if branch.mixer:
            loading = _state_bytes(request, branch.mixer, positions) / request.machine.gpu.memory_bytes_per_second
            computing = (request.draft_tokens + 1) * branch.mixer.decode_flops(positions) / request.ranks
            seconds += request.batch * max(loading, computing / (FLOPS_SHARE * request.machine.gpu.peak_flops))
    return seconds


def _weights_read(branch: Branch, tokens: float, ranks: int) -> float:
    """Return the numbers in a rank's matrices that a step of so many tokens reads.

    They are those of the expected number of distinct experts, if every expert is equally likely.
    """
    share = branch.share_in_use(tokens)
    return sum(matrix.local_numel(ranks) * (1.0 if matrix.expert_dim is None else share) for matrix in branch.matrices)


def _prefill_seconds(request: InferenceRequest, sub_block: SubBlockTensors) -> float:
    """Return the time of one sub-block in prefill."""
    tokens = request.batch * request.prompt
    streams = STREAM_PASSES * BYTES * tokens * request.model.hidden_size / request.machine.gpu.memory_bytes_per_second
    seconds = 0.0
    for branch in sub_block.branches:
        flops = tokens * 2.0 * branch.weights_per_token(request.ranks)
        if branch.mixer:
            # A flash kernel skips masked scores.
            flops += branch.mixer.flops(tokens, branch.mixer.causal_positions(request.prompt)) / request.ranks
        seconds += flops / (FLOPS_SHARE * request.machine.gpu.peak_flops)
        seconds += _share_of_floor(branch) * PREFILL_FLOOR * MICROSECOND
        if branch.mixer and request.expands(branch.mixer):
            heads = request.model.num_attention_heads / request.ranks
            moved = SCORE_PASSES * BYTES * tokens * request.prompt * heads
            seconds += moved / request.machine.gpu.memory_bytes_per_second
    return seconds + streams


def _share_of_floor(branch: Branch) -> float:
    return ATTENTION_FLOOR if branch.kind is BranchKind.MIXER else 1 - ATTENTION_FLOOR
