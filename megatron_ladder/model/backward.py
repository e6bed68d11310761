"""The rule of `stack.py`, mirrored: backward with the reduces of input gradients in flight.

With y_j the output of sub-block j, a forward pass is a list of two kinds of events: sub-block i reads the stream, and
y_j is added to it. Backward visits them in reverse, carrying g, the gradient of the stream:

    y_j was added     the gradient of y_j is g
    h_i read          g = g + all_reduce(d_i), with d_i this rank's gradient at the input of h_i

So the body of sub-block i can go backward once g includes every read that came after the addition of y_i. Let
`known_at[i]` be the first of these reads (`first_reads`). Earlier reads may still be in flight:

    g = gradient of the output; pending = []
    for i in n-1 .. 0:
        while pending and pending.first >= known_at[i]:  g = g + norm_backward(pending.pop_first().wait())
        pending.append(start_all_reduce(body_backward(h_i, g)))
    while pending:                                       g = g + norm_backward(pending.pop_first().wait())

For ladder, known_at[i] = i + 2: the reduce of h_{i+1} runs under the backward of h_i. For standard it is i + 1, and the
reduce runs only under the gradient of its own column-parallel weight. Norms go backward after the wait, so the
gradients of their weights are complete.

With sequence parallelism, forward gathers the normed stream before a body runs. Backward does the same with the
gradient of an output, and gathers the input of the column-parallel product again, which is not kept. The read of a
gradient (wait, norm, add, gather) runs alongside the backward of the preceding body (`comm/side_queue.py`). Norms read
only this rank's positions, so the gradients of their weights are partial.

Autograd would run these steps in another order (newest node first: launch, wait, launch, wait). Therefore one autograd
Function covers the whole range. It keeps local graphs for each sub-block and walks them itself.

Ranges. Reads and outputs that a range leaves to the next one belong to the same list. The outputs that leave a range
unreduced are q slots of its state. With h_n, h_n+1 .. the sub-blocks of the next range, the gradient of the last slot
is that of the stream when g includes all reads that include it. Earlier reads are missing from it and cross the cut as
forward's outputs do: unreduced, to be reduced by the range before under its own first sub-blocks. So the gradient of a
state [1 + q, s, b, h] is, from the last slot to the first:

    slot q                the gradient of the last output, complete
    slots q-1 .. 1        this rank's part of what the reads that include output k and not k+1 add to it
    slot 0                the same for reads that include none of the q outputs

With q = 0 the one slot is the complete gradient of the stream. Gradients cross after the backward of their norm, which
is linear in the gradient; its weight receives an unreduced gradient, so the weight's gradient is partial. The norm of a
sharded stream covers a rank's own positions and cannot pass an unreduced gradient of all positions. There the slots
cross reduced, in the first of the parts that the state has for them.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import SideQueue
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.model.sub_block import SequenceContext, SubBlock, walk
from megatron_ladder.parallel.input_gradient import InputGradient
from megatron_ladder.parallel.linear import reached_by_backward
from megatron_ladder.parallel.partial_gradients import PartialGradients, PartialSums


class LocalReading(NamedTuple):
    """The first local graph of a sub-block, from the stream through the norm, and its result."""

    stream: Tensor
    """What the sub-block read; a leaf that collects its gradient."""
    normed_edge: GradientEdge | None
    """None if only the stream is kept for backward."""
    normed: Tensor
    """This rank's positions, detached."""
    whole: InFlight
    """All positions."""


class _Graph(NamedTuple):
    """The two local graphs of one sub-block: from the stream through the norm, and from there to the partial sum."""

    stream: Tensor
    normed_edge: GradientEdge
    normed: Tensor
    partial: GradientEdge
    input_gradient: InputGradient


def _first_reads(stalenesses: Sequence[int], pending_in: int) -> list[int]:
    """Return the first sub-block whose read includes each output, in the order in which outputs are added.

    The outputs are the `pending_in` ones that enter the range, followed by those of its sub-blocks. The result is the
    number of sub-blocks for an output that no read of the range includes.
    """
    count = len(stalenesses)
    added_before = [pending_in + index - staleness for index, staleness in enumerate(stalenesses)]
    return [
        next((index for index, added in enumerate(added_before) if added > output), count)
        for output in range(pending_in + count)
    ]


