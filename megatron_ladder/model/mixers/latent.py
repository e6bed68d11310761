"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Layouts: see `attention.py`; latents [s, b, width].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.model.mixers.attention import AttentionHeads, AttentionInputs
from megatron_ladder.model.mixers.columns import PromptColumns, TokenColumns
from megatron_ladder.model.mixers.mixer import States
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.rotary import RotaryTable, apply_rotary
from megatron_ladder.model.sub_block import SequenceContext
from megatron_ladder.parallel.linear import ColumnParallelLinear

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents in all published models, independent of that of their other norms."""


class LatentHeads(AttentionHeads):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    The inputs are the queries or their latent, and the latent of keys and values with the rotated key, which all heads
    share. Every rank computes whole latents and norms them. It multiplies them with its rows of the matrices that make
    queries, keys and values of its heads, and so has partial sums of their gradients.
    """

    def __init__(self, build: BuildContext, number: int, branch: Branch) -> None:
        super().__init__(build, number, branch)
        config = build.config
        self.rotate_latent = build.operations.of_heads(_rotate_latent, 2)
        self.expand_latent = build.operations.of_heads(_expand_latent, 2)
        self.nope, self.value_dim = config.qk_nope_head_dim, self.mixer.value_dim
        self.latent_widths = (config.kv_lora_rank, config.qk_rope_head_dim)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build, branch.inner[name], own_input=True, epsilon=_LATENT_EPSILON)

        def expansion(name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear([branch.expansions[name]], build, sum_input_gradient=False)

        self.q_a_norm = norm("q_a") if config.q_lora_rank else None
        self.q_b_proj = expansion("q_b") if config.q_lora_rank else None
        self.kv_a_norm = norm("kv_a")
        self.kv_b_proj = expansion("kv_b")
        self.unpacked = (self.kv_b_proj,)

    def _columns(self, states: States, context: SequenceContext) -> PromptColumns | TokenColumns:
        if states.lengths is not None:
            return PromptColumns.of(states, len(context.positions), 0, 0)
        # Latents are usually wider than the heads of kernels that count columns.
        return TokenColumns.of(states, self.number, "latent", context.positions, 0, counts_filled=False)

    def attend(self, projected: Tensor, context: SequenceContext, inputs: AttentionInputs) -> Tensor:
        """See `AttentionHeads.attend`."""
        queries, latent_and_key = projected.split(self.widths, dim=-1)
        if self.q_a_norm is not None and self.q_b_proj is not None:
            queries = self.q_b_proj(self.q_a_norm(queries))
        latent, key = latent_and_key.split(self.latent_widths, dim=-1)
        latent = self.kv_a_norm(latent)
        q, key = self.rotate_latent(queries, key, self.nope, inputs.rotary)
        if inputs.columns is not None:
            assert context.states is not None
            new = torch.cat((latent.unsqueeze(2).permute(1, 2, 0, 3), key), dim=-1)
            (latents,) = inputs.columns.update((context.states.tensors[self.number]["latent"],), (new,))
            if context.states.lengths is None:
                return self._attend_to_latents(q, latents, inputs.columns.mask)
            if context.states.before:
                kept, key = latents.split(self.latent_widths, dim=-1)
                latent = kept.squeeze(1).transpose(0, 1).to(latent.dtype)
        k, v = self.expand_latent(self.kv_b_proj(latent), key, q.shape[1], self.nope)
        return self.attend_to(q, k, v, context, inputs)[..., : self.value_dim]

    def _attend_to_latents(self, q: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with few queries: q [b, heads/t, s, d], latents and rotated keys [b, 1, positions, c] ->
        [b, heads/t, s, width of a value].

        A head's rows of `kv_b_proj` multiply its query instead of every latent, which gives the same scores, and then
        the weighted sum of the latents. All heads share the latents, so both products are matrix products. The kernels
        of `Operations.attend` would process a sample on one multiprocessor, or support only smaller widths.
        """
        rank, rotated = self.latent_widths
        weight = self.kv_b_proj.weight.unflatten(0, (q.shape[1], -1))
        to_key, to_value = weight.split((self.nope, self.value_dim), dim=1)
        heads, queries = q.shape[1:3]
        q_nope, q_rotated = q.split((self.nope, rotated), dim=-1)
        absorbed = _of_each_head(q_nope.to(weight.dtype), to_key)
        columns = latents.squeeze(1)
        rows = torch.cat((absorbed, q_rotated), dim=-1).flatten(1, 2)
        scores = (_scores(rows, columns) * self.scale).unflatten(1, (heads, queries))
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        probabilities = scores.softmax(dim=-1).to(columns.dtype).flatten(1, 2)
        attended = torch.bmm(probabilities, columns[..., :rank]).unflatten(1, (heads, queries))
        return _of_each_head(attended.to(weight.dtype), to_value.mT)


def _of_each_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each head of x [b, heads, s, c] by its matrix, [heads, c, d] -> [b, heads, s, d]."""
    by_heads = torch.bmm(x.transpose(0, 1).flatten(1, 2), matrices)
    return by_heads.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


def _scores(rows: Tensor, columns: Tensor) -> Tensor:
    """[b, heads, c] x [b, positions, c] -> [b, heads, positions], in fp32 or a wider type."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(rows, columns.mT, out_dtype=torch.float32)
    return torch.bmm(rows, columns.mT)


def _rotate_latent(queries: Tensor, key: Tensor, nope: int, table: RotaryTable) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of elements 2j and 2j + 1 in the rotary parts of the queries and the key of latent attention.

    Queries [s, b, heads/t * (nope + rope)] -> [b, heads/t, s, nope + rope], of which the first `nope` elements of each
    head are not rotated; the key that all heads share, [s, b, rope] -> [b, 1, s, rope]. The first elements of all pairs
    then precede the second ones, in queries and key alike.
    """

    def rotate(x: Tensor) -> Tensor:
        return apply_rotary(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), table)

    heads = queries.unflatten(-1, (-1, nope + key.shape[-1]))
    q = torch.cat((heads[..., :nope], rotate(heads[..., nope:])), dim=-1)
    return q.permute(1, 2, 0, 3), rotate(key.unsqueeze(2)).permute(1, 2, 0, 3)


def _expand_latent(expanded: Tensor, key: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Return keys [b, heads/t, s, nope + rope] and values [b, heads/t, s, width of a value] of latent attention.

    `expanded` [s, b, heads/t * (nope + value)] is computed from the latents, `key` [b, 1, s, rope] is the shared
    rotated part. Values narrower than keys are padded with zeros: torch's fastest kernels need equal widths.
    """
    k, v = expanded.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3).tensor_split((nope,), dim=-1)
    k = torch.cat((k, key.expand(-1, heads, -1, -1)), dim=-1)
    missing = k.shape[-1] - v.shape[-1]
    return k, F.pad(v, (0, missing)) if missing > 0 else v
