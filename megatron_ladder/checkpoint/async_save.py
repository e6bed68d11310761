"""The parts of a save that runs in the background: host memory for the state, a thread, and a hand-over without
collectives.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron_ladder.comm.agreement import name_ranks
from megatron_ladder.files import temporary_path

_ALIGNMENT = 256
"""Bytes; every copy begins at a multiple, so that any element type can be viewed there."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context."""
_POLL_SECONDS = 0.05

T = TypeVar("T")


class HostMemory:
    """Host memory for the state of one save, reused by the next: pinning it takes longer than filling it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._pinned = False

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies in host memory, complete on return and valid until the next call.

        Copies from a GPU are queued together on the current stream, behind the work that computes the tensors.
        """
        *offsets, end = accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors), initial=0)
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if self._buffer is None or self._buffer.numel() < end:
            self.free()
            self._buffer = torch.empty(end, dtype=torch.uint8)
            self._pinned = bool(devices) and _pin(self._buffer, next(iter(devices)))
        copied = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            copy = self._buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied.append(copy.copy_(tensor.detach(), non_blocking=True))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def free(self) -> None:
        """Release the memory."""
        if self._buffer is not None and self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())))
        self._buffer, self._pinned = None, False


def _pin(buffer: Tensor, device: torch.device) -> bool:
    """Page-lock a buffer, so that GPUs copy into it directly; return False if the system refuses.

    torch's own pinned memory comes in powers of two, up to twice the size needed.
    """
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)))
    except torch.cuda.CudaError:
        # CUDA reports the error again at the next launch; an unneeded kernel clears it.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).zero_()
        return False
    return True


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a daemon thread. Unlike a thread of an executor, it never keeps the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def gather_through_files(directory: Path, rank: int, size: int, timeout_seconds: float, value: bytes) -> list[bytes]:
    """Gather the bytes of every rank on rank 0 through files in a shared directory.

    Saves in the background finish at different times on every rank, while the training threads use the process groups,
    which two threads must not share. All ranks write to one directory anyway. Returns the values in rank order on rank
    0, after removing the files; [] on other ranks, without waiting. Raises TimeoutError if ranks write nothing in time.
    """
    files = [directory / f".written_by_rank_{number:05d}.json" for number in range(size)]
    if rank != 0:
        # If the disk is full even for this file, rank 0 notices by waiting.
        with contextlib.suppress(OSError):
            temporary = temporary_path(files[rank])
            temporary.write_bytes(value)
            os.replace(temporary, files[rank])
        return []
    deadline = time.monotonic() + timeout_seconds
    while missing := _missing(directory, files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name_ranks(missing)} did not finish writing in {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)
    values = [value, *(file.read_bytes() for file in files[1:])]
    for file in files[1:]:
        file.unlink()
    return values


def _missing(directory: Path, files: Sequence[Path]) -> list[int]:
    """Return the ranks except 0 whose file does not exist yet, in one operation for any number of ranks."""
    present = set(os.listdir(directory))
    return [number for number, file in enumerate(files) if number and file.name not in present]
