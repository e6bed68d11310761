"""Times of an all-reduce on real interconnects, and of a step of a wiring on such a wire.

`PRESETS` are fitted to measurements of an all-reduce of S bytes on each of n ranks.

The step-time model walks the same list of sub-blocks by the same rule as the model does (a sub-block of staleness s
starts when at most s of the earlier outputs are missing), but it advances a clock instead of computing. It assumes that
all ranks behave the same, and simulates one. With sub-blocks of compute time c and all-reduce time t a layer takes

    wiring                    serial wire             pipelined wire
    standard                  2c + 2t                 2c + 2t
    parallel                  2c + t                  2c + t
    ladder                    2 max(c, t)             max(2c, c + t)
    ladder-parallel           max(2c, t)              max(2c, c + t/2)
    ladder of staleness 2     2 max(c, t)             max(2c, 2 (c + t)/3)

On a pipelined wire s + 1 sub-blocks of staleness s finish within one c + t: the all-reduce of a sub-block starts when
the sub-block ends, and the sub-block s + 1 positions later is the first to wait for it.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MICROSECOND = 1e-6
KILOBYTE = 2**10
MEGABYTE = 2**20
"""Tensor sizes are binary."""
GIGABYTE_PER_SECOND = 1e9
"""Rates are decimal, as in data sheets."""


@dataclass(frozen=True)
class LinkPreset:
    """The time of one all-reduce on a kind of interconnect."""

    name: str
    """Name on the command line."""
    seconds: Callable[[int, int], float]
    """(bytes of one rank's tensor, number of ranks) -> seconds; 0 for one rank. Raises ValueError for a number of
    ranks that was not measured."""
    sources: Mapping[str, str]
    """Figure in the formula -> its source."""


def wire_bytes(num_bytes: int, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends for an all-reduce: 2 (n - 1)/n S."""
    return 2 * (ranks - 1) / ranks * num_bytes


def _nvlink_seconds(num_bytes: int, ranks: int) -> float:
    """4.1 us + 2.12 us n + max(14 us sqrt(S / MB), wire bytes / 282 GB/s)."""
    if _is_alone(ranks, range(2, 9), "nvlink"):
        return 0.0
    latency = (4.1 + 2.12 * ranks) * MICROSECOND
    return latency + max(_root(14, num_bytes), wire_bytes(num_bytes, ranks) / (282 * GIGABYTE_PER_SECOND))


def _no_p2p_seconds(num_bytes: int, ranks: int) -> float:
    """n > 2: -4.1 us + 6.05 us n + max(1.16 us (n - 1) log2(1 + S / 8 KB), wire bytes / 233 GB/s);
    n = 2: 8 us + max(89 us sqrt(S / MB), wire bytes / 15.5 GB/s)."""
    if _is_alone(ranks, range(2, 9), "no-p2p"):
        return 0.0
    on_wire = wire_bytes(num_bytes, ranks)
    if ranks == 2:
        return 8 * MICROSECOND + max(_root(89, num_bytes), on_wire / (15.5 * GIGABYTE_PER_SECOND))
    latency = (-4.1 + 6.05 * ranks) * MICROSECOND
    steps = 1.16 * MICROSECOND * (ranks - 1) * math.log2(1 + num_bytes / (8 * KILOBYTE))
    return latency + max(steps, on_wire / (233 * GIGABYTE_PER_SECOND))


def _infiniband_seconds(num_bytes: int, ranks: int) -> float:
    """Through 44 us at 32 KB and 66 us at 512 KB with a square root of S, as on NVLink; never faster than 310 GB/s."""
    if _is_alone(ranks, range(16, 17), "infiniband"):
        return 0.0
    small, large = (32 * KILOBYTE, 44 * MICROSECOND), (512 * KILOBYTE, 66 * MICROSECOND)
    slope = (large[1] - small[1]) / (math.sqrt(large[0]) - math.sqrt(small[0]))
    latency = small[1] - slope * math.sqrt(small[0])
    return latency + max(slope * math.sqrt(num_bytes), wire_bytes(num_bytes, ranks) / (310 * GIGABYTE_PER_SECOND))


_FIT = (
    "fit of a step-time model to 170 benchmark runs published by the authors of arXiv 2501.06589 (Llama 3 of 1B, 8B "
    "and 70B on H100, prompt 1024, 512 new tokens; median error of decode times on held-out halves 2.0 %)"
)
_NVLINK_CHECKS = (
    "for comparison: 8 GPUs, NCCL in a CUDA graph 17.8 us at 16 KB, 20.9 us at 512 KB, 27.0 us at 1 MB "
    "(sgl-project/sglang#22734)"
)
PRESETS: Mapping[str, LinkPreset] = {
    preset.name: preset
    for preset in (
        LinkPreset(
            "nvlink",
            _nvlink_seconds,
            {
                "4.1 us + 2.12 us n": f"{_FIT}; {_NVLINK_CHECKS}",
                "14 us sqrt(S / MB)": _FIT,
                "282 GB/s": f"{_FIT}; for comparison: bus 365-370 GB/s by ring (NVIDIA/nccl#1455)",
            },
        ),
        LinkPreset(
            "no-p2p",
            _no_p2p_seconds,
            {
                "n > 2: -4.1 us + 6.05 us n": f"{_FIT}, those with NCCL_P2P_DISABLE=1",
                "n > 2: 1.16 us (n - 1) log2(1 + S / 8 KB)": f"{_FIT}, those with NCCL_P2P_DISABLE=1",
                "n > 2: 233 GB/s": (
                    f"{_FIT}, those with NCCL_P2P_DISABLE=1: NVLS was left on, so large tensors went over NVSwitch"
                ),
                "n = 2: 8 us, 89 us sqrt(S / MB), 15.5 GB/s": (
                    f"{_FIT}, those with NCCL_P2P_DISABLE=1: staged through the host, since NVLS takes more than 2 "
                    "GPUs (vllm-project/vllm#9699); for comparison: copies 37 GB/s (NVIDIA/nccl#1264)"
                ),
            },
        ),
        LinkPreset(
            "infiniband",
            _infiniband_seconds,
            {
                "44 us at 32 KB, 66 us at 512 KB": (
                    "fit of the same authors' runs on 2 x 8 GPUs; for comparison: 46-48 us at 1 KB and less "
                    "(NVIDIA/nccl#1244)"
                ),
                "sqrt(S) between and beyond": "assumed: the form that fits NVLink; only two sizes are known",
                "310 GB/s": "bus of two nodes of 8 GPUs (NVIDIA/nccl#1031)",
            },
        ),
    )
}


def gpu_contention(num_bytes: int) -> float:
    """Return the share of an overlap that a GPU gives back, 0.57 S / (S + 0.33 MB), because a collective takes
    multiprocessors.

    It is from the same fit as the presets. 0.03 at 16 KB; a collective bounded in multiprocessors gives back about 0.2.
    """
    return 0.57 * num_bytes / (num_bytes + 0.33 * MEGABYTE)


def _root(microseconds: float, num_bytes: int) -> float:
    return microseconds * MICROSECOND * math.sqrt(num_bytes / MEGABYTE)


def _is_alone(ranks: int, measured: range, name: str) -> bool:
    if ranks != 1 and ranks not in measured:
        known = f"{measured[0]}" if len(measured) == 1 else f"{measured[0]} to {measured[-1]}"
        raise ValueError(f"{name}: measured for {known} ranks, found {ranks}")
    return ranks == 1


@dataclass(frozen=True)
class SubBlockTime:
    """Seconds that one sub-block takes on a rank."""

    forward_seconds: float
    """Computation, forward."""
    reduce_seconds: float
    """Wire time of the all-reduce of its output, and of its input gradient, which has the same size."""
    staleness: int = 0
    """Earlier outputs that may be missing from the stream when it starts."""
    dgrad_seconds: float = 0.0
    """Backward, up to the gradient of its input."""
    wgrad_seconds: float = 0.0
    """Backward, the rest: the weight gradient of its column-parallel layer, which no other sub-block needs."""


@dataclass(frozen=True)
class WireModel:
    """How collectives of one rank share the wire, and their cost on the processor."""

    serial: bool = True
    """Whether a collective starts only when the previous one has ended."""
    launch_seconds: float = 0.0
    """Compute time to start a collective."""
    finish_seconds: float = 0.0
    """Compute time to wait for a collective; it overlaps with the wire if the collective is not done."""
    contention: float = 0.0
    """Compute time lost per second of overlap with the wire: max(c, t) + contention min(c, t)."""


@dataclass(slots=True, eq=False)
class SimulatedCollective:
    """A launched all-reduce."""

    seconds_left: float


class SimulatedClock:
    """The time of one rank, which computes or waits while collectives advance.

    A subclass can record computation by overriding `compute`, and the wire's activity by overriding `advance`.
    """

    def __init__(self, wire: WireModel) -> None:
        self.wire = wire
        self.now = 0.0
        self._in_flight: list[SimulatedCollective] = []

    def launch(self, seconds: float) -> SimulatedCollective:
        """Start a collective."""
        self.compute(self.wire.launch_seconds)
        collective = SimulatedCollective(seconds)
        self._in_flight.append(collective)
        return collective

    def compute(self, seconds: float) -> None:
        """Compute for this long, and longer with contention."""
        while seconds > 0:
            moving = self._moving()
            if not moving:
                self.now += seconds
                return
            overlapped = min(seconds, *(each.seconds_left for each in moving))
            seconds -= overlapped
            self.advance(moving, overlapped)
            self.now += self.wire.contention * overlapped

    def wait(self, collective: SimulatedCollective) -> None:
        """Wait until `collective` is done; collectives must be waited for in launch order."""
        self.compute(self.wire.finish_seconds)
        while collective.seconds_left > 0:
            moving = self._moving()
            self.advance(moving, min(each.seconds_left for each in moving))

    def _moving(self) -> list[SimulatedCollective]:
        """Drop finished collectives, and return those that the wire carries now."""
        if self.wire.serial:
            while self._in_flight and self._in_flight[0].seconds_left <= 0:
                self._in_flight.pop(0)
            return self._in_flight[:1]
        self._in_flight = [each for each in self._in_flight if each.seconds_left > 0]
        return self._in_flight

    def advance(self, moving: Sequence[SimulatedCollective], seconds: float) -> None:
        """Let the wire carry `moving` for this long."""
        self.now += seconds
        for each in moving:
            each.seconds_left -= seconds


def forward_seconds(
    sub_blocks: Sequence[SubBlockTime],
    wire: WireModel,
    head_seconds: float = 0.0,
    *,
    clock: SimulatedClock | None = None,
) -> float:
    """Return the time of a forward pass: the sub-blocks by the rule, the final waits, then the head.

    Args:
        head_seconds: everything after the last output has arrived, including exposed collectives.
        clock: a clock of the same wire, for callers that need more than the total.
    """
    clock = SimulatedClock(wire) if clock is None else clock
    pending: deque[SimulatedCollective] = deque()
    for block in sub_blocks:
        while len(pending) > block.staleness:
            clock.wait(pending.popleft())
        clock.compute(block.forward_seconds)
        pending.append(clock.launch(block.reduce_seconds))
    while pending:
        clock.wait(pending.popleft())
    clock.compute(head_seconds)
    return clock.now


def backward_seconds(
    sub_blocks: Sequence[SubBlockTime],
    wire: WireModel,
    head_seconds: float = 0.0,
    *,
    launch_before_wgrad: bool = False,
    wait_at_once: bool = False,
    clock: SimulatedClock | None = None,
) -> float:
    """Return the time of a backward pass, the mirror of the forward pass.

    The gradient of sub-block j's output is the gradient of the stream at the point where the output is added. So the
    backward of j needs the reduced input gradient of every later sub-block that read a stream with this output in it.
    The others can be in flight: for ladder that of j + 1, for standard none.

    Args:
        head_seconds: backward of the head, before the first sub-block's.
        launch_before_wgrad: launch the reduce as soon as the input gradient is ready, so that it overlaps with the
            weight-gradient product (for the standard wiring, Megatron's overlap); otherwise launch it after both.
        wait_at_once: wait for each reduce before the next backward, whatever the wiring allows, as autograd does with
            collectives that are only asynchronous.
        clock: as for `forward_seconds`.
    """
    clock = SimulatedClock(wire) if clock is None else clock
    clock.compute(head_seconds)
    added = outputs_added([block.staleness for block in sub_blocks])
    in_flight: deque[tuple[int, SimulatedCollective]] = deque()
    for index in reversed(range(len(sub_blocks))):
        block = sub_blocks[index]
        while in_flight and in_flight[0][0] > index:
            clock.wait(in_flight.popleft()[1])
        clock.compute(block.dgrad_seconds if launch_before_wgrad else block.dgrad_seconds + block.wgrad_seconds)
        reduce = clock.launch(block.reduce_seconds)
        if launch_before_wgrad:
            clock.compute(block.wgrad_seconds)
        if wait_at_once:
            clock.wait(reduce)
        else:
            in_flight.append((added[index], reduce))
    while in_flight:
        clock.wait(in_flight.popleft()[1])
    return clock.now


def outputs_added(staleness: Sequence[int]) -> list[int]:
    """Return how many outputs, counted from the first, are in the stream that each sub-block reads."""
    added, done = [], 0
    for index, missing in enumerate(staleness):
        done = max(done, index - missing)
        added.append(done)
    return added
