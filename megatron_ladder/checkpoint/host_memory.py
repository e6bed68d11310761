"""A copy of tensors in host memory, taken at the speed of the memory or of the bus, and written at leisure."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes; every copy begins at a multiple of it, so that any element type can be viewed there."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context."""


class HostMemory:
    """Memory that holds one save's state, kept from save to save: pinning it takes longer than filling it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._pinned = False

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies of the tensors in host memory, valid until the next call; returns when they are there.

        Copies from a GPU are queued together on the current stream, behind the work whose results they are.
        """
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if self._buffer is None or self._buffer.numel() < end:
            self.free()
            self._buffer = torch.empty(end, dtype=torch.uint8)
            self._pinned = bool(devices) and _pin(self._buffer, next(iter(devices)))
        taken = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            place = self._buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=True)
            taken.append(place)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return taken

    def free(self) -> None:
        """Gives the memory back."""
        if self._buffer is not None and self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())))
        self._buffer, self._pinned = None, False


def _pin(buffer: Tensor, device: torch.device) -> bool:
    """Locks a buffer's pages, so that GPUs copy into them directly; False if the system does not let it.

    torch's own pinned memory comes in powers of two, which may be twice as much as is needed.
    """
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE)))
    except torch.cuda.CudaError:
        # CUDA keeps the error until the next launch asks for it: that of a kernel that nobody needs.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).zero_()
        return False
    return True
