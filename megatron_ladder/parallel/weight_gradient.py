"""The gradient of a linear layer's weight, which an optimizer that sums gradients in fp32 can have added to its sum.

With rows [n, out] of the output's gradient and rows x [n, in] of the input, the gradient is rows^T x. Left to autograd,
a product writes it in the precision of the model, and a second kernel adds it to the sum.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SUM = "gradient_sum"
"""The attribute of a parameter with a `GradientSum`, which then gets no gradient from autograd."""
GradientSum = Callable[[Tensor, Tensor], None]
"""Adds the gradient a @ b, once per backward pass."""


def gradient_sum(weight: Tensor) -> GradientSum | None:
    """Return the weight's `GradientSum`, if it has one."""
    found: GradientSum | None = getattr(weight, SUM, None)
    return found


def weight_gradient(rows: Tensor, x: Tensor, add: GradientSum | None) -> Tensor | None:
    """Return rows^T @ x for autograd, or None if it was added: [..., out], [..., in] -> [out, in]."""
    a, b = rows.flatten(0, -2).t(), x.flatten(0, -2)
    return a @ b if add is None else add(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor, replace: bool = False) -> None:
    """Add a @ b to the total, which may have a wider dtype, or replace it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=1 - replace)
    elif not total.is_cpu:
        torch.addmm(total, a, b, total.dtype, beta=1 - replace, out=total)
    elif replace:
        total.copy_(a @ b)
    else:
        total += a @ b
