"""The start of a process: its place among the others, its device, and the first process group."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_ladder.comm.agreement import Host, Peers, Report, agree, open_store, tell_mistakes
from megatron_ladder.comm.nccl import explain_connections
from megatron_ladder.comm.watch import describe_lost, describe_unfinished, lost_peers
from megatron_ladder.errors import LostPeerError, UserError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What `deepspeed` and `torchrun` put into the environment of each process."""

DISCARD_PORT = 9
"""A port number where one must be given and none is meant."""
MISTAKE_SECONDS = 30.0
"""How long a process with a mistake waits for the others to hear of it."""
GLOO_FAILURES = ("gloo/transport", "Application timeout caused pair closure")
"""What stands in gloo's errors when a peer is gone or late; they have no type of their own."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that were launched with it."""

    rank: int
    """Number of the process, 0 to world size - 1."""
    world_size: int
    """Processes of the whole run."""
    local_rank: int
    """Number of the process on its machine."""

    @property
    def launched(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    def device(self) -> torch.device:
        """This process's GPU, or the CPU on a machine without."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def find_place() -> Place:
    """Reads what the launcher says; a process started by hand is alone.

    Raises:
        UserError: only some of the launcher's variables are there.
    """
    found = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    if not found or "WORLD_SIZE" not in found:
        return Place(0, 1, 0)
    if len(found) < len(LAUNCHER_VARIABLES):
        missing = [name for name in LAUNCHER_VARIABLES if name not in found]
        raise UserError(
            f"the environment has {', '.join(found)} but not {', '.join(missing)}: "
            "start with `deepspeed`, `torchrun`, or plain `python` for one process"
        )
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def check_device(place: Place) -> None:
    """Raises UserError where this process has no GPU of its own among those of its host, or CUDA would not start."""
    if not torch.cuda.is_available():
        return
    if place.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {place.rank} is process {place.local_rank + 1} of its host, which has {torch.cuda.device_count()} "
            "GPUs: launch one process for each GPU (--num_gpus, or slots in the hostfile), or find out which GPU is "
            "missing"
        )
    explain_connections(os.environ)


def start_process_group(
    place: Place,
    timeout_minutes: float,
    settings: Mapping[str, Any] | None = None,
    peers: Peers | None = None,
    device: torch.device | None = None,
) -> torch.device:
    """Joins the default process group (NCCL on GPUs, gloo on CPUs) and returns this process's device.

    A process that is alone gets a group of one that needs no address.

    Args:
        timeout_minutes: how long to wait for other processes.
        settings: what all processes must have alike, JSON-able values under the labels to name them by.
        peers: where to note the hosts of all ranks.
        device: what it computes on; `place.device()` if not given.

    Raises:
        UserError: the launcher's address is of no use, its port is in use, the environment has a number of queues
            that CUDA has not, or another process was told otherwise; then every process raises it.
        LostPeerError: a process did not come.
    """
    device = device or place.device()
    if device.type == "cuda":
        # CUDA reads the variable when it starts, which is here.
        explanation = explain_connections(os.environ)
        if place.launched and place.rank == 0:
            print(explanation, file=sys.stderr)
        torch.cuda.set_device(device)
        # A collective that times out leaves the last ones in a file of each rank.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if not place.launched:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        return device
    host = find_host()
    store = open_store(place.rank, place.world_size, timeout)
    hosts = agree(store, place.rank, place.world_size, Report(host, settings or {}), timeout)
    if peers is not None:
        peers.hosts = hosts
        peers.open_board(store)
        peers.beat(place.rank, 0)
    choose_interface(host, hosts)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    return device


def find_host() -> Host:
    """This machine, by the address from which it reaches MASTER_ADDR.

    Raises:
        UserError: the name is unknown here, or there is no way to it.
    """
    master, name = os.environ["MASTER_ADDR"], socket.gethostname()
    try:
        return Host(name, address_towards(master))
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR {master} cannot be reached from {name}: {error.strerror}: give the launcher --master_addr "
            "with an address of the first host that all hosts know"
        ) from error


def address_towards(target: str) -> str:
    """This machine's address on the way to the machine of that name or address.

    Raises:
        OSError: the name is unknown, or there is no way.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(target, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Of a datagram socket this sends nothing; it only chooses the way.
        probe.connect(address)
        return str(probe.getsockname()[0]).partition("%")[0]


def choose_interface(here: Host, hosts: Sequence[Host]) -> None:
    """Lets gloo use the network interface that leads to the other hosts, unless GLOO_SOCKET_IFNAME is set.

    By itself it takes the one that the machine's own name resolves to. On many systems that is the loopback
    interface, where no other host is; and there the first host may find itself under MASTER_ADDR as well.
    """
    address = here.address
    afar = [host.address for host in hosts if not is_loopback(host.address)]
    if is_loopback(address) and afar:
        address = address_towards(afar[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine can reach the address."""
    return address.startswith("127.") or address == "::1"


@contextlib.contextmanager
def telling_mistakes(place: Place) -> Iterator[None]:
    """Lets the others end at once when this process finds a mistake before it has joined them."""
    try:
        yield
    except UserError as error:
        if place.launched:
            with contextlib.suppress(UserError):
                timeout = timedelta(seconds=MISTAKE_SECONDS)
                tell_mistakes(place.rank, place.world_size, find_host(), error.mistakes, timeout)
        raise


@contextlib.contextmanager
def naming_lost_peers(peers: Peers | None = None) -> Iterator[None]:
    """Turns what a collective raises when another process is gone or does not answer into a LostPeerError.

    Its message says which collectives had not finished, and, from `peers`, on which host the lost process was.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not isinstance(error, dist.DistError) and not any(words in message for words in GLOO_FAILURES):
            raise
        known = peers or Peers()
        lost = lost_peers(message, known)
        text = f"{describe_lost(lost, known)}: {message}\n{describe_unfinished(known)}"
        raise LostPeerError(text, lost) from error


def stop_process_group() -> None:
    """Leaves the default process group together with the others: one that left early would look like a lost peer."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
