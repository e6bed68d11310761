"""The models of the compared wirings on one interconnect: times in alternation, and inputs of the step-time model."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ladder_lab.bench.calibration import (
    Calibration,
    Computation,
    DeviceClock,
    Prediction,
    SubBlockSeconds,
    time_backward,
    time_forward,
)
from ladder_lab.bench.interconnect import OWN_REDUCES, make_interconnect
from ladder_lab.bench.options import OWN, TRAINING, BenchmarkOptions, parse_alpha
from ladder_lab.bench.paired import PairedTimes, measure
from ladder_lab.bench.variants import VARIANTS, Variant, bound_of
from ladder_lab.bench.workloads import Workload, build_models
from ladder_lab.cost.links import WireModel, gpu_contention
from ladder_lab.cost.machines import PRESETS
from ladder_lab.link.link import EmulatedLink, WireTimes
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.model.operations import Operations

BOUNDED_CONTENTION = 0.2
"""Largest compute share lost to a collective with a bounded number of multiprocessors, per `gpu_contention`."""
Passes = Mapping[str, Callable[[], None]]
"""Functions that run passes of a workload, by variant."""


class WiringComparison:
    """The models to compare, and the interconnect between their ranks.

    Attributes:
        compared: the variants of the command line, with `standard`, and their bounds.
        is_rehearsal: whether one CPU plays a GPU that plays a rank.
        waited: seconds per pass that each round of the last `time` spent in waits of an emulated wire, by variant.
    """

    def __init__(
        self,
        options: BenchmarkOptions,
        shape: ModelConfig,
        rank_info: RankInfo,
        device: torch.device,
        operations: Operations | None = None,
    ) -> None:
        """Build interconnect and models, with these operations; a collective call of all ranks."""
        self.options = options
        self.shape = shape
        self.rank = rank_info.rank
        self.interconnect = make_interconnect(options, shape, device)
        self.mesh = self.interconnect.mesh
        self._wire = self.interconnect.wire
        self._seconds = time.perf_counter
        if isinstance(self._wire, EmulatedLink):
            link_clock = self._wire.clock
            self._seconds = lambda: 1e-9 * link_clock.now_ns()
        self._clock = DeviceClock(device, self._seconds)
        variants = [VARIANTS[name] for name in options.wirings]
        if VARIANTS["standard"] not in variants:
            variants.insert(0, VARIANTS["standard"])
        needed = {bound_of(variant).name for variant in variants}
        self._bounds = [variant for name, variant in VARIANTS.items() if name in needed]
        self.compared = [variant for variant in variants if variant not in self._bounds] + self._bounds
        no_comm = self.interconnect.no_comm
        dtype = self.interconnect.dtype
        self.models = build_models(self.compared, shape, self.mesh, self._wire, no_comm, dtype, device, operations)
        self.waited: dict[str, list[float]] = {}
        self.is_rehearsal = options.emulate and device.type == "cpu"

    @contextmanager
    def prepare(self, workload: Workload, variants: Sequence[Variant], timings: int) -> Iterator[Passes]:
        """Provide passes of the variants for so many calls of `time`; captured ones are captured once."""
        runs = timings * (self.options.rounds + 1)

        def counting(name: str) -> Callable[[], None]:
            run = stack.enter_context(workload.prepare(self.models[name], self.mesh, runs))

            def counted() -> None:
                if not isinstance(self._wire, EmulatedLink):
                    run()
                    if self.options.device == "cuda":
                        torch.cuda.synchronize()
                    return
                run()
                self.waited[name].append(self._wire.waited_seconds / workload.units)

            return counted

        with ExitStack() as stack:
            yield {variant.name: counting(variant.name) for variant in variants}

    def time(self, passes: Passes, what: str) -> PairedTimes:
        """Time passes in alternation; `what` labels the progress bar of rank 0."""
        self.waited = {name: [] for name in passes}
        label = what if self.rank == 0 else None

        def before_each(_: str) -> None:
            self.mesh.world.barrier()
            if isinstance(self._wire, EmulatedLink):
                self._wire.restart()

        return measure(passes, self.options.rounds, before_each=before_each, label=label, clock=self._seconds)

    def calibrate(self, workload: Workload) -> Prediction:
        """Measure the inputs of the step-time model, on a wire without latency."""
        self.interconnect.set_wire(lambda message: 0.0)
        finish = {bound.name: time_forward(self.models[bound.name], self._clock) for bound in self._bounds}
        with self.prepare(workload, [VARIANTS["standard"], *self._bounds], 1) as passes:
            times = self.time(passes, f"calibrating {workload.case}")
        calibrations: dict[str, Calibration] = {}
        for bound in self._bounds:
            calibrations[bound.name] = self._calibration(workload, bound, finish[bound.name](), times)
        # Count the collectives of a pass, with those of embedding, head and loss; a replay would pass the counter by.
        eager = replace(workload, cuda_graph=False)
        with eager.prepare(self.models["no-comm"], self.mesh, 1) as run:
            self.interconnect.no_comm.messages.clear()
            run()
        messages = self.interconnect.no_comm.messages
        always_waiting = {message: count // workload.units for message, count in messages.items()}
        # In a forward pass, as many numbers of rows travel as tokens.
        message = max(messages, key=lambda each: (messages[each], each.num_bytes))
        reduces = sum(always_waiting.values())
        directions = 2 if workload.case == "train" else 1
        stack = self.models["standard"].stack
        if stack.divides_experts:
            # The others have one rank.
            always_waiting.clear()
        else:
            always_waiting[message] -= directions * len(stack.sub_blocks())
        # What a collective costs the processor, or takes from the computation it overlaps with.
        cost = 0.0
        contention = 0.0
        if self.options.device == "cpu":
            pairs = zip(times.seconds["no-comm"], times.seconds["standard"], strict=True)
            cost = max(0.0, statistics.median(b - a for a, b in pairs) / (reduces * workload.units))
        else:
            contention = min(BOUNDED_CONTENTION, gpu_contention(message.num_bytes))
        serial = self.options.device == "cuda" or self.options.link == "serial"
        wire = WireModel(serial, launch_seconds=cost / 2, finish_seconds=cost / 2, contention=contention)
        return Prediction(calibrations, wire, message, always_waiting)

    def _calibration(
        self, workload: Workload, bound: Variant, seconds: dict[Computation, SubBlockSeconds], times: PairedTimes
    ) -> Calibration:
        if workload.case in TRAINING:
            shape = (workload.sequence, workload.batch, self.shape.hidden_size)
            hidden = torch.randn(shape, device=self.interconnect.device, dtype=self.interconnect.dtype)
            backward = time_backward(self.models[bound.name], hidden, self.options.rounds, self._clock)
            seconds = {key: backward[key]._replace(forward=forward.forward) for key, forward in seconds.items()}
        if workload.case == "forward":
            seconds = {key: one._replace(backward=0.0, weight_gradient=0.0) for key, one in seconds.items()}
        model = self.models[bound.name]
        return Calibration(
            seconds, times.median(bound.name) / workload.units, model.config, model.stack.divides_experts
        )

    def wire_times(self, text: str, prediction: Prediction, skew_seconds: float = 0.0) -> WireTimes:
        """Return the times of a wire, given as a preset, as OWN, or as a time or multiple; collective.

        Those of a preset depend on the bytes if the wire is emulated on one GPU.
        """
        if self.options.emulate and text in PRESETS:
            seconds_of = PRESETS[text].seconds
            return lambda message: message.share * seconds_of(message.num_bytes, message.ranks) + skew_seconds
        seconds = float(self.mesh.world.broadcast_object(self._reduce_seconds(text, prediction)))
        return lambda message: message.share * seconds + skew_seconds

    def _reduce_seconds(self, text: str, prediction: Prediction) -> float:
        num_bytes = prediction.message.num_bytes
        if text in PRESETS:
            return PRESETS[text].seconds(num_bytes, self.options.ranks)
        if text == OWN:
            dtype = self.interconnect.dtype
            numbers = num_bytes // dtype.itemsize
            message = torch.zeros(numbers, dtype=dtype, device=self.interconnect.device)
            marks = [self._clock.mark()]
            for _ in range(2 * OWN_REDUCES):
                self._wire.all_reduce(message)
                marks.append(self._clock.mark())
            return statistics.median(self._clock.seconds(*span) for span in itertools.pairwise(marks[OWN_REDUCES:]))
        parsed = parse_alpha(text)
        assert parsed is not None
        number, unit = parsed
        calibration = prediction.by_bound["no-comm"]
        return number * {"s": 1.0, "c": calibration.sub_block, "a": calibration.attention}[unit]
