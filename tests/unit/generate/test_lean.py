"""Weights in panels, and the memory that stores them."""

from pathlib import Path

import pytest
import torch

from megatron_ladder.generate.lean import _LARGE_PAGE, _PANEL_WIDTHS, LEAN_OPERATIONS, _empty_in_large_pages, _to_panels

ALWAYS_OR_ON_REQUEST = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", _PANEL_WIDTHS)
def test_panels_hold_the_weight_and_multiply_as_it_does(dtype: torch.dtype) -> None:
    weight = torch.randn(192, 70).to(dtype)
    panels = _to_panels(weight)
    assert torch.equal(LEAN_OPERATIONS.embed(torch.arange(192), panels), weight)
    x, bias = torch.randn(2, 3, 70).to(dtype), torch.randn(192).to(dtype)
    for rows in (x, x[:1, :1]):
        expected = rows.double() @ weight.double().t() + bias.double()
        found = LEAN_OPERATIONS.linear(rows, panels, bias)
        assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_large_tensors_begin_with_a_page_and_keep_their_memory() -> None:
    """The part of a page at the end also belongs to one tensor only."""
    size = (_LARGE_PAGE // 4 + 7, 3)
    first, second = (_empty_in_large_pages(size, torch.float32).fill_(number) for number in (1.0, 2.0))
    part = first[-5:]
    del first
    assert second.data_ptr() % _LARGE_PAGE == 0 and second.is_contiguous() and second.shape == size
    assert part.eq(1.0).all() and second.eq(2.0).all()
    assert _empty_in_large_pages((0,), torch.float32).shape == (0,)
    assert _empty_in_large_pages((4, 5), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.skipif(
    not ALWAYS_OR_ON_REQUEST.exists() or "[never]" in ALWAYS_OR_ON_REQUEST.read_text(), reason="Linux without them"
)
def test_the_system_gives_large_pages() -> None:
    held = _empty_in_large_pages((4 * _LARGE_PAGE,), torch.uint8).zero_()
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (area,) = (area for area in areas if f"{held.data_ptr():x}-" in area)
    (large,) = (line for line in area.splitlines() if line.startswith("AnonHugePages:"))
    assert int(large.split()[1]) > 0
