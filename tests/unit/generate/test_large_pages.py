"""Large pages, as Linux reports them."""

import ctypes
import mmap
import platform
from pathlib import Path

import pytest
import torch

from megatron_ladder.generate.large_pages import _LARGE_PAGE, move_to_large_pages, zeros_in_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KERNEL = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
pytestmark = pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="Linux without them")


def large_pages_at(address: int) -> int:
    """Return the kilobytes of large pages in the memory area that contains the address."""
    for area in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        lines = [line.split() for line in area.splitlines()]
        bounds = next((line[0].split("-") for line in lines if line and "-" in line[0]), None)
        if bounds and int(bounds[0], 16) <= address < int(bounds[1], 16):
            return next(int(line[1]) for line in lines if line and line[0] == "AnonHugePages:")
    raise AssertionError(f"no memory at {address:x}")


@pytest.mark.skipif(KERNEL < (6, 1), reason="Linux cannot move memory to large pages")
def test_packed_weights_move_to_large_pages() -> None:
    weight = torch.randn(4 * _LARGE_PAGE // 1024, 256)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    address = torch.ops.mkldnn.data_ptr(packed)
    before = large_pages_at(address + _LARGE_PAGE)
    move_to_large_pages(address, torch.ops.mkldnn._nbytes(packed))
    assert large_pages_at(address + _LARGE_PAGE) >= before + 3 * _LARGE_PAGE // 1024
    assert torch.equal(packed.to_dense(), weight)


@pytest.mark.skipif(KERNEL < (6, 1), reason="Linux cannot move memory to large pages")
def test_memory_of_another_kind_may_share_the_first_large_page() -> None:
    area = torch.frombuffer(mmap.mmap(-1, 6 * _LARGE_PAGE, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    first = -(-area.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    offset = first + _LARGE_PAGE // 2 - area.data_ptr()
    writable = area[offset:].fill_(1)
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(area.data_ptr()), ctypes.c_size_t(offset), mmap.PROT_READ) == 0
    move_to_large_pages(writable.data_ptr(), 3 * _LARGE_PAGE)
    assert large_pages_at(writable.data_ptr()) >= 3 * _LARGE_PAGE // 1024
    assert writable.min() == 1


def test_zeros_are_in_large_pages() -> None:
    zeros = zeros_in_large_pages((4, _LARGE_PAGE // 4), torch.float32)
    assert large_pages_at(zeros.data_ptr() + _LARGE_PAGE) >= 3 * _LARGE_PAGE // 1024
    assert (zeros.shape, zeros.dtype, zeros.count_nonzero()) == ((4, _LARGE_PAGE // 4), torch.float32, 0)
