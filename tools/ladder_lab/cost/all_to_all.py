"""The all-to-alls of tokens between expert-parallel ranks: what each rank sends, and how long that takes.

A token has k choices of experts. NCCL sends a row for each of them. Kernels such as DeepEP's send a token once to each
box that has some of its experts, and from there over the link to their ranks. A router that limits a token to some
groups of experts (DeepSeek-V3: 4 of 8) limits its boxes as well. All choices are assumed to be as likely.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ladder_lab.cost.links import MEGABYTE, MICROSECOND, wire_bytes
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.placement import Spread
from megatron_ladder.blueprint.model import ModelConfig

_LARGE = 512 * MEGABYTE
LATENCY = 60.0
"""us of an all-to-all without bytes, with the exchange of counts (assumed)."""


@dataclass(frozen=True)
class AllToAll:
    """A library's all-to-all."""

    name: str
    sends_once: bool
    """Whether a token travels once to each box, instead of a row for each choice."""
    link_share: float
    """Its rate inside a box, relative to the bus bandwidth of a large all-reduce."""
    network_share: float
    """Its rate through a GPU's part of the adapters, likewise."""
    contention: float | None
    """Share of an overlap that it gives back; None: that of a large all-reduce."""
    source: str
    """Where the figures are from."""


ALL_TO_ALLS: Mapping[str, AllToAll] = {
    library.name: library
    for library in (
        AllToAll(
            "nccl",
            False,
            0.83,
            1.0,
            None,
            "a row for each choice; 370 GB/s on 8 H100, whose all-reduces have 445 with NVLS "
            "(NVIDIA/nccl-tests#212); 48 GB/s through an adapter of 400 Gb/s (NVIDIA/nccl-tests#267)",
        ),
        AllToAll(
            "deepep",
            True,
            0.76,
            0.94,
            20 / 132,
            "a token once for each box; 337 GB/s on 8 H20, which have H100's NVLink (deepseek-ai/DeepEP#16); 58 and 51 "
            "GB/s on 32 and 64 H800, of which 3/4 and 7/8 leave the box (DeepEP, docs/legacy.md); 20 of 132 "
            "multiprocessors (DeepSeek-V3's report)",
        ),
    )
}


def _distinct(groups: int, chosen: int, experts: int) -> float:
    """Return how many of the groups that share the experts equally have some of those chosen, on average."""
    others = experts - experts // groups
    return groups * (1 - math.comb(others, chosen) / math.comb(experts, chosen))


def copies(model: ModelConfig, holders: int, sends_once: bool) -> float:
    """Return how often a token is sent to reach its experts on so many ranks or boxes, this one included."""
    if not sends_once:
        return model.moe_router_topk
    groups = model.moe_router_num_groups
    most = float(holders)
    if groups > 1:
        most = min(most, model.moe_router_group_topk * max(1.0, holders / groups))
    return min(most, _distinct(min(holders, model.num_experts), model.moe_router_topk, model.num_experts))


def all_to_all_seconds(
    library: AllToAll, machine: Machine, model: ModelConfig, tokens: float, row_bytes: float, spread: Spread
) -> float:
    """Return the time in which each rank of a group sends `tokens` tokens to the ranks of their experts, or back.

    Rows to ranks of the same box use the link at the same time. An adapter carries the rows of the GPUs that share it.
    """
    ranks = spread.boxes * spread.most
    to_boxes = copies(model, spread.boxes, library.sends_once)
    to_ranks = copies(model, ranks, library.sends_once)
    leaving = to_boxes * (spread.boxes - 1) / spread.boxes
    # Forwarded rows cross the link of the box that they arrive in.
    inside = (to_ranks if library.sends_once else to_ranks / spread.boxes) * (spread.most - 1) / spread.most
    seconds = 0.0
    if spread.most > 1:
        known = min(spread.most, machine.link.known_ranks[-1])
        bus = wire_bytes(_LARGE, known) / machine.link.seconds(_LARGE, known)
        seconds = tokens * row_bytes * inside / (library.link_share * bus)
    if spread.boxes > 1:
        network = wire_bytes(_LARGE, 2) / machine.network.seconds(_LARGE, 2)
        share = min(1.0, machine.adapters / machine.per_box)
        seconds = max(seconds, tokens * row_bytes * leaving / (library.network_share * share * network))
    return LATENCY * MICROSECOND + seconds
