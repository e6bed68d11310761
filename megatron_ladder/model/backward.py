"""The walk of `sub_block.py`, mirrored: backward with the reduces of input gradients in flight.

Ladder (`~~~` is the wire; d_i is this rank's gradient at the input of h_i):

    compute   [ backward of h_3 ][ backward of h_2 ][ backward of h_1 ][ ...
    wire                    ~~~~ d_3 ~~~~      ~~~~ d_2 ~~~~
                                                    ^ wait, norm backward, add to g: g includes the reads from h_3 on

With f_j the first read that sees output j and G the gradient of the stream after the last sub-block,

    gradient of y_j = g at f_j = G + sum over reads i >= f_j of all_reduce(d_i)

so g grows by one read after another, whatever the order in which outputs arrive, and an output that is seen later than
a younger one takes g as it was when the walk passed f_j. Usually a norm goes backward after the sum of its gradient,
and its weight's gradient is complete. With own partials it goes backward before, since each lane has normed another
stream, and part k of y_j also gets the unreduced gradients of the reads that added it: those before f_j.

Autograd would run these steps in another order (newest node first: launch, wait, launch, wait). Therefore one autograd
Function covers the whole range. It keeps local graphs for each sub-block and walks them itself. With sequence
parallelism, it gathers the gradient of an output, and again the input of the column-parallel product, which is not
kept; norms have read only this rank's positions, so the gradients of their weights are partial sums.

At a cut, the gradient of the state has as many slots as the state: the stream's, then for each missing output one for
each of its parts. If all outputs arrive in order, the reads behind the cut that miss some of them cross unreduced, and
the range before reduces them under its own first sub-blocks:

    first slot            g at the last output's first read
    slot of output k      sum of the unreduced gradients of the reads from the first read of output k - 1 on (for the
                          first output, from the cut on) that miss output k

Otherwise, and for a sharded stream, whose norms cannot pass on an unreduced gradient of all positions, they cross
complete: g at the cut, and the gradient of each part as far as it arises behind the cut.
"""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.blueprint.wiring import ReadPlan
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.model.sub_block import (
    Output,
    SequenceContext,
    SubBlock,
    add_losses,
    output_parts,
    walk,
)
from megatron_ladder.parallel.partial_gradients import PartialGradients, PartialSums
from megatron_ladder.parallel.products import InputGradient, reached_by_backward


class LocalReading(NamedTuple):
    """The first local graph of a lane of a sub-block, from the stream through the norm, and its result."""

    stream: Tensor
    """The input of the lane; a leaf that collects its gradient."""
    normed_edge: GradientEdge | None
    """None if only the stream is kept for backward."""
    normed: Tensor
    """This rank's positions, detached."""
    whole: InFlight | None
    """All positions; None once the body has used them."""
    input_gradient: InputGradient
    """Collects the gradient of `normed` from all sub-blocks that take it."""


class _Graph(NamedTuple):
    """The two local graphs of a lane; the second one ends in the partial sum and the losses."""

    reading: LocalReading
    partial: GradientEdge
    losses: dict[str, GradientEdge]