class ForwardRecord:
    """A `ForwardPass` over a range of sub-blocks that records what the mirrored backward needs."""

    def __init__(
        self,
        steps: Sequence[SubBlock],
        context: SequenceContext,
        layout: StreamLayout,
        pending: tuple[int, int],
        sums: PartialSums,
        side_queue: SideQueue | None,
    ) -> None:
        """Prepare a pass with so many outputs pending before and after it; reads run ahead in `side_queue`."""
        self.steps = steps
        self.context = context
        self.layout = layout
        self.sharded = layout.shards > 1
        self.side_queue = side_queue
        self.partial_gradients = PartialGradients(sums)
        self.pending_in, self.pending_out = pending
        count = len(steps)
        reduced_here = self.pending_in + count - self.pending_out
        reads = _first_reads([step.staleness for step in steps], self.pending_in)
        self.known_at = [
            read if output < reduced_here else count + 1 + output - reduced_here for output, read in enumerate(reads)
        ]
        """For each output, the first read that its gradient needs; `count + k` are the reads that begin with slot k of
        the state that leaves."""
        self.first_whole = self.known_at[self.pending_in - 1] if self.pending_in else 0
        """Gradients of reads before this one cross to the range before."""
        self._kept: list[_Graph | LocalReading | Tensor] = []
        """For each sub-block its graphs, or only the stream that it read if it is recomputed."""

    def read(self, index: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, LocalReading]:
        """See `ForwardPass.read`."""
        stream = stream if output is None else stream + output
        return stream, self._read(index, stream.detach().requires_grad_(), with_graph=not self.steps[index].recompute)

    def start(self, index: int, reading: LocalReading, launch: Launch) -> InFlight:
        """See `ForwardPass.start`."""
        step = self.steps[index]
        if step.recompute:
            self._kept.append(reading.stream)
            return step.body(reading.whole.wait(), self.context, launch=launch)
        graph, output = self._build(index, reading, keeps_input=not self.sharded)
        self._kept.append(graph)
        return launch(output)

    def gather_again(self, index: int) -> None:
        """Start to gather the tensor that the backward of a sub-block needs whole and forward did not keep."""
        kept = self._kept[index]
        with self.steps[index].named("gather"):
            if isinstance(kept, _Graph):
                kept.input_gradient.input_again = self.layout.start_read(kept.normed)
            elif isinstance(kept, Tensor):
                # CUDA runs the backward of an operation on the stream of its forward, which is then that of the queue.
                # The wait for the gather makes the computation run after the chain, without a join. The reading keeps
                # what the chain uses until then.
                read = partial(self._read, index, kept, with_graph=True)
                self._kept[index] = read() if self.side_queue is None else self.side_queue.run(read, uses=None)

    def pop_graph(self) -> _Graph:
        """Remove and return the graphs of the last sub-block that has not gone backward."""
        kept = self._kept.pop()
        if isinstance(kept, _Graph):
            return kept
        index = len(self._kept)
        with self.steps[index].named("recompute"):
            if isinstance(kept, Tensor):
                kept = self._read(index, kept, with_graph=True)
            return self._build(index, kept, keeps_input=True)[0]

    def _crosses_unreduced(self, index: int) -> bool:
        """Whether the range before reduces the gradient of what a sub-block read."""
        return index < self.first_whole and not self.sharded

    def _read(self, index: int, leaf: Tensor, with_graph: bool) -> LocalReading:
        norm = self.steps[index].norm
        with torch.set_grad_enabled(with_graph):
            is_partial = with_graph and self._crosses_unreduced(index)
            weight = self.partial_gradients.defer(norm.weight) if is_partial else None
            normed = norm(leaf, weight, self.partial_gradients)
        detached = normed.detach()
        edge = get_gradient_edge(normed) if with_graph else None
        return LocalReading(leaf, edge, detached, self.layout.start_read(detached))

    def _build(self, index: int, reading: LocalReading, keeps_input: bool) -> tuple[_Graph, Tensor]:
        """Run a body with a graph. The graph keeps an edge to the partial sum and not the tensor, whose storage the
        reduce overwrites."""
        sum_gradient = leave_unreduced if self._crosses_unreduced(index) else self.layout.start_write
        input_gradient = InputGradient(sum_gradient, self.partial_gradients, keeps_input)
        with torch.enable_grad():
            normed = reached_by_backward(reading.whole.wait())
            output = self.steps[index].body(normed, self.context, input_gradient, leave_unreduced).partial
        assert reading.normed_edge is not None
        graph = _Graph(reading.stream, reading.normed_edge, reading.normed, get_gradient_edge(output), input_gradient)
        return graph, output.detach()


