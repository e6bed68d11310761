"""The steps of a model, and the one forward walk over them.

Ladder, in which each sub-block misses the output of its predecessor (`~~~` is the wire):

    compute   [ norm h_0(r) ][ norm h_1(r) ][ norm h_2(r + y_0) ][ ...
    wire                     ~~~~~ y_0 ~~~~~ ~~~~~ y_1 ~~~~~
                             ^ launch        ^ wait, add to r; the norm adds the last one on its way

    for each sub-block i:
        r = r + wait(y_j)                for the outputs j that sub-block i is the first to see
        y_i = launch(h_i(r))             with own partials: h_i(r + this rank's parts of what is missing from r)

Layouts: the stream and the outputs added to it are [s, b, h], or this rank's positions of that (`comm/stream.py`);
bodies compute with [s, b, h]. Pipeline stages exchange one tensor, the state: the stream, and the missing outputs as
unreduced partial sums, [1 + pending x parts, s / shards, b, h]. An output has as many parts as the stream has shards
(its positions), or, with own partials, as the rank has lanes.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ladder.blueprint.wiring import ReadPlan, WiredSubBlock
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.spans import Span
from megatron_ladder.comm.stream import StreamLayout, share_gradient
from megatron_ladder.model.documents import DocumentBounds
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.rotary import RotaryTable
from megatron_ladder.model.stats import PassStats


class StateCache(Protocol):
    """What sub-blocks remember of earlier positions, in generation: a state for each sub-block and slot of the batch.

    The state of attention is its keys and values [b, kv_heads/t, positions, d].
    """

    def update(self, number: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store what new positions add to a state, and return the state that they see.

        `number` counts the sub-blocks of a kind, and those of each lane.
        """


class SequenceContext(NamedTuple):
    """Facts about the positions that a layer processes, the same for every layer."""

    rotary: RotaryTable
    """Cosines and sines of the positions."""
    cache: StateCache | None = None
    """Earlier positions; None in training."""
    mask: Tensor | None = None
    """Boolean, True where a query may attend, broadcastable to [b, heads, s, positions]. None means causal: each query
    sees the positions up to its own, and a single query, being the newest, sees all."""
    documents: DocumentBounds | None = None
    """In training, the documents of the rows, outside of which no query attends; None means one document per row."""
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] | None = None
    """Replaces the model's `Operations.attend`."""
    token_mask: Tensor | None = None
    """Boolean [s, b], False for padding, which counts neither in losses nor in loads; None: no padding."""
    counts: bool = False
    """Whether bodies return losses and loads, as in training."""


class BodyOutput(NamedTuple):
    """What a body returns."""

    partial: Tensor
    """This rank's partial sum of its output, [s, b, h]."""
    stats: PassStats = PassStats()
    """Without padding. Training adds the means of the losses over the global batch to its loss. Each tensor-parallel
    rank's backward gets their gradient divided by the number of ranks, so that all gradients inside the body are
    partial sums."""
    kept: tuple[Tensor, ...] = ()
    """Further arguments of a recomputation, which it does not compute again."""


class Body(nn.Module):
    """What a sub-block computes between its norm and the sum over the ranks: an input projection, work on this rank's
    share of it, and an output projection.

    `body(normed, context, input_gradient=None, *extra_arguments)` computes the output of the normed stream, all
    positions, [s, b, h]. `input_gradient` receives the gradient of `normed`; None leaves it to autograd. A repetition
    gets as `extra_arguments` what the first run kept; bodies that keep nothing do not take them.
    """

    loss_names: tuple[str, ...] = ()
    """Names of the losses that it returns."""
    __call__: Callable[..., BodyOutput]


class Output(NamedTuple):
    """An output that is missing from the stream."""

    whole: InFlight
    """The sum of the output over the ranks."""
    own: tuple[Tensor, ...] = ()
    """With own partials, the parts of this rank's lanes, which the sub-blocks that miss the output read."""


