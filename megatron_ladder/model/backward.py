"""The walk of `sub_block.py`, mirrored: backward with the reduces of input gradients in flight.

Ladder (`~~~` is the wire; d_i is this rank's gradient at the input of h_i):

    compute   [ backward of h_3 ][ backward of h_2 ][ backward of h_1 ][ ...
    wire                    ~~~~ d_3 ~~~~      ~~~~ d_2 ~~~~
                                                    ^ wait, norm backward, add to g: g includes the inputs from h_3 on

With f_j the first position that sees output j and G the gradient of the stream after the last sub-block,

    gradient of y_j = g at f_j = G + sum over positions i >= f_j of all_reduce(d_i)

so g grows by the gradient of one input after another, whatever the order in which outputs arrive, and is the gradient
of the outputs that arrive at position f while it includes the inputs from f on: g_f. A norm goes backward after the sum
of its gradient, and its weight's gradient is complete.

Autograd would run these steps in another order (newest node first: launch, wait, launch, wait). Therefore one autograd
Function covers the whole range. It keeps local graphs for each sub-block and walks them itself. With sequence
parallelism, it gathers the gradient of an output, and again the input of the column-parallel product, which is not
kept; norms have read only this rank's tokens, so the gradients of their weights are partial sums.

At a cut, the gradient of the state has as many slots as the state: the stream's, then those of each missing output.
Staleness 2 (position i misses y_{i-1} and y_{i-2}, so f_j = j + 3), 7 sub-blocks, and a range of three, which y_0 and
y_1 enter and y_3 and y_4 leave:

    step                 needs                    gives
    state from behind    [g_7, d_5, d_6]          launches d_6, d_5
    backward of h_4      g_7                      launches d_4
    backward of h_3      g_6 = g_7 + wait(d_6)    d_3
    backward of h_2      g_5 = g_6 + wait(d_5)    d_2
    state to before      g_4 = g_5 + wait(d_4)    [g_4, d_2, d_3]

Positions 2 and 3 miss outputs of the range before. Their gradients cross unreduced, one for each output, and the range
before reduces them under its own first sub-blocks. In general, the slots of an output hold the sum over the positions
from the first of the previous one (at first, from the cut) that miss it. This requires outputs that arrive in order,
and norms that can pass on an unreduced gradient of all tokens, which those of a sharded stream cannot. Otherwise
gradients cross complete: g at the cut, and the gradient of each output as far as it arises behind the cut. `MirrorPlan`
lists the positions.

Output gradients of divided experts need an all-to-all. Each all-to-all starts as soon as g includes the inputs from f_j
on, and overlaps with the sub-blocks in between. If that needs a wait which no whole sub-block has hidden, it happens in
the middle of the sub-block before the experts. Experts that ran in the middle of a sub-block go backward there. In such
models, gradients cross cuts complete, and those of experts' outputs ahead of the others (`cut.py`).

Gradients of weights are needed last. Where nothing is in flight that their products could hide, the products are kept
with their operands (`GradientSink`), for up to one more sub-block, and hide the next collective that is waited for.

Backward ends where nothing below trains. If the state that enters needs no gradient, and y_j are the outputs of
sub-blocks with weights that train, then only inputs from the lowest f_j on need a gradient. Other inputs of sub-blocks
whose norm trains are reduced for it alone; a sub-block with neither keeps no graph.
"""

import contextlib
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
from megatron_ladder.comm.group import Work
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.stream import Crossing, StreamLayout, share_gradient
from megatron_ladder.model.cut import StateMessages, output_slots
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import SequenceContext, SubBlock, runs_inside, walk
from megatron_ladder.parallel.products import GradientSink, InputGradient, reached_by_backward
from megatron_ladder.torch_private import run_backward


