"""The steps of a model, and the one forward walk over them.

Ladder, in which each sub-block misses the output of its predecessor (`~~~` is the wire):

    compute   [ norm h_0(r) ][ norm h_1(r) ][ norm h_2(r + y_0) ][ ...
    wire                     ~~~~~ y_0 ~~~~~ ~~~~~ y_1 ~~~~~
                             ^ launch        ^ wait, add to r; the norm adds the last one on its way

    for each sub-block i:
        r = r + wait(y_j)                for the outputs j that sub-block i is the first to see
        y_i = launch(h_i(r))

Layouts: the stream and the outputs added to it are [s, b, h], or this rank's positions of that (`comm/stream.py`);
bodies compute with [s, b, h]. Pipeline stages exchange one tensor, the state: the stream, and the missing outputs as
unreduced partial sums, [1 + pending x shards, s / shards, b, h]. A sub-block's position is its number in the model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

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


class SubBlock(NamedTuple):
    """One step of the walk: `h(r) = body(norm(r))`, without the residual."""

    wired: WiredSubBlock
    norm: RMSNorm
    body: Body
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


Input = TypeVar("Input")
"""What a sub-block computes from: the stream, on its way through the norm to the first product of the body."""


class ForwardPass(Protocol[Input]):
    """How a walk computes its sub-blocks, and what it keeps for backward."""

    @property
    def steps(self) -> Sequence[SubBlock]:
        """The sub-blocks, in order."""

    def start_input(self, step: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, Input]:
        """Add `output` to the stream if there is one, norm the stream for a step and start to gather it.

        Return the stream after the addition, and the input.
        """

    def start_output(self, step: int, input: Input, launch: Launch) -> tuple[InFlight, PassStats]:
        """Run the body of a step and launch the sum of its output.

        The sum may overwrite the partial sum: no graph may depend on its values.
        """


class AutogradPass(NamedTuple):
    """The forward pass whose backward is left to autograd, and the one without a backward.

    An input is the stream, and the normed stream, [s, b, h], in flight. If norm and body are computed together, and
    again in backward, there is only the stream.
    """

    steps: Sequence[SubBlock]
    context: SequenceContext

    def start_input(
        self, step: int, stream: Tensor, output: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, InFlight | None]]:
        """See `ForwardPass.start_input`."""
        sub_block = self.steps[step]
        if sub_block.recomputes:
            stream = stream if output is None else stream + output
            return stream, (stream, None)
        if output is None:
            normed = sub_block.norm(stream)
        else:
            stream, normed = sub_block.norm(stream, output=output)
        return stream, (stream, sub_block.layout.start_read(normed))

    def start_output(
        self, step: int, input: tuple[Tensor, InFlight | None], launch: Launch
    ) -> tuple[InFlight, PassStats]:
        """See `ForwardPass.start_output`."""
        sub_block = self.steps[step]
        stream, normed = input
        if normed is None:
            partial, stats, _ = sub_block.compute(stream, self.context)
        else:
            partial, stats, _ = sub_block.body(normed.wait(), self.context)
        in_flight = launch(partial)
        shared = {name: share_gradient(loss, sub_block.group) for name, loss in stats.losses.items()}
        return in_flight, stats._replace(losses=shared)


def walk(
    state: Tensor,
    forward: ForwardPass[Input],
    plan: ReadPlan,
    first: int,
    launch: Launch,
    queue: CudaSideQueue | None,
) -> tuple[Tensor, PassStats]:
    """Walk a range of sub-blocks by the rule at the top of this file.

    Args:
        state: the stream, and the outputs that are missing from it.
        first: position of the first sub-block of the range.
        launch: starts to sum a partial sum over the ranks.
        queue: prepares the input of the next sub-block (wait, add, norm, gather) under the current one where the plan
            allows it; None prepares it when the sub-block starts.

    Returns:
        The state that leaves, whose missing outputs are unreduced, and the sums of what the bodies return.
    """
    steps, last = forward.steps, first + len(forward.steps)
    # Outputs that enter and leave may include some that this range neither makes nor sees.
    entering, leaving = plan.missing(first), plan.missing(last)
    stream = state[0]
    stats = PassStats()
    pending = dict[int, InFlight]()
    ahead = list[Input]()
    joined: Tensor | None = None
    for output, slots in zip(entering, output_slots(state, len(entering)), strict=True):
        pending[output] = (leave_unreduced if output in leaving else launch)(slots.flatten(0, 1).clone())

    def start_input(position: int) -> Input:
        nonlocal stream
        arriving = [output for output in plan.arriving(position) if output in pending] if position > first else []
        for output in arriving[:-1]:
            stream = stream + pending.pop(output).wait()
        newest = pending.pop(arriving[-1]).wait() if arriving else None
        with steps[position - first].named("norm forward"):
            stream, input = forward.start_input(position - first, stream, newest)
        return input

    for position, step in enumerate(steps, start=first):
        # Prepare the input, or take the one that was prepared ahead.
        if queue is not None and ahead:
            queue.join()
        if not step.shares_input or position == first:
            input = ahead.pop() if ahead else start_input(position)
        next_has_input = position + 1 < last and not steps[position + 1 - first].shares_input
        if queue is not None and next_has_input and position not in plan.arriving(position + 1):
            ahead.append(queue.run(functools.partial(start_input, position + 1), uses=(stream, *pending.values())))
        # Compute, and launch the sum of the output, with that of a joined one.
        launch_sum = leave_unreduced if step.wired.joins_next or position in leaving else launch
        if joined is not None:
            launch_sum = functools.partial(_launch_together, launch_sum, joined)
        with step.named("forward"):
            in_flight, step_stats = forward.start_output(position - first, input, launch_sum)
        stats = stats.plus(step_stats)
        joined = in_flight.partial if step.wired.joins_next else None
        if joined is None:
            pending[position] = in_flight
    # Leave with the outputs that the next sub-block misses.
    for output in plan.arriving(last):
        if output in pending:
            stream = stream + pending.pop(output).wait()
    partials = [in_flight.partial.reshape(-1, *stream.shape) for in_flight in pending.values()]
    return torch.cat([stream.unsqueeze(0), *partials]), stats


def _launch_together(launch: Launch, joined: Tensor, partial: Tensor) -> InFlight:
    return launch(joined + partial)


def output_slots(state: Tensor, outputs: int) -> Sequence[Tensor]:
    """Return the slots of each missing output in a state, or of its gradient in that of a state, [slots, s, b, h]."""
    return state[1:].chunk(outputs) if outputs else ()
