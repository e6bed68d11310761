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
a gradient (wait, norm, add, gather) then takes place beside the backward of the body after it (`comm/aside.py`), and
flies under it like the reduce itself. The norms met this rank's positions alone: their gradients are partial.

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
norm is linear in the gradient; the weight of such a norm meets an unreduced gradient, so its own is partial. A sharded
stream has its norm on a rank's own positions, where an unreduced gradient of all positions cannot pass: there the slots
cross reduced, in the first of the parts that the state has for them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.aside import Aside
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.model.attention import Midway, SequenceContext
from megatron_ladder.model.sub_block import SubBlock, drain, join_state, split_state, walk
from megatron_ladder.parallel.input_gradient import InputGradient
from megatron_ladder.parallel.partial_gradients import PartialGradients, PartialSums
from megatron_ladder.parallel.partitioned import reached_by_backward


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

    def __init__(
        self,
        steps: Sequence[SubBlock],
        context: SequenceContext,
        pending: tuple[int, int],
        sums: PartialSums,
        aside: Aside | None,
    ) -> None:
        """
        Args:
            pending: how many outputs are missing from the stream that enters, and from the one that leaves.
            aside: where reads of a sharded stream take place ahead; None for one that is not.
        """
        self.steps = steps
        self.context = context
        self.layout = steps[0].layout
        self.sharded = self.layout.shards > 1
        self.aside = aside
        self.partial_gradients = PartialGradients(sums)
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
        """Gradients of reads before this one cross to the range before."""
        self.halfway_back: Callable[[], None] = lambda: None
        """Called when a body is halfway through its backward."""
        self._reads = 0
        self._kept: list[_Graph | _Reading | Tensor] = []
        """Of each sub-block, its graphs; or only the stream that it read, if it is computed again."""

    def read(self, step: SubBlock, stream: Tensor, output: Tensor | None) -> tuple[Tensor, _Reading]:
        """Adds an output to the stream if there is one, norms it and starts to make it whole."""
        stream = stream if output is None else stream + output
        # A read ahead comes before the sub-block under way is kept, so the reads are counted by themselves.
        index, self._reads = self._reads, self._reads + 1
        return stream, self._read(index, stream.detach().requires_grad_(), with_graph=not step.recompute)

    def apply(self, step: SubBlock, reading: _Reading, midway: Midway | None) -> InFlight:
        """Runs one sub-block, keeps what backward needs, and starts the reduce of its output.

        The last `pending_out` outputs leave the range unreduced.
        """
        index = len(self._kept)
        if step.recompute:
            output = step.body(reading.whole.wait(), self.context, False, midway=midway).partial
            self._kept.append(reading.stream)
        else:
            graph, output = self._build(index, reading, midway, keeps_input=not self.sharded)
            self._kept.append(graph)
        reduced = self.pending_in + index < self.reduced_here
        return self.layout.start_write(output) if reduced else InFlight(output, None)

    def gather_again(self, index: int) -> None:
        """Starts to gather what the backward of a sub-block needs whole and forward did not keep."""
        kept = self._kept[index]
        with self.steps[index].named("gather"):
            if isinstance(kept, _Graph):
                kept.input_gradient.input_again = self.layout.start_read(kept.normed)
            elif isinstance(kept, Tensor):
                self._kept[index] = self._read(index, kept, with_graph=True)

    def last_graph(self) -> _Graph:
        """The graphs of the last sub-block that has not gone backward, which the pass then forgets."""
        kept = self._kept.pop()
        if isinstance(kept, _Graph):
            return kept
        index = len(self._kept)
        with self.steps[index].named("recompute"):
            if isinstance(kept, Tensor):
                kept = self._read(index, kept, with_graph=True)
            return self._build(index, kept, None, keeps_input=True)[0]

    def crosses_unreduced(self, index: int) -> bool:
        """Whether the range before reduces the gradient of what a sub-block read."""
        return index < self.first_whole and not self.sharded

    def _read(self, index: int, leaf: Tensor, with_graph: bool) -> _Reading:
        norm = self.steps[index].norm
        with torch.set_grad_enabled(with_graph):
            is_partial = with_graph and self.crosses_unreduced(index)
            weight = self.partial_gradients.defer(norm.weight) if is_partial else None
            normed = norm(leaf, weight, self.partial_gradients)
        outside = normed.detach()
        edge = get_gradient_edge(normed) if with_graph else None
        return _Reading(leaf, edge, outside, self.layout.start_read(outside))

    def _build(
        self, index: int, reading: _Reading, midway: Midway | None, keeps_input: bool
    ) -> tuple[_Graph, Tensor]:
        """The graphs keep an edge to the partial sum and not the tensor, whose storage the reduce overwrites."""

        def halfway(inner: Tensor) -> None:
            inner.register_hook(lambda _: self.halfway_back())
            if midway is not None:
                midway(inner)

        tells_halfway = self.aside is not None and self.aside.halfway
        layout = None if self.crosses_unreduced(index) else self.layout
        input_gradient = InputGradient(layout, self.partial_gradients, keeps_input)
        with torch.enable_grad():
            normed = reached_by_backward(reading.whole.wait())
            output = self.steps[index].body(
                normed, self.context, False, input_gradient, halfway if tells_halfway else None
            ).partial
        assert reading.normed_edge is not None
        graph = _Graph(reading.stream, reading.normed_edge, reading.normed, get_gradient_edge(output), input_gradient)
        return graph, output.detach()


