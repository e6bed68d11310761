"""The rule of `stack.py`, mirrored: backward with the reduces of input gradients in flight.

With y_j the output of sub-block j, a forward pass is a list of two kinds of events: sub-block i reads the stream, and
y_j is added to it. Backward meets them in reverse, carrying g, the gradient of the stream:

    y_j was added     the gradient of y_j is g
    h_i read          g = g + all_reduce(d_i), with d_i this rank's gradient at the input of h_i

So the body of sub-block i can go backward once every read that came after the adding of y_i is in g; let `known_at[i]`
be the first of them (`first_reads`). Earlier reads may still be in flight:

    g = gradient of the output; pending = []
    for i in n-1 .. 0:
        while pending and pending.first >= known_at[i]:  g = g + norm_backward(pending.pop_first().wait())
        pending.append(start_all_reduce(body_backward(h_i, g)))
    while pending:                                       g = g + norm_backward(pending.pop_first().wait())

For ladder, known_at[i] = i + 2: the reduce of h_{i+1} flies under the backward of h_i. For standard it is i + 1, and
the reduce flies under the gradient of its own column-parallel weight alone. Norms go backward after the wait, so the
gradients of their weights are whole.

Autograd would run these steps in an order of its own (newest node first: launch, wait, launch, wait), hence one
Function for the whole range, which keeps a local graph for each sub-block and walks them itself.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.model.attention import SequenceContext
from megatron_ladder.model.sub_block import SubBlock, drain, walk
from megatron_ladder.parallel.input_gradient import InputGradient


class _Graph(NamedTuple):
    """The two local graphs of one sub-block: from the stream through the norm, and from there to the partial sum."""

    stream: Tensor
    """What it read; a leaf that collects its gradient."""
    normed: GradientEdge
    partial: GradientEdge
    input_gradient: InputGradient


def first_reads(stalenesses: Sequence[int], pending_in: int) -> list[int]:
    """For each output that is added to the stream, in order, the first sub-block whose read includes it.

    The outputs are the `pending_in` ones that entered the range and then those of its sub-blocks; one that no read of
    the range includes gets the number of sub-blocks.
    """
    count = len(stalenesses)
    added_before, added = [], 0
    for index, staleness in enumerate(stalenesses):
        added = max(added, pending_in + index - staleness)
        added_before.append(added)
    return [
        next((index for index, added in enumerate(added_before) if added > output), count)
        for output in range(pending_in + count)
    ]


class _Pass:
    """One forward pass over a range of sub-blocks, and what its backward needs."""

    def __init__(self, steps: Sequence[SubBlock], context: SequenceContext, pending_out: int) -> None:
        self.steps = steps
        self.context = context
        self.pending_out = pending_out
        self._kept: list[_Graph | Tensor] = []
        """Of each sub-block, its graphs; or only the stream that it read, if it is computed again."""

    def apply(self, step: SubBlock, stream: Tensor, missing: Tensor | None) -> tuple[Tensor, InFlight]:
        """Runs one sub-block, keeps what backward needs, and starts the reduce of its output.

        The last `pending_out` outputs leave the range unreduced.
        """
        stream = stream if missing is None else stream + missing
        leaf = stream.detach().requires_grad_()
        if step.recompute:
            partial = step.unreduced(stream, self.context)
            self._kept.append(leaf)
        else:
            graph, partial = self._build(step, leaf)
            self._kept.append(graph)
        leaves_unreduced = len(self._kept) > len(self.steps) - self.pending_out
        return stream, InFlight(partial, None if leaves_unreduced else step.group.start_all_reduce(partial))

    def last_graph(self) -> _Graph:
        """The graphs of the last sub-block that has not gone backward, which the pass then forgets."""
        kept = self._kept.pop()
        if isinstance(kept, _Graph):
            return kept
        step = self.steps[len(self._kept)]
        with step.named("recompute"):
            return self._build(step, kept)[0]

    def _build(self, step: SubBlock, leaf: Tensor) -> tuple[_Graph, Tensor]:
        """The graphs keep an edge to the partial sum and not the tensor, whose storage the reduce overwrites."""
        input_gradient = InputGradient(step.group)
        with torch.enable_grad():
            normed = step.norm(leaf)
            partial = step.body(normed.detach().requires_grad_(), self.context, False, input_gradient).partial
        graph = _Graph(leaf, get_gradient_edge(normed), get_gradient_edge(partial), input_gradient)
        return graph, partial.detach()


class _OverlappedRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, a_pass: _Pass) -> Tensor:
        ctx.a_pass = a_pass
        stream, *missing = state.unbind(0)
        ctx.pending_in = len(missing)
        pending: deque[InFlight] = deque()
        for partial in missing:
            entered = partial.clone()
            pending.append(InFlight(entered, a_pass.steps[0].group.start_all_reduce(entered)))
        stream = drain(walk(stream, pending, a_pass.steps, a_pass.apply), pending, a_pass.pending_out)
        return torch.stack([stream, *(in_flight.partial for in_flight in pending)])

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor) -> tuple[Tensor, None]:
        a_pass: _Pass = ctx.a_pass
        count = len(a_pass.steps)
        known_at = first_reads([step.staleness for step in a_pass.steps], ctx.pending_in)
        gradient, *of_unreduced = state_gradient.unbind(0)
        in_flight: deque[tuple[int, _Graph]] = deque()

        def absorb(gradient: Tensor, first: int) -> Tensor:
            """Adds the gradients of reads from sub-block `first` on."""
            while in_flight and in_flight[0][0] >= first:
                index, graph = in_flight.popleft()
                whole = graph.input_gradient.wait()
                with a_pass.steps[index].named("norm backward"):
                    torch.autograd.backward([graph.normed], [whole])
                assert graph.stream.grad is not None
                gradient = gradient + graph.stream.grad
            return gradient

        for index in reversed(range(count)):
            graph = a_pass.last_graph()
            gradient = absorb(gradient, known_at[ctx.pending_in + index])
            left = index - (count - a_pass.pending_out)
            with a_pass.steps[index].named("backward"):
                torch.autograd.backward([graph.partial], [of_unreduced[left] if left >= 0 else gradient])
            in_flight.append((index, graph))
        of_missing = []
        for first in reversed(known_at[: ctx.pending_in]):
            gradient = absorb(gradient, first)
            of_missing.append(gradient)
        return torch.stack([absorb(gradient, 0), *reversed(of_missing)]), None


def run_overlapped(
    state: Tensor, steps: Sequence[SubBlock], context: SequenceContext, pending_out: int
) -> Tensor:
    """The range's forward pass, [1 + pending_in, s, b, h] -> [1 + pending_out, s, b, h].

    Its backward keeps reduces in flight as the head of this file says. Parameters get their gradients from inside
    it, as under reentrant checkpointing.
    """
    result: Tensor = _OverlappedRange.apply(state, _Pass(steps, context, pending_out))
    return result
