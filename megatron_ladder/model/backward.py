"""The walk of `sub_block.py`, mirrored: backward with the reduces of input gradients in flight.

Ladder (`~~~` is the wire; d_i is this rank's gradient at the input of h_i):

    compute   [ backward of h_3 ][ backward of h_2 ][ backward of h_1 ][ ...
    wire                    ~~~~ d_3 ~~~~      ~~~~ d_2 ~~~~
                                                    ^ wait, norm backward, add to g: g includes the reads from h_3 on

With f_j the first read that sees output j and G the gradient of the stream after the last sub-block,

    gradient of y_j = g at f_j = G + sum over reads i >= f_j of all_reduce(d_i)

so g grows by one read after another, whatever the order in which outputs arrive, and is the gradient of the outputs
that arrive at read f while it includes the reads from f on: g_f. Usually a norm goes backward after the sum of its
gradient, and its weight's gradient is complete. With own partials it goes backward before, since each lane has normed
another stream, and part k of y_j also gets the unreduced gradients of the reads that added it: those before f_j.

Autograd would run these steps in another order (newest node first: launch, wait, launch, wait). Therefore one autograd
Function covers the whole range. It keeps local graphs for each sub-block and walks them itself. With sequence
parallelism, it gathers the gradient of an output, and again the input of the column-parallel product, which is not
kept; norms have read only this rank's positions, so the gradients of their weights are partial sums.

At a cut, the gradient of the state has as many slots as the state: the stream's, then for each missing output one for
each of its parts. Staleness 2 (read i misses y_{i-1} and y_{i-2}, so f_j = j + 3), 7 sub-blocks, and a range of three,
which y_0 and y_1 enter and y_3 and y_4 leave:

    step                 needs                    gives
    state from behind    [g_7, d_5, d_6]          launches d_6, d_5
    backward of h_4      g_7                      launches d_4
    backward of h_3      g_6 = g_7 + wait(d_6)    d_3
    backward of h_2      g_5 = g_6 + wait(d_5)    d_2
    state to before      g_4 = g_5 + wait(d_4)    [g_4, d_2, d_3]

Reads 2 and 3 miss outputs of the range before. They cross unreduced, one for each slot, and the range before reduces
them under its own first sub-blocks. In general, the slot of an output holds the sum of the reads from the first read of
the previous one (at first, from the cut) that miss it. This requires outputs that arrive in order, and norms that can
pass on an unreduced gradient of all positions, which those of a sharded stream cannot. Otherwise gradients cross
complete: g at the cut, and the gradient of each part as far as it arises behind the cut. `MirrorPlan` lists the reads.

Backward ends where nothing below trains. If the state that enters needs no gradient, and y_j is the first output of a
sub-block with weights that train, then only reads that see it need gradients: those from f_j on, or with own partials
all behind j. Other reads of sub-blocks whose norm trains are reduced for it alone; what neither has weights that train
nor such a read keeps no graph.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.blueprint.wiring import ReadPlan
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.stream import share_gradient
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import Output, SequenceContext, SubBlock, output_parts, walk
from megatron_ladder.parallel.products import InputGradient, reached_by_backward
from megatron_ladder.torch_private import run_backward


class LocalReading(NamedTuple):
    """The first local graph of a lane of a sub-block, from the stream through the norm, and its result."""

    stream: Tensor
    """The input of the lane; a leaf that collects its gradient."""
    normed_edge: GradientEdge | None
    """None if only the stream is kept for backward, or the normed stream needs no gradient."""
    normed: Tensor
    """This rank's positions, detached."""
    whole: InFlight | None
    """All positions; None once the body has used them."""
    input_gradient: InputGradient
    """Collects the gradient of `normed` from all sub-blocks that take it."""


class _Graph(NamedTuple):
    """The two local graphs of a lane; the second one ends in the partial sum and the losses."""

    reading: LocalReading
    partial: GradientEdge | None
    """None if nothing below it trains, but another lane does."""
    losses: dict[str, GradientEdge]


