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

Ranges. Reads and outputs that a range leaves to the next one belong to the same list. The outputs that leave a range
unreduced are q slots of its state, and with h_n, h_n+1 .. the sub-blocks of the next range the gradient of the last
slot is that of the stream when all reads that include it are in g. Reads that come before are missing from it, and
cross as forward's outputs do: unreduced, to be reduced by the range before under its own first sub-blocks. So the
gradient of a state [1 + q, s, b, h] is, from the last slot to the first:

    slot q                the gradient of the last output, whole
    slots q-1 .. 1        this rank's part of what the reads that include output k and not k+1 add to it
    slot 0                the same of reads that include none of the q outputs

With q = 0 the one slot is the whole gradient of the stream. What crosses has gone back through its norm, since the
norm is linear in the gradient; the weight of such a norm meets an unreduced gradient, and its own is summed over the
ranks in `CrossingNorms`.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.group import CommGroup
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


class CrossingNorms:
    """Gradients of norms (and of other small replicated parameters) whose sub-block's input gradient crosses unreduced.

    Their sum over the ranks is all that cannot hide behind a range's border. It is put off to the last of the backward
    passes that make up an optimizer step, and reaches the parameters inside of that pass, whole, as all gradients do.
    """

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self._passes_left = 1
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        """By the parameter's identity: the parameter, and this rank's sum so far in fp32 at least."""

    def expect(self, passes: int) -> None:
        """Puts the sum off to the last of so many backward passes; afterwards each pass sums again."""
        self._passes_left = passes

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Takes this rank's part of a gradient."""
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        earlier = self._sums.get(id(parameter))
        self._sums[id(parameter)] = parameter, wide.clone() if earlier is None else earlier[1] + wide

    def end_pass(self) -> None:
        """Called at the end of each backward pass; after the last, every parameter has its gradient."""
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        self._passes_left = 1
        if not self._sums:
            return
        parameters, sums = zip(*self._sums.values(), strict=True)
        self._sums.clear()
        whole = self.group.all_reduce(torch.cat([part.flatten() for part in sums]))
        parts = whole.split([part.numel() for part in sums])
        with torch.enable_grad():
            edges = [get_gradient_edge(parameter.view_as(parameter)) for parameter in parameters]
        torch.autograd.backward(
            edges, [part.view_as(p).to(p.dtype) for part, p in zip(parts, parameters, strict=True)]
        )


class _Pass:
    """One forward pass over a range of sub-blocks, and what its backward needs."""

    def __init__(
        self, steps: Sequence[SubBlock], context: SequenceContext, pending: tuple[int, int], norms: CrossingNorms
    ) -> None:
        """
        Args:
            pending: how many outputs are missing from the stream that enters, and from the one that leaves.
        """
        self.steps = steps
        self.context = context
        self.norms = norms
        self.pending_in, self.pending_out = pending
        count, outputs = len(steps), self.pending_in + len(steps)
        self.reduced_here = outputs - self.pending_out
        """Outputs whose reduce this range starts; the others leave it unreduced."""
        reads = first_reads([step.staleness for step in steps], self.pending_in)
        self.known_at = [
            read if output < self.reduced_here else count + 1 + output - self.reduced_here
            for output, read in enumerate(reads)
        ]
        """Of each output, the first read that its gradient needs; `count + k` are those that begin with slot k of what
        leaves."""
        self.first_whole = self.known_at[self.pending_in - 1] if self.pending_in else 0
        """Gradients of reads before this one cross to the range before, unreduced."""
        self._kept: list[_Graph | Tensor] = []
        """Of each sub-block, its graphs; or only the stream that it read, if it is computed again."""

    def apply(self, step: SubBlock, stream: Tensor) -> InFlight:
        """Runs one sub-block, keeps what backward needs, and starts the reduce of its output.

        The last `pending_out` outputs leave the range unreduced.
        """
        leaf = stream.detach().requires_grad_()
        if step.recompute:
            partial = step.unreduced(stream, self.context)
            self._kept.append(leaf)
        else:
            graph, partial = self._build(len(self._kept), leaf)
            self._kept.append(graph)
        reduced = self.pending_in + len(self._kept) <= self.reduced_here
        return InFlight(partial, step.group.start_all_reduce(partial) if reduced else None)

    def last_graph(self) -> _Graph:
        """The graphs of the last sub-block that has not gone backward, which the pass then forgets."""
        kept = self._kept.pop()
        return kept if isinstance(kept, _Graph) else self._build(len(self._kept), kept)[0]

    def _build(self, index: int, leaf: Tensor) -> tuple[_Graph, Tensor]:
        """The graphs keep an edge to the partial sum and not the tensor, whose storage the reduce overwrites."""
        step, crosses = self.steps[index], index < self.first_whole
        input_gradient = InputGradient(step.group, reduce=not crosses)
        with torch.enable_grad():
            normed = step.norm(leaf, input_gradient.defer(step.norm.weight) if crosses else None)
            partial = step.body(normed.detach().requires_grad_(), self.context, False, input_gradient).partial
        graph = _Graph(leaf, get_gradient_edge(normed), get_gradient_edge(partial), input_gradient)
        return graph, partial.detach()


