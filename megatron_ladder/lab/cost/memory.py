"""What training takes of one GPU's memory: weights, gradients, optimizer state, activations.

Counted as this package and DeepSpeed's optimizers allocate. With N parameters on the GPU (of its tensor- and
pipeline-parallel share) and D data-parallel ranks, bytes for each parameter:

    precision, ZeRO    weights   gradients   optimizer
    fp32, 0            4         4           8
    fp32, 1            4         4           12 / D         master copy and both moments
    fp32, 2            4         4 / D       12 / D
    fp32, 3            4 / D     4 / D       12 / D
    bf16, 1            2         6           12 / D         gradients in bf16, and their sums in fp32
    bf16, 2            2         4 / D       12 / D
    bf16, 3            2 / D     4 / D       12 / D

Activations are what autograd keeps for backward, of T = s b tokens, in numbers (t tensor-parallel ranks):

    sub-block          its input and what its norm gives            2 T h   (T h / t each with sequence parallelism)
    attention          queries and keys turned, q k v projected,
                       the heads' output                            T d (3 Hq + 3 Hkv) / t
    MLP                gate and up, silu(gate), their product       4 T f / t
    recomputed         its input alone                              T h
    head               the stream and its norm, and in fp32 the exponentials of the logits: 2 T h, T V / t

A pipeline's stage i of p holds those of min(p - i, micro-batches) micro-batches at once.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import embedding_tensor, final_norm_tensor, layer_tensors, padded_vocab_size
from megatron_ladder.lab.cost.links import outputs_added

Precision = Literal["fp32", "bf16"]
FP32_BYTES = 4
RESERVED_BYTES = 4e9
"""Assumed for the CUDA context, the buffers of NCCL, DeepSpeed's bucket of 5e8 numbers, and fragmentation."""


@dataclass(frozen=True)
class Layout:
    """How a model and its batch are shared out."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 1
    micro_batch: int = 1
    """Samples."""
    recompute: bool = False
    """Keep only the inputs of sub-blocks."""
    sequence_parallel: bool = False
    """Keep the stream and the norms' outputs cut over the tensor-parallel ranks."""
    fused_norms: bool = True
    """Norms keep their input alone, as torch's and apex's do on CUDA; on a CPU torch's keeps more."""

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for backward, with what one sub-block and the loss use in passing."""

    @property
    def total(self) -> float:
        """All four."""
        return self.weights + self.gradients + self.optimizer + self.activations


def number_bytes(precision: Precision) -> int:
    """Of one weight or activation."""
    return 2 if precision == "bf16" else FP32_BYTES


def layer_parameters(model: ModelConfig, tensor: int) -> int:
    """Return the parameters of one layer on one rank."""
    return sum(sub_block.parameters(tensor) for sub_block in layer_tensors(model)[0])


def stage_layers(model: ModelConfig, pipeline: int, stage: int) -> int:
    """Layers of a pipeline's stage; the first stages have one more where they cannot be shared out evenly."""
    return model.num_layers // pipeline + (stage < model.num_layers % pipeline)


def stage_parameters(model: ModelConfig, layout: Layout, stage: int) -> int:
    """On one rank of a stage: its layers, the embedding on the first, the head on the last (there, too, if tied)."""
    matrix = embedding_tensor(model).local_numel(layout.tensor)
    count = stage_layers(model, layout.pipeline, stage) * layer_parameters(model, layout.tensor)
    last = layout.pipeline - 1
    count += matrix * (stage == 0) + final_norm_tensor(model).numel * (stage == last)
    return count + matrix * (stage == last and not (model.tie_embeddings and stage == 0))


