"""The interconnect that a benchmark runs on: emulated on a CPU, emulated on one GPU, or that of several GPUs."""

from dataclasses import dataclass, replace

import torch

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import Place, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.options import BenchmarkOptions
from megatron_ladder.lab.link.cuda_groups import MeteredGroup, SymmetricMemoryGroup, check_peers
from megatron_ladder.lab.link.cuda_link import CudaLink
from megatron_ladder.lab.link.link import EmulatedLink, LinkSpec, NoCommGroup

TIMEOUT_MINUTES = 10.0
SPIN_SECONDS = 0.1
"""A wait watches the clock and does not sleep: each rank has a core of its own, and virtual machines wake up late."""


@dataclass(frozen=True)
class Interconnect:
    """The ranks of a benchmark and the wire between them."""

    name: str
    """For tables."""
    mesh: ProcessMesh
    wire: EmulatedLink | CudaLink | MeteredGroup
    """The tensor-parallel group whose reduces are timed."""
    no_comm: NoCommGroup
    """One whose reduces do nothing."""
    device: torch.device
    dtype: torch.dtype

    def set_alpha(self, seconds: float) -> None:
        """Gives every all-reduce this time, whatever its size, where the wire is emulated."""
        if not isinstance(self.wire, MeteredGroup):
            self.wire.set_wire(seconds, 0.0)

    def synchronize(self) -> None:
        """Returns when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Gives back what the wire holds."""
        if not isinstance(self.wire, MeteredGroup):
            self.wire.close()


def start_ranks(options: BenchmarkOptions, place: Place) -> torch.device:
    """Joins the other processes, if there are any, and returns this one's device.

    Raises:
        UserError: this machine has not what --device or --tp-all-reduce need.
    """
    if options.device == "cpu":
        return start_process_group(place, TIMEOUT_MINUTES, device=torch.device("cpu"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UserError("--device cuda: torch finds no GPU here: use --device cpu")
    if count < place.world_size:
        raise UserError(
            f"--device cuda: found {count} GPUs for {place.world_size} processes: lower --tp, or give --emulated-tp to "
            "run one rank's share of a larger group on one GPU"
        )
    if options.emulated_tp is not None:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        return device
    if options.tp_all_reduce == "symmetric-memory":
        check_peers(place.world_size, torch.device("cuda", place.local_rank))
    return start_process_group(place, TIMEOUT_MINUTES)


def make_interconnect(options: BenchmarkOptions, shape: ModelConfig, device: torch.device) -> Interconnect:
    """A collective call of all ranks."""
    replicas = key_value_replicas(shape, options.ranks)
    spec = LinkSpec(0.0, 0.0, options.link == "serial")
    if options.emulated_tp is not None:
        link = CudaLink(options.emulated_tp, spec, device, sms=options.comm_sms)
        replica = NoCommGroup(CommGroup(range(replicas), 0, None))
        mesh = replace(ProcessMesh.single(), tensor=link, kv_replica=replica)
        name = f"emulated {options.link} wire and ranks"
        return Interconnect(name, mesh, link, NoCommGroup(link), device, torch.bfloat16)
    mesh = ProcessMesh.build(options.tp, kv_replicas=replicas, tp_comm_max_ctas=options.comm_sms)
    no_comm = NoCommGroup(mesh.tensor)
    if options.device == "cpu":
        wire = EmulatedLink(mesh.tensor, spec, spin_seconds=SPIN_SECONDS)
        return Interconnect(f"emulated {options.link} wire", mesh, wire, no_comm, device, torch.float32)
    group = mesh.tensor
    if options.tp_all_reduce == "symmetric-memory":
        group = SymmetricMemoryGroup(group, device, torch.bfloat16)
    return Interconnect(options.tp_all_reduce, mesh, MeteredGroup(group), no_comm, device, torch.bfloat16)
