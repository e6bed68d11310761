"""Own partials: a lane reads its own parts of the outputs that are in flight.

The heads and neurons are divided into lanes, of which each rank computes one or several. With y_j^k the part of output
j that lane k computes, y_j their sum over all lanes, and a_i the number of outputs that the rule of `stack.py` has
added to the stream when sub-block i reads it:

    x_i^k = r_{a_i} + sum over j from a_i to i-1 of y_j^k

The number of lanes is part of the model, and with one lane it is the standard wiring. The stream after the last
sub-block contains all outputs of all lanes, as in any wiring.

Backward is the same rule mirrored. With g the gradient of the stream that includes the reads which began after output j
was added to it, and d_i^k the gradient of x_i^k:

    gradient of y_j^k = g + sum over i with a_i <= j of d_i^k        g receives sum over k of d_i^k once a_i > j

So there is one reduce per sub-block each way, in flight under as many sub-blocks as the outputs are. Both are summed in
separate buffers, because the parts are read again. The norm goes backward before the reduce, inside the backward of the
column-parallel product, whose weight gradient the reduce runs under. The norms of all lanes share their weights, whose
gradients are partial sums.

Ranges. The state that leaves a range is the stream and, for each output that is missing from it, the parts of this
rank's lanes: [1 + pending x lanes, s, b, h]. Its gradient has the same shape. Its first slot is g, for which the next
range has summed all reads with a_i >= the number of sub-blocks so far. The other slots are the unreduced d_i^k of
earlier reads, summed for each a_i in ascending order.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.model.sub_block import SequenceContext, SubBlock
from megatron_ladder.parallel.input_gradient import InputGradient
from megatron_ladder.parallel.linear import reached_by_backward
from megatron_ladder.parallel.partial_gradients import PartialGradients, PartialSums


class _Parts(NamedTuple):
    """An output, or the gradient of a read: the parts of this rank's lanes, and their sum over all lanes."""

    own: tuple[Tensor, ...]
    whole: InFlight


class _Graph(NamedTuple):
    """The two local graphs of a lane of a sub-block: from its stream through the norm, and from there to its part."""

    stream: Tensor
    normed_edge: GradientEdge
    part_edge: GradientEdge
    input_gradient: InputGradient


