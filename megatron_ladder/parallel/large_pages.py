"""Memory for weights that are read from end to end, token after token, by a CPU.

Linux hands memory out in pages of 4 KiB unless it is asked for large ones. A processor looks up where each page lies,
and its prefetcher stops where one ends: from pages of 2 MiB, a product with one row reads a weight a quarter faster.
They are also given out, and filled for the first time, several times as fast.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes, on x86-64, and on ARM with small pages of 4 KiB."""


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU, in large pages as far as it fills them and the system has them."""
    count = math.prod(shape) * dtype.itemsize
    if count < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    mapping = mmap.mmap(-1, count + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -found.data_ptr() % LARGE_PAGE
    # A kernel may be built without them. Of the last page, which is not filled, small ones will do.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE, start, count // LARGE_PAGE * LARGE_PAGE)
    return found[start : start + count].view(dtype).view(*shape)
