"""What NCCL is told about a group, and what CUDA's environment means for reduces that run under products.

The tensor-parallel group's communicator is one of its own. Its kernels are on a stream of high priority: a product that
was launched earlier fills every multiprocessor, and the reduce gets the next ones that become free, before any block of
the product that waits. And it may take no more than a bounded number of multiprocessors, for each that it takes is lost
to the product that hides it.

Collectives of several communicators (tensor, data, pipeline) must be issued in one order on all ranks that share them,
or each of two ranks may wait in the one that the other has yet to start. That order is kept by how they are issued:
every collective of a rank is issued by the one thread that runs the model at that time (autograd's, while the main one
waits for it in backward), in the order of the program, and all ranks of one stage run the same program: reduces of a
model by its walk over sub-blocks, those of gradients by hooks that the same walk fires, transfers between stages by the
schedule, of which each sender has its receiver.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ladder.errors import UserError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Of the CUDA programming guide: hardware queues from the host to a device, 1 to 32, 8 if unset."""
MOST_CONNECTIONS = 32


def overlapped_group_options(backend: str, max_ctas: int, timeout: timedelta | None) -> Any:
    """What `dist.new_group` is given for a group whose collectives run under computation; None if not on NCCL.

    A group needs options of its own: torch writes into them.

    Args:
        max_ctas: most thread blocks, and with them multiprocessors, that a collective takes; 0 leaves it to NCCL.
        timeout: the group's, which torch expects in both places; its default if not given.
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
    """What the environment's number of hardware queues means here; to be said before CUDA starts, which reads it then.

    Raises:
        UserError: it is no number that CUDA has.
    """
    text = environment.get(CONNECTIONS)
    if text is None:
        return _explain(f"{CONNECTIONS} is not set, so CUDA has 8 queues", 8)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CONNECTIONS):
        raise UserError(f"{CONNECTIONS}={text}: expected 1 to {MOST_CONNECTIONS}, or unset it for CUDA's 8")
    return _explain(f"{CONNECTIONS}={text}", int(text))


def _explain(setting: str, queues: int) -> str:
    if queues > 1:
        return (
            f"{setting}: a reduce is launched before the product that hides it, but the device may start the product "
            "first; the reduce then gets the multiprocessors that it frees, being on a stream of high priority"
        )
    return (
        f"{setting}: the device starts a reduce before the product launched after it, but a reduce that waits for the "
        "one before it holds up every later launch; two in flight (--residual-staleness 2) need more than 1"
    )
