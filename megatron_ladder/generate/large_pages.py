"""Memory in large pages, for weights and caches that every token reads.

Linux uses pages of 4 KiB by default; a processor looks up the address of each page, and its prefetcher stops at the end
of one. On other systems, or without large pages, the functions only return the memory.
"""

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20
"""Bytes, on x86-64, and on ARM with small pages of 4 KiB."""
_ON_FIRST_WRITE, _NOW = 14, 25
"""MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1, which Python's `mmap` module does not define."""


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU."""
    memory = torch.empty(shape, dtype=dtype)
    _advise(memory.data_ptr(), memory.nbytes, _ON_FIRST_WRITE)
    memory.zero_()
    # The allocator may have returned memory with small pages.
    _advise(memory.data_ptr(), memory.nbytes, _NOW)
    return memory


def move_to_large_pages(address: int, size: int) -> None:
    """Let large pages replace the small ones of these bytes."""
    _advise(address, size, _NOW)


def _advise(address: int, size: int, advice: int) -> None:
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    # Includes the pages at both ends: the weights of a model usually lie next to each other and share them.
    for page in range(address // _LARGE_PAGE * _LARGE_PAGE, address + size, _LARGE_PAGE):
        # Fails if the page includes memory of another kind, or if the kernel does not know the advice.
        madvise(ctypes.c_void_p(page), ctypes.c_size_t(_LARGE_PAGE), advice)
