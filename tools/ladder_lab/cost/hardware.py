"""Figures of a cluster's GPUs and links, each with its source.

`CLUSTERS` are from data sheets and from fits to published runs, so predicted times are uncertain by `TIME_RANGE` to
either side.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ladder_lab.cost.links import GIGABYTE_PER_SECOND, MEGABYTE, MICROSECOND, wire_bytes

TIME_RANGE = 0.15
"""Relative error of times predicted from figures of links and chips alone."""
HOP = 0.25
"""Assumed share of the network's latency in an all-reduce that one hop of a ring takes; 5 us on InfiniBand."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. Memory, FLOP/s and bandwidths are those of one GPU.

    Computation: the peak is dense bf16, of which the products of a model reach `flops_share`. A large collective gives
    back the share `contention` of an overlap because it takes multiprocessors; one of `contention_bytes`, half of it.

    An all-reduce inside a node: a latency (base, and further seconds per rank), and the root of the summed squares of
    two times: `node_root_seconds` per square root of the MB, and a ring's bytes at the bandwidth. Each doubling of the
    participating nodes adds `network_seconds`; the network's bandwidth is that of one adapter in one direction.

    `sources` maps a field to the source of its figure.
    """

    name: str
    gpus_per_node: int
    memory_bytes: float
    peak_flops: float
    flops_share: float
    memory_bytes_per_second: float
    node_base_seconds: float
    node_rank_seconds: float
    node_root_seconds: float
    node_bytes_per_second: float
    network_seconds: float
    network_bytes_per_second: float
    contention: float
    contention_bytes: float
    sources: Mapping[str, str]

    def all_reduce_seconds(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return the time of one all-reduce of `num_bytes` on each of `ranks` GPUs, of a node every `stride`-th.

        Ranks of one node reduce first, then the nodes, each GPU with its share of the bytes.
        """
        if ranks == 1:
            return 0.0
        inside, nodes = self._spread(ranks, stride)
        latency = self.network_seconds * math.log2(nodes)
        wire = wire_bytes(1, nodes) * num_bytes / inside / self.network_bytes_per_second
        root = 0.0
        if inside > 1:
            latency += self.node_base_seconds + self.node_rank_seconds * inside
            root = self.node_root_seconds * math.sqrt(num_bytes / MEGABYTE)
            wire = max(wire, wire_bytes(1, inside) * num_bytes / self.node_bytes_per_second)
        return latency + math.hypot(root, wire)

    def _spread(self, ranks: int, stride: int) -> tuple[int, int]:
        """Return the ranks per node and the number of nodes."""
        inside = min(ranks, max(1, self.gpus_per_node // stride))
        return inside, math.ceil(ranks / inside)

    def gather_seconds(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return the time of one all-gather or reduce-scatter of `num_bytes` in total, half the bytes of an all-reduce.

        It uses a ring, so each further node adds `HOP` of the network's latency.
        """
        if ranks == 1:
            return 0.0
        _, nodes = self._spread(ranks, stride)
        doublings = self.network_seconds * math.log2(nodes)
        around = HOP * self.network_seconds * (nodes - 1)
        return (self.all_reduce_seconds(num_bytes, ranks, stride) - doublings) / 2 + around

    def send_seconds(self, num_bytes: float, distance: int) -> float:
        """Return the time to send a tensor to the GPU that is this many ranks away."""
        if distance < self.gpus_per_node:
            return self.node_base_seconds + num_bytes / self.node_bytes_per_second
        return self.network_seconds + num_bytes / self.network_bytes_per_second

    def contention_of(self, num_bytes: float) -> float:
        """Return the share of the overlap with a collective of this size that is given back."""
        return self.contention * num_bytes / (num_bytes + self.contention_bytes)


_FIT = "fit to 170 runs published by the authors of arXiv 2501.06589 (H100, NVLink)"
_NVIDIA_NETWORK = "one ConnectX-7 of 400 Gb/s for each GPU (NVIDIA DGX H100/H200 user guide)"
_SHARED = {
    "peak_flops": "989 TFLOP/s dense bf16 (NVIDIA H100 and H200 data sheets, SXM)",
    "flops_share": f"0.58: {_FIT}, prefill of 1024 tokens",
    "node_base_seconds": f"4.1 us: {_FIT}",
    "node_rank_seconds": (
        f"2.12 us: {_FIT}; for comparison: 8 GPUs, NCCL in a CUDA graph 17.8 us at 16 KB (sgl-project/sglang#22734)"
    ),
    "node_root_seconds": f"14 us for 1 MB: {_FIT}",
    "node_bytes_per_second": (
        f"282 GB/s: {_FIT}; for comparison: bus 365-370 GB/s by ring, 480 GB/s by NVLS (NVIDIA/nccl#1455)"
    ),
    "network_seconds": (
        "20 us: two nodes 44 us at 32 KB, fit to runs of the same authors; for comparison: 46-48 us at 1 KB and less "
        "(NVIDIA/nccl#1244)"
    ),
    "network_bytes_per_second": f"50 GB/s: {_NVIDIA_NETWORK}",
    "contention": f"0.57: {_FIT}; about 0.2 if the collective's multiprocessors are bounded",
    "contention_bytes": f"0.33 MB: {_FIT}",
}


def _hopper(name: str, memory: float, memory_rate: float) -> Cluster:
    sheet = f"(NVIDIA {name.upper()} data sheet)"
    return Cluster(
        name=name,
        gpus_per_node=8,
        memory_bytes=memory,
        peak_flops=989e12,
        flops_share=0.58,
        memory_bytes_per_second=memory_rate,
        node_base_seconds=4.1 * MICROSECOND,
        node_rank_seconds=2.12 * MICROSECOND,
        node_root_seconds=14 * MICROSECOND,
        node_bytes_per_second=282 * GIGABYTE_PER_SECOND,
        network_seconds=20 * MICROSECOND,
        network_bytes_per_second=50 * GIGABYTE_PER_SECOND,
        contention=0.57,
        contention_bytes=0.33 * MEGABYTE,
        sources={
            **_SHARED,
            "gpus_per_node": f"8 (NVIDIA {name.upper()} SXM baseboard)",
            "memory_bytes": f"{memory / 1e9:.0f} GB {sheet}",
            "memory_bytes_per_second": f"{memory_rate / 1e12:.2f} TB/s {sheet}",
        },
    )


CLUSTERS: Mapping[str, Cluster] = {"h100": _hopper("h100", 80e9, 3.35e12), "h200": _hopper("h200", 141e9, 4.8e12)}
"""h100: the paper's nodes of eight H100 with NVLink, connected by InfiniBand. h200: the same with more and faster
memory; its other figures are assumed to be those of the H100."""
