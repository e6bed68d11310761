"""Weights laid out for products with few rows on a CPU, where reading the weight is what takes the time.

A matrix [out, in] as its rows lie is read at half the memory's rate when one row of x is multiplied with it: 768
numbers a row are too few for the processor's prefetcher. In panels of a few output columns,

    weight [out, in]   ->   panels [out / width, in, width]

the same product reads the weight from end to end, and the sums of a panel stay in registers. A weight of three
dimensions is one in panels, wherever a layer multiplies.
"""

import torch
from torch import Tensor

from megatron_ladder.parallel.large_pages import empty_in_large_pages

PANEL_WIDTHS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
"""Output columns of a panel: one vector register of 512 bits in fp32, and what oneDNN's half-precision products take
best."""


def fits_panels(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be laid out in panels: its dtype has a width, which divides `out`."""
    width = PANEL_WIDTHS.get(weight.dtype)
    return weight.dim() == 2 and width is not None and weight.shape[0] % width == 0


@torch.no_grad()
def to_panels(weight: Tensor) -> Tensor:
    """[out, in] -> [out / width, in, width], a copy. The weight must fit, see `fits_panels`."""
    width = PANEL_WIDTHS[weight.dtype]
    panels = empty_in_large_pages((weight.shape[0] // width, weight.shape[1], width), weight.dtype)
    # torch transposes a matrix in blocks, and a stack of them number by number, which rows of 4 KiB make very slow.
    for panel, rows in zip(panels, weight.detach().split(width), strict=True):
        panel.copy_(rows.t())
    return panels


def panel_product(x: Tensor, panels: Tensor) -> Tensor:
    """`x @ weight^T` for x [..., in] and panels [out / width, in, width] -> [..., out]."""
    count, _, width = panels.shape
    rows = x.flatten(0, -2)
    products = torch.bmm(rows.expand(count, -1, -1), panels)
    if len(rows) == 1:
        return products.view(*x.shape[:-1], count * width)
    return products.transpose(0, 1).reshape(*x.shape[:-1], count * width)


def panel_rows(indices: Tensor, panels: Tensor) -> Tensor:
    """Rows of the weight: indices [...] -> [..., in]."""
    width = panels.shape[-1]
    return panels.transpose(1, 2)[indices // width, indices % width]
