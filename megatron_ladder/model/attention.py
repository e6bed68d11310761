"""Causal grouped-query attention over this rank's heads.

Layouts: hidden_states [s, b, h]; queries [s, b, heads/t, d]; the attention product itself [b, heads/t, s, d].
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import Branch, SubBlockTensors
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.documents import Documents, document_attention
from megatron_ladder.model.norm import NormFunction, RMSNorm
from megatron_ladder.model.projections import input_projection, output_projection
from megatron_ladder.model.rotary import RotaryTable, apply_rotary
from megatron_ladder.parallel.input_gradient import InputGradient

Midway = Callable[[Tensor], None]
"""Called by a sub-block between its two products, with what lies between them: when collectives that fly under it may
make progress."""


class KeyValueCache(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values [b, kv_heads/t, s, d] of `layer`; returns those of all positions."""


class SequenceContext(NamedTuple):
    """What every layer needs to know about the positions it is given."""

    rotary: RotaryTable
    """Cosines and sines of the positions."""
    cache: KeyValueCache | None = None
    """Earlier positions; None in training."""
    mask: Tensor | None = None
    """Boolean, True where a query may look, broadcastable to [b, heads, s, positions]; None means causal: each query
    sees the positions up to its own, and a single one, being the newest, all of them."""
    documents: Documents | None = None
    """In training: pieces of the rows outside of which a query does not look; None means that it sees its whole row."""


def split_heads(
    projected: Tensor,
    widths: Sequence[int],
    head_dim: int,
    table: RotaryTable,
    norm: NormFunction,
    norm_weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [b, heads/t, s, d] from their projections side by side [s, b, sum of widths].

    Queries and keys are normed, if there are weights for that, and turned by their positions. A function of tensors
    alone, so that it can be compiled.
    """
    q, k, v = (x.view(*x.shape[:-1], -1, head_dim) for x in torch.split(projected, list(widths), dim=-1))
    if norm_weights is not None:
        q, k = norm(q, norm_weights[0], epsilon), norm(k, norm_weights[1], epsilon)
    q, k = apply_rotary(q, table), apply_rotary(k, table)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [b, heads/t, s, d] over keys and values [b, kv_heads/t, positions, d] -> [b, heads/t, s, d]; see
    `SequenceContext.mask`, which for a single query is alike for all heads: [b, 1, 1, positions]."""
    # torch aligns a causal mask at the first key, which would hide the cache from a single query.
    causal = mask is None and q.shape[2] > 1
    if mask is not None and q.shape[2] == 1 and q.shape[1] != k.shape[1]:
        # CUDA's fused kernels take a mask, or fewer heads of keys than of queries, and not both. The one query of
        # each head becomes a row of the head of keys that it shares.
        grouped = q.reshape(*k.shape[:2], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


class AttentionHeads(nn.Module):
    """From projected queries, keys and values to the heads' outputs; owns the norms of queries and keys."""

    def __init__(
        self, config: ModelConfig, layer: int, branch: Branch, norm: NormFunction, group: CommGroup,
        widths: Sequence[int], dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """`widths`: of the queries, the keys and the values in the input product."""
        super().__init__()
        self.widths = tuple(widths)
        self.norm = norm
        self.epsilon = config.norm_epsilon
        self.split_heads = split_heads
        self.attend = attend
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_norm, self.k_norm = None, None
        if branch.head_norms:
            self.q_norm, self.k_norm = (
                RMSNorm(tensor, config.norm_epsilon, norm, group=group, dtype=dtype, device=device, partial_over=group)
                for tensor in branch.head_norms
            )

    def forward(
        self,
        projected: Tensor,
        context: SequenceContext,
        input_gradient: InputGradient | None = None,
    ) -> Tensor:
        """Projections [s, b, sum of widths] -> [s, b, heads/t * d]."""
        norm_weights = None
        if self.q_norm is not None and self.k_norm is not None:
            later = None if input_gradient is None else input_gradient.partial_gradients
            norm_weights = self.q_norm.weight_in_use(later), self.k_norm.weight_in_use(later)
        q, k, v = self.split_heads(
            projected, self.widths, self.head_dim, context.rotary, self.norm, norm_weights, self.epsilon
        )
        if context.documents is not None:
            return document_attention(q, k, v, context.documents).permute(2, 0, 1, 3).flatten(2)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        attended = self.attend(q, k, v, context.mask)
        return attended.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """Fused q, k, v projection -> heads -> output projection in flight."""

    def __init__(
        self, config: ModelConfig, layer: int, tensors: SubBlockTensors, norm: NormFunction, mesh: ProcessMesh,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        (branch,) = tensors.branches
        self.qkv_proj = input_projection(config, tensors, mesh, dtype, device)
        self.heads = AttentionHeads(config, layer, branch, norm, mesh.tensor, self.qkv_proj.widths, dtype, device)
        self.o_proj = output_projection(tensors, branch, mesh, dtype, device)

    def forward(
        self,
        normed: Tensor,
        context: SequenceContext,
        launch: bool = True,
        input_gradient: InputGradient | None = None,
        midway: Midway | None = None,
    ) -> InFlight:
        """[s, b, h] normed -> the attention's output [s, b, h], in flight (unreduced if not `launch`)."""
        attended = self.heads(self.qkv_proj(normed, input_gradient), context, input_gradient)
        if midway is not None:
            midway(attended)
        in_flight: InFlight = self.o_proj(attended, launch=launch)
        return in_flight
