"""The steps of a model, and the one forward walk over them.

Layouts: the stream and the outputs added to it are [s, b, h], or this rank's positions of that (`comm/stream.py`);
bodies compute with [s, b, h]. Pipeline stages exchange one tensor, the state: the stream, and the outputs that are
missing from it as unreduced partial sums, each in as many parts as the stream has shards:
[1 + pending x shards, s / shards, b, h].
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import SideQueue
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.model.documents import DocumentBounds
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.rotary import RotaryTable
from megatron_ladder.parallel.input_gradient import InputGradient


class KeyValueCache(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, kv_heads/t, s, d] of `layer`, and return those of all positions."""


class SequenceContext(NamedTuple):
    """What every layer needs to know about the positions it processes."""

    rotary: RotaryTable
    """Cosines and sines of the positions."""
    cache: KeyValueCache | None = None
    """Earlier positions; None in training."""
    mask: Tensor | None = None
    """Boolean, True where a query may attend, broadcastable to [b, heads, s, positions]. None means causal: each query
    sees the positions up to its own, and a single query, being the newest, sees all."""
    documents: DocumentBounds | None = None
    """In training, the documents of the rows, outside of which no query attends; None means one document per row."""
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    """Replaces the model's `Operations.attend`."""


class SubBlockBody(Protocol):
    """What a sub-block computes between its norm and the sum over the ranks: an input projection, work on this rank's
    share of it, and an output projection."""

    def __call__(
        self,
        normed: Tensor,
        context: SequenceContext,
        input_gradient: InputGradient | None = None,
        launch: Launch | None = None,
    ) -> InFlight:
        """Return the handle of the output, [s, b, h] or this rank's positions of it.

        Args:
            normed: the normed stream, all positions, [s, b, h].
            context: the positions, and what their queries may attend to.
            input_gradient: receives the gradient of `normed`; None leaves it to autograd.
            launch: starts the sum over the ranks, as in `RowParallelLinear`.
        """


class SubBlock(NamedTuple):
    """One step of the walk: `h(r) = body(norm(r))`, without the residual."""

    norm: RMSNorm
    lanes: Sequence[SubBlockBody]
    """The body; with own partials, one for each lane of this rank."""
    staleness: int
    """Number of earlier outputs that may be missing from the stream it reads."""
    group: CommGroup
    """The ranks that its output is summed over."""
    layout: StreamLayout
    """How these ranks share the stream."""
    recompute: bool
    """Keep only the input for backward."""
    name: str = ""
    """The name in a profile: `layers.3.attention`."""
    span: Span = no_span

    def named(self, activity: str) -> AbstractContextManager[object]:
        """Name the computation inside for a profiler: `layers.3.attention forward`."""
        return self.span(f"{self.name} {activity}")

    @property
    def body(self) -> SubBlockBody:
        """The only body; fails with several lanes."""
        (body,) = self.lanes
        return body

    @property
    def recomputes(self) -> bool:
        """Whether this forward pass keeps only the input."""
        return self.recompute and torch.is_grad_enabled()

    def partial_sum(self, stream: Tensor, context: SequenceContext, norm_weight: Tensor | None = None) -> Tensor:
        """Return this rank's partial sum of the output for a stream, [s, b, h].

        Recomputation repeats the gather of a sharded stream, because its result is not kept. It does not repeat the sum
        over the ranks, which is started outside. `norm_weight` replaces the norm's weight.
        """

        def compute(stream: Tensor) -> Tensor:
            normed = self.layout.start_read(self.norm(stream, norm_weight)).wait()
            return self.body(normed, context, launch=leave_unreduced).partial

        if self.recomputes:
            return checkpoint(compute, stream, use_reentrant=False, preserve_rng_state=False)
        return compute(stream)


Reading = TypeVar("Reading")
"""What a sub-block has read: the stream, between its norm and the first product of the body."""