class _BackwardWalk:
    """The mirrored rule over one pass."""

    def __init__(self, a_pass: _Pass, state_gradient: Tensor) -> None:
        self._pass = a_pass
        self._in_flight: deque[tuple[int, _Graph | InFlight]] = deque()
        self._crossing: dict[int, _Graph | InFlight] = {}
        """Of reads whose gradients cross to the range before."""
        self._ahead: InFlight | None = None
        """The gradient of the output of the sub-block that goes backward next."""
        *of_later_reads, self._gradient = [state_gradient[0], *state_gradient[1 :: a_pass.layout.shards]]
        for index, part in reversed(list(enumerate(of_later_reads, start=len(a_pass.steps)))):
            if index < a_pass.first_whole:
                self._crossing[index] = InFlight(part, None)
            else:
                reduced = a_pass.sharded
                in_flight = InFlight(part, None) if reduced else a_pass.layout.start_write(part.clone())
                self._in_flight.append((index, in_flight))

    def run(self) -> Tensor:
        """The gradient of the state that entered."""
        a_pass = self._pass
        if a_pass.sharded:
            a_pass.gather_again(len(a_pass.steps) - 1)
        for index in reversed(range(len(a_pass.steps))):
            graph = a_pass.last_graph()
            output_gradient = (self._joined() or self._of_output(index)).wait()
            if a_pass.sharded and index > 0:
                a_pass.gather_again(index - 1)
            if a_pass.aside is not None and index > 0:
                read_ahead = partial(self._read_ahead, index - 1, a_pass.aside)
                if a_pass.aside.halfway:
                    a_pass.halfway_back = read_ahead
                else:
                    read_ahead()
            with a_pass.steps[index].named("backward"):
                torch.autograd.backward([graph.partial], [output_gradient])
            a_pass.halfway_back = lambda: None
            if index < a_pass.first_whole:
                self._crossing[index] = graph
            else:
                self._in_flight.append((index, graph))
        self._absorb(a_pass.first_whole)
        entered = self._of_entered_state()
        a_pass.partial_gradients.end_pass()
        return entered

    def _of_output(self, index: int) -> InFlight:
        """The gradient of a sub-block's output, [s, b, h], on its way."""
        self._absorb(self._pass.known_at[self._pass.pending_in + index])
        if not self._pass.sharded:
            return InFlight(self._gradient, None)
        with self._pass.steps[index].named("gather"):
            return self._pass.layout.start_read(self._gradient)

    def _read_ahead(self, index: int, aside: Aside) -> None:
        """Starts on a sub-block's output gradient, if that does not need the sub-block that is under way."""
        if self._pass.known_at[self._pass.pending_in + index] > index + 1:
            self._ahead = aside.run(lambda: self._of_output(index), uses=(self._gradient, *self._in_flight))

    def _joined(self) -> InFlight | None:
        """What was read ahead, if anything was."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._pass.aside is not None:
            self._pass.aside.join()
        return ahead

    def _absorb(self, first: int) -> None:
        """Adds the gradients of reads from number `first` on."""
        while self._in_flight and self._in_flight[0][0] >= first:
            self._gradient = self._gradient + self._of_read(*self._in_flight.popleft())

    def _of_read(self, index: int, waiting: _Graph | InFlight) -> Tensor:
        """What a read adds to the gradient of the stream."""
        if isinstance(waiting, InFlight):
            return waiting.wait()
        gradient = waiting.input_gradient.wait()
        with self._pass.steps[index].named("norm backward"):
            torch.autograd.backward([waiting.normed_edge], [gradient])
        assert waiting.stream.grad is not None
        return waiting.stream.grad

    def _of_entered_state(self) -> Tensor:
        """The slots of the gradient that crosses to the range before."""
        a_pass, gradient = self._pass, self._gradient
        slots = []
        for low, high in pairwise([0, *a_pass.known_at[: a_pass.pending_in]]):
            parts = [self._of_read(index, self._crossing[index]) for index in reversed(range(low, high))]
            slots.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(gradient))
        first, *others = [*slots, gradient]
        state = gradient.new_zeros(1 + a_pass.pending_in * a_pass.layout.shards, *gradient.shape)
        state[0] = first
        for place, slot in enumerate(others):
            state[1 + place * a_pass.layout.shards] = slot
        return state


class _OverlappedRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, a_pass: _Pass) -> Tensor:
        ctx.a_pass = a_pass
        stream, missing = split_state(state, a_pass.layout)
        pending = deque(
            a_pass.layout.start_write(output.clone()) if place < a_pass.reduced_here else InFlight(output, None)
            for place, output in enumerate(missing)
        )
        stream = walk(stream, pending, a_pass.steps, a_pass.read, a_pass.apply, a_pass.aside)
        stream = drain(stream, pending, a_pass.pending_out)
        return join_state(stream, (in_flight.partial for in_flight in pending))

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor) -> tuple[Tensor, None]:
        return _BackwardWalk(ctx.a_pass, state_gradient).run(), None


def run_overlapped(
    state: Tensor,
    steps: Sequence[SubBlock],
    context: SequenceContext,
    pending_out: int,
    sums: PartialSums,
    aside: Aside | None,
) -> Tensor:
    """The range's forward pass: a state to the state with `pending_out` outputs missing.

    Its backward keeps reduces in flight as the head of this file says. Parameters get their gradients from inside
    it, as under reentrant checkpointing.
    """
    pending = (state.shape[0] - 1) // steps[0].layout.shards, pending_out
    result: Tensor = _OverlappedRange.apply(state, _Pass(steps, context, pending, sums, aside))
    return result