class MirrorPlan(NamedTuple):
    """Where the gradients of reads go in the backward of a range. The values are those of the example above."""

    crosses_unreduced: bool
    """Whether gradients of reads cross the cuts, and not complete gradients of outputs."""
    crossing: Sequence[range]
    """The reads of this range whose gradients cross to the range before, by slot of the state: [2], [3]."""
    behind: Sequence[range]
    """The reads behind this range whose gradients have crossed to it, by slot of the state: [5], [6]."""
    first_reduced: int
    """The first read whose gradient is reduced here: 4."""
    start: int
    """The state gradient includes all reads from this one on: 7."""
    completed: Mapping[int, Sequence[int]]
    """For each read f the outputs whose gradients are taken from g_f: {7: [4], 6: [3], 5: [2]}."""

    @staticmethod
    def of(plan: ReadPlan, first: int, last: int, sharded: bool) -> "MirrorPlan":
        """Return the plan of sub-blocks `first` to `last` - 1."""
        crosses_unreduced = plan.in_order and not sharded
        crossing = _crossing_reads(plan, first) if crosses_unreduced else []
        behind = _crossing_reads(plan, last) if crosses_unreduced else []
        first_reduced = crossing[-1].stop if crossing else first
        start = behind[-1].stop if behind else last
        needed = set(range(first, last))
        if not crosses_unreduced:
            needed.update(plan.missing(first))
        completed = {
            read: [output for output in plan.arriving(read) if output in needed]
            for read in range(first_reduced, start + 1)
        }
        return MirrorPlan(crosses_unreduced, crossing, behind, first_reduced, start, completed)

    def crossing_norms(self, steps: Sequence[SubBlock], first: int) -> set[RMSNorm]:
        """Return the norms of a range that go backward before the sum over the ranks, and so get partial gradients."""
        return {step.norm for step in steps[: self.first_reduced - first] if not step.reads_own}


def _crossing_reads(plan: ReadPlan, cut: int) -> list[range]:
    """Return the reads behind a cut whose unreduced gradients cross it, by slot of the state."""
    bounds = [cut, *(plan.first_reads[output] for output in plan.missing(cut))]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


