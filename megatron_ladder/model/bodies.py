"""The bodies of sub-blocks: attention, MLP, and both fused. Each is a `Body`.

Layouts: hidden_states [s, b, h]; queries [s, b, heads/t, d]; MLP inner [s, b, ffn/t]; the attention product itself
[b, heads/t, s, d].
"""

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


def _input_projection(build: BuildContext, tensors: SubBlockTensors) -> ColumnParallelLinear:
    matrices = [matrix for branch in tensors.branches for matrix in branch.inputs]
    is_shared = build.config.wiring.stream == "shared"
    return ColumnParallelLinear(matrices, build, sum_input_gradient=is_shared and build.mesh.stream.shards == 1)


def _output_projection(build: BuildContext, tensors: SubBlockTensors, branch: Branch) -> RowParallelLinear:
    return RowParallelLinear(branch.output, build, tensors.wired.leaves_shared and not build.config.lanes)


class _AttentionHeads(nn.Module):
    """Maps projections [s, b, sum of widths] of queries, keys and values to the heads' outputs [s, b, heads/t * d]."""

    def __init__(self, build: BuildContext, number: int, branch: Branch, widths: Sequence[int]) -> None:
        super().__init__()
        config = build.config
        self.operations = build.operations
        self.widths = tuple(widths)
        self.epsilon = config.norm_epsilon
        self.number = number
        self.head_dim = config.head_dim
        self.q_norm, self.k_norm = None, None
        if branch.head_norms:
            self.q_norm, self.k_norm = (RMSNorm(build, tensor, own_input=True) for tensor in branch.head_norms)

    def forward(
        self, projected: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> Tensor:
        norm_weights = None
        if self.q_norm is not None and self.k_norm is not None:
            deferred = None if input_gradient is None else input_gradient.partial_gradients
            norm_weights = self.q_norm.weight_in_use(deferred), self.k_norm.weight_in_use(deferred)
        q, k, v = self.operations.split_heads(
            projected, self.widths, self.head_dim, context.rotary, norm_weights, self.epsilon
        )
        if context.documents is not None:
            return document_attention(q, k, v, context.documents).permute(2, 0, 1, 3).flatten(2)
        if context.cache is not None:
            k, v = context.cache.update(self.number, k, v)
        attended = (context.attend or self.operations.attend)(q, k, v, context.mask)
        return attended.permute(2, 0, 1, 3).flatten(2)


class Attention(Body):
    """Causal grouped-query attention over this rank's heads: fused q, k, v projection, heads, output projection."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        (branch,) = tensors.branches
        self.qkv_proj = _input_projection(build, tensors)
        self.heads = _AttentionHeads(build, number, branch, self.qkv_proj.widths)
        self.o_proj = _output_projection(build, tensors, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        attended = self.heads(self.qkv_proj(normed, input_gradient), context, input_gradient)
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
        self.heads = _AttentionHeads(build, number, attention, self.in_proj.widths[:3])
        self.o_proj = _output_projection(build, tensors, attention)
        self.down_proj = _output_projection(build, tensors, mlp)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        widths = self.in_proj.widths
        projected = self.in_proj(normed, input_gradient)
        heads, gate_up = torch.split(projected, [sum(widths[:3]), sum(widths[3:])], dim=-1)
        of_attention = self.o_proj(self.heads(heads, context, input_gradient))
        return BodyOutput(of_attention + self.down_proj(self.operations.swiglu(gate_up)))
