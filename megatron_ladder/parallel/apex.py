"""Finds NVIDIA's apex, which brings fused kernels and is never required.

The Python index has an unrelated package of that name, so an import that succeeds proves nothing: apex is known by
the attribute that is wanted from it.
"""

import importlib
from typing import Any

import torch


def find_in_apex(module: str, attribute: str, extension: str, device: torch.device) -> tuple[Any | None, str]:
    """`attribute` of `module`, or None and the reason why it cannot be used here.

    Args:
        extension: the compiled module that it calls; an apex that was installed without its kernels lacks that, and
            says so only when it is used.
    """
    if device.type != "cuda":
        return None, "apex's kernels need a CUDA device"
    try:
        imported = importlib.import_module(module)
    except ImportError:
        return None, "NVIDIA's apex is not installed (the package apex of the Python index is an unrelated project)"
    found = getattr(imported, attribute, None)
    if found is None:
        return None, f"the installed apex has no {module}.{attribute}: it is not NVIDIA's, or too old"
    try:
        importlib.import_module(extension)
    except ImportError as error:
        return None, f"the installed apex cannot load its kernels ({error}): it has to be built with --cuda_ext"
    return found, ""
