"""The steps of a model, and the one forward walk over them.

Ladder, in which each sub-block misses the output of its predecessor (`~~~` is the wire):

    compute   [ norm h_0(r) ][ norm h_1(r) ][ norm h_2(r + y_0) ][ ...
    wire                     ~~~~~ y_0 ~~~~~ ~~~~~ y_1 ~~~~~
                             ^ launch        ^ wait, add to r; the norm adds the last one on its way

    for each sub-block i:
        r = r + wait(y_j)                for the outputs j that sub-block i is the first to see
        y_i = launch(h_i(r))

A sub-block reads across its border: `open` maps the normed stream to what this rank sends of the input, and returns
the crossing that carries it there, and the output back. For bodies whose weights are divided over the tensor-parallel
ranks, this is the layout of the stream.

Layouts: the stream and the outputs added to it are [s, b, h], or this rank's positions of that (`comm/stream.py`);
bodies compute with [s, b, h]. Pipeline stages exchange one tensor, the state: the stream, and the missing outputs as
unreduced partial sums, [1 + pending x shards, s / shards, b, h] (`cut.py`). A sub-block's position is its number in the
model.

Routed experts that expert-parallel ranks divide (`blueprint/expert_parallel.py`) read tokens of all these ranks, and
their outputs are complete: they cross a cut as [1, s / shards, b, h]. Their tokens come from other ranks, so the walk
reads ahead up to them: at once where what they see has arrived, or a whole sub-block has hidden it; otherwise in the
middle of the sub-block before (`Middle`). Ladder:

    compute   [ A: projections, scores |][ norms of S, R ][| output ][ S ][ R ][ A of the next layer ...
    wire      ~~~~~~~~~ combine ~~~~~~~~                  ~~ dispatch ~~~     ~~~~~~ combine ~~~~~~~~~

Where the next sub-block sees the output of R at once, R runs in the middle of the one before it. Standard:

    compute   [ norms of S, R ][ S: up |][ R ][| down ][ A of the next layer ...
    wire                       dispatch       combine
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ladder.blueprint.wiring import ReadPlan, WiredSubBlock
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.spans import Span
from megatron_ladder.comm.stream import Crossing, StreamLayout
from megatron_ladder.model.cut import StateMessages, output_slots
from megatron_ladder.model.documents import DocumentBounds
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.stats import PassStats

if TYPE_CHECKING:
    from megatron_ladder.model.mixers.mixer import States


class SequenceContext(NamedTuple):
    """Facts about the positions that a layer processes, the same for every layer."""

    positions: Tensor
    """[s, b or 1] int64."""
    states: "States | None" = None
    """What mixers remember of earlier positions, in generation; None in training."""
    documents: DocumentBounds | None = None
    """In training, the documents of the rows, outside of which tokens do not mix; None means one document per row."""
    prepared: Mapping[str, Any] = MappingProxyType({})
    """What the mixers have made of positions and states for all of their layers, by the mixer's name."""
    token_mask: Tensor | None = None
    """Boolean [s, b], False for padding, which counts neither in losses nor in loads; None: no padding."""
    counts: bool = False
    """Whether bodies return losses and loads, as in training."""


class BodyOutput(NamedTuple):
    """What a body returns."""

    partial: Tensor
    """This rank's partial sum of its output, [s, b, h], or the outputs of its rows."""
    stats: PassStats = PassStats()
    """Without padding. Training adds the means of the losses over the global batch to its loss. A body divides their
    gradient by the number of tensor-parallel ranks, so that all gradients inside of it are partial sums."""
    kept: tuple[Tensor, ...] = ()
    """Further arguments of a recomputation, which it does not compute again."""


class Middle:
    """The place between the work of a body and its output projection, where a walk may wait, read and compute.

    Attributes:
        forward, backward: what the next forward pass, or the next backward of one, does there; reset once it is done.
    """

    forward: Callable[[], object] | None = None
    backward: Callable[[], object] | None = None

    def cross(self, inner: Tensor) -> Tensor:
        """Return what the output projection gets, whose gradient crosses as well."""
        self.run_forward()
        if inner.requires_grad:
            inner.register_hook(lambda _: self.run_backward())
        return inner

    def run_forward(self) -> None:
        """Do what is set for a forward pass, if it has not been done."""
        action, self.forward = self.forward, None
        if action is not None:
            action()

    def run_backward(self) -> None:
        """Do what is set for a backward pass, if it has not been done."""
        action, self.backward = self.backward, None
        if action is not None:
            action()


