"""Which part of each tensor is written by which rank of a layout of T tensor-parallel ranks and P pipeline stages.

A checkpoint knows no layout, so any cut would be right. This is the one that training makes: a rank that reads it in
the same layout opens its own file alone.
"""

from collections.abc import Iterator, Sequence

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.blueprint.partition import uniform_partition
from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.convert.names import layer_of
from megatron_ladder.lab.cost.memory import VOCABULARY_MULTIPLE

VOCABULARY = ("embedding", "lm_head")
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")


def stage_of(name: str, config: ModelConfig, stages: int) -> int:
    """The pipeline stage that holds a canonical tensor, the layers being shared out evenly."""
    layer = layer_of(name)
    if layer is None:
        return 0 if name.startswith("embedding.") else stages - 1
    ranges = uniform_partition(config.num_layers, stages)
    return next(stage for stage, layers in enumerate(ranges) if layer in layers)


def shares(name: str, shape: Sequence[int], config: ModelConfig, tensor_parallel: int) -> Iterator[tuple[int, Box]]:
    """The tensor-parallel ranks that write a part of a canonical tensor, and which; in the order of their rows.

    What several ranks hold is written by the first of them.
    """
    module, kind = name.split(".")[-2:]
    t = tensor_parallel
    if module in VOCABULARY:
        rows = -(-shape[0] // (VOCABULARY_MULTIPLE * t)) * VOCABULARY_MULTIPLE
        cuts = [(rank, 0, rank * rows, min(rows, shape[0] - rank * rows)) for rank in range(t)]
    elif module in BY_ROWS:
        replicas = key_value_replicas(config, t) if module in ("k_proj", "v_proj") else 1
        rows = shape[0] * replicas // t
        cuts = [(rank, 0, rank // replicas * rows, rows) for rank in range(0, t, replicas)]
    elif module in BY_COLUMNS and kind == "weight":
        cuts = [(rank, 1, rank * (shape[1] // t), shape[1] // t) for rank in range(t)]
    elif module.endswith("_norm") and len(shape) == 2:
        cuts = [(rank, 0, rank, 1) for rank in range(t)]
    else:
        cuts = [(0, 0, 0, shape[0])]
    for rank, dimension, start, length in cuts:
        if length > 0:
            offset = tuple(start if d == dimension else 0 for d in range(len(shape)))
            extent = tuple(length if d == dimension else size for d, size in enumerate(shape))
            yield rank, Box(offset, extent)
