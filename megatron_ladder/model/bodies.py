"""The bodies of sub-blocks: a token mixer, MLP, and both fused. Each is a `Body`.

Layouts: hidden_states [s, b, h]; MLP inner [s, b, ffn/t].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ladder.blueprint.specs import Branch, Matrix
from megatron_ladder.blueprint.tensors import SubBlockTensors
from megatron_ladder.model.mixers.table import new_heads
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.sub_block import Body, BodyOutput, Middle, SequenceContext
from megatron_ladder.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ladder.parallel.products import InputGradient


def _input_projection(build: BuildContext, tensors: SubBlockTensors) -> ColumnParallelLinear:
    return _column(build, [matrix for branch in tensors.branches for matrix in branch.inputs.values()])


def _column(build: BuildContext, matrices: Sequence[Matrix]) -> ColumnParallelLinear:
    is_shared = build.config.wiring.stream == "shared"
    return ColumnParallelLinear(matrices, build, sum_input_gradient=is_shared and build.mesh.stream.shards == 1)


def _output_gate(build: BuildContext, branch: Branch) -> ColumnParallelLinear | None:
    """Return the gate of a shared expert: one number for each token, which every rank computes.

    A rank multiplies its part of the output by it, so its gradient of the gate's weight is a partial sum.
    """
    return _column(build, [Matrix(branch.inner["gate"], None)]) if "gate" in branch.inner else None


def _gated(
    partial: Tensor, gate: ColumnParallelLinear | None, normed: Tensor, input_gradient: InputGradient | None
) -> Tensor:
    return partial if gate is None else partial * torch.sigmoid(gate(normed, input_gradient))


def _output_projection(build: BuildContext, tensors: SubBlockTensors, branch: Branch) -> RowParallelLinear:
    return RowParallelLinear(branch.output, build, tensors.wired.leaves_shared)


class _HalvedBody(Body):
    middle: Middle

    def __init__(self) -> None:
        super().__init__()
        self.middle = Middle()


class MixerBody(_HalvedBody):
    """A token mixer over this rank's heads: one product of all inputs, heads, output projection."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        (branch,) = tensors.branches
        self.in_proj = _input_projection(build, tensors)
        self.heads = new_heads(build, number, branch)
        self.o_proj = _output_projection(build, tensors, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        mixed = self.heads(self.in_proj(normed, input_gradient), context)
        return BodyOutput(self.o_proj(self.middle.cross(mixed)))


class MLP(_HalvedBody):
    """SwiGLU, `down(silu(gate(x)) * up(x))`: fused gate and up projection, SwiGLU, down projection."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        self.operations = build.operations
        (branch,) = tensors.branches
        self.gate_up_proj = _input_projection(build, tensors)
        self.down_proj = _output_projection(build, tensors, branch)
        self.output_gate = _output_gate(build, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        inner = self.operations.swiglu(self.gate_up_proj(normed, input_gradient))
        partial = self.down_proj(self.middle.cross(inner))
        return BodyOutput(_gated(partial, self.output_gate, normed, input_gradient))


class MixerMLP(_HalvedBody):
    """Token mixer and MLP, or shared expert, of one norm in parallel (PaLM): one input projection, and one sum."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        self.operations = build.operations
        mixer, mlp = tensors.branches
        self.in_proj = _input_projection(build, tensors)
        self.heads = new_heads(build, number, mixer)
        self.mixer_width = sum(self.in_proj.widths[: len(mixer.inputs)])
        self.o_proj = _output_projection(build, tensors, mixer)
        self.down_proj = _output_projection(build, tensors, mlp)
        self.output_gate = _output_gate(build, mlp)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        projected = self.in_proj(normed, input_gradient)
        heads, gate_up = projected.tensor_split((self.mixer_width,), dim=-1)
        mixer_partial = self.o_proj(self.middle.cross(self.heads(heads, context)))
        mlp_partial = self.down_proj(self.operations.swiglu(gate_up))
        return BodyOutput(mixer_partial + _gated(mlp_partial, self.output_gate, normed, input_gradient))
