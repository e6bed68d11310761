"""The bodies of sub-blocks: attention, MLP, and both fused. Each is a `Body`.

Layouts: hidden_states [s, b, h]; queries [s, b, heads/t, d]; MLP inner [s, b, ffn/t]; the attention product itself
[b, heads/t, s, d].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.tensors import Branch, SubBlockTensors
from megatron_ladder.model.documents import document_attention
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.sub_block import Body, BodyOutput, SequenceContext
from megatron_ladder.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ladder.parallel.products import InputGradient

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents in all published models, independent of that of their other norms."""


def _input_projection(build: BuildContext, tensors: SubBlockTensors) -> ColumnParallelLinear:
    matrices = [matrix for branch in tensors.branches for matrix in branch.inputs.values()]
    is_shared = build.config.wiring.stream == "shared"
    return ColumnParallelLinear(matrices, build, sum_input_gradient=is_shared and build.mesh.stream.shards == 1)


def _output_projection(build: BuildContext, tensors: SubBlockTensors, branch: Branch) -> RowParallelLinear:
    return RowParallelLinear(branch.output, build, tensors.wired.leaves_shared)


class _AttentionHeads(nn.Module):
    """Maps projections [s, b, sum of widths] of a branch's inputs to the heads' outputs [s, b, heads/t * d], gated."""

    def __init__(self, build: BuildContext, number: int, branch: Branch, widths: Sequence[int]) -> None:
        super().__init__()
        config = build.config
        self.operations = build.operations
        named_widths = dict(zip(branch.inputs, widths, strict=True))
        self.gate_width = named_widths.pop("gate", 0)
        self.widths = tuple(named_widths.values())
        self.epsilon = config.norm_epsilon
        self.number = number
        self.head_dim = config.head_dim
        self.scale = config.softmax_scale
        self.q_norm, self.k_norm = None, None
        if "q" in branch.norms:
            self.q_norm, self.k_norm = (RMSNorm(build, branch.norms[name], own_input=True) for name in ("q", "k"))

    def forward(self, projected: Tensor, context: SequenceContext) -> Tensor:
        gate = None
        if self.gate_width:
            projected, gate = projected.split((sum(self.widths), self.gate_width), dim=-1)
        attended = self.attend(projected, context).permute(2, 0, 1, 3).flatten(2)
        return attended if gate is None else self.operations.gate(attended, gate)

    def attend(self, projected: Tensor, context: SequenceContext) -> Tensor:
        """[s, b, sum of widths], without the gate -> [b, heads/t, s, d]."""
        norm_weights = None
        if self.q_norm is not None and self.k_norm is not None:
            norm_weights = self.q_norm.weight, self.k_norm.weight
        q, k, v = self.operations.split_heads(
            projected, self.widths, self.head_dim, context.rotary, norm_weights, self.epsilon
        )
        if context.cache is not None:
            k, v = context.cache.update(self.number, k, v)
        return self.attend_to(q, k, v, context)

    def attend_to(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Attend to the keys that `context` lets each query see."""
        if context.documents is not None:
            return document_attention(q, k, v, context.documents, self.scale)
        return (context.attend or self.operations.attend)(q, k, v, context.mask, self.scale)


class LatentHeads(_AttentionHeads):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    The inputs are the queries or their latent, and the latent of keys and values with the rotated key, which all heads
    share. Every rank computes whole latents and norms them. It multiplies them with its rows of the matrices that make
    queries, keys and values of its heads, and so has partial sums of their gradients.
    """

    def __init__(self, build: BuildContext, number: int, branch: Branch, widths: Sequence[int]) -> None:
        super().__init__(build, number, branch, widths)
        config = build.config
        self.nope, self.value_dim = config.qk_nope_head_dim, config.value_dim
        self.latent_widths = (config.kv_lora_rank, config.qk_rope_head_dim)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build, branch.norms[name], own_input=True, epsilon=_LATENT_EPSILON)

        def expansion(name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear([branch.expansions[name]], build, sum_input_gradient=False)

        self.q_a_norm = norm("q_a") if config.q_lora_rank else None
        self.q_b_proj = expansion("q_b") if config.q_lora_rank else None
        self.kv_a_norm = norm("kv_a")
        self.kv_b_proj = expansion("kv_b")

    def attend(self, projected: Tensor, context: SequenceContext) -> Tensor:
        """See `_AttentionHeads.attend`."""
        queries, latent_and_key = projected.split(self.widths, dim=-1)
        if self.q_a_norm is not None and self.q_b_proj is not None:
            queries = self.q_b_proj(self.q_a_norm(queries))
        latent, key = latent_and_key.split(self.latent_widths, dim=-1)
        latent = self.kv_a_norm(latent)
        q, key = self.operations.rotate_latent(queries, key, self.nope, context.rotary)
        if context.cache is not None:
            new = torch.cat((latent.unsqueeze(2).permute(1, 2, 0, 3), key), dim=-1)
            (latents,) = context.cache.update(self.number, new)
            if q.shape[2] == 1:
                return self._attend_to_latents(q, latents, context.mask)
        # Several queries belong to prompts or training, where the keys are those of the same tokens.
        k, v = self.operations.expand_latent(self.kv_b_proj(latent), key, q.shape[1], self.nope)
        return self.attend_to(q, k, v, context)[..., : self.value_dim]

    def _attend_to_latents(self, q: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with single queries: q [b, heads/t, 1, d], latents and rotated keys [b, 1, positions, c] ->
        [b, heads/t, 1, width of a value].

        A head's rows of `kv_b_proj` multiply its query instead of every latent, which gives the same scores, and then
        the weighted sum of the latents. All heads share the latents, so both products are matrix products. The kernels
        of `Operations.attend` would process a sample on one multiprocessor, or support only smaller widths.
        """
        rank, rotated = self.latent_widths
        weight = self.kv_b_proj.weight.unflatten(0, (q.shape[1], -1))
        to_key, to_value = weight.split((self.nope, self.value_dim), dim=1)
        q_nope, q_rotated = q.squeeze(2).split((self.nope, rotated), dim=-1)
        absorbed = torch.bmm(q_nope.transpose(0, 1).to(weight.dtype), to_key).transpose(0, 1)
        columns = latents.squeeze(1)
        scores = _scores(torch.cat((absorbed, q_rotated), dim=-1), columns) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask.squeeze(1), -math.inf)
        attended = torch.bmm(scores.softmax(dim=-1).to(columns.dtype), columns[..., :rank])
        return torch.bmm(attended.transpose(0, 1).to(weight.dtype), to_value.mT).transpose(0, 1).unsqueeze(2)


def _scores(rows: Tensor, columns: Tensor) -> Tensor:
    """[b, heads, c] x [b, positions, c] -> [b, heads, positions], in fp32 or a wider type."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(rows, columns.mT, out_dtype=torch.float32)
    return torch.bmm(rows, columns.mT)


def _heads(build: BuildContext, number: int, branch: Branch, widths: Sequence[int]) -> _AttentionHeads:
    return (LatentHeads if build.config.is_latent else _AttentionHeads)(build, number, branch, widths)


class Attention(Body):
    """Causal attention over this rank's heads: one product of all inputs, heads, output projection."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        (branch,) = tensors.branches
        self.qkv_proj = _input_projection(build, tensors)
        self.heads = _heads(build, number, branch, self.qkv_proj.widths)
        self.o_proj = _output_projection(build, tensors, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        attended = self.heads(self.qkv_proj(normed, input_gradient), context)
        return BodyOutput(self.o_proj(attended))


class MLP(Body):
    """SwiGLU, `down(silu(gate(x)) * up(x))`: fused gate and up projection, SwiGLU, down projection."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        self.operations = build.operations
        (branch,) = tensors.branches
        self.gate_up_proj = _input_projection(build, tensors)
        self.down_proj = _output_projection(build, tensors, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        inner = self.operations.swiglu(self.gate_up_proj(normed, input_gradient))
        return BodyOutput(self.down_proj(inner))


class AttentionMLP(Body):
    """Attention and MLP of one norm in parallel (PaLM): one input projection, and one sum of both outputs."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        self.operations = build.operations
        attention, mlp = tensors.branches
        self.in_proj = _input_projection(build, tensors)
        inputs = len(attention.inputs)
        self.attention_width = sum(self.in_proj.widths[:inputs])
        self.heads = _heads(build, number, attention, self.in_proj.widths[:inputs])
        self.o_proj = _output_projection(build, tensors, attention)
        self.down_proj = _output_projection(build, tensors, mlp)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        projected = self.in_proj(normed, input_gradient)
        heads, gate_up = projected.tensor_split((self.attention_width,), dim=-1)
        attention_partial = self.o_proj(self.heads(heads, context))
        return BodyOutput(attention_partial + self.down_proj(self.operations.swiglu(gate_up)))
