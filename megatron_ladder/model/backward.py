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

With sequence parallelism, the gradient of an output is gathered before the body goes backward, as the normed stream
was before it went forward, and so is once more the input of its column-parallel product, which is not kept. The read of
a gradient (wait, norm, add, gather) then takes place while the body after it is halfway through its own backward, and
flies under it like the reduce itself. The norms met this rank's positions alone: their gradients are partial.

Autograd would run these steps in an order of its own (newest node first: launch, wait, launch, wait), hence one
Function for the whole range, which keeps a local graph for each sub-block and walks them itself.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.model.attention import Midway, SequenceContext
from megatron_ladder.model.sub_block import SubBlock, drain, join_state, split_state, walk
from megatron_ladder.parallel.input_gradient import InputGradient
from megatron_ladder.parallel.partial_gradients import PartialGradients


class _Reading(NamedTuple):
    """The first local graph of a sub-block, from the stream through the norm, and what it gives."""

    stream: Tensor
    """What it read; a leaf that collects its gradient."""
    normed_edge: GradientEdge | None
    """None if nothing but the stream is kept for backward."""
    normed: Tensor
    """This rank's positions; outside of the graph."""
    whole: InFlight
    """All positions."""


class _Graph(NamedTuple):
    """The two local graphs of one sub-block: from the stream through the norm, and from there to the partial sum."""

    stream: Tensor
    normed_edge: GradientEdge
    normed: Tensor
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
        self.layout = steps[0].layout
        self.sharded = self.layout.shards > 1
        self.partial_gradients = PartialGradients(steps[0].group)
        self.halfway_back: Callable[[], None] = lambda: None
        """Called when a body is halfway through its backward."""
        self._kept: list[_Graph | _Reading | Tensor] = []
        """Of each sub-block, its graphs; or only the stream that it read, if it is computed again."""

    def read(self, step: SubBlock, stream: Tensor) -> _Reading:
        """Norms the stream and starts to make it whole."""
        return self._read(step, stream.detach().requires_grad_(), with_graph=not step.recompute)

    def apply(self, step: SubBlock, reading: _Reading, midway: Midway | None) -> InFlight:
        """Runs one sub-block, keeps what backward needs, and starts the reduce of its output.

        The last `pending_out` outputs leave the range unreduced.
        """
        if step.recompute:
            output = step.body(reading.whole.wait(), self.context, False, midway=midway).partial
            self._kept.append(reading.stream)
        else:
            graph, output = self._build(step, reading, midway, keeps_input=not self.sharded)
            self._kept.append(graph)
        leaves_unreduced = len(self._kept) > len(self.steps) - self.pending_out
        return InFlight(output, None) if leaves_unreduced else self.layout.start_write(output)

    def gather_again(self, index: int) -> None:
        """Starts to gather what the backward of a sub-block needs whole and forward did not keep."""
        kept = self._kept[index]
        if isinstance(kept, _Graph):
            kept.input_gradient.input_again = self.layout.start_read(kept.normed)
        elif isinstance(kept, Tensor):
            self._kept[index] = self._read(self.steps[index], kept, with_graph=True)

    def last_graph(self) -> _Graph:
        """The graphs of the last sub-block that has not gone backward, which the pass then forgets."""
        kept = self._kept.pop()
        step = self.steps[len(self._kept)]
        if isinstance(kept, Tensor):
            kept = self._read(step, kept, with_graph=True)
        return self._build(step, kept, None, keeps_input=True)[0] if isinstance(kept, _Reading) else kept

    def _read(self, step: SubBlock, leaf: Tensor, with_graph: bool) -> _Reading:
        with torch.set_grad_enabled(with_graph):
            normed = step.norm(leaf, partial_gradients=self.partial_gradients)
        outside = normed.detach()
        edge = get_gradient_edge(normed) if with_graph else None
        return _Reading(leaf, edge, outside, self.layout.start_read(outside))

    def _build(
        self, step: SubBlock, reading: _Reading, midway: Midway | None, keeps_input: bool
    ) -> tuple[_Graph, Tensor]:
        """The graphs keep an edge to the partial sum and not the tensor, whose storage the reduce overwrites."""

        def halfway(inner: Tensor) -> None:
            inner.register_hook(lambda _: self.halfway_back())
            if midway is not None:
                midway(inner)

        input_gradient = InputGradient(self.layout, self.partial_gradients, keeps_input)
        with torch.enable_grad():
            output = step.body(
                reading.whole.wait(), self.context, False, input_gradient, halfway if self.sharded else None
            ).partial
        assert reading.normed_edge is not None
        graph = _Graph(reading.stream, reading.normed_edge, reading.normed, get_gradient_edge(output), input_gradient)
        return graph, output.detach()