class LaneRange:
    """One pass over a range of sub-blocks, and the tensors for its backward."""

    def __init__(
        self,
        steps: Sequence[SubBlock],
        context: SequenceContext,
        pending: tuple[int, int],
        launch: Launch,
        sums: PartialSums,
    ) -> None:
        """Prepare a pass.

        Args:
            pending: numbers of outputs that are missing from the stream when it enters and when it leaves.
            launch: starts the sum over the ranks.
        """
        self._steps = steps
        self._context = context
        self._launch = launch
        self._pending_in, self._pending_out = pending
        self._reduced_here = self._pending_in + len(steps) - self._pending_out
        self._lanes = range(len(steps[0].lanes))
        self._partial_gradients = PartialGradients(sums)
        self._kept: list[list[_Graph | Tensor]] = []
        """For each sub-block and lane, its graphs, or only the stream that it read if it is recomputed."""
        self._added: list[int] = []
        """For each sub-block, the number of outputs that were added to the stream that it read, from the pending ones
        of the range before."""

    def forward(self, state: Tensor, keeps_graphs: bool) -> Tensor:
        """Map the state that enters to the one that leaves."""
        # torch.compile cannot trace the call of `deque[_Parts]`.
        pending: deque[_Parts] = deque()
        stream, added = state[0], 0
        for output, own in enumerate(self._groups(state)):
            pending.append(self._sum(own) if output < self._reduced_here else _unreduced(own))
        for index, step in enumerate(self._steps):
            while len(pending) > step.staleness:
                stream, added = stream + pending.popleft().whole.wait(), added + 1
            with step.named("forward"):
                own = self._compute(index, stream, pending, keeps_graphs)
            self._added.append(added)
            pending.append(self._sum(own) if self._pending_in + index < self._reduced_here else _unreduced(own))
        while len(pending) > self._pending_out:
            stream = stream + pending.popleft().whole.wait()
        return torch.stack([stream, *(part for parts in pending for part in parts.own)])

    def backward(self, state_gradient: Tensor) -> Tensor:
        """Map the gradient of the state that left to that of the state that entered."""
        gradient = state_gradient[0]
        # Gradients of reads that precede the addition of an output of the previous range, which sums them.
        crossing = [_unreduced(tuple(torch.zeros_like(gradient) for _ in self._lanes)) for _ in range(self._pending_in)]
        pending = deque[tuple[int, _Parts]]()
        later_reads = enumerate(self._groups(state_gradient), start=self._reduced_here)
        for added, own in reversed(list(later_reads)):
            if added < self._pending_in:
                crossing[added] = _unreduced(own)
            else:
                pending.append((added, self._sum(own)))
        for index in reversed(range(len(self._steps))):
            # Recomputation runs before the wait.
            graphs = self._pop_graphs()
            while pending and pending[0][0] > self._pending_in + index:
                gradient = gradient + pending.popleft()[1].whole.wait()
            added, earlier = self._added[index], [*(parts for _, parts in pending), *crossing]
            with self._steps[index].named("backward"):
                read = self._differentiate(graphs, gradient, earlier, is_reduced=added >= self._pending_in)
            if added >= self._pending_in:
                pending.append((added, read))
            else:
                crossing[added] = _unreduced(tuple(map(torch.add, crossing[added].own, read.own)))
        while pending:
            gradient = gradient + pending.popleft()[1].whole.wait()
        self._partial_gradients.end_pass()
        return torch.stack([gradient, *(part for parts in crossing for part in parts.own)])

    def _groups(self, state: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the slots of a state after the first: one tensor per lane of this rank at a time."""
        for first in range(1, len(state), len(self._lanes)):
            yield state[first : first + len(self._lanes)].unbind(0)

    def _sum(self, own: tuple[Tensor, ...]) -> _Parts:
        return _Parts(own, self._launch(functools.reduce(torch.add, own) if len(own) > 1 else own[0].clone()))

    def _compute(self, index: int, stream: Tensor, pending: Iterable[_Parts], keeps_graphs: bool) -> tuple[Tensor, ...]:
        """Compute the parts of this rank's lanes."""
        parts: list[Tensor] = []
        kept: list[_Graph | Tensor] = []
        step = self._steps[index]
        for lane in self._lanes:
            read = stream
            for output in pending:
                read = read + output.own[lane]
            if keeps_graphs and not step.recompute:
                graph, part = self._build(index, lane, read)
                kept.append(graph)
            else:
                part = step.lanes[lane](step.norm(read), self._context, launch=leave_unreduced).partial
                kept += [read] if keeps_graphs else []
            parts.append(part)
        self._kept.append(kept)
        return tuple(parts)

    def _build(self, index: int, lane: int, read: Tensor) -> tuple[_Graph, Tensor]:
        step, leaf = self._steps[index], read.detach().requires_grad_()
        with torch.enable_grad():
            normed = step.norm(leaf, None, self._partial_gradients)
            input_gradient = InputGradient(leave_unreduced, self._partial_gradients)
            entering = reached_by_backward(normed.detach())
            part = step.lanes[lane](entering, self._context, input_gradient, launch=leave_unreduced).partial
        return _Graph(leaf, get_gradient_edge(normed), get_gradient_edge(part), input_gradient), part.detach()

    def _pop_graphs(self) -> list[_Graph]:
        """Remove and return the graphs of the last sub-block that has not gone backward."""
        kept = self._kept.pop()
        index = len(self._kept)
        with self._steps[index].named("recompute") if self._steps[index].recompute else nullcontext():
            return [
                one if isinstance(one, _Graph) else self._build(index, lane, one)[0] for lane, one in enumerate(kept)
            ]

    def _differentiate(
        self, graphs: Sequence[_Graph], gradient: Tensor, reads: Sequence[_Parts], is_reduced: bool
    ) -> _Parts:
        """Run the backward of a sub-block, for the gradient of its output and the reads of its own parts."""
        own, handle = list[Tensor](), None
        for lane, graph in enumerate(graphs):
            starts_sum = is_reduced and lane == self._lanes[-1]
            graph.input_gradient.launch = functools.partial(
                self._end_read, graph.normed_edge, graph.stream, own, starts_sum
            )
            part_gradient = gradient
            for read in reads:
                part_gradient = part_gradient + read.own[lane]
            torch.autograd.backward([graph.part_edge], [part_gradient])
            handle = graph.input_gradient.in_flight
        assert handle is not None
        return _Parts(tuple(own), handle)

    def _end_read(
        self, normed_edge: GradientEdge, stream: Tensor, own: list[Tensor], starts_sum: bool, normed_gradient: Tensor
    ) -> InFlight:
        """Run the backward of a norm, and start the sum over the ranks after that of the last lane."""
        torch.autograd.backward([normed_edge], [normed_gradient])
        assert stream.grad is not None
        own.append(stream.grad)
        return self._sum(tuple(own)).whole if starts_sum else leave_unreduced(own[-1])


def _unreduced(own: tuple[Tensor, ...]) -> _Parts:
    return _Parts(own, leave_unreduced(own[0]))


class _LaneRangeFunction(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, lanes: LaneRange) -> Tensor:
        ctx.lanes = lanes
        return lanes.forward(state, keeps_graphs=True)

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.lanes.backward(state_gradient), None


def walk_lanes(state: Tensor, lanes: LaneRange) -> Tensor:
    """Walk a range forward; parameters get their gradients from inside its backward, as in `backward.py`."""
    if not torch.is_grad_enabled():
        return lanes.forward(state, keeps_graphs=False)
    result: Tensor = _LaneRangeFunction.apply(state, lanes)
    return result
