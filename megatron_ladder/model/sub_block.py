"""One step of a model, and the rule that walks a list of them."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, start_all_reduce
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.model.attention import SequenceContext
from megatron_ladder.model.norm import RMSNorm


class SubBlock(NamedTuple):
    """One step of the walk: `h(r) = body(norm(r))`, without the residual."""

    norm: RMSNorm
    body: nn.Module
    staleness: int
    """Earlier outputs that may be missing from the stream it reads."""
    group: CommGroup
    """The ranks that its output is summed over."""
    recompute: bool
    """Keep only the input for backward."""
    name: str = ""
    """As a profiler shows it: `layers.3.attention`."""
    span: Span = no_span

    def named(self, what: str) -> AbstractContextManager[object]:
        """Names what is done for this sub-block inside, `layers.3.attention forward`."""
        return self.span(f"{self.name} {what}")

    def start(self, stream: Tensor, missing: Tensor | None, context: SequenceContext) -> tuple[Tensor, InFlight]:
        """The stream [s, b, h] that it reads, and its output for that, the all-reduce started.

        Args:
            missing: the output that is to be added to the stream before; the norm does it on its way.
        """
        if self.recompute and torch.is_grad_enabled():
            stream = stream if missing is None else stream + missing
            return stream, start_all_reduce(self.unreduced(stream, context), self.group)
        stream, normed = (stream, self.norm(stream)) if missing is None else self.norm(stream, output=missing)
        return stream, self.body(normed, context)

    def unreduced(self, stream: Tensor, context: SequenceContext, norm_weight: Tensor | None = None) -> Tensor:
        """This rank's partial sum of the output; no collective lies inside what is recomputed, so none runs twice.

        Args:
            norm_weight: stands in for the norm's own.
        """

        def partial_sum(stream: Tensor) -> Tensor:
            partial: Tensor = self.body(self.norm(stream, norm_weight), context, launch=False).partial
            return partial

        if self.recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(partial_sum, stream, use_reentrant=False, preserve_rng_state=False)
            return recomputed
        return partial_sum(stream)


def walk(
    stream: Tensor,
    pending: deque[InFlight],
    sub_blocks: Iterable[SubBlock],
    apply: Callable[[SubBlock, Tensor, Tensor | None], tuple[Tensor, InFlight]],
) -> Tensor:
    """The rule. Returns the stream after the last read; `pending` then holds what is still missing from it.

    The newest output that a sub-block does not miss is given to `apply` beside the stream, since the norm can add it.
    """
    for sub_block in sub_blocks:
        stream = drain(stream, pending, sub_block.staleness + 1)
        missing = pending.popleft().wait() if len(pending) > sub_block.staleness else None
        with sub_block.named("forward"):
            stream, in_flight = apply(sub_block, stream, missing)
        pending.append(in_flight)
    return stream


def drain(stream: Tensor, pending: deque[InFlight], remaining: int) -> Tensor:
    """Adds the oldest outputs to the stream until at most `remaining` are missing."""
    while len(pending) > remaining:
        stream = stream + pending.popleft().wait()
    return stream
