"""DeepSpeed on torch's meta device, whose tensors have no data: for the dry run.

Importing this file imports DeepSpeed, and modules that it and torch import when they run, so that forks share them.
"""

import sys
from collections.abc import Callable

import torch
import torch._dynamo  # noqa: F401
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator


class _MetaAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """Allocates on the meta device; everything else is as on a CPU."""

    def __init__(self, synchronized: Callable[[], None]) -> None:
        super().__init__()
        self._synchronized = synchronized

    def device_name(self, device_index: int | None = None) -> str:
        return "meta"

    def current_device_name(self) -> str:
        return "meta"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta

    def available_memory(self, device_index: int | None = None) -> int:
        # The host's memory would be too little, and DeepSpeed would allocate on the host instead.
        return sys.maxsize

    def synchronize(self, device_index: int | None = None) -> None:
        self._synchronized()


def use_meta_device(synchronized: Callable[[], None]) -> None:
    """Make DeepSpeed allocate on the meta device, and call `synchronized` where it would wait for a device."""
    set_accelerator(_MetaAccelerator(synchronized))
    # ZeRO-3 compares numbers with rank 0's in its first step; there are none to compare.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
