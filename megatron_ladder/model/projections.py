"""The matrices of a layer, as the tensor-parallel ranks share them: into a sub-block, and out of it.

What a sub-block reads is multiplied with one column-parallel matrix, in which several canonical ones lie side by side;
what it writes to the residual stream comes from a row-parallel one.
"""

import math
from collections.abc import Sequence

import torch

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas, synchronised_after
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.parallel.linear import ColumnParallelLinear, ColumnShare, RowParallelLinear


def query_key_value_shares(config: ModelConfig, layer: int, tensor_parallel: int) -> list[ColumnShare]:
    """Queries, keys and values; heads stay whole."""
    d, replicas = config.head_dim, key_value_replicas(config, tensor_parallel)
    kv_rows = config.num_key_value_heads * d
    name, bias = f"layers.{layer}.attention", config.add_qkv_bias
    return [
        ColumnShare(f"{name}.q_proj", config.num_attention_heads * d, block=d, bias=bias),
        ColumnShare(f"{name}.k_proj", kv_rows, block=d, replicas=replicas, bias=bias),
        ColumnShare(f"{name}.v_proj", kv_rows, block=d, replicas=replicas, bias=bias),
    ]


def gate_up_shares(config: ModelConfig, layer: int) -> list[ColumnShare]:
    """Gate and up of the MLP."""
    return [
        ColumnShare(f"layers.{layer}.mlp.{which}_proj", config.ffn_hidden_size, bias=config.add_mlp_bias)
        for which in ("gate", "up")
    ]


def input_projection(
    config: ModelConfig, shares: Sequence[ColumnShare], mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
) -> ColumnParallelLinear:
    """From the normed stream to everything that `shares` name."""
    return ColumnParallelLinear(
        config.hidden_size,
        shares,
        std=config.init_method_std,
        group=mesh.tensor,
        kv_replica_group=mesh.kv_replica,
        dtype=dtype,
        device=device,
        sum_input_gradient=config.residual_mode != "desync" and mesh.stream.shards == 1,
    )


def attention_output(
    config: ModelConfig, layer: int, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
) -> RowParallelLinear:
    """From all heads back to the residual stream."""
    return RowParallelLinear(
        f"layers.{layer}.attention.o_proj",
        config.num_attention_heads * config.head_dim,
        config.hidden_size,
        bias=config.add_attention_output_bias,
        std=_output_std(config),
        group=mesh.tensor,
        layout=mesh.stream,
        dtype=dtype,
        device=device,
        block=config.head_dim,
        equal_gradients=synchronised_after(config, 2 * layer),
    )


def mlp_output(
    config: ModelConfig, layer: int, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
) -> RowParallelLinear:
    """From the MLP's inner width back to the residual stream."""
    return RowParallelLinear(
        f"layers.{layer}.mlp.down_proj",
        config.ffn_hidden_size,
        config.hidden_size,
        bias=config.add_mlp_bias,
        std=_output_std(config),
        group=mesh.tensor,
        layout=mesh.stream,
        dtype=dtype,
        device=device,
        equal_gradients=synchronised_after(config, 2 * layer + 1),
    )


def _output_std(config: ModelConfig) -> float:
    """Projections that write to the residual stream begin smaller: std / sqrt(2 x layers)."""
    return config.init_method_std / math.sqrt(2 * config.num_layers)
