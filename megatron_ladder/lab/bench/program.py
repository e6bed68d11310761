"""One rank of `tools/benchmark.py`: calibrates, measures round by round, and holds the model against it."""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ladder.comm.launch import Place, find_place, naming_lost_peers, stop_process_group
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.lab.bench.calibration import Calibration, ForwardTimer, collective_cost, time_backward
from megatron_ladder.lab.bench.clocks import clock_of
from megatron_ladder.lab.bench.options import OWN, BenchmarkOptions, Case, parse_alpha
from megatron_ladder.lab.bench.paired import PairedTimes, Ratio, Verdict, measure
from megatron_ladder.lab.bench.plot import Curve, Point, plot_speed_up
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.bench.variants import VARIANTS, Variant, bound_of, build_models, find_variants
from megatron_ladder.lab.bench.wires import Interconnect, make_interconnect, start_ranks
from megatron_ladder.lab.bench.workloads import Workload
from megatron_ladder.lab.cost.links import PRESETS, WireModel, gpu_contention

BOUNDED_CONTENTION = 0.2
"""What a collective that is bounded in multiprocessors gives back at most, as `gpu_contention` says."""
OWN_REDUCES = 50
"""All-reduces that the time of one on the GPUs' own interconnect is the median of."""


@dataclass(frozen=True)
class Row:
    """One wiring at one interconnect time."""

    case: str
    size: str
    wiring: str
    interconnect: str
    """What carried the reduces; says so where it is emulated."""
    alpha: str
    alpha_seconds: float
    """Time of one all-reduce on the wire."""
    median_seconds: float
    """One pass: a decoded token, a prefill, or forward and backward."""
    ratio_to_standard: float
    """Median of the rounds' paired ratios, standard over this wiring."""
    spread: float
    """Distance of the ratio's quartiles."""
    predicted_ratio: float
    """By the step-time model, from the calibration."""
    exposed_seconds_per_layer: float
    """Time spent waiting for reduces."""
    verdict: str


