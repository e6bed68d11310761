"""The ranks of a benchmark and the interconnect between them."""

import os
from dataclasses import dataclass

import torch

from ladder_lab.bench.options import BenchmarkOptions
from ladder_lab.link.link import EmulatedLink, NoCommGroup
from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo, check_device, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.symmetric import SymmetricMemoryGroup, check_peers, select_all_reduce
from megatron_ladder.errors import UserError

TIMEOUT_MINUTES = 10.0
SPIN_SECONDS = 0.1
"""Waits poll the clock instead of sleeping: each rank has its own core, and virtual machines wake up late."""


@dataclass(frozen=True)
class Interconnect:
    """A benchmark's tensor-parallel group; an emulated wire times its waits."""

    name: str
    mesh: ProcessMesh
    wire: CommGroup
    no_comm: NoCommGroup
    device: torch.device
    dtype: torch.dtype

    def set_wire(self, seconds: float) -> None:
        """Set the time of an all-reduce from now on; a wire that is not emulated has its own."""
        if isinstance(self.wire, EmulatedLink):
            self.wire.set_wire(seconds, 0.0)

    def close(self) -> None:
        """Release the emulated wire."""
        if isinstance(self.wire, EmulatedLink):
            self.wire.close()


def start_ranks(options: BenchmarkOptions, place: RankInfo) -> torch.device:
    """Join the other processes and return this one's device.

    Raises:
        UserError: the machine lacks what the flags need, or the launcher started another number of processes.
    """
    if place.world_size != options.tp:
        raise UserError(f"--tp {options.tp} needs as many processes, but the launcher started {place.world_size}")
    if options.device == "cpu":
        # One thread and, if there are enough cores, a dedicated core for each rank.
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= place.world_size:
            os.sched_setaffinity(0, {cores[place.local_rank]})
        return start_process_group(place, TIMEOUT_MINUTES, device=torch.device("cpu"))
    device = place.device()
    if device.type == "cpu":
        raise UserError("--device cuda: torch finds no GPU here: use --device cpu")
    check_device(place)
    if options.tp_all_reduce == "symmetric":
        check_peers(place.world_size, device, torch.bfloat16)
    return start_process_group(place, TIMEOUT_MINUTES)


def make_interconnect(options: BenchmarkOptions, shape: ModelConfig, device: torch.device) -> Interconnect:
    """Build the interconnect; a collective call of all ranks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mesh = ProcessMesh.build(
        options.tp, kv_replicas=key_value_replicas(shape, options.tp), tp_comm_max_ctas=options.comm_sms
    )
    no_comm = NoCommGroup(mesh.tensor)
    if options.device == "cpu":
        wire = EmulatedLink(mesh.tensor, serial=options.link == "serial", spin_seconds=SPIN_SECONDS)
        return Interconnect(f"emulated {options.link} wire", mesh, wire, no_comm, device, dtype)
    group = select_all_reduce(options.tp_all_reduce, mesh.tensor, device, dtype, equal_sums=shape.num_experts > 0)
    name = "symmetric" if isinstance(group, SymmetricMemoryGroup) else "nccl"
    return Interconnect(name, mesh, group, no_comm, device, dtype)