class ForwardRecord:
    """A `ForwardPass` over a range of sub-blocks that records what the mirrored backward needs."""

    def __init__(
        self,
        steps: Sequence[SubBlock],
        context: SequenceContext,
        plan: ReadPlan,
        first: int,
        launch: Launch,
        queue: CudaSideQueue | None,
        state_trains: bool,
    ) -> None:
        """Prepare a pass over sub-blocks from `first` on; `launch` starts sums, and `queue` runs reads ahead.

        `state_trains`: whether the state that enters needs a gradient.
        """
        self.steps = steps
        self.context = context
        self.plan = plan
        self.first, self.last = first, first + len(steps)
        self.launch = launch
        self.layout = steps[0].layout
        self.sharded = self.layout.shards > 1
        self.queue = queue
        norms = Counter(step.norm for step in steps if not step.shares_reading for _ in step.lanes)
        self._shared_norms = {norm for norm, uses in norms.items() if uses > 1}
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._collected: dict[RMSNorm, tuple[GradientEdge, Tensor]] = {}
        """For some norms a leaf that stands in for the weight, and what its gradient goes to."""
        self.mirror = MirrorPlan.of(plan, self.first, self.last, self.sharded)
        self._crossing_norms = self.mirror.crossing_norms(steps, self.first)
        self.state_trains = state_trains
        trained = [number for number, step in enumerate(steps, first) if state_trains or step.trains]
        self.first_needed = first
        """The first read whose gradient is needed."""
        if not state_trains:
            seen = [number + 1 if steps[0].reads_own else plan.first_reads[number] for number in trained]
            self.first_needed = min(seen)
        self.backward_order = sorted({*trained, *range(self.first_needed, self.last)}, reverse=True)
        """The sub-blocks that go backward."""
        self._extra_arguments: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """For each sub-block and lane that is recomputed what its body does not compute again."""
        self._lanes: list[list[_Graph | LocalReading | Tensor]] = []
        """For each sub-block and lane its graphs, or only the stream that it read if it is recomputed."""

    def read(
        self, step: int, stream: Tensor, output: Tensor | None, missing: Collection[Output]
    ) -> tuple[Tensor, list[LocalReading]]:
        """See `ForwardPass.read`."""
        stream = stream if output is None else stream + output
        needs_gradient = self.first + step >= self.first_needed
        leaves = (read.detach().requires_grad_(needs_gradient) for read in self.steps[step].reads(stream, missing))
        with_graph = not self.steps[step].recompute and self._needs_normed(step)
        return stream, [self._read(step, leaf, with_graph) for leaf in leaves]

    def _needs_normed(self, step: int) -> bool:
        """Whether a sub-block needs the gradient of its normed stream."""
        return self.first + step >= self.first_needed or self.steps[step].norm.weight.requires_grad

    def start(self, step: int, reading: list[LocalReading], launch: Launch) -> tuple[Output, PassStats]:
        """See `ForwardPass.start`."""
        sub_block = self.steps[step]
        stats = PassStats()
        parts: list[Tensor] = []
        lanes: list[_Graph | LocalReading | Tensor] = []
        goes_backward = self.first + step in self.backward_order
        for lane, read in enumerate(reading):
            if sub_block.recompute or not goes_backward:
                assert read.whole is not None
                part, lane_stats, extra_arguments = sub_block.lanes[lane](read.whole.wait(), self.context)
                if goes_backward:
                    self._extra_arguments[step, lane] = extra_arguments
                    lanes.append(read.stream)
            else:
                graph, part, lane_stats = self._build(step, lane, read)
                lanes.append(graph)
            stats = stats.plus(lane_stats)
            parts.append(part)
        self._lanes.append(lanes)
        return sub_block.start_sum(parts, launch), stats

    def gather_again(self, step: int) -> None:
        """Start to gather the tensor that the backward of a sub-block needs whole and forward did not keep."""
        (recorded,) = self._lanes[step]
        with self.steps[step].named("gather"):
            if isinstance(recorded, _Graph):
                input_gradient = recorded.reading.input_gradient
                if input_gradient.needs_input_again and input_gradient.input_again is None:
                    input_gradient.input_again = self.layout.start_read(recorded.reading.normed)
            elif isinstance(recorded, Tensor):
                # CUDA runs the backward of an operation on the stream of its forward, which is then that of the queue.
                # The wait for the gather makes the computation run after the chain, without a join. The reading keeps
                # what the chain uses until then.
                read = functools.partial(self._read, step, recorded, self._needs_normed(step))
                self._lanes[step] = [read() if self.queue is None else self.queue.run(read, uses=None)]

    def pop_graphs(self, step: int) -> list[_Graph]:
        """Remove and return the graphs of a sub-block."""
        lanes = self._lanes[step]
        self._lanes[step] = []
        graphs = [recorded for recorded in lanes if isinstance(recorded, _Graph)]
        if graphs:
            return graphs
        with self.steps[step].named("recompute"):
            # All lanes are read before the first body runs.
            readings = [
                self._read(step, recorded, self._needs_normed(step)) if isinstance(recorded, Tensor) else recorded
                for recorded in lanes
                if not isinstance(recorded, _Graph)
            ]
            return [self._build(step, lane, reading)[0] for lane, reading in enumerate(readings)]

    def _read(self, step: int, leaf: Tensor, with_graph: bool) -> LocalReading:
        norm = self.steps[step].norm
        with torch.set_grad_enabled(with_graph):
            normed = norm(leaf, stand_in=functools.partial(self._stand_in, step) if with_graph else None)
        detached = normed.detach()
        edge = get_gradient_edge(normed) if with_graph else None
        keeps_input = not self.sharded or self.steps[step].recompute
        input_gradient = InputGradient(self.launch, keeps_input)
        return LocalReading(leaf, edge, detached, self.layout.start_read(detached), input_gradient)

    def _stand_in(self, step: int, weight: Tensor) -> Tensor:
        """Return the weight of the norm of a step, or a leaf that collects its gradients until the pass ends.

        A weight that several sub-blocks or lanes use gets their gradients at once, because ZeRO counts them. One that
        is used on another stream gets its gradient on the current one: DeepSpeed copies a gradient to a bucket on the
        stream on which it arrives, and the one that fills the bucket reduces it there, without waiting for the others.
        """
        norm = self.steps[step].norm
        if weight.requires_grad and (self.queue is not None or norm in self._shared_norms):
            if norm not in self._collected:
                with torch.enable_grad(), torch.cuda.stream(self._stream):
                    edge = get_gradient_edge(weight.view_as(weight))
                self._collected[norm] = edge, weight.detach().requires_grad_()
            _, weight = self._collected[norm]
        if norm in self._crossing_norms and self.first + step >= self.mirror.first_reduced:
            # Complete on every rank, unlike those of its other uses.
            return share_gradient(weight, self.steps[step].group)
        return weight

    def end_pass(self) -> None:
        """Pass on the gradients of the leaves that stand in for weights."""
        for edge, leaf in self._collected.values():
            torch.autograd.backward([edge], [leaf.grad])
        self._collected.clear()

    def _build(self, step: int, lane: int, reading: LocalReading) -> tuple[_Graph, Tensor, PassStats]:
        """Run a body with a graph, and return the graph, the partial sum and the stats. The graph keeps an edge to the
        partial sum and not the tensor, whose storage the reduce overwrites."""
        assert reading.whole is not None
        with torch.enable_grad():
            normed = reading.whole.wait()
            if self._needs_normed(step):
                normed = reached_by_backward(normed)
            body = self.steps[step].lanes[lane]
            extra_arguments = self._extra_arguments.pop((step, lane), ())
            partial, stats, _ = body(normed, self.context, reading.input_gradient, *extra_arguments)
        edges = {name: get_gradient_edge(loss) for name, loss in stats.losses.items() if loss.requires_grad}
        edge = get_gradient_edge(partial) if partial.requires_grad else None
        graph = _Graph(reading._replace(whole=None), edge, edges)
        return graph, partial.detach(), stats.detached()