class ForwardRecord:
    """A `ForwardPass` over a range of sub-blocks that records what the mirrored backward needs.

    Attributes:
        losses: those of the bodies, summed by name.
    """

    def __init__(
        self,
        steps: Sequence[SubBlock],
        context: SequenceContext,
        plan: ReadPlan,
        first: int,
        launch: Launch,
        sums: PartialSums,
        queue: CudaSideQueue | None,
    ) -> None:
        """Prepare a pass over sub-blocks from `first` on; `launch` starts sums, and `queue` runs reads ahead."""
        self.steps = steps
        self.context = context
        self.plan = plan
        self.first, self.last = first, first + len(steps)
        self.launch = launch
        self.layout = steps[0].layout
        self.sharded = self.layout.shards > 1
        self.queue = queue
        self.partial_gradients = PartialGradients(sums)
        norms = Counter(step.norm for step in steps if not step.shares_reading)
        self._shared_norms = {norm for norm, uses in norms.items() if uses > 1}
        self.losses: dict[str, Tensor] = {}
        entering = plan.missing(first)
        self.crosses_unreduced = plan.in_order and not self.sharded
        """Whether the reads behind a cut that miss outputs from before it are reduced by the range before."""
        self.first_reduced = plan.first_reads[entering[-1]] if entering and self.crosses_unreduced else first
        """The first read whose gradient is reduced here."""
        self._again: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """For each sub-block and lane that is recomputed what its body kept."""
        self._kept: list[list[_Graph | LocalReading | Tensor]] = []
        """For each sub-block and lane its graphs, or only the stream that it read if it is recomputed."""

    def read(
        self, step: int, stream: Tensor, output: Tensor | None, missing: Collection[Output]
    ) -> tuple[Tensor, list[LocalReading]]:
        """See `ForwardPass.read`."""
        stream = stream if output is None else stream + output
        leaves = (read.detach().requires_grad_() for read in self.steps[step].reads(stream, missing))
        return stream, [self._read(step, leaf, with_graph=not self.steps[step].recompute) for leaf in leaves]

    def start(self, step: int, reading: list[LocalReading], launch: Launch) -> Output:
        """See `ForwardPass.start`."""
        sub_block, parts = self.steps[step], []
        kept: list[_Graph | LocalReading | Tensor] = []
        for lane, read in enumerate(reading):
            if sub_block.recompute:
                assert read.whole is not None
                part, losses, again = sub_block.lanes[lane](read.whole.wait(), self.context)
                self._again[step, lane] = again
                kept.append(read.stream)
            else:
                graph, part, losses = self._build(step, lane, read)
                kept.append(graph)
            add_losses(self.losses, losses)
            parts.append(part)
        self._kept.append(kept)
        return sub_block.start_sum(parts, launch)

    def gather_again(self, step: int) -> None:
        """Start to gather the tensor that the backward of a sub-block needs whole and forward did not keep."""
        (kept,) = self._kept[step]
        with self.steps[step].named("gather"):
            if isinstance(kept, _Graph):
                input_gradient = kept.reading.input_gradient
                if input_gradient.input_again is None:
                    input_gradient.input_again = self.layout.start_read(kept.reading.normed)
            elif isinstance(kept, Tensor):
                # CUDA runs the backward of an operation on the stream of its forward, which is then that of the queue.
                # The wait for the gather makes the computation run after the chain, without a join. The reading keeps
                # what the chain uses until then.
                read = functools.partial(self._read, step, kept, with_graph=True)
                self._kept[step] = [read() if self.queue is None else self.queue.run(read, uses=None)]

    def pop_graphs(self) -> list[_Graph]:
        """Remove and return the graphs of the last sub-block that has not gone backward."""
        kept = self._kept.pop()
        graphs = [one for one in kept if isinstance(one, _Graph)]
        if graphs:
            return graphs
        step = len(self._kept)
        with self.steps[step].named("recompute"):
            readings = [self._read(step, one, with_graph=True) if isinstance(one, Tensor) else one for one in kept]
            return [
                self._build(step, lane, reading)[0]
                for lane, reading in enumerate(readings)
                if isinstance(reading, LocalReading)
            ]

    def _read(self, step: int, leaf: Tensor, with_graph: bool) -> LocalReading:
        norm = self.steps[step].norm
        with torch.set_grad_enabled(with_graph):
            is_partial = with_graph and self.first + step < self.first_reduced
            weight = self.partial_gradients.defer(norm.weight) if is_partial else None
            if with_graph and not is_partial and norm in self._shared_norms and norm.partial_over is None:
                weight = self.partial_gradients.collect(norm.weight)
            normed = norm(leaf, weight, self.partial_gradients)
        detached = normed.detach()
        edge = get_gradient_edge(normed) if with_graph else None
        keeps_input = not self.sharded or self.steps[step].recompute
        input_gradient = InputGradient(self.launch, self.partial_gradients, keeps_input)
        return LocalReading(leaf, edge, detached, self.layout.start_read(detached), input_gradient)

    def _build(self, step: int, lane: int, reading: LocalReading) -> tuple[_Graph, Tensor, dict[str, Tensor]]:
        """Run a body with a graph, and return the graph, the partial sum and the losses. The graph keeps an edge to the
        partial sum and not the tensor, whose storage the reduce overwrites."""
        assert reading.whole is not None
        with torch.enable_grad():
            normed = reached_by_backward(reading.whole.wait())
            again = self._again.pop((step, lane), ())
            partial, found, _ = self.steps[step].lanes[lane](normed, self.context, reading.input_gradient, *again)
        edges = {name: get_gradient_edge(loss) for name, loss in found.items()}
        graph = _Graph(reading._replace(whole=None), get_gradient_edge(partial), edges)
        return graph, partial.detach(), {name: loss.detach() for name, loss in found.items()}