class _BackwardWalk:
    """The mirrored rule over one pass."""

    def __init__(self, a_pass: _Pass, pending_in: int, state_gradient: Tensor) -> None:
        self._pass = a_pass
        self._pending_in = pending_in
        self._known_at = first_reads([step.staleness for step in a_pass.steps], pending_in)
        self._gradient, self._of_unreduced = split_state(state_gradient, a_pass.layout)
        self._in_flight: deque[tuple[int, _Graph]] = deque()
        self._ahead: InFlight | None = None

    def run(self) -> Tensor:
        """The gradient of the state that entered."""
        a_pass, count = self._pass, len(self._pass.steps)
        if a_pass.sharded:
            a_pass.gather_again(count - 1)
        for index in reversed(range(count)):
            graph = a_pass.last_graph()
            ahead, self._ahead = self._ahead, None
            output_gradient = (ahead or self._of_output(index)).wait()
            if a_pass.sharded and index > 0:
                a_pass.gather_again(index - 1)
                a_pass.halfway_back = partial(self._read_ahead, index - 1)
            torch.autograd.backward([graph.partial], [output_gradient])
            a_pass.halfway_back = lambda: None
            self._in_flight.append((index, graph))
        of_missing = []
        for first in reversed(self._known_at[: self._pending_in]):
            self._absorb(first)
            of_missing.append(a_pass.layout.start_read(self._gradient).wait())
        self._absorb(0)
        a_pass.partial_gradients.flush()
        return join_state(self._gradient, reversed(of_missing))

    def _of_output(self, index: int) -> InFlight:
        """The gradient of a sub-block's output, [s, b, h], on its way."""
        unreduced = index - (len(self._pass.steps) - self._pass.pending_out)
        if unreduced >= 0:
            return InFlight(self._of_unreduced[unreduced], None)
        self._absorb(self._known_at[self._pending_in + index])
        return self._pass.layout.start_read(self._gradient)

    def _read_ahead(self, index: int) -> None:
        """Starts on a sub-block's output gradient, if that does not need the sub-block that is under way."""
        if self._known_at[self._pending_in + index] > index + 1:
            self._ahead = self._of_output(index)

    def _absorb(self, first: int) -> None:
        """Adds the gradients of reads from sub-block `first` on."""
        while self._in_flight and self._in_flight[0][0] >= first:
            _, graph = self._in_flight.popleft()
            torch.autograd.backward([graph.normed_edge], [graph.input_gradient.wait()])
            assert graph.stream.grad is not None
            self._gradient = self._gradient + graph.stream.grad


class _OverlappedRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, a_pass: _Pass) -> Tensor:
        ctx.a_pass = a_pass
        stream, missing = split_state(state, a_pass.layout)
        ctx.pending_in = len(missing)
        pending = deque(a_pass.layout.start_write(output.clone()) for output in missing)
        stream = walk(stream, pending, a_pass.steps, a_pass.read, a_pass.apply, read_ahead=a_pass.sharded)
        stream = drain(stream, pending, a_pass.pending_out)
        return join_state(stream, (in_flight.partial for in_flight in pending))

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor) -> tuple[Tensor, None]:
        return _BackwardWalk(ctx.a_pass, ctx.pending_in, state_gradient).run(), None


def run_overlapped(
    state: Tensor, steps: Sequence[SubBlock], context: SequenceContext, pending_out: int
) -> Tensor:
    """The range's forward pass: a state to the state with `pending_out` outputs missing.

    Its backward keeps reduces in flight as the head of this file says. Parameters get their gradients from inside
    it, as under reentrant checkpointing.
    """
    result: Tensor = _OverlappedRange.apply(state, _Pass(steps, context, pending_out))
    return result