class _BackwardWalk:
    def __init__(self, record: ForwardRecord, state_gradient: Tensor, losses: Mapping[str, Tensor]) -> None:
        self._record = record
        self._plan = record.mirror
        self._losses = losses
        self._stream_gradient = state_gradient[0]
        """g."""
        self._next_read = self._plan.start
        """The newest read of which g might not include the gradient yet."""
        self._reduces: dict[int, Callable[[], Tensor | None]] = {}
        """Reads that g does not include yet, or the first of several that crossed a cut together, and a function that
        waits for the sum of the gradients over the ranks."""
        self._complete: dict[int, Sequence[Tensor]] = {}
        """Outputs, and the gradient of each lane's part, but for reads whose unreduced gradients are added to it."""
        self._unreduced: dict[int, Sequence[Tensor]] = {}
        """With own partials, unreduced gradients of the reads that some output's parts still need, newest first."""
        self._crossing: list[Sequence[Tensor] | None] = [None for _ in self._plan.crossing]
        """The sums of the gradients that cross to the range before, by slot of the state."""
        self._ahead: InFlight | None = None
        """The gradient of the output of the sub-block that goes backward next."""
        step = record.steps[0]
        slots = [parts[: len(step.lanes)].unbind(0) for parts in output_parts(state_gradient, step)]
        if not self._plan.crosses_unreduced:
            self._complete.update(zip(record.plan.missing(record.last), slots, strict=True))
            return
        for reads, parts in reversed([*zip(self._plan.behind, slots, strict=True)]):
            if reads and reads.start < self._plan.first_reduced:
                self._cross(reads.start, parts)
            elif reads:
                whole = step.start_sum(parts if step.reads_own else [parts[0].clone()], record.launch).whole
                self._keep(reads.start, whole.wait, parts)

    def run(self) -> Tensor | None:
        record = self._record
        if record.sharded:
            record.gather_again(record.backward_order[0] - record.first)
        for number, following in itertools.pairwise([*record.backward_order, None]):
            assert number is not None
            step = number - record.first
            graphs = record.pop_graphs(step)
            if record.sharded:
                gradients: Sequence[Tensor] = [(self._join() or self._start_gather(number)).wait()]
            else:
                gradients = self._output_gradients(number)
            if record.sharded and following is not None:
                record.gather_again(following - record.first)
            if record.queue is not None and following is not None and record.plan.first_reads[following] > number:
                # The gradient of the next output does not depend on the sub-block that is about to run. If g has passed
                # the output, its gather alone uses the gradient, and holds it.
                uses = (self._stream_gradient, *self._reduces.values())
                self._ahead = record.queue.run(functools.partial(self._start_gather, following), uses)
            with record.steps[step].named("backward"):
                self._differentiate(number, graphs, gradients)
        if not record.state_trains:
            # Of norms whose stream needs no gradient.
            for wait in self._reduces.values():
                wait()
        entered = self._entered_state_gradient() if record.state_trains else None
        record.end_pass()
        return entered

    def _keep(self, read: int, wait: Callable[[], Tensor | None], unreduced: Sequence[Tensor]) -> None:
        self._reduces[read] = wait
        if self._record.steps[0].reads_own and self._record.plan.missing(read):
            self._unreduced[read] = unreduced

    def _cross(self, read: int, parts: Sequence[Tensor]) -> None:
        slot = next(slot for slot, reads in enumerate(self._plan.crossing) if read in reads)
        earlier = self._crossing[slot]
        self._crossing[slot] = parts if earlier is None else list(map(torch.add, earlier, parts))

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
        self._advance(self._record.plan.first_reads[output])
        gradients = self._complete.pop(output)
        if not self._record.steps[0].reads_own:
            return gradients
        for read, parts in [*self._unreduced.items()]:
            missing = self._record.plan.missing(read)
            if output in missing:
                gradients = list(map(torch.add, gradients, parts))
            if output == missing[0]:
                # The oldest one is the last to go backward.
                del self._unreduced[read]
        for crossing in self._crossing:
            if crossing is not None:
                gradients = list(map(torch.add, gradients, crossing))
        return gradients

    def _advance(self, read: int) -> None:
        """Make g include the reads from `read` on, and take from it the gradients of outputs on the way."""
        lanes = len(self._record.steps[0].lanes)
        while self._next_read >= read:
            if self._next_read in self._reduces:
                gradient = self._reduces.pop(self._next_read)()
                assert gradient is not None, "a read below the weights that train"
                self._stream_gradient = self._stream_gradient + gradient
            for output in self._plan.completed[self._next_read]:
                self._complete[output] = [self._stream_gradient] * lanes
            self._next_read -= 1

    def _wait_and_norm(self, step: SubBlock, reading: LocalReading) -> Tensor | None:
        gradient = reading.input_gradient.wait()
        with step.named("norm backward"):
            return _run_norm_backward(reading.normed_edge, reading.stream, gradient)

    def _differentiate(self, number: int, graphs: Sequence[_Graph], gradients: Sequence[Tensor]) -> None:
        """Run the backward of a sub-block, for the gradients of its output's parts."""
        step = self._record.steps[number - self._record.first]
        crosses = number < self._plan.first_reduced
        unreduced: list[Tensor] = []
        for graph, gradient in zip(graphs, gradients, strict=True):
            if graph.partial is None:
                continue
            if crosses or step.reads_own:
                starts_sum = graph is graphs[-1] and not crosses and number >= self._record.first_needed
                # Without the graph, whose nodes lead to this function: a cycle through C++ would never be freed.
                norm_backward = functools.partial(_run_norm_backward, graph.reading.normed_edge, graph.reading.stream)
                end_read = functools.partial(self._end_read, step, norm_backward, unreduced, starts_sum)
                graph.reading.input_gradient.launch = end_read
            # Every rank has computed the losses.
            of_losses = [self._losses[name] / step.group.size for name in graph.losses]
            run_backward((graph.partial, *graph.losses.values()), (gradient, *of_losses))
        last = graphs[-1].reading
        in_flight = last.input_gradient.in_flight
        if in_flight is None:
            # The sub-block before it takes the same normed stream, and starts the sum, or nothing needs it.
            return
        if (crosses or step.reads_own) and not unreduced:
            # Only its norm needs the gradient, and has gone backward.
            return
        if crosses:
            self._cross(number, unreduced)
            return
        wait = in_flight.wait if step.reads_own else functools.partial(self._wait_and_norm, step, last)
        self._keep(number, wait, unreduced)

    def _end_read(
        self,
        step: SubBlock,
        norm_backward: Callable[[Tensor], Tensor | None],
        unreduced: list[Tensor],
        starts_sum: bool,
        normed_gradient: Tensor,
    ) -> InFlight:
        """Run the backward of a norm before the sum over the ranks, which that of the last lane starts."""
        gradient = norm_backward(normed_gradient)
        if gradient is not None:
            unreduced.append(gradient)
        if starts_sum:
            return step.start_sum(unreduced, self._record.launch).whole
        return leave_unreduced(normed_gradient)

    def _entered_state_gradient(self) -> Tensor:
        """Return the gradient of the state that entered, which goes to the range before."""
        slots: Sequence[Sequence[Tensor] | None] = self._crossing
        if not self._plan.crosses_unreduced:
            entering = self._record.plan.missing(self._record.first)
            slots = [self._output_gradients(output) for output in reversed(entering)][::-1]
        self._advance(self._plan.first_reduced)
        stream_gradient = self._stream_gradient
        step = self._record.steps[0]
        state = stream_gradient.new_zeros(1 + len(slots) * len(step.lanes) * step.layout.shards, *stream_gradient.shape)
        state[0] = stream_gradient
        for parts, slot in zip(output_parts(state, step), slots, strict=True):
            for lane, part in enumerate(slot or ()):
                parts[lane] = part
        return state