class _BackwardWalk:
    def __init__(self, record: ForwardRecord, state_gradient: Tensor, losses: Mapping[str, Tensor]) -> None:
        self._record = record
        self._losses = losses
        self._first_reads = record.plan.first_reads
        self._gradient = state_gradient[0]
        """g."""
        self._pending: deque[tuple[int, Callable[[], Tensor]]] = deque()
        """Reads that g does not include yet, or several that crossed a cut together, newest first: the number of the
        first of them, and a function that waits for the sum of the gradients over the ranks."""
        self._own: deque[tuple[int, Sequence[Tensor]]] = deque()
        """With own partials, number and unreduced gradients of the reads that some output's parts still need."""
        self._passed: dict[int, Tensor] = {}
        """g as it was at some reads."""
        self._ahead: InFlight | None = None
        """The gradient of the output of the sub-block that goes backward next."""
        self._entering, leaving = record.plan.missing(record.first), record.plan.missing(record.last)
        bounds = [record.first, *(self._first_reads[output] for output in self._entering)]
        self._crossing = list(itertools.starmap(range, itertools.pairwise(bounds))) if record.crosses_unreduced else []
        """The reads whose unreduced gradients cross to the range before, by slot of the state."""
        self._sums: list[Sequence[Tensor] | None] = [None for _ in self._crossing]
        """The sums of these gradients."""
        slots = [
            parts[: len(record.steps[0].lanes)].unbind(0) for parts in output_parts(state_gradient, record.steps[0])
        ]
        self._behind: dict[int, Sequence[Tensor]] = {}
        """The complete gradients that outputs get from behind the cut."""
        if record.crosses_unreduced:
            bounds = [record.last, *(self._first_reads[output] for output in leaving)]
            for (first, after), parts in reversed(list(zip(itertools.pairwise(bounds), slots, strict=True))):
                if first < after:
                    self._keep_crossed(first, parts)
        else:
            self._behind = dict(zip(leaving, slots, strict=True))
        # The outputs whose gradients are needed, in this order.
        needed = [*reversed(range(record.first, record.last)), *([] if self._crossing else reversed(self._entering))]
        reads = [self._first_reads[output] for output in needed if output not in self._behind]
        earliest = itertools.accumulate(reads, min)
        self._later = {read for read, least in zip(reads, earliest, strict=True) if read > least}
        """The reads at which g is needed after it has gone on."""
        latest = [*itertools.accumulate((self._first_reads[output] for output in reversed(needed)), max)][::-1]
        self._latest = dict(zip(needed, latest, strict=True))
        """For each output, the latest first read of it and those needed after it."""

    def run(self) -> Tensor:
        record = self._record
        if record.sharded:
            record.gather_again(len(record.steps) - 1)
        for number in reversed(range(record.first, record.last)):
            graphs, step = record.pop_graphs(), number - record.first
            if record.sharded:
                gradients: Sequence[Tensor] = [(self._join() or self._start_gather(number)).wait()]
            else:
                gradients = self._output_gradients(number)
            if record.sharded and step > 0:
                record.gather_again(step - 1)
            if record.queue is not None and step > 0 and self._first_reads[number - 1] > number:
                # The gradient of the next output does not depend on the sub-block that is about to run.
                uses = (self._gradient, *self._pending)
                self._ahead = record.queue.run(functools.partial(self._start_gather, number - 1), uses)
            with record.steps[step].named("backward"):
                self._differentiate(number, graphs, gradients)
        entered = self._entered_state_gradient()
        record.partial_gradients.end_pass()
        return entered

    def _keep_crossed(self, first: int, parts: Sequence[Tensor]) -> None:
        """Reduce the gradients of reads behind this range, or pass them on to the range before."""
        step = self._record.steps[0]
        if first < self._record.first_reduced:
            self._cross(first, parts)
            return
        whole = step.start_sum(parts if step.reads_own else [parts[0].clone()], self._record.launch).whole
        self._keep(first, whole.wait, parts)

    def _keep(self, read: int, wait: Callable[[], Tensor], own: Sequence[Tensor]) -> None:
        self._pending.append((read, wait))
        if self._record.steps[0].reads_own:
            self._own.append((read, own))

    def _cross(self, read: int, parts: Sequence[Tensor]) -> None:
        slot = next(slot for slot, reads in enumerate(self._crossing) if read in reads)
        earlier = self._sums[slot]
        self._sums[slot] = parts if earlier is None else list(map(torch.add, earlier, parts))

    def _start_gather(self, number: int) -> InFlight:
        with self._record.steps[number - self._record.first].named("gather"):
            return self._record.layout.start_read(self._output_gradients(number)[0])

    def _join(self) -> InFlight | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._record.queue is not None:
            self._record.queue.join()
        return ahead

    def _output_gradients(self, output: int) -> Sequence[Tensor]:
        """Return the gradient of each lane's part of an output."""
        gradients, step = self._behind.get(output), self._record.steps[0]
        if gradients is None:
            self._absorb(self._first_reads[output])
            gradients = [self._passed.get(self._first_reads[output], self._gradient)] * len(step.lanes)
        if step.reads_own:
            while self._own and self._own[0][0] >= self._latest[output]:
                self._own.popleft()
            missed = [own for number, own in self._own if number < self._first_reads[output]]
            for own in (*missed, *(parts for parts in self._sums if parts is not None)):
                gradients = list(map(torch.add, gradients, own))
        return gradients

    def _absorb(self, first: int) -> None:
        """Add all reads from `first` on to g."""
        while self._pending and self._pending[0][0] >= first:
            read, wait = self._pending.popleft()
            for later in [later for later in self._later if later > read]:
                self._later.remove(later)
                self._passed[later] = self._gradient
            self._gradient = self._gradient + wait()

    def _wait_and_norm(self, step: SubBlock, reading: LocalReading) -> Tensor:
        gradient = reading.input_gradient.wait()
        with step.named("norm backward"):
            return _run_norm_backward(reading.normed_edge, reading.stream, gradient)

    def _differentiate(self, number: int, graphs: Sequence[_Graph], gradients: Sequence[Tensor]) -> None:
        """Run the backward of a sub-block, for the gradients of its output's parts."""
        step, crosses = self._record.steps[number - self._record.first], number < self._record.first_reduced
        own: list[Tensor] = []
        for graph, gradient in zip(graphs, gradients, strict=True):
            if crosses or step.reads_own:
                starts_sum = graph is graphs[-1] and not crosses
                # Without the graph, whose nodes lead to this function: a cycle through C++ would never be freed.
                norm_backward = functools.partial(_run_norm_backward, graph.reading.normed_edge, graph.reading.stream)
                end_read = functools.partial(self._end_read, step, norm_backward, own, starts_sum)
                graph.reading.input_gradient.launch = end_read
            # Every rank has computed the losses.
            of_losses = [self._losses[name] / step.group.size for name in graph.losses]
            _run_backward((graph.partial, *graph.losses.values()), (gradient, *of_losses))
        last = graphs[-1].reading
        in_flight = last.input_gradient.in_flight
        if in_flight is None:
            # The sub-block before it takes the same normed stream, and starts the sum.
            return
        if crosses:
            self._cross(number, own)
            return
        wait = in_flight.wait if step.reads_own else functools.partial(self._wait_and_norm, step, last)
        self._keep(number, wait, own)

    def _end_read(
        self,
        step: SubBlock,
        norm_backward: Callable[[Tensor], Tensor],
        own: list[Tensor],
        starts_sum: bool,
        normed_gradient: Tensor,
    ) -> InFlight:
        """Run the backward of a norm before the sum over the ranks, which that of the last lane starts."""
        own.append(norm_backward(normed_gradient))
        return step.start_sum(own, self._record.launch).whole if starts_sum else leave_unreduced(own[-1])

    def _entered_state_gradient(self) -> Tensor:
        """Return the gradient of the state that entered, which goes to the range before."""
        slots: list[Sequence[Tensor] | None] = self._sums
        if not self._crossing:
            slots = [*reversed([self._output_gradients(output) for output in reversed(self._entering)])]
        self._absorb(self._record.first_reduced)
        gradient, step = self._gradient, self._record.steps[0]
        state = gradient.new_zeros(1 + len(slots) * len(step.lanes) * step.layout.shards, *gradient.shape)
        state[0] = gradient
        for parts, slot in zip(output_parts(state, step), slots, strict=True):
            for place, part in enumerate(slot or ()):
                parts[place] = part
        return state