class Benchmark:
    """The models side by side, and the wire between their ranks."""

    def __init__(
        self, case: Case, options: BenchmarkOptions, size: str, place: Place, device: torch.device
    ) -> None:
        self.case = case
        self.options = options
        self.size = size
        self.place = place
        self.shape = find_size(size)
        self.interconnect: Interconnect = make_interconnect(options, self.shape, device)
        self.mesh, self.wire = self.interconnect.mesh, self.interconnect.wire
        self.workload = Workload(case, options.batch, options.sequence, options.tokens)
        self.variants = find_variants(options.wirings)
        if VARIANTS["standard"] not in self.variants:
            self.variants.insert(0, VARIANTS["standard"])
        self.bounds = [b for b in (VARIANTS["no-comm"], VARIANTS["no-comm-parallel"]) if self._needs(b)]
        self.models = build_models(
            [*self.variants, *self.bounds], self.shape, self.mesh, self.wire, self.interconnect.no_comm,
            self.interconnect.dtype, device,
        )  # fmt: skip
        self.waited: dict[str, list[float]] = {}

    def _needs(self, bound: Variant) -> bool:
        return any(bound_of(variant) is bound for variant in self.variants)

    def time(self, variants: Sequence[Variant], what: str) -> PairedTimes:
        """Interleaved rounds over the wire as it is set."""
        rounds = self.options.rounds
        self.waited = {variant.name: [] for variant in variants}
        ways = {
            variant.name: self._counting(
                variant.name, self.workload.prepare(self.models[variant.name], self.mesh, rounds + 1)
            )
            for variant in variants
        }
        return measure(ways, rounds, before_each=self.mesh.world.barrier, progress=self._progress(what))

    def _counting(self, name: str, run: Callable[[], object]) -> Callable[[], None]:
        def counted() -> None:
            self.wire.reset_counters()
            run()
            self.interconnect.synchronize()
            self.waited[name].append(self.wire.waited_seconds / self.workload.units)

        return counted

    def _progress(self, what: str) -> Callable[[int, int], None]:
        def show(done: int, total: int) -> None:
            if self.place.rank == 0 and sys.stderr.isatty():
                bar = "#" * (24 * done // total)
                print(f"\r{what:>12} [{bar:<24}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr)

        return show

    def calibrate(self) -> "Prediction":
        """Measures what the step-time model needs, on a wire that takes no time."""
        self.interconnect.set_alpha(0.0)
        clock = clock_of(self.interconnect.device)
        timers = {bound.name: ForwardTimer(self.models[bound.name], clock) for bound in self.bounds}
        times = self.time([VARIANTS["standard"], *self.bounds], "calibrating")
        forward = {name: timer.finish() for name, timer in timers.items()}
        found = {bound.one_norm: self._calibration(bound, forward[bound.name], times) for bound in self.bounds}
        reduces = self._reduces_of_a_pass()
        cost = 0.0
        if not self.options.own_interconnect:
            cost = collective_cost(times.seconds["no-comm"], times.seconds["standard"], reduces * self.workload.units)
        hideable = len(self.models["standard"].stack.sub_blocks()) * (2 if self.case == "train" else 1)
        contention = 0.0
        if self.interconnect.device.type == "cuda":
            contention = min(BOUNDED_CONTENTION, gpu_contention(self._message_bytes()))
        serial = self.options.own_interconnect or self.options.link == "serial"
        wire = WireModel(serial, launch_seconds=cost / 2, finish_seconds=cost / 2, contention=contention)
        return Prediction(found, wire, reduces - hideable)

    def _calibration(self, bound: Variant, forward: tuple[float, ...], times: PairedTimes) -> Calibration:
        backward = weight_gradient = (0.0,) * len(forward)
        if self.case == "train":
            device, dtype = self.interconnect.device, self.interconnect.dtype
            shape = (self.options.sequence, self.options.batch, self.shape.hidden_size)
            hidden = torch.randn(shape, device=device, dtype=dtype)
            model, clock = self.models[bound.name], clock_of(device)
            backward, weight_gradient = time_backward(model, hidden, self.options.rounds, clock)
        seconds = times.median(bound.name) / self.workload.units
        return Calibration(forward, backward, weight_gradient, seconds, self.shape.num_layers)

    def _reduces_of_a_pass(self) -> int:
        """Reduces of one pass of the standard wiring, those of the embedding, head and loss included."""
        run = self.workload.prepare(self.models["standard"], self.mesh, 1)
        self.wire.reset_counters()
        run()
        return self.wire.collectives // self.workload.units

    def _message_bytes(self) -> int:
        """Of the tensor that a sub-block's output is."""
        tokens = self.options.batch * (1 if self.case == "decode" else self.options.sequence)
        return tokens * self.shape.hidden_size * self.interconnect.dtype.itemsize

    def _alpha_seconds(self, text: str, prediction: "Prediction") -> float:
        """Time of one all-reduce of that size."""
        if text in PRESETS:
            return PRESETS[text].seconds(self._message_bytes(), self.options.ranks)
        if text == OWN:
            return self._own_seconds()
        return _seconds_of(text, prediction.by_modules[False])

    def _own_seconds(self) -> float:
        clock = clock_of(self.interconnect.device)
        dtype = self.interconnect.dtype
        message = torch.zeros(self._message_bytes() // dtype.itemsize, dtype=dtype, device=self.interconnect.device)
        marks = [clock.mark()]
        for _ in range(2 * OWN_REDUCES):
            self.wire.all_reduce(message)
            marks.append(clock.mark())
        measured = marks[OWN_REDUCES:]
        return statistics.median(clock.seconds(a, b) for a, b in zip(measured, measured[1:], strict=False))

    def rows(self, prediction: "Prediction", text: str) -> list[Row]:
        """Every wiring at one interconnect time."""
        alpha = float(self.mesh.world.broadcast_object(self._alpha_seconds(text, prediction)))
        self.interconnect.set_alpha(alpha)
        compared = [*self.variants, *self.bounds]
        times = self.time(compared, f"alpha {text}")
        return [self._row(variant, text, alpha, times, prediction) for variant in compared]

    def _row(
        self, variant: Variant, text: str, alpha: float, times: PairedTimes, prediction: "Prediction"
    ) -> Row:
        ratio = times.ratio("standard", variant.name)
        bound = times.ratio("standard", bound_of(variant).name)
        standard = prediction.seconds(VARIANTS["standard"], alpha)
        return Row(
            case=self.case,
            size=self.size,
            wiring=variant.name,
            interconnect=self.interconnect.name,
            alpha=text,
            alpha_seconds=alpha,
            median_seconds=times.median(variant.name) / self.workload.units,
            ratio_to_standard=ratio.median,
            spread=ratio.spread,
            predicted_ratio=standard / prediction.seconds(variant, alpha),
            exposed_seconds_per_layer=statistics.median(self.waited[variant.name]) / self.shape.num_layers,
            verdict=ratio.verdict(bound.median + bound.spread).value,
        )


@dataclass(frozen=True)
class Prediction:
    """The step-time model with this machine's figures."""

    by_modules: dict[bool, Calibration]
    """Of the modules with two norms a layer (False) and with one (True)."""
    wire: WireModel
    always_waiting: int
    """Reduces of a pass that no wiring hides: those of embedding, head and loss."""

    def seconds(self, variant: Variant, alpha: float) -> float:
        """One pass, if every all-reduce takes `alpha` seconds on the wire."""
        calibration = self.by_modules[variant.one_norm]
        if variant.without_reduces:
            return calibration.pass_seconds
        cost = self.wire.launch_seconds + self.wire.finish_seconds
        return calibration.predict(variant, alpha, self.wire) + self.always_waiting * (alpha + cost)


def run_rank(case: Case, options: BenchmarkOptions) -> None:
    """Runs the benchmark as one of its ranks.

    Raises:
        BadNumbersError: a ratio exceeds what is possible, or the machine was too noisy to judge one.
    """
    place = find_place()
    if options.device == "cpu":
        _pin(place)
    with naming_lost_peers():
        rows = _measure(case, options, place)
    doubtful = [row for row in rows if row.verdict != Verdict.SOUND.value]
    if doubtful and place.rank == 0:
        told = (f"{row.wiring} of {row.size} at {row.alpha}: {row.verdict}" for row in doubtful)
        raise BadNumbersError("; ".join(told))


def _measure(case: Case, options: BenchmarkOptions, place: Place) -> list[Row]:
    device = start_ranks(options, place)
    rows: list[Row] = []
    for size in options.sizes:
        benchmark = Benchmark(case, options, size, place, device)
        prediction = benchmark.calibrate()
        if place.rank == 0:
            print(_heading(benchmark, prediction), flush=True)
        for text in (*options.alpha, *options.link_preset):
            new = benchmark.rows(prediction, text)
            rows += new
            if place.rank == 0:
                print(_table(new), flush=True)
        benchmark.interconnect.close()
    if place.rank == 0:
        _write(rows, options, prediction)
    stop_process_group()
    return rows


def _pin(place: Place) -> None:
    """One thread and, where there are enough, a core of its own for each rank."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= place.world_size:
        os.sched_setaffinity(0, {cores[place.local_rank]})


def _seconds_of(text: str, calibration: Calibration) -> float:
    parsed = parse_alpha(text)
    assert parsed is not None
    number, unit = parsed
    return number * {"s": 1.0, "c": calibration.sub_block, "a": calibration.forward[0]}[unit]


def _heading(benchmark: Benchmark, prediction: Prediction) -> str:
    calibration, options = prediction.by_modules[False], benchmark.options
    parts = " and ".join(f"{1e3 * seconds:.3f}" for seconds in calibration.forward)
    dtype = str(benchmark.interconnect.dtype).removeprefix("torch.")
    ranks = f"{options.processes} processes"
    if options.emulated_tp is not None:
        ranks = f"one process, rank 0 of {options.ranks} emulated ones (its results are wrong numbers)"
    return (
        f"{benchmark.case}, {benchmark.size}, batch {options.batch}, {ranks}, {dtype} on {options.device}, "
        f"{benchmark.interconnect.name}\n"
        f"attention and MLP {parts} ms forward, the rest of a pass {1e3 * calibration.head:.3f} ms, "
        f"a collective costs its processor {2e3 * prediction.wire.launch_seconds:.3f} ms\n\n"
        "| all-reduce | wiring | ms | standard / it | spread | model | share | exposed ms a layer | |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )


def _table(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"| {row.interconnect}, {row.alpha} = {_milliseconds(row.alpha_seconds)} "
        f"| {row.wiring} | {1e3 * row.median_seconds:.2f} "
        f"| {row.ratio_to_standard:.3f} | {row.spread:.3f} | {row.predicted_ratio:.3f} "
        f"| {row.ratio_to_standard / row.predicted_ratio:.2f} | {1e3 * row.exposed_seconds_per_layer:.3f} "
        f"| {'' if row.verdict == Verdict.SOUND.value else row.verdict} |"
        for row in rows
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.{2 if seconds >= 1e-4 or not seconds else 4}f} ms"


def _write(rows: Sequence[Row], options: BenchmarkOptions, prediction: Prediction) -> None:
    if options.json is not None:
        plain: list[dict[str, Any]] = [vars(row) for row in rows]
        _replace(options.json, json.dumps(plain, indent=1) + "\n")
    if options.plot is not None:
        c = prediction.by_modules[False].sub_block
        names = list(dict.fromkeys(row.wiring for row in rows if row.wiring not in ("standard", "no-comm-parallel")))
        curves = {name: Curve(name, tuple(_point(row) for row in rows if row.wiring == name)) for name in names}
        bound = curves.pop("no-comm")
        title = f"{rows[0].case}, {rows[0].size}, {options.ranks} ranks, {rows[0].interconnect}"
        plot_speed_up(list(curves.values()), bound, options.plot, title=title, unit_seconds=c, unit="sub-blocks")


def _point(row: Row) -> Point:
    half = row.spread / 2
    ratio = Ratio(row.ratio_to_standard, row.ratio_to_standard - half, row.ratio_to_standard + half)
    return Point(row.alpha_seconds, ratio, row.predicted_ratio)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
