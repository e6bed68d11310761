"""The ranks of a benchmark and the interconnect between them."""

import os
from dataclasses import dataclass, replace

import torch

from ladder_lab.bench.options import ComparisonOptions
from ladder_lab.link.cuda_groups import MeteredGroup
from ladder_lab.link.cuda_link import CudaLink
from ladder_lab.link.link import EmulatedLink, LinkSpec, NoCommGroup, WireGroup
from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.symmetric import SymmetricMemoryGroup, check_peers, select_all_reduce
from megatron_ladder.errors import UserError

TIMEOUT_MINUTES = 10.0
SPIN_SECONDS = 0.1
"""Waits poll the clock instead of sleeping: each rank has its own core, and virtual machines wake up late."""


@dataclass(frozen=True)
class Interconnect:
    """A benchmark's tensor-parallel group, whose reduces are timed."""

    name: str
    mesh: ProcessMesh
    wire: EmulatedLink | CudaLink | MeteredGroup
    no_comm: NoCommGroup
    device: torch.device
    dtype: torch.dtype

    def set_wire(self, seconds: float, seconds_per_byte: float = 0.0) -> None:
        """Set the time of an all-reduce from now on; a wire that is not emulated has its own."""
        if isinstance(self.wire, WireGroup):
            self.wire.set_wire(seconds, seconds_per_byte)

    def describe(self, options: ComparisonOptions) -> str:
        """Describe ranks, precision and wire for the head of a table."""
        ranks = f"{options.processes} processes"
        if options.emulated_tp is not None:
            ranks = f"one process, rank 0 of {options.ranks} emulated ones (its results are wrong numbers)"
        return f"{ranks}, {str(self.dtype).removeprefix('torch.')} on {options.device}, {self.name}"

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Release the emulated wire."""
        if isinstance(self.wire, WireGroup):
            self.wire.close()


def start_ranks(options: ComparisonOptions, place: RankInfo) -> torch.device:
    """Join the other processes and return this one's device.

    Raises:
        UserError: the machine lacks what the flags need, or the launcher started another number of processes.
    """
    if place.world_size != options.processes:
        flag = "--tp" if options.emulated_tp is None else "--emulated-tp"
        raise UserError(
            f"{flag} {options.ranks} needs {options.processes} processes, but the launcher started {place.world_size}"
        )
    if options.device == "cpu":
        # One thread and, if there are enough cores, a dedicated core for each rank.
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= place.world_size:
            os.sched_setaffinity(0, {cores[place.local_rank]})
        return start_process_group(place, TIMEOUT_MINUTES, device=torch.device("cpu"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UserError("--device cuda: torch finds no GPU here: use --device cpu")
    if place.local_rank >= count:
        raise UserError(
            f"--device cuda: rank {place.rank} is process {place.local_rank + 1} of its host, which has {count} GPUs: "
            "lower --tp, start the ranks of several hosts with deepspeed or torchrun, or give --emulated-tp to run one "
            "rank's share of a larger group on one GPU"
        )
    device = torch.device("cuda", place.local_rank)
    if options.emulated_tp is not None:
        torch.cuda.set_device(device)
        return device
    if options.tp_all_reduce == "symmetric":
        check_peers(place.world_size, device, torch.bfloat16)
    return start_process_group(place, TIMEOUT_MINUTES)


def make_interconnect(options: ComparisonOptions, shape: ModelConfig, device: torch.device) -> Interconnect:
    """Build the interconnect; a collective call of all ranks."""
    replicas = key_value_replicas(shape, options.ranks)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = LinkSpec(0.0, 0.0, options.link == "serial")
    if options.emulated_tp is not None:
        link = CudaLink(options.emulated_tp, spec, device, sms=options.comm_sms)
        replica = NoCommGroup(CommGroup(range(replicas), 0, None))
        mesh = replace(ProcessMesh.single(), tensor=link, kv_replica=replica)
        name = f"emulated {options.link} wire and ranks"
        return Interconnect(name, mesh, link, NoCommGroup(link), device, dtype)
    mesh = ProcessMesh.build(options.tp, kv_replicas=replicas, tp_comm_max_ctas=options.comm_sms)
    no_comm = NoCommGroup(mesh.tensor)
    if options.device == "cpu":
        wire = EmulatedLink(mesh.tensor, spec, spin_seconds=SPIN_SECONDS)
        return Interconnect(f"emulated {options.link} wire", mesh, wire, no_comm, device, dtype)
    group = select_all_reduce(options.tp_all_reduce, mesh.tensor, device, dtype)
    name = "symmetric" if isinstance(group, SymmetricMemoryGroup) else "nccl"
    return Interconnect(name, mesh, MeteredGroup(group), no_comm, device, dtype)
