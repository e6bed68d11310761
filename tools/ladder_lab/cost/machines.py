"""GPUs and interconnects that people own, each with the source of its figures.

The fit is that of a step-time model to 170 benchmark runs published by the authors of arXiv 2501.06589 (Llama 3 of 1B,
8B and 70B on H100, prompt 1024, 512 new tokens; median error of decode times on held-out halves 2.0 %). Measurements of
the same interconnect differ by factors of two and more with drivers, NUMA and the number of channels: measure your own
with nccl-tests.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladder_lab.cost.links import (
    CONTENTION,
    GIGABYTE_PER_SECOND,
    KILOBYTE,
    MEGABYTE,
    MICROSECOND,
    gpu_contention,
    wire_bytes,
)
from ladder_lab.cost.measured import Curve, curve_parts, interpolate, measured_curves, read_table
from ladder_lab.cost.placement import Spread
from megatron_ladder.blueprint.flops import PEAK_TFLOPS

LINK_ERROR = 1.33
"""All-reduces so many times faster or slower give the range of a predicted speed-up."""
TIME_RANGE = 0.15
"""Relative error of training times predicted from figures of links and chips alone."""
HOP = 0.25
"""Assumed share of the network's latency in an all-reduce that one hop of a ring takes; 5 us on InfiniBand."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense bf16 FLOP/s with sums in fp32, without sparsity.

    Its usual box: GPUs in it, the link between them, the network between boxes, and a box's adapters to it.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    peak_flops: float
    box: tuple[int, str, str, int]
    source: str
    """Where the figures are from."""
    capability: int = 0
    """Major CUDA compute capability; 0 if it is unknown."""

    @property
    def figures(self) -> str:
        """Memory, its rate and the peak."""
        memory = f"{self.memory_bytes / 1e9:g} GB, {self.memory_bytes_per_second / 1e9:,g} GB/s"
        return f"{memory}, {self.peak_flops / 1e12:,g} TFLOP/s ({self.source})"


def _gpu(
    name: str, capability: int, gigabytes: float, gigabytes_s: float, box: tuple[int, str, str, int], source: str
) -> Gpu:
    return Gpu(name, gigabytes * 1e9, gigabytes_s * 1e9, PEAK_TFLOPS[name] * 1e12, box, source, capability)


_HGX = (8, "nvlink", "ib-400", 8)
_CONSUMER = (4, "pcie-4-host", "10gbe", 1)
_WORKSTATION = (4, "pcie-4-p2p", "10gbe", 1)
OTHER_BOX = (1, "pcie-4-host", "10gbe", 1)
"""The usual box of a GPU that is described by its figures."""
_SPARK = "NVIDIA data sheet; FLOP/s an eighth of the sparse FP4 rate (assumed)"
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 9, 80, 3350, _HGX, "NVIDIA H100 data sheet, SXM"),
        _gpu("h200", 9, 141, 4800, (8, "nvlink-h200", "ib-400", 8), "NVIDIA H200 data sheet, SXM"),
        _gpu("h20", 9, 96, 4000, _HGX, "NVIDIA H20 data sheet"),
        _gpu("b200", 10, 180, 8000, (8, "nvlink-5", "ib-400", 8), "NVIDIA HGX B200 data sheet"),
        _gpu("a100", 8, 80, 2039, (8, "nvlink-3", "ib-200", 8), "NVIDIA A100 data sheet, SXM 80 GB"),
        _gpu("l40s", 8, 48, 864, (8, "pcie-4", "ib-200", 1), "NVIDIA data sheet"),
        _gpu("a6000", 8, 48, 768, _WORKSTATION, "NVIDIA GA102 whitepaper"),
        _gpu("rtx-6000-ada", 8, 48, 960, _WORKSTATION, "NVIDIA data sheet"),
        _gpu("rtx-pro-6000", 12, 96, 1792, (4, "pcie-5-p2p", "10gbe", 1), "NVIDIA data sheet"),
        _gpu("rtx-3090", 8, 24, 936, _CONSUMER, "NVIDIA GA102 whitepaper"),
        _gpu("rtx-4090", 8, 24, 1008, _CONSUMER, "NVIDIA Ada whitepaper"),
        _gpu("rtx-5090", 12, 32, 1792, (4, "pcie-5", "10gbe", 1), "NVIDIA Blackwell whitepaper"),
        _gpu("gb10", 12, 128, 273, (1, "dgx-spark", "dgx-spark", 1), _SPARK),
    )
}
"""The boxes are assumptions: those of servers are NVIDIA's baseboards."""