class SubBlock(NamedTuple):
    """One step of the walk: `h(r) = body(norm(r))`, without the residual."""

    wired: WiredSubBlock
    norm: RMSNorm
    lanes: Sequence[Body]
    """The body; with own partials, one for each lane of this rank."""
    reads_own: bool
    """Own partials: each lane adds its parts of the missing outputs to what it reads."""
    group: CommGroup
    """The ranks that its output is summed over."""
    layout: StreamLayout
    """How these ranks share the stream."""
    recompute: bool
    """Keep only the input for backward."""
    name: str
    """The name in a profile: `layers.3.attention`."""
    span: Span

    def named(self, activity: str) -> AbstractContextManager[object]:
        """Name the computation inside for a profiler: `layers.3.attention forward`."""
        return self.span(f"{self.name} {activity}")

    @property
    def shares_reading(self) -> bool:
        """Whether it takes the normed stream of the sub-block before it; a recomputed one reads by itself."""
        return self.wired.shares_reading and not self.recompute

    @property
    def body(self) -> Body:
        """The only body; fails with several lanes."""
        (body,) = self.lanes
        return body

    @property
    def trains(self) -> bool:
        """Whether some of its weights train."""
        return any(weight.requires_grad for module in (self.norm, *self.lanes) for weight in module.parameters())

    @property
    def recomputes(self) -> bool:
        """Whether this forward pass keeps only the input."""
        return self.recompute and torch.is_grad_enabled()

    def reads(self, stream: Tensor, missing: Iterable[Output]) -> list[Tensor]:
        """Return what each lane reads."""
        lane_reads = [stream for _ in self.lanes]
        for output in missing if self.reads_own else ():
            lane_reads = [read + part for read, part in zip(lane_reads, output.own, strict=True)]
        return lane_reads

    def start_sum(self, parts: Sequence[Tensor], launch: Launch) -> Output:
        """Start the sum of an output, or of the gradient of a read, of which each lane has a part."""
        if not self.reads_own:
            return Output(launch(parts[0]))
        # Not in place, because the parts are read.
        return Output(launch(functools.reduce(torch.add, parts) if len(parts) > 1 else parts[0].clone()), tuple(parts))

    def compute(self, stream: Tensor, context: SequenceContext, norm_weight: Tensor | None = None) -> BodyOutput:
        """Norm a stream and run the body.

        Recomputation repeats the gather of a sharded stream, because its result is not kept. It does not repeat the sum
        over the ranks, which is started outside. `norm_weight` replaces the norm's weight.
        """
        kept: tuple[Tensor, ...] = ()

        def run(stream: Tensor) -> BodyOutput:
            nonlocal kept
            output = self.body(self.layout.start_read(self.norm(stream, norm_weight)).wait(), context, None, *kept)
            kept = output.kept
            return output

        if not self.recomputes:
            return run(stream)
        output: BodyOutput = checkpoint(run, stream, use_reentrant=False, preserve_rng_state=False)
        return output


Reading = TypeVar("Reading")
"""What a sub-block has read: the stream, between its norm and the first product of the body."""


class ForwardPass(Protocol[Reading]):
    """How a walk computes its sub-blocks, and what it keeps for backward."""

    @property
    def steps(self) -> Sequence[SubBlock]:
        """The sub-blocks, in order."""

    def read(
        self, step: int, stream: Tensor, output: Tensor | None, missing: Collection[Output]
    ) -> tuple[Tensor, Reading]:
        """Add `output` to the stream if there is one, norm the stream for a step and start to gather it.

        `missing` are the outputs that the stream then lacks. Return the stream after the addition, and the reading.
        """

    def start(self, step: int, reading: Reading, launch: Launch) -> tuple[Output, PassStats]:
        """Run the body of a step and launch the sum of its output.

        The sum may overwrite the partial sum: no graph may depend on its values.
        """


class AutogradPass(NamedTuple):
    """The forward pass whose backward is left to autograd, and the one without a backward, as always with own parts.

    A reading is the stream, and its normed reads, [s, b, h], in flight. If norm and body are computed together, and
    again in backward, there are none.
    """

    steps: Sequence[SubBlock]
    context: SequenceContext

    def read(
        self, step: int, stream: Tensor, output: Tensor | None, missing: Collection[Output]
    ) -> tuple[Tensor, tuple[Tensor, list[InFlight]]]:
        """See `ForwardPass.read`."""
        sub_block = self.steps[step]
        norm = sub_block.norm
        if not sub_block.recomputes and not sub_block.reads_own:
            stream, normed = (stream, norm(stream)) if output is None else norm(stream, output=output)
            return stream, (stream, [sub_block.layout.start_read(normed)])
        stream = stream if output is None else stream + output
        reads = [] if sub_block.recomputes else sub_block.reads(stream, missing)
        return stream, (stream, [InFlight(norm(read), None) for read in reads])

    def start(self, step: int, reading: tuple[Tensor, list[InFlight]], launch: Launch) -> tuple[Output, PassStats]:
        """See `ForwardPass.start`."""
        sub_block = self.steps[step]
        stream, reads = reading
        if reads:
            body_outputs = [body(read.wait(), self.context) for body, read in zip(sub_block.lanes, reads, strict=True)]
        else:
            body_outputs = [sub_block.compute(stream, self.context)]
        output = sub_block.start_sum([body_output.partial for body_output in body_outputs], launch)
        stats = functools.reduce(PassStats.plus, (body_output.stats for body_output in body_outputs))
        shared = {name: share_gradient(loss, sub_block.group) for name, loss in stats.losses.items()}
        return output, stats._replace(losses=shared)


