"""Copies from the host to the device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait if it has to be copied from the CPU.

    A GPU copies from page-locked memory by itself. From any other memory, the host copies.
    """
    return tensor if tensor.device == device else tensor.pin_memory().to(device, non_blocking=True)