class Body(nn.Module):
    """What a sub-block computes between its norm and the sum over the ranks: an input projection, work on this rank's
    share of it, and an output projection.

    `body(normed, context, input_gradient=None, *extra_arguments)` computes the output of the normed stream, all
    positions, [s, b, h]. `input_gradient` receives the gradient of `normed`; None leaves it to autograd. The
    `extra_arguments` are those of the crossing, and in a repetition what the first run kept, if there are any.
    """

    loss_names: tuple[str, ...] = ()
    """Names of the losses that it returns."""
    middle: Middle | None = None
    """Where a walk may do something before the output projection."""
    __call__: Callable[..., BodyOutput]


class SentInput(NamedTuple):
    """What a sub-block reads, before anything is communicated."""

    part: Tensor
    """This rank's part of the body's input, in the graph of the normed stream."""
    crossing: Crossing
    stats: PassStats = PassStats()
    """What arises here and not in the body."""


class Border(Protocol):
    """How a sub-block reads the stream."""

    @property
    def trains(self) -> bool:
        """Whether weights that train compute what is sent."""

    def open(self, normed: Tensor, context: SequenceContext, earlier: Crossing | None = None) -> SentInput:
        """Begin to read the normed stream; a repetition gets the crossing of the first time."""


class StreamBorder(NamedTuple):
    """The border of a body that computes a partial sum from all positions."""

    layout: StreamLayout
    trains: bool = False

    def open(self, normed: Tensor, context: SequenceContext, earlier: Crossing | None = None) -> SentInput:
        """See `Border`."""
        return SentInput(normed, self.layout)


class SubBlock(NamedTuple):
    """One step of the walk: `h(r) = body(norm(r))`, without the residual."""

    wired: WiredSubBlock
    norm: RMSNorm
    body: Body
    group: CommGroup
    """The ranks that its output is summed over."""
    border: Border
    recompute: bool
    """Keep only the input for backward."""
    name: str
    """The name in a profile: `layers.3.attention`."""
    span: Span

    def named(self, activity: str) -> AbstractContextManager[object]:
        """Name the computation inside for a profiler: `layers.3.attention forward`."""
        return self.span(f"{self.name} {activity}")

    @property
    def shares_input(self) -> bool:
        """Whether it takes the normed stream of the sub-block before it; a recomputed one norms the stream itself."""
        return self.wired.shares_input and not self.recompute

    @property
    def trains(self) -> bool:
        """Whether some of its weights train."""
        return any(weight.requires_grad for module in (self.norm, self.body) for weight in module.parameters())

    @property
    def recomputes(self) -> bool:
        """Whether this forward pass keeps only the input."""
        return self.recompute and torch.is_grad_enabled()

    def compute(
        self, stream: Tensor, context: SequenceContext, norm_weight: Tensor | None = None
    ) -> tuple[BodyOutput, Launch]:
        """Norm a stream and run the body; return also how the sum of its output starts.

        Recomputation repeats the communication of the input, because its result is not kept. It does not repeat that of
        the output, which is started outside. `norm_weight` replaces the norm's weight.
        """
        crossing: Crossing | None = None
        kept: tuple[Tensor, ...] = ()

        def run(stream: Tensor) -> BodyOutput:
            nonlocal crossing, kept
            sent = self.border.open(self.norm(stream, norm_weight), context, crossing)
            crossing = sent.crossing
            whole = crossing.start_read(sent.part).wait()
            output = self.body(whole, context, None, *crossing.arguments, *kept)
            kept = output.kept
            return output._replace(stats=sent.stats.plus(output.stats))

        output: BodyOutput = (
            checkpoint(run, stream, use_reentrant=False, preserve_rng_state=False) if self.recomputes else run(stream)
        )
        assert crossing is not None
        return output, crossing.start_write


Input = TypeVar("Input")
"""What a sub-block computes from: the stream, on its way through the norm to the first product of the body."""


class ForwardPass(Protocol[Input]):
    """How a walk computes its sub-blocks, and what it keeps for backward."""

    @property
    def steps(self) -> Sequence[SubBlock]:
        """The sub-blocks, in order."""

    def start_input(self, step: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, Input]:
        """Add `output` to the stream if there is one, norm the stream for a step and start to communicate its input.

        Return the stream after the addition, and the input.
        """

    def compute(self, step: int, input: Input) -> tuple[Tensor, Launch, PassStats]:
        """Run the body of a step; return its output, and how the sum of it starts.

        The sum may overwrite the output: no graph may depend on its values.
        """


class StartedInput(NamedTuple):
    """An input that is on its way to the body."""

    whole: InFlight
    crossing: Crossing
    stats: PassStats