class _OverlappedRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, a_pass: _Pass) -> Tensor:
        ctx.a_pass = a_pass
        stream, *missing = state.unbind(0)
        pending: deque[InFlight] = deque()
        for place, partial in enumerate(missing):
            entered = partial.clone()
            reduced = place < a_pass.reduced_here
            pending.append(InFlight(entered, a_pass.steps[0].group.start_all_reduce(entered) if reduced else None))
        stream = drain(walk(stream, pending, a_pass.steps, a_pass.apply), pending, a_pass.pending_out)
        return torch.stack([stream, *(in_flight.partial for in_flight in pending)])

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor) -> tuple[Tensor, None]:
        a_pass: _Pass = ctx.a_pass
        count, pending_in, first_whole = len(a_pass.steps), a_pass.pending_in, a_pass.first_whole
        *of_later_reads, gradient = state_gradient.unbind(0)
        in_flight: deque[tuple[int, _Graph | InFlight]] = deque()
        crossing: dict[int, Tensor] = {}

        def absorb(gradient: Tensor, first: int) -> Tensor:
            """Adds the gradients of reads from number `first` on."""
            while in_flight and in_flight[0][0] >= first:
                gradient = gradient + _wait(in_flight.popleft()[1])
            return gradient

        for index in reversed(range(count, count + len(of_later_reads))):
            part = of_later_reads[index - count]
            if index < first_whole:
                crossing[index] = part
            else:
                entered = part.clone()
                in_flight.append((index, InFlight(entered, a_pass.steps[0].group.start_all_reduce(entered))))
        for index in reversed(range(count)):
            graph = a_pass.last_graph()
            gradient = absorb(gradient, a_pass.known_at[pending_in + index])
            torch.autograd.backward([graph.partial], [gradient])
            if index < first_whole:
                crossing[index] = _unreduced(graph, a_pass.norms)
            else:
                in_flight.append((index, graph))
        gradient = absorb(gradient, first_whole)
        slots = []
        for low, high in pairwise([0, *a_pass.known_at[:pending_in]]):
            parts = [crossing[index] for index in range(low, high)]
            slots.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(gradient))
        a_pass.norms.end_pass()
        return torch.stack([*slots, gradient]), None


def _wait(in_flight: _Graph | InFlight) -> Tensor:
    """What a read adds to the gradient of the stream."""
    if isinstance(in_flight, InFlight):
        return in_flight.wait()
    torch.autograd.backward([in_flight.normed], [in_flight.input_gradient.wait()])
    assert in_flight.stream.grad is not None
    return in_flight.stream.grad


def _unreduced(graph: _Graph, norms: CrossingNorms) -> Tensor:
    """This rank's part of what a read adds to the gradient of the stream."""
    torch.autograd.backward([graph.normed], [graph.input_gradient.unreduced()])
    for parameter, part in graph.input_gradient.unreduced_parameters():
        norms.add(parameter, part)
    assert graph.stream.grad is not None
    return graph.stream.grad


def run_overlapped(
    state: Tensor, steps: Sequence[SubBlock], context: SequenceContext, pending_out: int, norms: CrossingNorms
) -> Tensor:
    """The range's forward pass, [1 + pending_in, s, b, h] -> [1 + pending_out, s, b, h].

    Its backward keeps reduces in flight as the head of this file says. Parameters get their gradients from inside
    it, as under reentrant checkpointing.
    """
    pending = state.shape[0] - 1, pending_out
    result: Tensor = _OverlappedRange.apply(state, _Pass(steps, context, pending, norms))
    return result
