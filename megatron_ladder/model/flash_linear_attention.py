"""The rule of gated DeltaNet by the Triton kernels of flash-linear-attention, an optional package for GPUs."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MODULE, _KERNEL = "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"


def find_delta_kernel(device: torch.device) -> tuple[Callable[..., Any] | None, str]:
    """Return the kernel and "", or None and the reason why it cannot be used on this device."""
    if device.type != "cuda":
        return None, "the kernels of flash-linear-attention need a CUDA device"
    try:
        imported = importlib.import_module(_MODULE)
    except ImportError as error:
        return None, f"flash-linear-attention cannot be imported ({error}): pip install megatron-ladder[fla]"
    kernel: Callable[..., Any] | None = getattr(imported, _KERNEL, None)
    return kernel, "" if kernel is not None else f"the installed package fla has no {_MODULE}.{_KERNEL}"


def apply_delta_kernel(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    dtype: torch.dtype,
    bounds: Tensor | None,
) -> Tensor:
    """Return the outputs [b, value heads, s, d_v] of operands as in `mixers/gated_delta.py`; queries are scaled.

    The kernel multiplies queries, keys and values in `dtype`, and keeps decays and states in fp32. `bounds` are those
    of `DocumentBounds`, int64. Its host reads them, and remembers those of the same tensor.
    """
    # Only newer versions know value heads that share a key head.
    shared = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
    tokens_first = (x.transpose(1, 2) for x in (q, k, v, log_decay, beta))
    if bounds is not None:
        # Documents are parts of one row.
        tokens_first = (x.flatten(0, 1).unsqueeze(0) for x in tokens_first)
    *vectors, log_decay, beta = tokens_first
    outputs, _ = kernel(*(x.to(dtype) for x in vectors), g=log_decay, beta=beta, scale=1.0, cu_seqlens=bounds)
    return outputs.view(v.shape[0], v.shape[2], *v.shape[1::2]).transpose(1, 2).to(v.dtype)