class AutogradPass(NamedTuple):
    """The forward pass whose backward is left to autograd, and the one without a backward.

    An input is the stream, and what was started. If norm and body are computed together, and again in backward, there
    is only the stream.
    """

    steps: Sequence[SubBlock]
    context: SequenceContext

    def start_input(
        self, step: int, stream: Tensor, output: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, StartedInput | None]]:
        """See `ForwardPass.start_input`."""
        sub_block = self.steps[step]
        if sub_block.recomputes:
            stream = stream if output is None else stream + output
            return stream, (stream, None)
        if output is None:
            normed = sub_block.norm(stream)
        else:
            stream, normed = sub_block.norm(stream, output=output)
        part, crossing, stats = sub_block.border.open(normed, self.context)
        return stream, (stream, StartedInput(crossing.start_read(part), crossing, stats))

    def compute(self, step: int, input: tuple[Tensor, StartedInput | None]) -> tuple[Tensor, Launch, PassStats]:
        """See `ForwardPass.compute`."""
        sub_block = self.steps[step]
        stream, started = input
        if started is None:
            if sub_block.body.middle is not None:
                # Before the checkpointed function, which backward repeats.
                sub_block.body.middle.run_forward()
            (partial, stats, _), start = sub_block.compute(stream, self.context)
            return partial, start, stats
        whole, crossing, input_stats = started
        partial, stats, _ = sub_block.body(whole.wait(), self.context, None, *crossing.arguments)
        return partial, crossing.start_write, input_stats.plus(stats)


def walk(
    state: Tensor,
    forward: ForwardPass[Input],
    plan: ReadPlan,
    first: int,
    layout: StreamLayout,
    queue: CudaSideQueue | None,
    overlap: bool,
    messages: StateMessages,
) -> tuple[Tensor, PassStats]:
    """Walk a range of sub-blocks by the rule at the top of this file.

    Args:
        state: the stream, and the outputs that are missing from it.
        first: position of the first sub-block of the range.
        layout: how the ranks share the stream.
        queue: prepares the input of the next sub-block (wait, add, norm, gather) under the current one where the plan
            allows it; None prepares it when the sub-block starts.
        overlap: whether outputs and tokens stay in flight; otherwise they are waited for at once.
        messages: those of the state.

    Returns:
        The state that leaves, whose missing outputs are unreduced or complete, and the sums of what inputs and bodies
        count.
    """
    return _ForwardWalk(forward, plan, first, layout, queue, overlap, messages).run(state)


