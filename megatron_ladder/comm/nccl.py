"""NCCL options for groups whose collectives overlap with computation, and the CUDA setting that affects the overlap.

The tensor-parallel group has a separate communicator. Its kernels run on a high-priority stream: a product that was
launched earlier fills every multiprocessor, and the reduce gets the next ones that become free, before the product's
waiting blocks. The number of multiprocessors per collective can be bounded, because the product that hides the
collective cannot use them.

Collectives of several communicators (tensor, data, pipeline) must be issued in the same order on all ranks that share
them. Otherwise two ranks may each wait in a collective that the other has not started. The order is the same because
every collective is issued by the one thread that runs the model at that time (autograd's thread during backward), in
program order, and all ranks of a stage run the same program: the walk over sub-blocks issues the model's reduces and
fires the hooks that issue those of gradients, and the schedule pairs each transfer between stages.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ladder.errors import UserError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Number of hardware queues from the host to a device, 1 to 32, default 8 (CUDA programming guide)."""


def overlapped_group_options(backend: str, max_ctas: int, timeout: timedelta | None) -> Any:
    """Return `pg_options` for a group whose collectives overlap with computation; None for backends other than NCCL.

    Each group needs a new object, because torch writes to it. `max_ctas` bounds the thread blocks, and so the
    multiprocessors, of a collective; 0 leaves it to NCCL. torch expects the timeout of the group here as well.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options


def explain_connections(environment: Mapping[str, str]) -> str:
    """Describe the effect of CUDA_DEVICE_MAX_CONNECTIONS on the overlap; CUDA reads the variable when it starts.

    Raise a UserError if the value is not a number that CUDA accepts.
    """
    text = environment.get(CONNECTIONS)
    if text is None:
        setting, queues = f"{CONNECTIONS} is not set, so CUDA has 8 queues", 8
    elif text.isascii() and text.isdigit() and 1 <= int(text) <= 32:
        setting, queues = f"{CONNECTIONS}={text}", int(text)
    else:
        raise UserError(f"{CONNECTIONS}={text}: expected 1 to 32, or unset it for CUDA's 8")
    if queues > 1:
        return (
            f"{setting}: a reduce is launched before the product that hides it, but the device may start the product "
            "first; the reduce then gets the multiprocessors that it frees, being on a stream of high priority"
        )
    return (
        f"{setting}: the device starts a reduce before the product launched after it, but a reduce that waits for the "
        "one before it holds up every later launch; two in flight (--residual-staleness 2) need more than 1"
    )
