"""One step of a model, and the rule that walks a list of them.

Layouts: the stream and what is added to it are [s, b, h], or this rank's positions of that, as `comm/stream.py` says;
what a body computes with is [s, b, h]. Between processes they travel as one tensor, the state: the stream, and the
outputs that are missing from it as unreduced partial sums, each in as many parts as the stream is cut into,
[1 + pending x shards, s / shards, b, h].
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ladder.comm.aside import Aside
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.model.attention import Midway, SequenceContext
from megatron_ladder.model.norm import RMSNorm

Reading = TypeVar("Reading")
"""What a sub-block has read: the stream, on its way through the norm to the sub-block's first product."""


class NormedStream(NamedTuple):
    """What a sub-block has read, in autograd's graph."""

    stream: Tensor
    whole: InFlight | None
    """The normed stream, [s, b, h]; None if norm and body are computed together, and again in backward."""


class SubBlock(NamedTuple):
    """One step of the walk: `h(r) = body(norm(r))`, without the residual."""

    norm: RMSNorm
    body: nn.Module
    staleness: int
    """Earlier outputs that may be missing from the stream it reads."""
    group: CommGroup
    """The ranks that its output is summed over."""
    layout: StreamLayout
    """How they share the stream."""
    recompute: bool
    """Keep only the input for backward."""
    name: str = ""
    """As a profiler shows it: `layers.3.attention`."""
    span: Span = no_span

    def named(self, what: str) -> AbstractContextManager[object]:
        """Names what is done for this sub-block inside, `layers.3.attention forward`."""
        return self.span(f"{self.name} {what}")

    def read(self, stream: Tensor, output: Tensor | None) -> tuple[Tensor, NormedStream]:
        """Norms the stream, after adding an output to it if there is one, and starts to make it whole.

        Returns:
            The stream, and what was read of it.
        """
        if self.recompute and torch.is_grad_enabled():
            stream = stream if output is None else stream + output
            return stream, NormedStream(stream, None)
        stream, normed = (stream, self.norm(stream)) if output is None else self.norm(stream, output=output)
        return stream, NormedStream(stream, self.layout.start_read(normed))

    def start(self, reading: NormedStream, context: SequenceContext, midway: Midway | None = None) -> InFlight:
        """The output for what was read, its sum started."""
        if reading.whole is None:
            return self.layout.start_write(self.unreduced(reading.stream, context))
        in_flight: InFlight = self.body(reading.whole.wait(), context, midway=midway)
        return in_flight

    def unreduced(self, stream: Tensor, context: SequenceContext, norm_weight: Tensor | None = None) -> Tensor:
        """This rank's partial sum of the output, [s, b, h].

        The output's sum does not lie inside what is recomputed, so it does not run twice; the gather of a sharded
        stream does, since what it gathers is what is not kept.

        Args:
            norm_weight: stands in for the norm's own.
        """

        def partial_sum(stream: Tensor) -> Tensor:
            normed = self.layout.start_read(self.norm(stream, norm_weight)).wait()
            partial: Tensor = self.body(normed, context, launch=False).partial
            return partial

        if self.recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(partial_sum, stream, use_reentrant=False, preserve_rng_state=False)
            return recomputed
        return partial_sum(stream)


def walk(
    stream: Tensor,
    pending: deque[InFlight],
    sub_blocks: Sequence[SubBlock],
    read: Callable[[SubBlock, Tensor, Tensor | None], tuple[Tensor, Reading]],
    apply: Callable[[SubBlock, Reading, Midway | None], InFlight],
    aside: Aside | None = None,
) -> Tensor:
    """The rule. Returns the stream after the last read; `pending` then holds what is still missing from it.

    Args:
        read: given the stream, and the newest output that the sub-block does not miss, since its norm can add that
            on its way; returns the stream with it, and what the sub-block computes with.
        aside: where a sub-block that may read late does so beside the one before it, since what it reads has to be
            gathered first: wait, add, norm and gather then all fly under that one. None reads when its turn comes.
    """
    ahead: list[Reading] = []

    def read_now(sub_block: SubBlock, missing: int) -> Reading:
        nonlocal stream
        stream = drain(stream, pending, missing + 1)
        output = pending.popleft().wait() if len(pending) > missing else None
        with sub_block.named("norm forward"):
            stream, reading = read(sub_block, stream, output)
        return reading

    for index, sub_block in enumerate(sub_blocks):
        if aside is not None and ahead:
            aside.join()
        reading = ahead.pop() if ahead else read_now(sub_block, sub_block.staleness)
        midway: Midway | None = None
        if aside is not None and index + 1 < len(sub_blocks) and sub_blocks[index + 1].staleness > 0:
            following = sub_blocks[index + 1]

            def read_following(_: object = None, following: SubBlock = following, aside: Aside = aside) -> None:
                # The output of the sub-block that is under way will be missing as well.
                missing = following.staleness - 1
                ahead.append(aside.run(lambda: read_now(following, missing), uses=(stream, *pending)))

            if aside.halfway:
                midway = read_following
            else:
                read_following()

        with sub_block.named("forward"):
            pending.append(apply(sub_block, reading, midway))
    return stream


def drain(stream: Tensor, pending: deque[InFlight], remaining: int) -> Tensor:
    """Adds the oldest outputs to the stream until at most `remaining` are missing."""
    while len(pending) > remaining:
        stream = stream + pending.popleft().wait()
    return stream


def split_state(state: Tensor, layout: StreamLayout) -> tuple[Tensor, list[Tensor]]:
    """The stream, and the partial sums [s, b, h] of what is missing from it."""
    parts, positions, *rest = state.shape
    missing = state[1:].reshape((parts - 1) // layout.shards, layout.shards * positions, *rest)
    return state[0], list(missing.unbind(0))


def join_state(stream: Tensor, missing: Iterable[Tensor]) -> Tensor:
    """The state of a stream and the partial sums of what is missing from it."""
    return torch.cat([stream.unsqueeze(0), *(partial.reshape(-1, *stream.shape) for partial in missing)])