class ForwardPass(Protocol[Reading]):
    """How a walk computes its sub-blocks, and what it keeps for backward."""

    @property
    def steps(self) -> Sequence[SubBlock]:
        """The sub-blocks, in order."""

    def read(self, index: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, Reading]:
        """Add `output` to the stream if there is one, norm the stream for step `index` and start to gather it.

        Return the stream after the addition, and the reading.
        """

    def start(self, index: int, reading: Reading, launch: Launch) -> InFlight:
        """Run the body of step `index` and launch the sum of its output.

        The sum may overwrite the partial sum: no graph may depend on its values.
        """


class NormedStream(NamedTuple):
    """A reading in autograd's graph."""

    stream: Tensor
    whole: InFlight | None
    """The normed stream, [s, b, h]; None if norm and body are computed together, and again in backward."""


class AutogradPass(NamedTuple):
    """The forward pass whose backward is left to autograd, and the one without a backward."""

    steps: Sequence[SubBlock]
    context: SequenceContext

    def read(self, index: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, NormedStream]:
        """See `ForwardPass.read`."""
        step = self.steps[index]
        if step.recomputes:
            stream = stream if output is None else stream + output
            return stream, NormedStream(stream, None)
        stream, normed = (stream, step.norm(stream)) if output is None else step.norm(stream, output=output)
        return stream, NormedStream(stream, step.layout.start_read(normed))

    def start(self, index: int, reading: NormedStream, launch: Launch) -> InFlight:
        """See `ForwardPass.start`."""
        step = self.steps[index]
        if reading.whole is None:
            return launch(step.partial_sum(reading.stream, self.context))
        return step.body(reading.whole.wait(), self.context, launch=launch)


def walk(
    state: Tensor,
    forward: ForwardPass[Reading],
    pending_out: int,
    layout: StreamLayout,
    launch: Launch,
    side_queue: SideQueue | None,
) -> Tensor:
    """Walk a range of sub-blocks by the rule of `stack.py`.

    Args:
        state: the stream, and the outputs that are missing from it.
        pending_out: outputs that may be missing from the stream that leaves.
        launch: starts to sum a partial sum over the ranks.
        side_queue: runs the read of the next sub-block (wait, add, norm, gather) under the current one where the
            wiring allows it; None reads when the sub-block starts.

    Returns:
        The state that leaves. Its missing outputs are unreduced.
    """
    parts, positions, *rest = state.shape
    stream = state[0]
    entered = state[1:].reshape((parts - 1) // layout.shards, layout.shards * positions, *rest).unbind(0)
    steps = forward.steps
    # A range shorter than its staleness passes on outputs that it neither made nor read.
    reduced_here = len(entered) + len(steps) - pending_out
    pending = deque(
        launch(part.clone()) if number < reduced_here else leave_unreduced(part) for number, part in enumerate(entered)
    )
    ahead: list[Reading] = []

    def read(index: int, missing: int) -> Reading:
        nonlocal stream
        step = steps[index]
        stream = _drain(stream, pending, missing + 1)
        # The norm can add the newest output that it does not miss on its way.
        output = pending.popleft().wait() if len(pending) > missing else None
        with step.named("norm forward"):
            stream, reading = forward.read(index, stream, output)
        return reading

    for index, step in enumerate(steps):
        if side_queue is not None and ahead:
            side_queue.join()
        reading = ahead.pop() if ahead else read(index, step.staleness)
        if side_queue is not None and index + 1 < len(steps) and steps[index + 1].staleness > 0:
            # The output of the sub-block that is about to run will be missing as well.
            missing = steps[index + 1].staleness - 1
            ahead.append(side_queue.run(partial(read, index + 1, missing), uses=(stream, *pending)))
        with step.named("forward"):
            is_reduced = len(entered) + index < reduced_here
            pending.append(forward.start(index, reading, launch if is_reduced else leave_unreduced))
    stream = _drain(stream, pending, pending_out)
    leaving = (in_flight.partial.reshape(-1, *stream.shape) for in_flight in pending)
    return torch.cat([stream.unsqueeze(0), *leaving])


def _drain(stream: Tensor, pending: deque[InFlight], remaining: int) -> Tensor:
    while len(pending) > remaining:
        stream = stream + pending.popleft().wait()
    return stream
