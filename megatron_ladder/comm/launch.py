"""Starts a process: finds its rank and device, and joins the default process group."""

import contextlib
import json
import os
import socket
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_ladder.comm.agreement import Host, Peers
from megatron_ladder.errors import ErrorCollector, LostPeerError, Problem, UserError, raise_user_errors

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that `deepspeed` and `torchrun` set in each process."""

ERROR_SECONDS = 30.0
"""Time that a process with an error waits for the others to receive it."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process among the `world_size` processes that were launched with it, and on its machine."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def launched(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    def device(self) -> torch.device:
        """Return the GPU of this process, or the CPU on a machine without GPUs.

        Raise a UserError if the machine has GPUs that torch cannot use, unless CUDA_VISIBLE_DEVICES hides them.
        """
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            _check_gpus_are_usable()
        return torch.device("cpu")


def read_rank_info() -> RankInfo:
    """Read the launcher's environment variables; without a launcher, the process is the only rank.

    Raise a UserError if only some of the variables are set.
    """
    present = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    if "WORLD_SIZE" not in present:
        return RankInfo(0, 1, 0)
    missing = [name for name in LAUNCHER_VARIABLES if name not in present]
    if missing:
        raise UserError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}: "
            "start with `deepspeed`, `torchrun`, or plain `python` for one process"
        )
    return RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def _check_gpus_are_usable() -> None:
    """Raise a UserError if `nvidia-smi` lists GPUs, which torch did not find."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        drivers = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition(" Please")[0].rstrip(".")
        raise UserError(
            f"nvidia-smi lists {len(drivers)} GPUs with driver {drivers[0]}, but torch {torch.__version__} cannot use "
            f"them ({reason}): install the build for this driver with `uv pip install --reinstall-package torch "
            f"--torch-backend auto torch=={torch.__version__.partition('+')[0]}`, or set CUDA_VISIBLE_DEVICES= to run "
            "on the CPU"
        ) from None


def check_device(rank_info: RankInfo) -> None:
    """Raise a UserError if this process has no separate GPU on its host, or torch cannot use it."""
    if rank_info.device().type == "cpu":
        return
    if rank_info.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {rank_info.rank} is process {rank_info.local_rank + 1} of its host, which has "
            f"{torch.cuda.device_count()} GPUs: launch one process per GPU (--num_gpus, or slots in the hostfile), or "
            "check which GPU is missing"
        )


def start_process_group(
    rank_info: RankInfo,
    timeout_minutes: float,
    settings: Mapping[str, Any] | None = None,
    peers: Peers | None = None,
    device: torch.device | None = None,
) -> torch.device:
    """Join the default process group (NCCL on GPUs, gloo on CPUs) and return the device of this process.

    A single process gets a group of size one, which needs no address.

    Args:
        timeout_minutes: time to wait for other processes.
        settings: JSON-compatible values by label, which must be the same in all processes.
        peers: receives the hosts of all ranks, and the store.
        device: `rank_info.device()` by default.

    Raises:
        UserError: the launcher's address cannot be reached, its port is in use, or the settings of processes
            differ; then every process raises it.
        LostPeerError: a process did not arrive.
    """
    device = device or rank_info.device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # After a timeout each rank writes its last collectives to a file, and ends after four times these milliseconds.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2000")
    timeout = timedelta(minutes=timeout_minutes)
    if not rank_info.launched:
        _limit_threads(device, 1)
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        return device
    host = _find_host()
    peers = peers or Peers()
    peers.agree(rank_info.rank, rank_info.world_size, host, settings or {}, (), timeout)
    peers.beat(rank_info.rank, 0)
    _choose_interface(host, peers.hosts)
    _limit_threads(device, len(os.sched_getaffinity(0)) // peers.hosts.count(host))
    dist.init_process_group(
        backend, store=peers.board, rank=rank_info.rank, world_size=rank_info.world_size, timeout=timeout
    )
    return device


def _limit_threads(device: torch.device, threads: int) -> None:
    """Compute with this many threads unless OMP_NUM_THREADS is set.

    By default, torch has a thread per core, and these wait for each other whenever another process uses a core.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads))


def _find_host() -> Host:
    """Return this machine, with the address from which it reaches MASTER_ADDR, or raise a UserError."""
    master = os.environ["MASTER_ADDR"]
    name = socket.gethostname()
    try:
        return Host(name, _address_towards(master))
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR {master} cannot be reached from {name}: {error.strerror}: give the launcher --master_addr "
            "with an address of the first host that all hosts can reach"
        ) from error


def _address_towards(target: str) -> str:
    """Return this machine's address on the route to a machine, given by name or address, or raise OSError."""
    # For a datagram socket, `connect` sends nothing to the (discard) port; it only selects the route.
    family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]).partition("%")[0]


def _choose_interface(here: Host, hosts: Sequence[Host]) -> None:
    """Make gloo use the network interface that leads to the other hosts, unless GLOO_SOCKET_IFNAME is set.

    Gloo's default is the interface to which the machine's own name resolves. On many systems this is the loopback
    interface, which no other host can reach, and to which MASTER_ADDR may also resolve on the first host.
    """
    address = here.address
    afar = [host.address for host in hosts if not ip_address(host.address).is_loopback]
    if ip_address(address).is_loopback and afar:
        address = _address_towards(afar[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return


def from_rank_0(rank_info: RankInfo, peers: Peers, timeout_minutes: float, look: Callable[[], Any]) -> Any:
    """Return the JSON-able findings of `look` on rank 0; the other ranks do not call it. Needs no process group.

    A thousand ranks that look at the same directories at the same time would overload a file system, or a hub. All
    ranks must call this.

    Raises:
        UserError: `look` raised it, the launcher's address cannot be reached, or its port is in use.
        LostPeerError: rank 0 did not answer in time.
    """
    if not rank_info.launched:
        return look()
    _find_host()
    try:
        timeout = timedelta(minutes=timeout_minutes)
        store = peers.open(rank_info.rank, rank_info.world_size, timeout)
        if rank_info.rank == 0:
            findings = None
            errors = ErrorCollector()
            with errors.collect():
                findings = look()
            # The store accepts bytes, too, up to 8 MB.
            written = json.dumps([list(map(vars, errors.problems)), findings])
            store.set("findings", zlib.compress(written.encode()))  # type: ignore[arg-type]
        text = peers.unless_ended(partial(store.get, "findings"), "the findings of rank 0", timeout)
        problems, findings = json.loads(zlib.decompress(text))
    except dist.DistError as error:
        raise LostPeerError(f"rank 0 sent no findings about the files that the run names: {error}", [0]) from error
    raise_user_errors(map(Problem.read, problems))
    return findings


@contextlib.contextmanager
def reporting_errors(rank_info: RankInfo, peers: Peers) -> Iterator[None]:
    """Report a UserError inside the block to the other processes, which otherwise wait for this one at start-up."""
    try:
        yield
    except UserError as error:
        if rank_info.launched:
            with contextlib.suppress(dist.DistError, UserError, LostPeerError, OSError):
                timeout = timedelta(seconds=ERROR_SECONDS)
                peers.agree(rank_info.rank, rank_info.world_size, _find_host(), {}, error.problems, timeout)
        raise


def stop_process_group() -> None:
    """Leave the default process group together with all ranks; a rank that leaves early looks like a lost peer."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