class _BackwardWalk:
    def __init__(self, record: ForwardRecord, state_gradient: Tensor) -> None:
        self._record = record
        self._in_flight: deque[tuple[int, _Graph | InFlight]] = deque()
        self._crossing: dict[int, _Graph | InFlight] = {}
        """Reads whose gradients cross to the range before."""
        self._ahead: InFlight | None = None
        """The gradient of the output of the sub-block that goes backward next."""
        *later_reads, self._gradient = [state_gradient[0], *state_gradient[1 :: record.layout.shards]]
        for index, part in reversed(list(enumerate(later_reads, start=len(record.steps)))):
            if index < record.first_whole:
                self._crossing[index] = InFlight(part, None)
            else:
                in_flight = InFlight(part, None) if record.sharded else record.layout.start_write(part.clone())
                self._in_flight.append((index, in_flight))

    def run(self) -> Tensor:
        record = self._record
        if record.sharded:
            record.gather_again(len(record.steps) - 1)
        for index in reversed(range(len(record.steps))):
            graph = record.pop_graph()
            output_gradient = (self._join() or self._start_output_gradient(index)).wait()
            if record.sharded and index > 0:
                record.gather_again(index - 1)
            if record.side_queue is not None and index > 0:
                self._read_ahead(index - 1, record.side_queue)
            with record.steps[index].named("backward"):
                torch.autograd.backward([graph.partial], [output_gradient])
            if index < record.first_whole:
                self._crossing[index] = graph
            else:
                self._in_flight.append((index, graph))
        self._absorb(record.first_whole)
        entered = self._entered_state_gradient()
        record.partial_gradients.end_pass()
        return entered

    def _start_output_gradient(self, index: int) -> InFlight:
        record = self._record
        self._absorb(record.known_at[record.pending_in + index])
        if not record.sharded:
            return InFlight(self._gradient, None)
        with record.steps[index].named("gather"):
            return record.layout.start_read(self._gradient)

    def _read_ahead(self, index: int, side_queue: SideQueue) -> None:
        """Start on a sub-block's output gradient unless it depends on the sub-block that is running."""
        if self._record.known_at[self._record.pending_in + index] > index + 1:
            uses = (self._gradient, *self._in_flight)
            self._ahead = side_queue.run(lambda: self._start_output_gradient(index), uses)

    def _join(self) -> InFlight | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._record.side_queue is not None:
            self._record.side_queue.join()
        return ahead

    def _absorb(self, first: int) -> None:
        while self._in_flight and self._in_flight[0][0] >= first:
            self._gradient = self._gradient + self._read_gradient(*self._in_flight.popleft())

    def _read_gradient(self, index: int, waiting: _Graph | InFlight) -> Tensor:
        if isinstance(waiting, InFlight):
            return waiting.wait()
        gradient = waiting.input_gradient.wait()
        with self._record.steps[index].named("norm backward"):
            torch.autograd.backward([waiting.normed_edge], [gradient])
        assert waiting.stream.grad is not None
        return waiting.stream.grad

    def _entered_state_gradient(self) -> Tensor:
        """Return the slots of the gradient that crosses to the range before."""
        record, gradient, shards = self._record, self._gradient, self._record.layout.shards
        slots = []
        for low, high in pairwise([0, *record.known_at[: record.pending_in]]):
            parts = [self._read_gradient(index, self._crossing[index]) for index in reversed(range(low, high))]
            slots.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(gradient))
        first, *others = [*slots, gradient]
        state = gradient.new_zeros(1 + record.pending_in * shards, *gradient.shape)
        state[0] = first
        for place, slot in enumerate(others):
            state[1 + place * shards] = slot
        return state


class _MirroredRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, record: ForwardRecord) -> Tensor:
        ctx.record = record
        layout = record.layout
        return walk(state, record, record.pending_out, layout, layout.start_write, record.side_queue)

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor) -> tuple[Tensor, None]:
        return _BackwardWalk(ctx.record, state_gradient).run(), None


def walk_mirrored(state: Tensor, record: ForwardRecord) -> Tensor:
    """Walk a range forward, such that its backward follows the mirrored rule.

    Parameters get their gradients from inside that backward, as under reentrant checkpointing.
    """
    result: Tensor = _MirroredRange.apply(state, record)
    return result