def walk(
    state: Tensor,
    forward: ForwardPass[Reading],
    plan: ReadPlan,
    first: int,
    launch: Launch,
    queue: CudaSideQueue | None,
) -> tuple[Tensor, PassStats]:
    """Walk a range of sub-blocks by the rule at the top of this file.

    Args:
        state: the stream, and the outputs that are missing from it.
        first: number of the first sub-block of the range in the plan.
        launch: starts to sum a partial sum over the ranks.
        queue: runs the read of the next sub-block (wait, add, norm, gather) under the current one where the plan
            allows it; None reads when the sub-block starts.

    Returns:
        The state that leaves, whose missing outputs are unreduced, and the sums of what the bodies return.
    """
    steps, last = forward.steps, first + len(forward.steps)
    # Outputs that enter and leave may include some that this range neither makes nor reads.
    leaving = plan.missing(last)
    stream = state[0]
    stats = PassStats()
    pending = dict[int, Output]()
    ahead = list[Reading]()
    joined: Tensor | None = None
    for number, parts in zip(plan.missing(first), output_parts(state, steps[0]), strict=True):
        whole = parts.unbind(0) if steps[0].reads_own else [parts.flatten(0, 1).clone()]
        pending[number] = steps[0].start_sum(whole, leave_unreduced if number in leaving else launch)

    def read(number: int) -> Reading:
        nonlocal stream
        arriving = [output for output in plan.arriving(number) if output in pending] if number > first else []
        for output in arriving[:-1]:
            stream = stream + pending.pop(output).whole.wait()
        newest = pending.pop(arriving[-1]).whole.wait() if arriving else None
        with steps[number - first].named("norm forward"):
            stream, reading = forward.read(number - first, stream, newest, pending.values())
        return reading

    for number, step in enumerate(steps, start=first):
        # Read, or take what was read ahead.
        if queue is not None and ahead:
            queue.join()
        if not step.shares_reading or number == first:
            reading = ahead.pop() if ahead else read(number)
        reads_next = number + 1 < last and not steps[number + 1 - first].shares_reading
        if queue is not None and reads_next and number not in plan.arriving(number + 1):
            ahead.append(queue.run(functools.partial(read, number + 1), uses=(stream, *pending.values())))
        # Compute, and launch the sum of the output, with that of a joined one.
        launch_sum = leave_unreduced if step.wired.joins_next or number in leaving else launch
        if joined is not None:
            launch_sum = functools.partial(_launch_together, launch_sum, joined)
        with step.named("forward"):
            output, step_stats = forward.start(number - first, reading, launch_sum)
        stats = stats.plus(step_stats)
        joined = output.whole.partial if step.wired.joins_next else None
        if joined is None:
            pending[number] = output
    # Leave with the outputs that the next read misses.
    for arrived in plan.arriving(last):
        if arrived in pending:
            stream = stream + pending.pop(arrived).whole.wait()
    parts_left = [part for output in pending.values() for part in output.own or [output.whole.partial]]
    return torch.cat([part.reshape(-1, *stream.shape) for part in (stream, *parts_left)]), stats


def _launch_together(launch: Launch, joined: Tensor, partial: Tensor) -> InFlight:
    return launch(joined + partial)


def output_parts(state: Tensor, step: SubBlock) -> Sequence[Tensor]:
    """Return the parts of each missing output in a state, or of each gradient in that of a state: [parts, s, b, h]."""
    count = len(step.lanes) * step.layout.shards
    return [state[start : start + count] for start in range(1, len(state), count)]