def state_bytes(parameters: int, layout: Layout, precision: Precision) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state, by the table at the head of this file.

    Raises:
        ValueError: bf16 without ZeRO, whose masters DeepSpeed would step on zero gradients.
    """
    if precision == "bf16" and layout.zero == 0:
        raise ValueError("bf16 needs ZeRO 1 or more")
    share = 1 / layout.data
    weights = number_bytes(precision) * parameters * (share if layout.zero >= 3 else 1)
    gradients = FP32_BYTES * parameters * (share if layout.zero >= 2 else 1)
    if precision == "bf16" and layout.zero == 1:
        gradients += number_bytes(precision) * parameters
    optimizer = 2 * FP32_BYTES * parameters if layout.zero == 0 else 3 * FP32_BYTES * parameters * share
    return weights, gradients, optimizer


def layers_activation_bytes(
    model: ModelConfig, layout: Layout, stage: int, tokens: int, precision: Precision
) -> float:
    """Bytes that the layers of a stage keep of a micro-batch of so many tokens.

    Late sub-blocks may read the same stream as their predecessors, which is then kept once.
    """
    layers = stage_layers(model, layout.pipeline, stage)
    sub_blocks = layers * len(model.wiring.sub_blocks)
    size = number_bytes(precision)
    stream = tokens * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    first = sum(stage_layers(model, layout.pipeline, earlier) for earlier in range(stage))
    inputs = _streams_read(model, first, first + layers) * stream * size
    if layout.recompute:
        return inputs
    if precision == "bf16" and not layout.fused_norms:
        # A norm of several operators keeps its own fp32 copy, so nothing is shared.
        inputs = sub_blocks * stream * size
    norms = sub_blocks * stream * (size + _unfused_bytes(layout, precision))
    return inputs + norms + layers * inner_activations(model, layout.tensor, tokens) * size


@lru_cache(maxsize=256)
def _streams_read(model: ModelConfig, start: int, stop: int) -> int:
    """Return how many different streams the sub-blocks of a range of layers read."""
    added = outputs_added([one.wired.staleness for layer in layer_tensors(model) for one in layer])
    width = len(model.wiring.sub_blocks)
    return len(set(added[width * start : width * stop]))


def _unfused_bytes(layout: Layout, precision: Precision) -> int:
    """For each number of its input, what a norm of several operators keeps beside: the normalised one before the
    weight, and in bf16 the input once more in fp32."""
    if layout.fused_norms:
        return 0
    return FP32_BYTES if precision == "fp32" else FP32_BYTES + number_bytes(precision)


def inner_activations(model: ModelConfig, tensor: int, tokens: int) -> float:
    """Return the numbers that one layer keeps inside its sub-blocks, all of them cut over the tensor-parallel ranks."""
    return tokens * sum(sub_block.activations(tensor) for sub_block in layer_tensors(model)[0])


def head_activation_bytes(model: ModelConfig, layout: Layout, tokens: int, precision: Precision) -> float:
    """Bytes that final norm, output head and loss keep. The head's input is whole on every rank."""
    size, cut = number_bytes(precision), layout.tensor if layout.sequence_parallel else 1
    stream = tokens * model.hidden_size * (size + (size + _unfused_bytes(layout, precision)) / cut)
    rows = padded_vocab_size(model.vocab_size, layout.tensor) // layout.tensor
    return stream + FP32_BYTES * tokens * min(model.vocab_size, rows)


def stage_memory(
    model: ModelConfig, layout: Layout, stage: int, sequence: int, micro_batches: int, precision: Precision = "bf16"
) -> Memory:
    """Of one GPU of a pipeline's stage.

    Args:
        sequence: tokens of a sample.
        micro_batches: of one step on one data-parallel rank.
    """
    size, tokens = number_bytes(precision), sequence * layout.micro_batch
    weights, gradients, optimizer = state_bytes(stage_parameters(model, layout, stage), layout, precision)
    held = min(layout.pipeline - stage, micro_batches)
    activations = held * layers_activation_bytes(model, layout, stage, tokens, precision)
    if layout.recompute:
        activations += inner_activations(model, layout.tensor, tokens) * size
    if stage == layout.pipeline - 1:
        # Backward makes a gradient of the logits, in fp32 and once more in the model's precision.
        logits = tokens * padded_vocab_size(model.vocab_size, layout.tensor) // layout.tensor
        activations += head_activation_bytes(model, layout, tokens, precision) + (FP32_BYTES + size) * logits
    if layout.zero >= 3:
        weights += 2 * size * layer_parameters(model, layout.tensor)
    return Memory(weights, gradients, optimizer, activations)


def worst_memory(
    model: ModelConfig, layout: Layout, sequence: int, micro_batches: int, precision: Precision = "bf16"
) -> Memory:
    """Of the GPU that needs most: on the first stage of a pipeline, which holds most micro-batches, or the last."""
    stages = {0, layout.pipeline - 1}
    found = [stage_memory(model, layout, stage, sequence, micro_batches, precision) for stage in stages]
    return max(found, key=lambda memory: memory.total)
