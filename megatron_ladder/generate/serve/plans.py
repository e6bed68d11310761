"""Step plans: before each step, rank 0 broadcasts which slots to release and which requests to admit.

A plan is one broadcast of a few hundred bytes:

    bytes 0 .. 7    length of the plan's MessagePack, little-endian; 0 for a plan without changes
    bytes 8 ..      the MessagePack; the part that does not fit follows in a second broadcast

The broadcast uses gloo on every device, because ranks that wait for a gloo message sleep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.slots import SlotBatch

_FIRST_BYTES = 512
_LENGTH_BYTES = 8
HEARTBEAT_SECONDS = 10.0
"""Longest interval between two plans, so that the other ranks do not time out."""
PLAN_TIMEOUT = timedelta(minutes=5)
"""Timeout of a rank that waits for a plan: many heartbeats, or one long prompt."""


@dataclass(frozen=True)
class StepPlan:
    """Changes before one step; the default continues with the samples that are in the slots."""

    release: tuple[int, ...] = ()
    """Slots whose samples were cancelled."""
    admit: dict[int, GenerationRequest] = field(default_factory=dict)
    """New requests by slot."""
    stop: bool = False
    """Whether this is the last plan."""


class PlanChannel:
    """Broadcasts plans from rank 0 to all ranks."""

    def __init__(self, group: CommGroup) -> None:
        """`group`: over gloo."""
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def share(self, plan: StepPlan | None) -> StepPlan:
        """Return rank 0's plan on every rank; the other ranks pass None."""
        if self._group.size == 1:
            assert plan is not None
            return plan
        first = bytearray(_FIRST_BYTES)
        packed = b""
        if plan is not None:
            packed = b"" if plan == StepPlan() else self._encoder.encode(plan)
            first[:_LENGTH_BYTES] = len(packed).to_bytes(_LENGTH_BYTES, "little")
            beginning = packed[: _FIRST_BYTES - _LENGTH_BYTES]
            first[_LENGTH_BYTES : _LENGTH_BYTES + len(beginning)] = beginning
        self._group.broadcast(torch.frombuffer(first, dtype=torch.uint8))
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        beginning = bytes(first[_LENGTH_BYTES : _LENGTH_BYTES + length])
        rest = bytearray(packed[_FIRST_BYTES - _LENGTH_BYTES :] or max(0, length - len(beginning)))
        if rest:
            self._group.broadcast(torch.frombuffer(rest, dtype=torch.uint8))
        if plan is not None:
            return plan
        return self._decoder.decode(beginning + rest) if length else StepPlan()


def run_plans(
    batch: SlotBatch,
    channel: PlanChannel,
    next_plan: Callable[[], StepPlan] | None = None,
    on_tokens: Callable[[Sequence[NewToken]], None] | None = None,
) -> None:
    """Run steps until a plan stops; every rank must call it.

    Args:
        next_plan: returns rank 0's next plan, and may wait for it; None on the other ranks.
        on_tokens: receives the tokens of each step before the slots of finished samples are released; on rank 0.

    Raises:
        BadNumbersError: the model's logits are not finite; on every rank.
    """

    def take(tokens: Sequence[NewToken]) -> None:
        if on_tokens is not None:
            on_tokens(tokens)
        for token in tokens:
            if token.finish_reason is not None:
                batch.release(token.sample)

    while True:
        plan = channel.share(None if next_plan is None else next_plan())
        if plan.stop:
            return
        for slot in plan.release:
            batch.release(slot)
        if plan.admit:
            take(batch.admit(plan.admit))
        if batch.is_busy():
            take(batch.step())