def _run_norm_backward(normed_edge: GradientEdge | None, stream: Tensor, gradient: Tensor) -> Tensor | None:
    """Return the gradient of the stream that a norm has read, if it is needed."""
    assert normed_edge is not None
    run_backward((normed_edge,), (gradient,))
    return stream.grad


class _MirroredRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, record: ForwardRecord) -> tuple[Any, ...]:
        ctx.record = record
        leaving, stats = walk(state, record, record.plan, record.first, record.launch, record.queue)
        ctx.loss_names = [*stats.losses]
        # Only tensors outside of other objects get a gradient.
        return leaving, stats, *stats.losses.values()

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor, _: None, *losses: Tensor) -> tuple[Tensor | None, None]:
        named = dict(zip(ctx.loss_names, losses, strict=True))
        return _BackwardWalk(ctx.record, state_gradient, named).run(), None


def walk_mirrored(state: Tensor, record: ForwardRecord) -> tuple[Tensor, PassStats]:
    """Walk a range forward, such that its backward follows the mirrored rule.

    Parameters get their gradients from inside that backward, as under reentrant checkpointing.
    """
    if not state.requires_grad:
        # Nothing below trains.
        state = reached_by_backward(state)
    leaving, stats, *losses = _MirroredRange.apply(state, record)
    return leaving, stats._replace(losses=dict(zip(stats.losses, losses, strict=True)))
