"""The emulated interconnect of `link.py` on a GPU: one device runs one rank's share of a larger group.

The other ranks are not there. They are taken to run alike, so that the latest launch of collective k is this rank's;
nothing is summed, and **results are wrong numbers**: only times mean something, and whoever prints them says that they
are emulated. Collective k is done at

    end(k) = max(launch of k, end(k - 1)) + alpha + bytes * beta         serial wire
    end(k) =     launch of k              + alpha + bytes * beta         pipelined wire

by the device's clock. Nothing of this is on the host:

    compute   [ h_0 ]-.         [ h_1              ]-.     .-[ h_2 ...
    stamps            `[t]-.                          `[t]-|--.
    wire                    `[ carries y_0 ~~~~~~~~ ]------'   `[ carries y_1 ~~~
                       ^ launch of 0                ^ end(0)

A stamp notes when the compute stream reached the launch; the wire's stream itself may be busy then. The stand-in kernel
takes a stated number of multiprocessors, as a real collective does, moves the bytes that each rank of a ring sends
within memory of its own, and holds until the end. A pipelined wire has several streams.

Launch and end are late by what the device takes to start a kernel, some microseconds, as those of real collectives are.
"""

import importlib
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.lab.link.cuda_streams import SideStream, StreamWork, WaitMeter
from megatron_ladder.lab.link.link import LinkSpec

SLOTS = 1024
"""Launches whose times are kept: more than are ever in flight."""
PIPELINED_LANES = 8
"""Collectives that a pipelined wire carries at once; one more waits for the eighth before it."""
SCRATCH_BYTES = 1 << 27
"""Memory within which bytes are moved, half to half: more than the device's cache."""


class Kernels(Protocol):
    """What runs on the device: `stand_in_kernels.StandInKernels`, where the arguments are explained."""

    def stamp(self, launched: Tensor, slot: int) -> None:
        """launched[slot] = the time."""

    def carry(
        self, launched: Tensor, ends: Tensor, slot: int, before: int, scratch: Tensor, num_bytes: int, wire_ns: int,
        *, serial: bool, sms: int,
    ) -> None:  # fmt: skip
        """Moves bytes, and ends at ends[slot]."""


class CudaLink(CommGroup):
    """Rank 0 of a group of which the others, and the wire to them, are emulated.

    As of `EmulatedLink`, a reduce-scatter and an all-gather take half of an all-reduce's time each, the wire can be
    changed, and there are counters. Every call is this process's own; gathering repeats this rank's values. At most
    `SLOTS` collectives are in flight. It can be captured in a CUDA graph once both kernels have run.

    Attributes:
        spec: what the wire does to collectives launched from now on.
        sms: multiprocessors that a collective takes.
        collectives: launched since the counters were reset.
    """

    def __init__(
        self, size: int, spec: LinkSpec, device: torch.device, *, sms: int, kernels: Kernels | None = None
    ) -> None:
        """Takes memory and streams on `device`.

        Args:
            size: ranks of the emulated group.
            kernels: those of Triton if not given.
        """
        super().__init__(range(size), 0, None)
        self.spec = spec
        self.sms = sms
        self.collectives = 0
        self._kernels = kernels or _triton_kernels()
        self._meter = WaitMeter()
        self._number = 0
        self._launched, self._ends = torch.zeros(2, SLOTS, dtype=torch.int64, device=device).unbind(0)
        self._scratch = torch.zeros(2, SCRATCH_BYTES // 8, dtype=torch.int32, device=device)
        self._stamps = SideStream(device)
        self._lanes = [SideStream(device) for _ in range(1 if spec.serial else PIPELINED_LANES)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def waited_seconds(self) -> float:
        """Time that the compute stream spent waiting since the counters were reset; blocks until it is known."""
        return self._meter.seconds()

    def set_wire(self, alpha_seconds: float, seconds_per_byte: float) -> None:
        """Changes the wire for collectives launched from now on."""
        self.spec = replace(self.spec, alpha_seconds=alpha_seconds, seconds_per_byte=seconds_per_byte)

    def reset_counters(self) -> None:
        """Sets `waited_seconds` and `collectives` to zero."""
        self._meter.reset()
        self.collectives = 0

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Sends a collective of the tensor's size over the wire; the tensor keeps this rank's own values."""
        if self.size == 1:
            return None
        return self._launch(tensor, tensor, halves=2)

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """This rank's rows of its own values, after half of an all-reduce's time."""
        if self.size == 1:
            return tensor, None
        rows = tensor.chunk(self.size)[self.rank]
        return rows, self._launch(tensor, rows, halves=1)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """This rank's rows as often as there are ranks, after half of the time of an all-reduce of the result."""
        if self.size == 1:
            return tensor, None
        whole = torch.cat([tensor] * self.size)
        return whole, self._launch(whole, whole, halves=1)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`tensor` as it is, for a sum after the wire's time."""
        work = self.start_all_reduce(tensor) if op == dist.ReduceOp.SUM else None
        if work is not None:
            work.wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's tensor, as often as there are ranks, along `dim`; the wire is not asked."""
        return torch.cat([tensor] * self.size, dim)

    def gather_objects(self, value: object) -> list[Any]:
        """This rank's value, as often as there are ranks."""
        return [value] * self.size

    def broadcast_object(self, value: object) -> Any:
        """`value`."""
        return value

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """`tensor` as it is."""
        return tensor

    def barrier(self) -> None:
        """Returns at once: the others are where this rank is."""

    def close(self) -> None:
        """Nothing to give back; as of `EmulatedLink`."""

    def _launch(self, whole: Tensor, result: Tensor, halves: int) -> StreamWork:
        """Takes the wire for so many halves of an all-reduce of `whole`; `result` is kept until its wait."""
        num_bytes = whole.numel() * whole.element_size()
        slot, before = self._number % SLOTS, (self._number - 1) % SLOTS
        lane = self._lanes[self._number % len(self._lanes)]
        launched = self._stamps.put(lambda: self._kernels.stamp(self._launched, slot))
        done = lane.put(
            lambda: self._kernels.carry(
                self._launched,
                self._ends,
                slot,
                before,
                self._scratch,
                round(halves * (self.size - 1) / self.size * num_bytes),
                round(halves / 2 * self.spec.seconds(num_bytes) * 1e9),
                serial=self.spec.serial,
                sms=self.sms,
            ),
            after=launched,
        )
        self._number += 1
        self.collectives += 1
        return StreamWork(result, done, self._meter)


def _triton_kernels() -> Kernels:
    # Not above: triton comes with torch for CUDA alone.
    kernels: Kernels = importlib.import_module("megatron_ladder.lab.link.stand_in_kernels").StandInKernels()
    return kernels
