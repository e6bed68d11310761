"""Detection of NVIDIA's apex, which provides optional fused kernels.

PyPI has an unrelated package of that name, so a successful import proves nothing: NVIDIA's apex is recognised by the
attribute that is needed.
"""

import importlib
from typing import Any

import torch


def find_in_apex(module: str, attribute: str, extension: str, device: torch.device) -> tuple[Any | None, str]:
    """Return `attribute` of `module` and "", or None and the reason why it cannot be used.

    `extension` is the compiled module that it calls. An apex installed without kernels lacks it, but would report that
    only at the first use.
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