class LocalInput(NamedTuple):
    """The first local graph of a sub-block, from the stream to what this rank sends of the input, and its result."""

    stream: Tensor
    """A leaf that collects its gradient."""
    edges: tuple[GradientEdge, ...]
    """Those of what is sent, and of the losses that arise here; none if only the stream is kept for backward, or it
    needs no gradient."""
    sent: Tensor | None
    """This rank's tokens, detached; None if they move to experts, since backward keeps the rows that arrive."""
    crossing: Crossing
    whole: InFlight | None
    """The input of the body; None once the body has used it."""
    input_gradient: InputGradient
    """Collects the gradient of `sent` from all sub-blocks that take it."""
    loss_names: tuple[str, ...]
    stats: PassStats


class LocalGraphs(NamedTuple):
    """The two local graphs of a sub-block; the second one ends in the partial sum and the losses."""

    input: LocalInput
    partial: GradientEdge
    losses: Mapping[str, GradientEdge]


class MirrorPlan(NamedTuple):
    """Where the gradients of inputs go in the backward of a range. The values are those of the example above."""

    crosses_unreduced: bool
    """Whether gradients of inputs cross the cuts, and not complete gradients of outputs."""
    crossing: Sequence[range]
    """The positions of this range whose gradients cross to the range before, by output that crosses: [2], [3]."""
    behind: Sequence[range]
    """The positions behind this range whose gradients have crossed to it, by output that crosses: [5], [6]."""
    first_reduced: int
    """The first position whose gradient is reduced here: 4."""
    start: int
    """The state gradient includes all positions from this one on: 7."""
    completed: Mapping[int, Sequence[int]]
    """For each position f the outputs whose gradients are taken from g_f: {7: [4], 6: [3], 5: [2]}."""

    @staticmethod
    def of(plan: ReadPlan, first: int, last: int, sharded: bool) -> "MirrorPlan":
        """Return the plan of sub-blocks `first` to `last` - 1."""
        crosses_unreduced = plan.in_order and not sharded and not plan.complete
        crossing = _crossing_positions(plan, first) if crosses_unreduced else []
        behind = _crossing_positions(plan, last) if crosses_unreduced else []
        first_reduced = crossing[-1].stop if crossing else first
        start = behind[-1].stop if behind else last
        needed = set(range(first, last))
        if not crosses_unreduced:
            needed.update(plan.missing(first))
        completed = {
            position: [output for output in plan.arriving(position) if output in needed]
            for position in range(first_reduced, start + 1)
        }
        return MirrorPlan(crosses_unreduced, crossing, behind, first_reduced, start, completed)

    def crossing_norms(self, steps: Sequence[SubBlock], first: int) -> set[RMSNorm]:
        """Return the norms of a range that go backward without a sum over the ranks, and so get partial gradients."""
        return {step.norm for step in steps[: self.first_reduced - first]}


def _crossing_positions(plan: ReadPlan, cut: int) -> list[range]:
    """Return the positions behind a cut whose unreduced gradients cross it, by output that crosses it."""
    bounds = [cut, *(plan.arrivals[output] for output in plan.missing(cut))]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


