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

from megatron_ladder.bench.calibration import Calibration, ForwardTimer, collective_cost, time_backward
from megatron_ladder.bench.options import BenchmarkOptions, Case, parse_alpha
from megatron_ladder.bench.paired import PairedTimes, Ratio, Verdict, measure
from megatron_ladder.bench.plot import Curve, Point, plot_speed_up
from megatron_ladder.bench.sizes import SIZES
from megatron_ladder.bench.variants import VARIANTS, Variant, bound_of, build_models, find_variants
from megatron_ladder.bench.workloads import Workload
from megatron_ladder.comm.launch import Place, find_place, naming_lost_peers, start_process_group, stop_process_group
from megatron_ladder.comm.link import EmulatedLink, LinkSpec, NoCommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.model import key_value_replicas
from megatron_ladder.cost.links import WireModel
from megatron_ladder.errors import BadNumbersError

TIMEOUT_MINUTES = 10.0
SPIN_SECONDS = 0.1
"""A wait watches the clock and does not sleep: each rank has a core of its own, and virtual machines wake up late."""


@dataclass(frozen=True)
class Row:
    """One wiring at one interconnect time."""

    case: str
    size: str
    wiring: str
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

    def __init__(self, case: Case, options: BenchmarkOptions, place: Place) -> None:
        self.case = case
        self.options = options
        self.place = place
        assert options.size is not None
        self.shape = SIZES[options.size]
        self.mesh = ProcessMesh.build(options.tp, kv_replicas=key_value_replicas(self.shape, options.tp))
        wire = LinkSpec(0.0, 0.0, options.link == "serial")
        self.link = EmulatedLink(self.mesh.tensor, wire, spin_seconds=SPIN_SECONDS)
        self.workload = Workload(case, options.batch, options.sequence, options.tokens)
        self.variants = find_variants(options.wirings)
        if VARIANTS["standard"] not in self.variants:
            self.variants.insert(0, VARIANTS["standard"])
        self.bounds = [b for b in (VARIANTS["no-comm"], VARIANTS["no-comm-parallel"]) if self._needs(b)]
        self.models = build_models(
            [*self.variants, *self.bounds], self.shape, self.mesh, self.link, NoCommGroup(self.mesh.tensor),
            torch.float32, torch.device("cpu"),
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
            self.link.reset_counters()
            run()
            self.waited[name].append(self.link.waited_seconds / self.workload.units)

        return counted

    def _progress(self, what: str) -> Callable[[int, int], None]:
        def show(done: int, total: int) -> None:
            if self.place.rank == 0 and sys.stderr.isatty():
                bar = "#" * (24 * done // total)
                print(f"\r{what:>12} [{bar:<24}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr)

        return show

    def calibrate(self) -> "Prediction":
        """Measures what the step-time model needs, on a wire that takes no time."""
        self.link.set_wire(0.0, 0.0)
        timers = {bound.name: ForwardTimer(self.models[bound.name]) for bound in self.bounds}
        times = self.time([VARIANTS["standard"], *self.bounds], "calibrating")
        forward = {name: timer.finish() for name, timer in timers.items()}
        found = {bound.one_norm: self._calibration(bound, forward[bound.name], times) for bound in self.bounds}
        reduces = self._reduces_of_a_pass()
        cost = collective_cost(times.seconds["no-comm"], times.seconds["standard"], reduces * self.workload.units)
        hideable = len(self.models["standard"].stack.sub_blocks()) * (2 if self.case == "train" else 1)
        wire = WireModel(self.options.link == "serial", launch_seconds=cost / 2, finish_seconds=cost / 2)
        return Prediction(found, wire, reduces - hideable)

    def _calibration(self, bound: Variant, forward: tuple[float, ...], times: PairedTimes) -> Calibration:
        backward = weight_gradient = (0.0,) * len(forward)
        if self.case == "train":
            hidden = torch.randn(self.options.sequence, self.options.batch, self.shape.hidden_size)
            backward, weight_gradient = time_backward(self.models[bound.name], hidden, self.options.rounds)
        seconds = times.median(bound.name) / self.workload.units
        return Calibration(forward, backward, weight_gradient, seconds, self.shape.num_layers)

    def _reduces_of_a_pass(self) -> int:
        """Reduces of one pass of the standard wiring, those of the embedding, head and loss included."""
        run = self.workload.prepare(self.models["standard"], self.mesh, 1)
        self.link.reset_counters()
        run()
        return self.link.collectives // self.workload.units

    def rows(self, prediction: "Prediction", text: str) -> list[Row]:
        """Every wiring at one interconnect time."""
        alpha = float(self.mesh.world.broadcast_object(_seconds_of(text, prediction.by_modules[False])))
        self.link.set_wire(alpha, 0.0)
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
            size=str(self.options.size),
            wiring=variant.name,
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
    _pin(place)
    with naming_lost_peers():
        rows = _measure(case, options, place)
    doubtful = [row for row in rows if row.verdict != Verdict.SOUND.value]
    if doubtful and place.rank == 0:
        raise BadNumbersError("; ".join(f"{row.wiring} at {row.alpha}: {row.verdict}" for row in doubtful))


def _measure(case: Case, options: BenchmarkOptions, place: Place) -> list[Row]:
    start_process_group(place, TIMEOUT_MINUTES)
    benchmark = Benchmark(case, options, place)
    prediction = benchmark.calibrate()
    rows: list[Row] = []
    if place.rank == 0:
        print(_heading(case, options, prediction), flush=True)
    for text in options.alpha:
        rows += benchmark.rows(prediction, text)
        if place.rank == 0:
            print(_table(rows[-len(benchmark.variants) - len(benchmark.bounds) :]), flush=True)
    benchmark.link.close()
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


def _heading(case: Case, options: BenchmarkOptions, prediction: Prediction) -> str:
    calibration = prediction.by_modules[False]
    parts = " and ".join(f"{1e3 * seconds:.3f}" for seconds in calibration.forward)
    return (
        f"{case}, {options.size}, batch {options.batch}, {options.tp} processes, fp32, emulated {options.link} wire\n"
        f"attention and MLP {parts} ms forward, the rest of a pass {1e3 * calibration.head:.3f} ms, "
        f"a collective costs its processor {2e3 * prediction.wire.launch_seconds:.3f} ms\n\n"
        "| all-reduce | wiring | ms | standard / it | spread | model | share | exposed ms a layer | |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )


def _table(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"| {row.alpha} = {1e3 * row.alpha_seconds:.2f} ms | {row.wiring} | {1e3 * row.median_seconds:.2f} "
        f"| {row.ratio_to_standard:.3f} | {row.spread:.3f} | {row.predicted_ratio:.3f} "
        f"| {row.ratio_to_standard / row.predicted_ratio:.2f} | {1e3 * row.exposed_seconds_per_layer:.3f} "
        f"| {'' if row.verdict == Verdict.SOUND.value else row.verdict} |"
        for row in rows
    )


def _write(rows: Sequence[Row], options: BenchmarkOptions, prediction: Prediction) -> None:
    if options.json is not None:
        plain: list[dict[str, Any]] = [vars(row) for row in rows]
        _replace(options.json, json.dumps(plain, indent=1) + "\n")
    if options.plot is not None:
        c = prediction.by_modules[False].sub_block
        names = list(dict.fromkeys(row.wiring for row in rows if row.wiring not in ("standard", "no-comm-parallel")))
        curves = {name: Curve(name, tuple(_point(row) for row in rows if row.wiring == name)) for name in names}
        bound = curves.pop("no-comm")
        title = f"{rows[0].case}, {options.size}, {options.tp} processes, emulated {options.link} wire"
        plot_speed_up(list(curves.values()), bound, options.plot, title=title, unit_seconds=c, unit="sub-blocks")


def _point(row: Row) -> Point:
    half = row.spread / 2
    ratio = Ratio(row.ratio_to_standard, row.ratio_to_standard - half, row.ratio_to_standard + half)
    return Point(row.alpha_seconds, ratio, row.predicted_ratio)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
