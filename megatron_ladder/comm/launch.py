"""The start of a process: its place among the others, its device, and the first process group."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ladder.errors import LostPeerError, UserError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What `deepspeed` and `torchrun` put into the environment of each process."""


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


def start_process_group(place: Place, timeout_minutes: float) -> torch.device:
    """Joins the default process group (NCCL on GPUs, gloo on CPUs) and returns this process's device.

    A process that is alone gets a group of one that needs no address.

    Raises:
        UserError: the launcher's port is in use.
    """
    device = place.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if place.launched:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            port = os.environ["MASTER_PORT"]
            raise UserError(f"MASTER_PORT {port} is in use: give the launcher another --master_port") from error
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return device


def start_deepspeed(place: Place, device: torch.device) -> None:
    """Lets DeepSpeed use the process group that exists. Nothing may have imported it before.

    On a CPU it would compile an operator for shared-memory collectives here, in a folder where the lock of a killed
    build blocks every later run. Nothing of this project uses that operator, so it is never built.
    """
    # DeepSpeed reads these; told the device, it does not search for one.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    deepspeed = importlib.import_module("deepspeed")
    # By its full name: the attribute `deepspeed.comm.torch` is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    # ZeRO-3 calls them by names that torch has replaced, and no user can mend that.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f".torch.distributed.{name}. is deprecated", FutureWarning)


@contextlib.contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Turns what a collective raises when another process is gone or does not answer into a LostPeerError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            raise LostPeerError(f"another process is gone or does not answer: {error}") from error
        raise


def stop_process_group() -> None:
    """Leaves the default process group together with the others: one that left early would look like a lost peer."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