@dataclass(frozen=True)
class LinkPreset:
    """The time of one all-reduce on a kind of interconnect: a latency, and the longer of its steps and its bytes."""

    name: str
    known_ranks: range
    rate: float | None
    """GB/s of the ring's bytes; None: those of `curves`."""
    source: str
    """Where the figures are from."""
    latency: float | None = 0.0
    """us, or None for that of `curves`; and for each rank, and for each doubling of the ranks."""
    per_rank: float = 0.0
    per_doubling: float = 0.0
    curves: Mapping[int, Curve] | None = None
    """Measured times by number of ranks, which give the medium sizes instead of the following figures."""
    root: float = 0.0
    """us of medium sizes: times the square root of the MB."""
    to_megabyte: float = 0.0
    """us of medium sizes: times the MB up to 1 MB and as much beyond it, where the wire takes over."""
    per_step: float = 0.0
    """us of medium sizes: for each step of the ring, times the binary logarithm of 1 + size / 8 KB."""
    of_two: "LinkPreset | None" = None
    """The interconnect of two ranks, if it is another one."""

    def parts(self, num_bytes: float, ranks: int) -> tuple[float, float, float]:
        """Return the seconds of latency, of steps and on the wire; raise ValueError for an unknown number of ranks."""
        if ranks == 1:
            return 0.0, 0.0, 0.0
        if ranks not in self.known_ranks:
            known = " to ".join(map(str, dict.fromkeys((self.known_ranks[0], self.known_ranks[-1]))))
            raise ValueError(f"{self.name}: known for {known} ranks, found {ranks}")
        if ranks == 2 and self.of_two is not None:
            return self.of_two.parts(num_bytes, ranks)
        latency = (self.latency or 0.0) + self.per_rank * ranks + self.per_doubling * math.log2(ranks)
        per_byte = wire_bytes(1, ranks) / (self.rate * GIGABYTE_PER_SECOND * MICROSECOND) if self.rate else None
        if self.curves is not None:
            curve = self.curves[min(ranks, max(self.curves))]
            parts = curve_parts(curve, num_bytes, None if self.latency is None else latency, per_byte)
        else:
            size = num_bytes / MEGABYTE
            steps = self.root * math.sqrt(size) + self.to_megabyte * min(size, 1.0)
            steps += self.per_step * (ranks - 1) * math.log2(1 + num_bytes / (8 * KILOBYTE))
            on_wire = 0.0 if per_byte is None else per_byte * num_bytes
            parts = latency, steps, on_wire
        latency, steps, on_wire = (MICROSECOND * part for part in parts)
        return latency, steps, on_wire

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the time for a tensor of `num_bytes` on each rank; raise ValueError as `parts` does."""
        latency, steps, on_wire = self.parts(num_bytes, ranks)
        return latency + max(steps, on_wire)

    def changed(self, latency: float | None, rate: float | None, per_doubling: bool = False) -> "LinkPreset":
        """Return the link with a measured latency in us, or one for each doubling of the ranks, and rate in GB/s."""
        changes: dict[str, Any] = {}
        figures = []
        if rate is not None:
            changes["rate"] = rate
            figures.append(f"{rate:g} GB/s")
        if latency is not None:
            figures.append(f"{latency:g} us" + (" for each doubling of the boxes" if per_doubling else ""))
            changes |= {"latency": 0.0, "per_rank": 0.0, "per_doubling": 0.0, "known_ranks": _BOXES}
            changes["per_doubling" if per_doubling else "latency"] = latency
        if not changes:
            return self
        of_two = None if self.of_two is None else self.of_two.changed(latency, rate, per_doubling)
        return replace(
            self,
            **changes,
            of_two=of_two,
            source=f"{' and '.join(figures)} by the command line; otherwise {self.source}",
        )


def _measured(name: str, machine: str, libraries: Sequence[str]) -> LinkPreset:
    """Return the times of the fastest of these libraries at each size, with some of them as the source."""
    curves = measured_curves(machine, libraries)
    most = max(curves)
    versions = " or ".join(f"{library} {read_table()[machine, library, most][0]}" for library in libraries)
    largest, time = curves[most][-1]
    some = ", ".join(f"{interpolate(curves[most], size * KILOBYTE):.1f} us at {size} KB" for size in (16, 64, 1024))
    bus = wire_bytes(largest, most) / (time * MICROSECOND * GIGABYTE_PER_SECOND)
    source = f"{machine}, {versions} (NVIDIA AIConfigurator, Apache-2.0); {most} GPUs: {some}, bus {bus:.3g} GB/s"
    return LinkPreset(name, range(min(curves), most + 1), None, source, None, curves=curves)


_BOX = range(2, 9)
_BOXES = range(2, 4097)
_FIT = "fit to 170 runs published by the authors of arXiv 2501.06589"
_STAGED = (
    f"without P2P: latency 8 us for 2 ranks ({_FIT}, NCCL_P2P_DISABLE=1) to 42.6 us for 8 RTX 4090 (NVIDIA/nccl#1530; "
    "8 RTX 3090: 54.2 us, NVIDIA/nccl#1439); medium sizes as 2 H100 through the host"
)
_PCIE_4_SOURCE = (
    "4 RTX 4090: 18.8 us at 32 KB, 152.7 us at 1 MB (tinygrad/open-gpu-kernel-modules#22), bus 24.7 GB/s "
    "(tinygrad/open-gpu-kernel-modules#17); growth with the ranks that of RTX PRO 6000: 4 GPUs 13.5 us at 1 KB, 8 GPUs "
    "24.2 us at 8 KB (local-inference-lab/rtx6kpro, optimization/nccl-tuning.md)"
)
_SPARK_SOURCE = (
    "2 GB10 over 200 Gb/s: 27.8 us at 8 KB, 39.5 us at 32 KB, 67 us at 64 KB (NVIDIA/dgx-spark-playbooks#103); bus 161 "
    "Gb/s (tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#35)"
)
_PER_NODE = (
    "InfiniBand or RoCE, one GPU per node; 20 us for each doubling (assumed), as for 2 (NVIDIA/nccl-tests#150); 2 "
    "nodes of 8 H100 took 46-48 us at 1 KB (NVIDIA/nccl#1244), a third more than nvlink and this"
)
_EFA_SOURCE = (
    "AWS, each GPU's part of the adapters: 2 nodes of 8 GPUs 50.6 us at 8 B (p6-b200, dstackai/dstack#3961) and bus "
    "57.2 GB/s (p4d, NVIDIA/nccl#527), both less NVLink's part; medium sizes as InfiniBand (assumed)"
)
_ETHERNET_SOURCE = (
    "TCP sockets, one GPU per node: 45.8 us for a broadcast to 2 ranks (NVIDIA/nccl-tests#82), so an all-reduce takes "
    "at least that; 90 % of the wire's rate (assumed)"
)
_THUNDERBOLT_SOURCE = (
    "RDMA between Macs: below 50 us (jeffgeerling.com, RDMA over Thunderbolt 5), 7.6 GB/s (pytorch/pytorch#189856); "
    "TCP: a round trip of 341 to 950 us (exo-explore/exo#2295)"
)
_NO_P2P_SOURCE = f"H100 with NCCL_P2P_DISABLE=1: {_FIT}; for comparison: copies 37 GB/s (NVIDIA/nccl#1264)"
_TWO_WITHOUT_P2P = LinkPreset("no-p2p", _BOX, 15.5, _NO_P2P_SOURCE, latency=8, root=89)
"""NVLS was left on, so large tensors went over NVSwitch. It takes more than 2 GPUs (vllm-project/vllm#9699), so 2 are
staged through the host."""
_NO_P2P: dict[str, Any] = {"latency": -4.1, "per_rank": 6.05, "per_step": 1.16, "of_two": _TWO_WITHOUT_P2P}
_HOST_4_SOURCE = f"{_STAGED}; bus 12.8 GB/s, 4 RTX 4090 (tinygrad/open-gpu-kernel-modules#22)"
_HOST_5_SOURCE = f"{_STAGED}; bus 28 GB/s, 8 RTX 5090 (NVIDIA/nccl#1639)"
_THROUGH_HOST: dict[str, Any] = {"latency": -3.5, "per_rank": 5.77, "root": 89}
_P2P: dict[str, Any] = {"latency": 2.8, "per_rank": 2.7}
_IB: dict[str, Any] = {"per_doubling": 20, "root": 20}
_MACHINES = {
    "nvlink": "h100_sxm",
    "nvlink-h200": "h200_sxm",
    "nvlink-3": "a100_sxm",
    "nvlink-5": "b200_sxm",
    "pcie-4": "l40s",
    "pcie-5-p2p": "rtx_pro_6000_server",
}
_ONE_SHOT = "{}-one-shot"
PRESETS: Mapping[str, LinkPreset] = {
    preset.name: preset
    for preset in (
        *(_measured(name, machine, ["nccl"]) for name, machine in _MACHINES.items()),
        *(_measured(_ONE_SHOT.format(name), machine, ["sglang", "vllm"]) for name, machine in _MACHINES.items()),
        LinkPreset("no-p2p", _BOX, 233, _NO_P2P_SOURCE, **_NO_P2P),
        LinkPreset("pcie-4-host", _BOX, 12.8, _HOST_4_SOURCE, **_THROUGH_HOST),
        LinkPreset("pcie-5", _BOX, 28, _HOST_5_SOURCE, **_THROUGH_HOST),
        LinkPreset("pcie-4-p2p", _BOX, 24.7, _PCIE_4_SOURCE, to_megabyte=139, **_P2P),
        LinkPreset("dgx-spark", range(2, 3), 20.1, _SPARK_SOURCE, latency=24, to_megabyte=690),
        LinkPreset("ib-400", _BOXES, 47, f"{_PER_NODE}; bus 46-49 GB/s (NVIDIA/nccl-tests#290)", **_IB),
        LinkPreset("ib-200", _BOXES, 24, f"{_PER_NODE}; bus 24 GB/s (NVIDIA/nccl#412)", **_IB),
        LinkPreset("ib-100", _BOXES, 12.2, f"{_PER_NODE}; bus 12.2 GB/s (NVIDIA/nccl-tests#29)", **_IB),
        LinkPreset("efa", _BOXES, 5, _EFA_SOURCE, per_doubling=25.5, root=20),
        LinkPreset("25gbe", _BOXES, 2.8, _ETHERNET_SOURCE, per_doubling=46),
        LinkPreset("10gbe", _BOXES, 1.1, _ETHERNET_SOURCE, per_doubling=46),
        LinkPreset("thunderbolt-5", range(2, 5), 7.6, _THUNDERBOLT_SOURCE, latency=50),
    )
}
"""An all-reduce of S bytes on each of n ranks, by name."""


@dataclass(frozen=True)
class Machine:
    """Boxes of equal GPUs, with a link inside and a network between them, whose adapters a box's GPUs share."""

    gpu: Gpu
    per_box: int
    link: LinkPreset
    network: LinkPreset
    adapters: int
    contention: float = CONTENTION
    """The largest share of an overlap that a collective gives back."""

    @classmethod
    def usual(cls, gpu: str) -> "Machine":
        """Return a GPU in its usual boxes."""
        return cls.of(GPUS[gpu])

    @classmethod
    def of(cls, gpu: Gpu) -> "Machine":
        """Return a GPU in its usual boxes."""
        per_box, link, network, adapters = gpu.box
        return cls(gpu, per_box, PRESETS[link], PRESETS[network], adapters)

    def with_one_shot(self) -> "Machine | None":
        """Return the machine with the all-reduces of today's servers; None if they were not measured with its link."""
        link = PRESETS.get(_ONE_SHOT.format(self.link.name))
        return None if link is None or self.link is not PRESETS[self.link.name] else replace(self, link=link)

    def all_reduce_seconds(self, num_bytes: float, spreads: Iterable[Spread]) -> float:
        """Return the time of one all-reduce of `num_bytes` on each rank, in the slowest of groups so spread.

        Ranks of one box reduce first, then the boxes, each GPU with its share of the bytes, as those of other groups do
        at that time. Large tensors use both wires at once.
        """
        return max(self._all_reduce_seconds(num_bytes, spread) for spread in spreads)

    def _all_reduce_seconds(self, num_bytes: float, spread: Spread) -> float:
        between = self._through_adapter(num_bytes, spread)
        parts = self.link.parts(num_bytes, spread.most), self.network.parts(between, spread.boxes)
        latencies, steps, wires = zip(*parts, strict=True)
        return sum(latencies) + max(sum(steps), *wires)

    def gather_seconds(self, num_bytes: float, spreads: Iterable[Spread]) -> float:
        """Return the time of one all-gather or reduce-scatter of `num_bytes` in total, half the bytes of an all-reduce.

        It uses a ring, so each further box adds `HOP` of the network's latency.
        """
        return max(self._gather_seconds(num_bytes, spread) for spread in spreads)

    def _gather_seconds(self, num_bytes: float, spread: Spread) -> float:
        if spread.boxes == 1:
            return self._all_reduce_seconds(num_bytes, spread) / 2
        doublings = self.network.parts(0, spread.boxes)[0]
        hops = HOP * self.network.parts(0, 2)[0] * (spread.boxes - 1)
        return (self._all_reduce_seconds(num_bytes, spread) - doublings) / 2 + hops

    def contention_of(self, num_bytes: float) -> float:
        """Return the share of the overlap with a collective of this size that is given back."""
        return gpu_contention(num_bytes, self.contention)

    def describe(self, gpus: int) -> str:
        """Return the sources of all figures for so many GPUs."""
        sources = {self.gpu.name: self.gpu.figures}
        if min(self.per_box, gpus) > 1:
            sources[self.link.name] = self.link.source
        if gpus > self.per_box:
            sources[self.network.name] = self.network.source
        return "\n".join(f"  {name}: {source}" for name, source in sources.items())

    def _through_adapter(self, num_bytes: float, spread: Spread) -> float:
        """Return the bytes of a group's all-reduce that pass through one of the adapters which its box shares."""
        return num_bytes * max(1 / spread.fewest, spread.sharing / self.adapters)
