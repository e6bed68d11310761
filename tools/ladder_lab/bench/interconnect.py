"""The ranks of a benchmark and the interconnect between them."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ladder_lab.bench.calibration import DeviceClock
from ladder_lab.bench.options import BenchmarkOptions
from ladder_lab.link.clocks import ProcessorClock
from ladder_lab.link.link import FIRST_TENSOR_BYTES, EmulatedLink, Message, NoCommGroup, WireTimes
from ladder_lab.link.occupied import OccupiedGroup, count_launch
from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo, check_device, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.symmetric import SymmetricMemoryGroup, check_peers, select_all_reduce
from megatron_ladder.errors import UserError
from megatron_ladder.generate.graph import CudaStepGraph

TIMEOUT_MINUTES = 10.0
SPIN_SECONDS = 0.1
"""Waits poll the clock instead of sleeping: each rank has its own core, and virtual machines wake up late."""

OWN_REDUCES = 50
"""All-reduces in the median time of one on the GPUs' own interconnect, and in the mean of an emulated one."""
TYPICAL_SECONDS = 20e-6
"""Duration with which emulated all-reduces are timed."""


@dataclass(frozen=True)
class Interconnect:
    """A benchmark's tensor-parallel or expert-parallel group; an emulated wire times its waits."""

    name: str
    mesh: ProcessMesh
    wire: CommGroup
    no_comm: NoCommGroup
    device: torch.device
    dtype: torch.dtype

    def set_wire(self, times: WireTimes) -> None:
        """Set the times of collectives from now on; between processes, those of all sizes are equal.

        A wire that is not emulated has its own.
        """
        if isinstance(self.wire, EmulatedLink):
            self.wire.set_wire(times(Message(0, self.wire.size)), 0.0)
        if self.emulated:
            self.emulated.set_wire(times)

    @property
    def emulated(self) -> OccupiedGroup | None:
        """The group, if this process plays its rank 0."""
        return self.wire if isinstance(self.wire, OccupiedGroup) else None

    def close(self) -> None:
        """Release the emulated wire."""
        if isinstance(self.wire, EmulatedLink):
            self.wire.close()


def start_ranks(options: BenchmarkOptions, rank_info: RankInfo) -> torch.device:
    """Join the other processes and return this one's device.

    Raises:
        UserError: the machine lacks what the flags need, or the launcher started another number of processes.
    """
    flag = "--emulate" if options.emulate else f"--{'ep' if options.ep else 'tp'} {options.ranks}"
    processes = 1 if options.emulate else options.ranks
    if rank_info.world_size != processes:
        raise UserError(f"{flag} needs processes: {processes}, but the launcher started {rank_info.world_size}")
    if options.device == "cpu" and options.emulate:
        return torch.device("cpu")
    if options.device == "cpu":
        # One thread and, if there are enough cores, a dedicated core for each rank.
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= rank_info.world_size:
            os.sched_setaffinity(0, {cores[rank_info.local_rank]})
        return start_process_group(rank_info, TIMEOUT_MINUTES, device=torch.device("cpu"))
    device = rank_info.device()
    if device.type == "cpu":
        raise UserError("--device cuda: torch finds no GPU here: use --device cpu")
    check_device(rank_info)
    if options.emulate:
        torch.cuda.set_device(device)
        return device
    if options.tp_all_reduce == "symmetric":
        check_peers(rank_info.world_size, device, torch.bfloat16)
    return start_process_group(rank_info, TIMEOUT_MINUTES)


def make_interconnect(options: BenchmarkOptions, shape: ModelConfig, device: torch.device) -> Interconnect:
    """Build the interconnect; a collective call of all ranks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    replicas = head_replicas(shape, options.tensor_parallel)
    if options.emulate:
        return _emulate(options, replicas, device, dtype)
    mesh = ProcessMesh.build(
        options.tensor_parallel,
        head_replicas=replicas,
        tp_comm_max_ctas=options.comm_sms[0],
        expert_parallel=options.ep or 1,
    )
    communicating = mesh.experts if options.ep else mesh.tensor
    no_comm = NoCommGroup(communicating)
    if options.device == "cpu":
        wire = _emulated_link(options, communicating, shape, dtype)
        return Interconnect(f"emulated {options.link} wire", mesh, wire, no_comm, device, dtype)
    group = select_all_reduce(options.tp_all_reduce, communicating, device, dtype, equal_sums=shape.num_experts > 0)
    name = "symmetric" if isinstance(group, SymmetricMemoryGroup) else "nccl"
    return Interconnect(name, mesh, group, no_comm, device, dtype)


def _emulated_link(options: BenchmarkOptions, group: CommGroup, shape: ModelConfig, dtype: torch.dtype) -> EmulatedLink:
    room = FIRST_TENSOR_BYTES
    if options.ep:
        # A rank sends most if its experts are the choices of all ranks' tokens.
        tokens = options.ep * options.batch * options.sequence
        room = tokens * shape.moe_router_topk * (shape.hidden_size + 1) * dtype.itemsize
    serial = options.link == "serial"
    if options.clock == "processor":
        return EmulatedLink(group, serial=serial, slot_bytes=room, clock=ProcessorClock())
    return EmulatedLink(group, serial=serial, slot_bytes=room, spin_seconds=SPIN_SECONDS)


def _emulate(
    options: BenchmarkOptions, replicas: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Interconnect:
    """Return the interconnect of a process that plays rank 0, without a process group."""
    occupy = count_launch
    if device.type == "cuda":
        # torch for CUDA includes triton.
        from ladder_lab.link.occupying_kernel import occupy
    wire = OccupiedGroup(options.ranks, device, options.comm_sms[0], occupy)
    # Passes send nothing over the ranks that share key heads.
    sharing = {count: CommGroup(range(count), 0, None) for count in replicas}
    single = replace(ProcessMesh.single(), head_replicas=sharing)
    mesh = replace(single, experts=wire) if options.ep else replace(single, tensor=wire)
    interconnect = Interconnect("emulated on one GPU", mesh, wire, NoCommGroup(wire), device, dtype)
    if device.type == "cuda":
        wire.launch_seconds = measure_launch(wire, DeviceClock(device), torch.zeros(4096, dtype=dtype, device=device))
    return interconnect


def measure_launch(wire: OccupiedGroup, clock: DeviceClock, message: Tensor) -> float:
    """Return the seconds that an emulated all-reduce takes beyond its duration.

    It is timed as those are that the durations come from: one after another, in a graph.
    """
    marks: list[Any] = []

    def run() -> Tensor:
        marks[:] = [clock.mark()]
        works = [wire.start_all_reduce(message) for _ in range(OWN_REDUCES)]
        works[-1].wait()
        marks.append(clock.mark())
        return message

    wire.set_wire(lambda _: TYPICAL_SECONDS)
    with closing(CudaStepGraph()) as graph:
        graph.capture(run)
        graph.replay()
        return clock.seconds(*marks) / OWN_REDUCES - TYPICAL_SECONDS
