"""Causal softmax attention over grouped heads.

Layouts: queries [s, b, heads, d]; the attention product itself [b, heads/t, s, d].
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megatron_ladder.blueprint import mixers
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.model.documents import attend_to_blocks, document_attention, visible_blocks
from megatron_ladder.model.mixers import columns
from megatron_ladder.model.mixers.columns import PromptColumns, TokenColumns
from megatron_ladder.model.mixers.mixer import Heads, States
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext, uses_compiled_sinks
from megatron_ladder.model.rotary import RotaryTable, apply_rotary, rotary_table
from megatron_ladder.model.sub_block import SequenceContext
from megatron_ladder.model.windows import attend_with_mask


class AttentionInputs(NamedTuple):
    """What all layers with the same attention share."""

    rotary: RotaryTable
    """Cosines and sines of the positions."""
    columns: PromptColumns | TokenColumns | None = None
    """In generation, where keys and values are kept."""
    blocks: BlockMask | None = None
    """On CUDA with sinks, which blocks of keys the queries of whole sequences see."""


class AttentionHeads(Heads):
    """See `blueprint/mixers/attention.py`."""

    mixer: mixers.attention.Attention
    sinks: nn.Parameter | None
    """[heads/t]."""

    def __init__(self, build: BuildContext, number: int, branch: Branch) -> None:
        super().__init__(build, number, branch)
        config = build.config
        operations = build.operations
        self.attend_once = operations.attend
        self.norm = operations.norm
        self.split_heads = operations.of_heads(_split_heads, 1)
        self.gate = operations.of_heads(_gate, 0)
        self.gate_width = 0
        if "gate" in branch.inputs:
            self.gate_width = self.widths[-1]
            self.widths = self.widths[:-1]
        self.epsilon = config.norm_epsilon
        self.head_dim = config.head_dim
        self.scale = self.mixer.softmax_scale
        self.dtype = build.dtype
        self.q_norm, self.k_norm = None, None
        sinks = [branch.inner["sinks"]] if "sinks" in branch.inner else []
        self.add_parameter("sinks", sinks, build)
        if "q" in branch.inner:
            self.q_norm, self.k_norm = (RMSNorm(build, branch.inner[name], own_input=True) for name in ("q", "k"))

    def prepare(self, context: SequenceContext) -> AttentionInputs:
        """See `Heads.prepare`."""
        table = rotary_table(self.mixer, context.positions, self.dtype)
        states = context.states
        columns = None if states is None else self._columns(states, context)
        blocks = None
        device = context.positions.device
        if uses_compiled_sinks(self.mixer.config, device) and (states is None or states.begins):
            length, documents = len(context.positions), context.documents
            rows = 1 if documents is None else sum(documents.lengths) // length
            blocks = visible_blocks(rows, length, documents, self.mixer.window, device)
        return AttentionInputs(table, columns, blocks)

    def _columns(self, states: States, context: SequenceContext) -> PromptColumns | TokenColumns:
        if states.lengths is not None:
            kept = states.tensors[self.number]["k"].shape[2]
            return PromptColumns.of(states, len(context.positions), self.mixer.window, kept)
        counts_filled = columns.counts_filled_columns(self.dtype, self.head_dim, context.positions.device)
        return TokenColumns.of(states, self.number, "k", context.positions, self.mixer.window, counts_filled)

    def forward(self, projected: Tensor, context: SequenceContext) -> Tensor:
        """See `Heads.forward`."""
        gate = None
        if self.gate_width:
            projected, gate = projected.split((sum(self.widths), self.gate_width), dim=-1)
        inputs: AttentionInputs = context.prepared[self.mixer.name]
        attended = self.attend(projected, context, inputs).permute(2, 0, 1, 3).flatten(2)
        return attended if gate is None else self.gate(attended, gate)

    def attend(self, projected: Tensor, context: SequenceContext, inputs: AttentionInputs) -> Tensor:
        """[s, b, sum of widths], without the gate -> [b, heads/t, s, d]."""
        norm_weights, offset = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norm_weights, offset = (self.q_norm.weight, self.k_norm.weight), self.q_norm.offset
        q, k, v = self.split_heads(
            projected, self.widths, self.head_dim, inputs.rotary, norm_weights, self.epsilon, offset, self.norm
        )
        if inputs.columns is not None:
            assert context.states is not None
            states = context.states.tensors[self.number]
            k, v = inputs.columns.update((states["k"], states["v"]), (k, v))
        return self.attend_to(q, k, v, context, inputs)

    def attend_to(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, inputs: AttentionInputs) -> Tensor:
        """Attend to the keys that each query may see."""
        sinks = self.sinks
        if sinks is not None and inputs.blocks is not None:
            return attend_to_blocks(q, k, v, inputs.blocks, self.scale, sinks)
        if inputs.columns is None or context.states is None or context.states.begins:
            window = self.mixer.window
            if context.documents is None and not window and sinks is None:
                return self.attend_once(q, k, v, None, self.scale)
            return document_attention(q, k, v, context.documents, self.scale, window, sinks)
        if inputs.columns.filled is not None:
            return inputs.columns.filled.attend(q, k, v, self.scale, sinks)
        if sinks is None:
            return self.attend_once(q, k, v, inputs.columns.mask, self.scale)
        mask = q.new_ones(1, 1, dtype=torch.bool) if inputs.columns.mask is None else inputs.columns.mask
        return attend_with_mask(q, k, v, mask, self.scale, sinks)


def _split_heads(
    projected: Tensor,
    widths: Sequence[int],
    head_dim: int,
    table: RotaryTable,
    norm_weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
    offset: float,
    norm: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused projections [s, b, sum of widths] into queries, keys and values [b, heads/t, s, d].

    Queries and keys are normed in their type if `norm_weights` are given, and rotated by their positions.
    """
    heads = [width // head_dim for width in widths]
    turned, v = projected.view(*projected.shape[:-1], -1, head_dim).split((heads[0] + heads[1], heads[2]), dim=2)
    if norm_weights is None:
        q, k = apply_rotary(turned, table).split(heads[:2], dim=2)
    else:
        q, k = turned.split(heads[:2], dim=2)
        q = apply_rotary(norm(q, norm_weights[0].to(q.dtype), epsilon, offset), table)
        k = apply_rotary(norm(k, norm_weights[1].to(k.dtype), epsilon, offset), table)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def _gate(attended: Tensor, gate: Tensor) -> Tensor:
    return attended * torch.sigmoid(gate)