def _run_backward(edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """Accumulate gradients from edges, without the checks of torch.autograd.backward, which take as long as the run."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _run_norm_backward(normed_edge: GradientEdge | None, stream: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the stream that a norm has read."""
    assert normed_edge is not None
    _run_backward((normed_edge,), (gradient,))
    assert stream.grad is not None
    return stream.grad


class _MirroredRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, record: ForwardRecord) -> tuple[Tensor, ...]:
        ctx.record = record
        leaving = walk(state, record, record.plan, record.first, record.launch, record.queue)
        # Not the tensors of the record: what is returned leads to this function, which holds the record.
        return leaving, *(loss.detach() for loss in record.losses.values())

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor, *losses: Tensor) -> tuple[Tensor, None]:
        named = dict(zip(ctx.record.losses, losses, strict=True))
        return _BackwardWalk(ctx.record, state_gradient, named).run(), None


def walk_mirrored(state: Tensor, record: ForwardRecord) -> Tensor:
    """Walk a range forward, such that its backward follows the mirrored rule.

    Parameters get their gradients from inside that backward, as under reentrant checkpointing.
    """
    if not state.requires_grad:
        # The embedding is frozen.
        state = reached_by_backward(state)
    leaving, *losses = _MirroredRange.apply(state, record)
    add_losses(record.context.losses, dict(zip(record.losses, losses, strict=True)))
    result: Tensor = leaving
    return result