class ForwardRecord:
    """A `ForwardPass` over a range of sub-blocks that records what the mirrored backward needs."""

    def __init__(
        self,
        steps: Sequence[SubBlock],
        context: SequenceContext,
        plan: ReadPlan,
        first: int,
        layout: StreamLayout,
        queue: CudaSideQueue | None,
        state_trains: bool,
        crossing_norms: Collection[RMSNorm],
        overlap: bool,
        messages: StateMessages,
        late: GradientSink | None,
    ) -> None:
        """Prepare a pass over sub-blocks from `first` on; `queue` prepares inputs ahead.

        `state_trains`: whether the state that enters needs a gradient. `crossing_norms` are those of `MirrorPlan`,
        unless all norms get partial gradients. `late` takes the gradients of weights, if they shall hide waits.
        """
        self.steps = steps
        self.context = context
        self.plan = plan
        self.first, self.last = first, first + len(steps)
        self.layout = layout
        self.sharded = self.layout.shards > 1
        self.queue = queue
        self.overlap = overlap
        self.messages = messages
        self.late = late
        self.mirror = MirrorPlan.of(plan, self.first, self.last, self.sharded)
        norms = Counter(step.norm for step in steps if not step.shares_input)
        self._shared_norms = {norm for norm, uses in norms.items() if uses > 1}
        self._crossing_norms = crossing_norms
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._collected: dict[RMSNorm, tuple[GradientEdge, Tensor]] = {}
        """For some norms a leaf that stands in for the weight, and what its gradient goes to."""
        self.state_trains = state_trains
        trained = [position for position, step in enumerate(steps, first) if state_trains or step.trains]
        self._first_needed = first if state_trains else self._first_input_after(trained)
        """The first position whose input needs a gradient."""
        self.backward_order = sorted({*trained, *range(self._first_needed, self.last)}, reverse=True)
        """The sub-blocks that go backward."""
        self._extra_arguments: dict[int, tuple[Tensor, ...]] = {}
        """For each sub-block that is recomputed what its body does not compute again."""
        self._crossings: dict[int, Crossing] = {}
        self._recorded: dict[int, LocalGraphs | LocalInput | Tensor] = {}
        """For each sub-block that goes backward its graphs, or only the stream if it is recomputed."""

    def walk(self, state: Tensor) -> tuple[Tensor, PassStats]:
        """Walk the range forward."""
        return walk(state, self, self.plan, self.first, self.layout, self.queue, self.overlap, self.messages)

    def walk_backward(self, entered: torch.Size, state_gradient: Tensor, losses: Mapping[str, Tensor]) -> Tensor | None:
        """Return the gradient of the state that entered, which had this shape, if it needs one."""
        return BackwardWalk(self, state_gradient, losses).run(entered)

    def start_input(self, step: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, LocalInput]:
        """See `ForwardPass.start_input`."""
        stream = stream if output is None else stream + output
        leaf = stream.detach().requires_grad_(self.first + step >= self._first_needed)
        with_graph = not self.steps[step].recompute and self._needs_normed(step)
        return stream, self._start_input(step, leaf, with_graph)

    def compute(self, step: int, input: LocalInput) -> tuple[Tensor, Launch, PassStats]:
        """See `ForwardPass.compute`."""
        sub_block = self.steps[step]
        self._crossings[step] = input.crossing
        goes_backward = self.first + step in self.backward_order
        if goes_backward and not sub_block.recompute:
            self._recorded[step], partial, stats = self._build(step, input)
            return partial, input.crossing.start_write, stats
        assert input.whole is not None
        partial, stats, extra_arguments = sub_block.body(
            input.whole.wait(), self.context, None, *input.crossing.arguments
        )
        if goes_backward:
            self._extra_arguments[step] = extra_arguments
            self._recorded[step] = input.stream
        return partial, input.crossing.start_write, input.stats.plus(stats)

    def _first_input_after(self, outputs: Sequence[int]) -> int:
        """Return the first position whose input contains one of these outputs."""
        return min(self.plan.arrivals[output] for output in outputs)

    def _needs_normed(self, step: int) -> bool:
        """Whether a sub-block needs the gradient of its input."""
        sub_block = self.steps[step]
        return self.first + step >= self._first_needed or sub_block.norm.weight.requires_grad or sub_block.border.trains

    def gather_again(self, step: int) -> None:
        """Start to gather the tensor that the backward of a sub-block needs whole and forward did not keep."""
        if not self.gathers(step):
            return
        recorded = self._recorded[step]
        with self.steps[step].named("gather"):
            if isinstance(recorded, LocalGraphs):
                input_gradient = recorded.input.input_gradient
                if input_gradient.needs_input_again and input_gradient.input_again is None:
                    assert recorded.input.sent is not None
                    input_gradient.input_again = recorded.input.crossing.start_read(recorded.input.sent)
            elif isinstance(recorded, Tensor):
                # CUDA runs the backward of an operation on the stream of its forward, which is then that of the queue.
                # The wait for the gather makes the computation run after the chain, without a join. The input keeps
                # what the chain uses until then.
                start = functools.partial(self._start_input, step, recorded, self._needs_normed(step))
                queue = None if self.steps[step].wired.moves_tokens else self.queue
                self._recorded[step] = start() if queue is None else queue.run(start, uses=None)

    def gathers(self, step: int) -> bool:
        """Whether the input of a sub-block, and the gradient of its output, come from other ranks."""
        return self.sharded or self.steps[step].wired.moves_tokens

    def crossing(self, position: int) -> Crossing:
        """Return the crossing of a sub-block whose input has been read."""
        return self._crossings[position - self.first]

    def pop_graphs(self, step: int) -> LocalGraphs:
        """Remove and return the graphs of a sub-block."""
        recorded = self._recorded.pop(step)
        if isinstance(recorded, LocalGraphs):
            return recorded
        with self.steps[step].named("recompute"):
            if isinstance(recorded, Tensor):
                recorded = self._start_input(step, recorded, self._needs_normed(step))
            return self._build(step, recorded)[0]

    def _start_input(self, step: int, leaf: Tensor, with_graph: bool) -> LocalInput:
        sub_block = self.steps[step]
        with torch.set_grad_enabled(with_graph):
            normed = sub_block.norm(leaf, stand_in=functools.partial(self._stand_in, step) if with_graph else None)
            part, crossing, stats = sub_block.border.open(normed, self.context, self._crossings.get(step))
        sent = part.detach()
        keeps_input = not self.sharded or sub_block.recompute or sub_block.wired.moves_tokens
        input_gradient = InputGradient(crossing.start_write, keeps_input)
        losses = _gradient_edges(stats.losses)
        edges = (get_gradient_edge(part), *losses.values()) if with_graph else ()
        whole = crossing.start_read(sent)
        kept = None if sub_block.wired.moves_tokens else sent
        return LocalInput(leaf, edges, kept, crossing, whole, input_gradient, (*losses,), stats.detached())

    def _stand_in(self, step: int, weight: Tensor) -> Tensor:
        """Return the weight of the norm of a step, or a leaf that collects its gradients until the pass ends.

        A weight that several sub-blocks use gets their gradients at once, because ZeRO counts them. One that is used on
        another stream gets its gradient on the current one: DeepSpeed copies a gradient to a bucket on the stream on
        which it arrives, and the one that fills the bucket reduces it there, without waiting for the others.
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

    def _build(self, step: int, input: LocalInput) -> tuple[LocalGraphs, Tensor, PassStats]:
        """Run a body with a graph, and return the graphs, the partial sum and the stats. The graph keeps an edge to the
        partial sum and not the tensor, whose storage the reduce overwrites."""
        assert input.whole is not None
        with torch.enable_grad():
            normed = input.whole.wait()
            if self._needs_normed(step):
                normed = reached_by_backward(normed)
            arguments = *input.crossing.arguments, *self._extra_arguments.pop(step, ())
            partial, stats, _ = self.steps[step].body(normed, self.context, input.input_gradient, *arguments)
        losses = _gradient_edges(stats.losses)
        graphs = LocalGraphs(input._replace(whole=None), get_gradient_edge(partial), losses)
        return graphs, partial.detach(), input.stats.plus(stats.detached())


def _gradient_edges(losses: Mapping[str, Tensor]) -> Mapping[str, GradientEdge]:
    return {name: get_gradient_edge(loss) for name, loss in losses.items() if loss.requires_grad}


class _Reduce(NamedTuple):
    """The sum over the ranks of gradients of inputs."""

    in_flight: InFlight
    finish: Callable[[], Tensor | None]
    """Waits for it, and returns the gradient of the stream."""


class BackwardWalk:
    """Walks the sub-blocks of a range backward by the rule at the top of this file."""

    def __init__(self, record: ForwardRecord, state_gradient: Tensor, losses: Mapping[str, Tensor]) -> None:
        """Start with the gradients of the state that left the range, and of the losses."""
        self._record = record
        self._plan = record.mirror
        self._losses = losses
        self._stream_gradient = state_gradient[0]
        """g."""
        self._arriving = record.messages.stream
        """The handle of g where it enters."""
        self._next_position = self._plan.start
        """The newest position whose gradient g might not include yet."""
        self._reduces: dict[int, _Reduce] = {}
        """Positions that g does not include yet, or the first of several that crossed a cut together."""
        self._complete: dict[int, InFlight] = {}
        """Outputs and their gradients."""
        self._crossing: list[Tensor | None] = [None for _ in self._plan.crossing]
        """The sums of the gradients that cross to the range before, by output that crosses."""
        self._started: dict[int, InFlight] = {}
        """Gradients of outputs that have been started ahead."""
        self._running: InputGradient | None = None
        """The gradient of the input of the sub-block whose body goes backward."""
        entered = reversed(record.plan.missing(record.first)) if record.state_trains else ()
        self._exchanged = deque(
            output for output in (*record.backward_order, *entered) if output in record.plan.complete
        )
        """Outputs whose gradients are sent to other ranks, as far as this has not started."""
        left = record.plan.missing(record.last)
        gradients = [self._in_slots(slots) for slots in output_slots(state_gradient, left, record.plan)]
        if not self._plan.crosses_unreduced:
            handles = record.messages.of_outputs(left, record.plan)
            self._complete.update(zip(left, map(InFlight, gradients, handles), strict=True))
            return
        for positions, unreduced in reversed([*zip(self._plan.behind, gradients, strict=True)]):
            if positions:
                self._pass_on(positions.start, unreduced)

    def run(self, entered: torch.Size) -> Tensor | None:
        """Return the gradient of the state that entered the range, which has this shape, if it needs one."""
        late = self._record.late
        with contextlib.nullcontext() if late is None else late.deferring(self._has_in_flight):
            return self._run(entered)

    def _run(self, entered: torch.Size) -> Tensor | None:
        record = self._record
        record.gather_again(record.backward_order[0] - record.first)
        for position, following in itertools.pairwise([*record.backward_order, None]):
            assert position is not None
            if record.steps[position - record.first].wired.moves_tokens and position not in self._started:
                # Under the recomputation, if there is one.
                self._started[position] = self._start_gradient(position)
            if following is not None and self._runs_inside(position, following):
                record.gather_again(following - record.first)
                continue
            self._go_back(position, following)
        self._catch_up()
        if not record.state_trains:
            # Of norms whose stream needs no gradient.
            for reduce in self._reduces.values():
                reduce.finish()
        state_gradient = self._entered_gradient(entered) if record.state_trains else None
        record.end_pass()
        return state_gradient

    def _runs_inside(self, position: int, following: int) -> bool:
        record = self._record
        inside = runs_inside(record.steps, record.plan, record.first, position)
        return inside and following == position - 1 and position in record.backward_order

    def _go_back(self, position: int, following: int | None) -> None:
        """Run the backward of a sub-block, and of the one that has run in its middle."""
        record = self._record
        step = record.steps[position - record.first]
        graphs = record.pop_graphs(position - record.first)
        gradient = self._wait_for_gradient(position)
        if following is not None:
            record.gather_again(following - record.first)
        self._start_ahead(position, following)
        middle = step.body.middle
        if middle is not None:
            middle.backward = functools.partial(self._run_in_the_middle, position)
        with step.named("backward"):
            self._differentiate(position, graphs, gradient)
        if middle is not None:
            # Not reached if nothing before it needs a gradient.
            middle.run_backward()
        if record.late is not None:
            # Operands are not kept for longer than the next sub-block.
            record.late.step()

    def _entered_gradient(self, entered: torch.Size) -> Tensor:
        gradients: Sequence[Tensor | None] = self._crossing
        entering = self._record.plan.missing(self._record.first)
        if not self._plan.crosses_unreduced:
            gradients = [self._wait_for_gradient(output) for output in reversed(entering)][::-1]
        self._advance(self._plan.first_reduced)
        state_gradient = self._stream_gradient.new_zeros(entered)
        state_gradient[0] = self._stream_gradient
        for slots, gradient in zip(output_slots(state_gradient, entering, self._record.plan), gradients, strict=True):
            if gradient is not None:
                slots.copy_(gradient)
        return state_gradient

    def _in_slots(self, slots: Tensor) -> Tensor:
        """Return the gradient in the slots of an output, which are equal."""
        return slots[0]

    def _start_sum(self, unreduced: Tensor) -> InFlight:
        """Start to sum a gradient that crossed a cut over the ranks."""
        return self._record.layout.start_write(unreduced.clone())

    def _pass_on(self, position: int, unreduced: Tensor) -> None:
        """Start to sum the gradient of an input over the ranks, or leave it to the range before."""
        if position >= self._plan.first_reduced:
            in_flight = self._start_sum(unreduced)
            in_flight = in_flight if self._record.overlap else in_flight.completed()
            self._reduces[position] = _Reduce(in_flight, in_flight.wait)
            return
        index = next(index for index, positions in enumerate(self._plan.crossing) if position in positions)
        earlier = self._crossing[index]
        self._crossing[index] = unreduced if earlier is None else earlier + unreduced

    def _run_in_the_middle(self, position: int) -> None:
        """Run the backward of the experts that have run in the middle of a sub-block, or start the all-to-all of the
        output gradient that `_start_ahead` has left for the middle."""
        if self._runs_inside(position + 1, position):
            self._go_back(position + 1, None)
        else:
            self._start_exchanged(position, lambda output: output == position - 1)

    def _start_ahead(self, position: int, following: int | None) -> None:
        """Start the gradients of outputs that do not depend on the sub-block that is about to run: of those that
        need an all-to-all, and with a side queue, that of the next one."""
        record, arrivals = self._record, self._record.plan.arrivals
        waits_inside = record.queue is None and record.steps[position - record.first].body.middle is not None
        self._start_exchanged(position, lambda output: not waits_inside or self._is_hidden(output, position))
        if (
            following is not None
            and record.queue is not None
            and record.gathers(following - record.first)
            and arrivals[following] > position
            and following not in self._started
        ):
            self._start(following)

    def _start_exchanged(self, position: int, is_ready: Callable[[int], bool]) -> None:
        """Start the gradients of outputs that need all-to-alls, if they are ready and do not depend on a sub-block."""
        while self._exchanged and self._exchanged[0] >= position:
            self._exchanged.popleft()
        arrivals = self._record.plan.arrivals
        while self._exchanged and arrivals[self._exchanged[0]] > position and is_ready(self._exchanged[0]):
            self._start(self._exchanged.popleft())

    def _is_hidden(self, output: int, position: int) -> bool:
        """Whether all that the gradient of an output lacks has arrived, or a whole sub-block has hidden it."""
        lacking = range(self._record.plan.arrivals[output], position + 2)
        return not any(self._is_in_flight(one) for one in lacking)

    def _is_in_flight(self, position: int) -> bool:
        return position in self._reduces and self._reduces[position].in_flight.work is not None

    def _start(self, output: int) -> None:
        record = self._record
        start = functools.partial(self._start_gradient, output)
        if record.queue is None:
            self._started[output] = start()
        else:
            # If g has passed the output, its gather alone uses the gradient, and holds it.
            uses = (self._stream_gradient, *self._reduces.values())
            self._started[output] = record.queue.run(start, uses)

    def _start_gradient(self, position: int) -> InFlight:
        """Start to bring the gradient of an output to the ranks that have computed it."""
        record, step = self._record, position - self._record.first
        if step < 0:
            gradient = self._output_gradient(position)
            if position in record.plan.complete:
                record.messages.send(gradient)
            return InFlight(gradient, None)
        if not record.gathers(step):
            return InFlight(self._output_gradient(position), None)
        with record.steps[step].named("output gradient"):
            return record.crossing(position).start_read(self._output_gradient(position))

    def _wait_for_gradient(self, position: int) -> Tensor:
        queue = self._record.queue
        if queue is not None:
            # Before the stream of the computation waits for a chain.
            self._catch_up()
        started = self._started.pop(position, None)
        if started is not None and queue is not None:
            queue.join()
        gradient = started or self._start_gradient(position)
        self._hide(gradient.work)
        return gradient.wait()

    def _has_in_flight(self) -> bool:
        """Whether the gradient of an input or output is in flight."""
        handles = [*self._started.values(), *(reduce.in_flight for reduce in self._reduces.values())]
        if self._running is not None and self._running.in_flight is not None:
            handles.append(self._running.in_flight)
        return any(handle.work is not None for handle in handles)

    def _hide(self, work: Work | None) -> None:
        """Catch up before something in flight is waited for, unless that happens on another stream."""
        if work is not None and self._record.queue is None:
            self._catch_up()

    def _catch_up(self) -> None:
        """Compute the gradients of weights that have been kept."""
        if self._record.late is not None:
            self._record.late.catch_up()

    def _output_gradient(self, output: int) -> Tensor:
        if output not in self._complete:
            self._advance(self._record.plan.arrivals[output])
        gradient = self._complete.pop(output)
        self._hide(gradient.work)
        return gradient.wait()

    def _advance(self, position: int) -> None:
        """Make g include the inputs from `position` on, and take from it the gradients of outputs on the way."""
        if self._arriving is not None:
            self._hide(self._arriving)
            self._arriving.wait()
            self._arriving = None
        while self._next_position >= position:
            if self._next_position in self._reduces:
                reduce = self._reduces.pop(self._next_position)
                self._hide(reduce.in_flight.work)
                gradient = reduce.finish()
                assert gradient is not None, "an input below the weights that train"
                self._stream_gradient = self._stream_gradient + gradient
            for output in self._plan.completed[self._next_position]:
                self._complete[output] = InFlight(self._stream_gradient, None)
            self._next_position -= 1

    def _differentiate(self, position: int, graphs: LocalGraphs, gradient: Tensor) -> None:
        """Run the backward of a sub-block, for the gradient of its output."""
        step = self._record.steps[position - self._record.first]
        input_gradient = graphs.input.input_gradient
        crosses = position < self._plan.first_reduced
        if crosses:
            input_gradient.launch = leave_unreduced
        grad_losses = [self._losses[name] for name in graphs.losses]
        outer, self._running = self._running, input_gradient
        run_backward((graphs.partial, *graphs.losses.values()), (gradient, *grad_losses))
        self._running = outer
        if input_gradient.in_flight is None:
            # The sub-block before it takes the same normed stream, and starts the sum, or nothing needs it.
            return
        reduce = _Reduce(input_gradient.in_flight, functools.partial(self._wait_and_norm, step, graphs.input))
        if not crosses:
            self._reduces[position] = reduce
        elif (unreduced := reduce.finish()) is not None:
            self._pass_on(position, unreduced)

    def _wait_and_norm(self, step: SubBlock, input: LocalInput) -> Tensor | None:
        gradients = input.input_gradient.wait(), *(self._losses[name] for name in input.loss_names)
        with step.named("norm backward"):
            return run_norm_backward(input.edges, input.stream, gradients)


def run_norm_backward(edges: tuple[GradientEdge, ...], stream: Tensor, gradients: tuple[Tensor, ...]) -> Tensor | None:
    """Return the gradient of the stream at the input of a norm, if it is needed."""
    assert edges, "an input that needs no gradient"
    run_backward(edges, gradients)
    return stream.grad


class _MirroredRange(Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, record: ForwardRecord) -> tuple[Any, ...]:
        ctx.record = record
        ctx.entered = state.shape
        leaving, stats = record.walk(state)
        ctx.loss_names = [*stats.losses]
        # Only tensors outside of other objects get a gradient.
        return leaving, stats, *stats.losses.values()

    @staticmethod
    def backward(ctx: Any, state_gradient: Tensor, _: None, *losses: Tensor) -> tuple[Tensor | None, None]:
        named = dict(zip(ctx.loss_names, losses, strict=True))
        return ctx.record.walk_backward(ctx.entered, state_gradient, named), None


def walk_mirrored(state: Tensor, record: ForwardRecord) -> tuple[Tensor, PassStats]:
    """Walk a range forward, such that its backward follows the mirrored rule.

    Parameters get their gradients from inside that backward, as under reentrant checkpointing.
    """
    if not state.requires_grad:
        # Nothing below trains.
        state = reached_by_backward(state)
    leaving, stats, *losses = _MirroredRange.apply(state, record)
    return leaving, stats._replace(losses=dict(zip(stats.losses, losses, strict=True)))
