"""The emulated interconnect of `link.py` on a GPU: one device runs one rank's share of a larger group.

The other ranks do not exist. They are assumed to run in lockstep, so the latest launch of collective k is this rank's.
Nothing is summed, so **results are wrong numbers**: only times are meaningful, and programs that print them state that
they are emulated. Collective k is done at

    end(k) = max(launch of k, end(k - 1)) + alpha + bytes * beta         serial wire
    end(k) =     launch of k              + alpha + bytes * beta         pipelined wire

by the device's clock. The host takes no part in the timing:

    compute   [ h_0 ]-.         [ h_1              ]-.     .-[ h_2 ...
    stamps            `[t]-.                          `[t]-|--.
    wire                    `[ carries y_0 ~~~~~~~~ ]------'   `[ carries y_1 ~~~
                       ^ launch of 0                ^ end(0)

A stamp records when the compute stream reached the launch; the wire's stream itself may be busy then. The stand-in
kernel occupies a stated number of multiprocessors, as a real collective does, moves the bytes that each rank of a ring
sends within its own memory, and holds until the end. A pipelined wire has several streams.

Launch and end are late by the time that the device takes to start a kernel, some microseconds, as in real collectives.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.link.cuda_groups import MeteredWork, WaitMeter
from ladder_lab.link.link import LinkSpec, WireGroup
from megatron_ladder.comm.group import Work
from megatron_ladder.comm.symmetric import SideStream, StreamWork

SLOTS = 1024
"""Launches whose times are kept: more than are ever in flight."""
PIPELINED_LANES = 8
"""Collectives that a pipelined wire carries at once; the next one waits for the eighth before it."""
SCRATCH_BYTES = 1 << 27
"""Memory within which bytes are moved, from one half to the other: more than the device's cache."""


class Kernels(Protocol):
    """The two kernels that run on the device."""

    def stamp(self, launched: Tensor, slot: int) -> None:
        """Store the time in launched[slot]."""

    def carry(
        self,
        launched: Tensor,
        ends: Tensor,
        slot: int,
        before: int,
        scratch: Tensor,
        num_bytes: int,
        wire_ns: int,
        *,
        serial: bool,
        sms: int,
    ) -> None:
        """Move bytes in `sms` programs, and finish at ends[slot] = launched[slot] + wire_ns.

        Args:
            launched: [slots] int64.
            ends: [slots] int64; with `serial`, the wire is busy until ends[before].
            scratch: [2, words] int32; bytes move from the first half to the second, repeatedly if there are more.
        """


class CudaLink(WaitMeter, WireGroup):
    """Rank 0 of a group whose other ranks, and the wire to them, are emulated.

    As in `EmulatedLink`, a reduce-scatter and an all-gather each take half of an all-reduce's time, the wire can be
    changed, and there are counters. No call is collective; gathering repeats this rank's values. At most `SLOTS`
    collectives are in flight. The link can be captured in a CUDA graph after both kernels have run once.
    """

    def __init__(
        self, size: int, spec: LinkSpec, device: torch.device, *, sms: int, kernels: Kernels | None = None
    ) -> None:
        """Emulate `size` ranks with collectives that occupy `sms` multiprocessors, by default with Triton's kernels."""
        WaitMeter.__init__(self)
        WireGroup.__init__(self, range(size), 0, None, spec)
        self.sms = sms
        if kernels is None:
            # Imported here because triton comes only with torch for CUDA.
            from ladder_lab.link.stand_in_kernels import StandInKernels

            kernels = StandInKernels()
        self._kernels = kernels
        self._number = 0
        self._launched, self._ends = torch.zeros(2, SLOTS, dtype=torch.int64, device=device).unbind(0)
        self._scratch = torch.zeros(2, SCRATCH_BYTES // 8, dtype=torch.int32, device=device)
        self._stamps = SideStream(device)
        self._lanes = [SideStream(device) for _ in range(1 if spec.serial else PIPELINED_LANES)]

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Send a collective of the tensor's size over the wire; the tensor keeps this rank's values."""
        if self.size == 1:
            return None
        return self._launch(tensor, tensor, halves=2)

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Return this rank's rows of its own values, after half of an all-reduce's time."""
        if self.size == 1:
            return tensor, None
        rows = tensor.chunk(self.size)[self.rank]
        rows = rows if into is None else into.copy_(rows)
        return rows, self._launch(tensor, rows, halves=1)

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Return this rank's rows, repeated for every rank, after half of an all-reduce's time for the result."""
        if self.size == 1:
            return tensor, None
        whole = torch.cat([tensor] * self.size)
        whole = whole if into is None else into.copy_(whole)
        return whole, self._launch(whole, whole, halves=1)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return `tensor` unchanged; a sum takes the wire's time."""
        if op == dist.ReduceOp.SUM and (work := self.start_all_reduce(tensor)):
            work.wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Repeat this rank's tensor for every rank along `dim`, without the wire."""
        return torch.cat([tensor] * self.size, dim)

    def gather_objects(self, value: object) -> list[Any]:
        """Repeat this rank's value for every rank."""
        return [value] * self.size

    def broadcast_object(self, value: object) -> Any:
        """Return `value`."""
        return value

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return `tensor` unchanged."""
        return tensor

    def barrier(self) -> None:
        """Return at once: the emulated ranks run in lockstep."""

    def _launch(self, whole: Tensor, result: Tensor, halves: int) -> MeteredWork:
        """Occupy the wire for `halves` halves of an all-reduce of `whole`; keep `result` until the wait."""
        slot, before = self._number % SLOTS, (self._number - 1) % SLOTS
        lane = self._lanes[self._number % len(self._lanes)]
        launched = self._stamps.put(lambda: self._kernels.stamp(self._launched, slot))
        moved = round(halves * (self.size - 1) / self.size * whole.nbytes)
        wire_ns = round(halves / 2 * self.spec.seconds(whole.nbytes) * 1e9)

        def carry() -> None:
            self._kernels.carry(
                self._launched,
                self._ends,
                slot,
                before,
                self._scratch,
                moved,
                wire_ns,
                serial=self.spec.serial,
                sms=self.sms,
            )

        done = lane.put(carry, after=launched)
        self._number += 1
        self.collectives += 1
        return MeteredWork(StreamWork(result, done), self)
