"""What rank 0 tells the other ranks before each step: which slots empty, which requests fill them, whether to stop.

A plan is one broadcast of a few hundred bytes:

    bytes 0 .. 7    length of the plan's MessagePack, little-endian; 0 for the plan that changes nothing
    bytes 8 ..      the MessagePack; what does not fit follows in a second broadcast

It goes over gloo on every device, where a rank that waits for the next plan sleeps.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.generate.requests import GenerationRequest

FIRST_BYTES = 512
LENGTH_BYTES = 8
HEARTBEAT_SECONDS = 10.0
"""Rank 0 sends a plan at least so often, lest the others take it for lost."""
PLAN_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another one's plan: many heartbeats, or one long prompt."""


@dataclass(frozen=True)
class Plan:
    """One step; the one without arguments goes on with what is in the slots."""

    gone: tuple[int, ...] = ()
    """Slots whose requests are given up."""
    admit: dict[int, GenerationRequest] = field(default_factory=dict)
    """New requests by slot."""
    stop: bool = False
    """Whether this is the last plan."""


class PlanChannel:
    """From rank 0 to all ranks."""

    def __init__(self, group: CommGroup) -> None:
        """`group`: of gloo."""
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Plan)

    def share(self, plan: Plan | None) -> Plan:
        """The plan of rank 0, on every rank; the others give None."""
        if self._group.size == 1:
            assert plan is not None
            return plan
        first = bytearray(FIRST_BYTES)
        packed = b""
        if plan is not None:
            packed = b"" if plan == Plan() else self._encoder.encode(plan)
            first[:LENGTH_BYTES] = len(packed).to_bytes(LENGTH_BYTES, "little")
            beginning = packed[: FIRST_BYTES - LENGTH_BYTES]
            first[LENGTH_BYTES : LENGTH_BYTES + len(beginning)] = beginning
        self._group.broadcast(torch.frombuffer(first, dtype=torch.uint8))
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        beginning = bytes(first[LENGTH_BYTES : LENGTH_BYTES + length])
        rest = bytearray(packed[FIRST_BYTES - LENGTH_BYTES :] or max(0, length - len(beginning)))
        if rest:
            self._group.broadcast(torch.frombuffer(rest, dtype=torch.uint8))
        if plan is not None:
            return plan
        return self._decoder.decode(beginning + rest) if length else Plan()