class _ForwardWalk(Generic[Input]):
    def __init__(
        self,
        forward: ForwardPass[Input],
        plan: ReadPlan,
        first: int,
        layout: StreamLayout,
        queue: CudaSideQueue | None,
        overlap: bool,
        messages: StateMessages,
    ) -> None:
        self._forward = forward
        self._steps = forward.steps
        self._plan = plan
        self._first, self._last = first, first + len(forward.steps)
        self._layout = layout
        self._queue = queue
        self._overlap = overlap
        self._messages = messages
        # Outputs that enter and leave may include some that this range neither makes nor sees.
        self._leaving = plan.missing(self._last)
        self._pending: dict[int, InFlight] = {}
        """Outputs that the stream lacks."""
        self._ahead = deque[Input]()
        """Inputs that are prepared."""
        self._next_input = first
        """The first position whose input is not prepared."""
        self._exchanged = deque(position for position, step in enumerate(self._steps, first) if step.wired.moves_tokens)
        """Sub-blocks whose tokens move, as far as their inputs are not prepared."""
        self._joined: Tensor | None = None
        """An output that travels with the next one."""
        self._stats = PassStats()

    def run(self, state: Tensor) -> tuple[Tensor, PassStats]:
        """See `walk`."""
        plan, queue = self._plan, self._queue
        self._stream = state[0]
        entering = plan.missing(self._first)
        handles = self._messages.of_outputs(entering, plan)
        for output, slots, handle in zip(entering, output_slots(state, entering, plan), handles, strict=True):
            if output in plan.complete:
                self._pending[output] = InFlight(slots.flatten(0, 1), handle)
            else:
                self._launch(output, self._layout.start_write, slots.flatten(0, 1).clone())
        for position in range(self._first, self._last):
            if self._overlap and runs_inside(self._steps, plan, self._first, position):
                continue
            if queue is not None and self._ahead:
                queue.join()
            if self._next_input == position:
                self._start_input()
            if self._has_input(position):
                input = self._ahead.popleft()
            if self._overlap:
                self._start_exchanged_inputs(self._is_hidden, position)
            if queue is not None and self._next_can_start(position):
                queue.run(self._start_input, uses=(self._stream, *self._pending.values()))
            self._compute(position, input)
        # Leave with the outputs that the next sub-block misses.
        for output in plan.arriving(self._last):
            if output in self._pending:
                self._stream = self._stream + self._pending.pop(output).wait()
        return self._leaving_state(), self._stats

    def _leaving_state(self) -> Tensor:
        complete = [self._pending.pop(output) for output in self._leaving if output in self._plan.complete]
        partial = [in_flight.wait().reshape(-1, *self._stream.shape) for in_flight in self._pending.values()]
        state = torch.cat([self._stream.unsqueeze(0), *partial])
        if not complete:
            return state
        self._messages.send(state)
        return torch.cat([state, *(in_flight.wait().unsqueeze(0) for in_flight in complete)])

    def _has_input(self, position: int) -> bool:
        """Whether a sub-block does not take the input of the one before it."""
        return position == self._first or not self._steps[position - self._first].shares_input

    def _start_input(self) -> None:
        """Prepare the next input."""
        position = self._next_input
        self._next_input += 1
        if not self._has_input(position):
            return
        arriving = [output for output in self._plan.arriving(position) if output in self._pending]
        for output in arriving[:-1]:
            self._stream = self._stream + self._pending.pop(output).wait()
        newest = self._pending.pop(arriving[-1]).wait() if arriving else None
        step = position - self._first
        with self._steps[step].named("norm forward"):
            self._stream, input = self._forward.start_input(step, self._stream, newest)
        self._ahead.append(input)

    def _start_exchanged_inputs(self, is_ready: Callable[[int, int], bool], position: int) -> None:
        """Let tokens move before it is the turn of their sub-block, if all outputs that have to be added are ready;
        `position` is the sub-block that runs."""
        while self._exchanged and self._exchanged[0] < self._next_input:
            self._exchanged.popleft()
        if not self._exchanged:
            return
        inputs = range(self._next_input, self._exchanged[0] + 1)
        if not all(is_ready(output, position) for one in inputs for output in self._plan.arriving(one)):
            return
        if self._queue is not None and self._ahead:
            self._queue.join()
        for _ in inputs:
            self._start_input()

    def _is_hidden(self, output: int, position: int) -> bool:
        """Whether an output has arrived, or a whole sub-block has hidden it."""
        in_flight = self._pending.get(output)
        if in_flight is None:
            return output < position
        return in_flight.work is None or output < position - 1

    def _is_hidden_or_next(self, output: int, position: int) -> bool:
        """Whether an output is hidden, or the next sub-block waits for it."""
        is_next = output < position and self._plan.arrivals[output] == position + 1
        return is_next or self._is_hidden(output, position)

    def _next_can_start(self, position: int) -> bool:
        """Whether the input of the next sub-block can be prepared while this one runs."""
        following = position + 1
        if self._next_input != following or following == self._last or not self._has_input(following):
            return False
        # A router's matrix is used, and gets its gradient, on the stream of the computation.
        is_exchanged = self._steps[following - self._first].wired.moves_tokens
        return not is_exchanged and position not in self._plan.arriving(following)

    def _compute(self, position: int, input: Input) -> None:
        """Compute, and start the sum of the output, with that of a joined one."""
        step = self._steps[position - self._first]
        joined, self._joined = self._joined, None
        if step.body.middle is not None and self._overlap:
            step.body.middle.forward = functools.partial(self._run_in_the_middle, position, torch.is_grad_enabled())
        with step.named("forward"):
            partial, start, stats = self._forward.compute(position - self._first, input)
            self._stats = self._stats.plus(stats)
            if joined is not None:
                partial = joined + partial
            if step.wired.joins_next:
                self._joined = partial
            else:
                self._launch(position, start, partial)

    def _run_in_the_middle(self, position: int, enable_grad: bool) -> None:
        """Run the experts that belong in the middle of a sub-block, or let the tokens of later ones move."""
        with torch.set_grad_enabled(enable_grad):
            if runs_inside(self._steps, self._plan, self._first, position + 1):
                self._compute(position + 1, self._ahead.popleft())
            else:
                self._start_exchanged_inputs(self._is_hidden_or_next, position)

    def _launch(self, position: int, start: Launch, partial: Tensor) -> None:
        if position in self._leaving and position not in self._plan.complete:
            start = leave_unreduced
        in_flight = start(partial)
        self._pending[position] = in_flight if self._overlap else in_flight.completed()


def runs_inside(steps: Sequence[SubBlock], plan: ReadPlan, first: int, position: int) -> bool:
    """Return whether a sub-block runs in the middle of the one before it, if outputs stay in flight.

    These are experts that read the same stream, and whose output the next sub-block sees, so that only the sub-block
    before them can hide both ways of their tokens.
    """
    step = position - first
    if not 0 < step < len(steps) or not steps[step].wired.moves_tokens or steps[step - 1].body.middle is None:
        return False
    reads_same = not plan.arriving(position) and plan.arrivals[position - 1] > position
    return reads_same and plan.arrivals[position] == position + 1
