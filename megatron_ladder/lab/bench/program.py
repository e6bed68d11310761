"""One rank of `tools/benchmark.py`: calibrates, measures round by round, and compares with the step-time model."""

import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import (
    RankInfo,
    naming_lost_peers,
    read_rank_info,
    start_process_group,
    stop_process_group,
)
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.symmetric import SymmetricMemoryGroup, check_peers, select_all_reduce
from megatron_ladder.errors import BadNumbersError, UserError
from megatron_ladder.files import write_atomically
from megatron_ladder.lab.bench.calibration import (
    Calibration,
    DeviceClock,
    Prediction,
    collective_cost,
    time_backward,
    time_forward,
)
from megatron_ladder.lab.bench.options import OWN, BenchmarkOptions, Case, parse_alpha
from megatron_ladder.lab.bench.paired import PairedTimes, RatioVerdict, measure
from megatron_ladder.lab.bench.results import TABLE_HEAD, BenchmarkRow, plot_speed_up, results_table
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.bench.variants import VARIANTS, Variant, bound_of
from megatron_ladder.lab.bench.workloads import Workload, build_models
from megatron_ladder.lab.cost.links import WireModel, gpu_contention
from megatron_ladder.lab.cost.machines import PRESETS
from megatron_ladder.lab.link.cuda_groups import MeteredGroup
from megatron_ladder.lab.link.cuda_link import CudaLink
from megatron_ladder.lab.link.link import EmulatedLink, LinkSpec, NoCommGroup, WireGroup

BOUNDED_CONTENTION = 0.2
"""Largest compute share lost to a collective with a bounded number of multiprocessors, per `gpu_contention`."""
OWN_REDUCES = 50
"""All-reduces in the median time of one on the GPUs' own interconnect."""
TIMEOUT_MINUTES = 10.0
SPIN_SECONDS = 0.1
"""Waits poll the clock instead of sleeping: each rank has its own core, and virtual machines wake up late."""


@dataclass(frozen=True)
class _Interconnect:
    """The ranks of a benchmark and the wire between them: the tensor-parallel group whose reduces are timed."""

    name: str
    mesh: ProcessMesh
    wire: EmulatedLink | CudaLink | MeteredGroup
    no_comm: NoCommGroup
    device: torch.device
    dtype: torch.dtype

    def set_alpha(self, seconds: float) -> None:
        if isinstance(self.wire, WireGroup):
            self.wire.set_wire(seconds, 0.0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if isinstance(self.wire, WireGroup):
            self.wire.close()


def _start_ranks(options: BenchmarkOptions, place: RankInfo) -> torch.device:
    """Join the other processes and return this one's device; raise UserError if the machine lacks what flags need."""
    if options.device == "cpu":
        return start_process_group(place, TIMEOUT_MINUTES, device=torch.device("cpu"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UserError("--device cuda: torch finds no GPU here: use --device cpu")
    if count < place.world_size:
        raise UserError(
            f"--device cuda: found {count} GPUs for {place.world_size} processes: lower --tp, or give --emulated-tp to "
            "run one rank's share of a larger group on one GPU"
        )
    if options.emulated_tp is not None:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        return device
    if options.tp_all_reduce == "symmetric":
        check_peers(place.world_size, torch.device("cuda", place.local_rank), torch.bfloat16)
    return start_process_group(place, TIMEOUT_MINUTES)


def _make_interconnect(options: BenchmarkOptions, shape: ModelConfig, device: torch.device) -> _Interconnect:
    """Build the interconnect; a collective call of all ranks."""
    replicas = key_value_replicas(shape, options.ranks)
    spec = LinkSpec(0.0, 0.0, options.link == "serial")
    if options.emulated_tp is not None:
        link = CudaLink(options.emulated_tp, spec, device, sms=options.comm_sms)
        replica = NoCommGroup(CommGroup(range(replicas), 0, None))
        mesh = replace(ProcessMesh.single(), tensor=link, kv_replica=replica)
        name = f"emulated {options.link} wire and ranks"
        return _Interconnect(name, mesh, link, NoCommGroup(link), device, torch.bfloat16)
    mesh = ProcessMesh.build(options.tp, kv_replicas=replicas, tp_comm_max_ctas=options.comm_sms)
    no_comm = NoCommGroup(mesh.tensor)
    if options.device == "cpu":
        wire = EmulatedLink(mesh.tensor, spec, spin_seconds=SPIN_SECONDS)
        return _Interconnect(f"emulated {options.link} wire", mesh, wire, no_comm, device, torch.float32)
    group = select_all_reduce(options.tp_all_reduce, mesh.tensor, device, torch.bfloat16)
    name = "symmetric" if isinstance(group, SymmetricMemoryGroup) else "nccl"
    return _Interconnect(name, mesh, MeteredGroup(group), no_comm, device, torch.bfloat16)


class _Benchmark:
    """The models to compare, and the wire between their ranks."""

    def __init__(self, case: Case, options: BenchmarkOptions, size: str, place: RankInfo, device: torch.device) -> None:
        self.case, self.options, self.size, self.place = case, options, size, place
        self.shape = find_size(size)
        self.interconnect = _make_interconnect(options, self.shape, device)
        self.mesh, self.wire = self.interconnect.mesh, self.interconnect.wire
        self.workload = Workload(case, options.batch, options.sequence, options.tokens, options.cuda_graph)
        self.clock = DeviceClock(device)
        self.variants = [VARIANTS[name] for name in options.wirings]
        if VARIANTS["standard"] not in self.variants:
            self.variants.insert(0, VARIANTS["standard"])
        needed = {bound_of(variant).name for variant in self.variants}
        self.bounds = [VARIANTS[name] for name in ("no-comm", "no-comm-parallel") if name in needed]
        self.models = build_models(
            [*self.variants, *self.bounds], self.shape, self.mesh, self.wire, self.interconnect.no_comm,
            self.interconnect.dtype, device,
        )  # fmt: skip
        self.waited: dict[str, list[float]] = {}

    def time(self, variants: Sequence[Variant], what: str) -> PairedTimes:
        rounds = self.options.rounds
        self.waited = {variant.name: [] for variant in variants}

        def counting(name: str, run: Callable[[], object]) -> Callable[[], None]:
            def counted() -> None:
                self.wire.reset_counters()
                run()
                self.interconnect.synchronize()
                self.waited[name].append(self.wire.waited_seconds / self.workload.units)

            return counted

        label = what if self.place.rank == 0 else None
        with ExitStack() as stack:
            ways = {
                name: counting(
                    name, stack.enter_context(self.workload.prepare(self.models[name], self.mesh, rounds + 1))
                )
                for name in self.waited
            }
            return measure(ways, rounds, before_each=self.mesh.world.barrier, label=label)

    def calibrate(self) -> Prediction:
        """Measure the inputs of the step-time model, on a wire without latency."""
        self.interconnect.set_alpha(0.0)
        finish = {bound.name: time_forward(self.models[bound.name], self.clock) for bound in self.bounds}
        times = self.time([VARIANTS["standard"], *self.bounds], "calibrating")
        found = {bound.one_norm: self._calibration(bound, finish[bound.name](), times) for bound in self.bounds}
        # Including those of embedding, head and loss.
        # A replay does not pass through the wire's counters.
        eager = replace(self.workload, cuda_graph=False)
        with eager.prepare(self.models["standard"], self.mesh, 1) as run:
            self.wire.reset_counters()
            run()
        reduces = self.wire.collectives // self.workload.units
        hideable = len(self.models["standard"].stack.sub_blocks()) * (2 if self.case == "train" else 1)
        cost = contention = 0.0
        if not self.options.own_interconnect:
            cost = collective_cost(times.seconds["no-comm"], times.seconds["standard"], reduces * self.workload.units)
        if self.interconnect.device.type == "cuda":
            contention = min(BOUNDED_CONTENTION, gpu_contention(self._message_bytes()))
        serial = self.options.own_interconnect or self.options.link == "serial"
        wire = WireModel(serial, launch_seconds=cost / 2, finish_seconds=cost / 2, contention=contention)
        return Prediction(found, wire, reduces - hideable)

    def _calibration(self, bound: Variant, forward: tuple[float, ...], times: PairedTimes) -> Calibration:
        backward = weight_gradient = (0.0,) * len(forward)
        if self.case == "train":
            shape = (self.options.sequence, self.options.batch, self.shape.hidden_size)
            hidden = torch.randn(shape, device=self.interconnect.device, dtype=self.interconnect.dtype)
            model, rounds = self.models[bound.name], self.options.rounds
            backward, weight_gradient = time_backward(model, hidden, rounds, self.clock)
        seconds = times.median(bound.name) / self.workload.units
        return Calibration(forward, backward, weight_gradient, seconds, self.shape.num_layers)

    def _message_bytes(self) -> int:
        tokens = self.options.batch * (1 if self.case == "decode" else self.options.sequence)
        return tokens * self.shape.hidden_size * self.interconnect.dtype.itemsize

    def _alpha_seconds(self, text: str, prediction: Prediction) -> float:
        """Return the time of one all-reduce, given as a preset, as OWN, or as a time or multiple."""
        if text in PRESETS:
            return PRESETS[text].seconds(self._message_bytes(), self.options.ranks)
        if text == OWN:
            dtype = self.interconnect.dtype
            message = torch.zeros(self._message_bytes() // dtype.itemsize, dtype=dtype, device=self.interconnect.device)
            marks = [self.clock.mark()]
            for _ in range(2 * OWN_REDUCES):
                self.wire.all_reduce(message)
                marks.append(self.clock.mark())
            return statistics.median(self.clock.seconds(*span) for span in itertools.pairwise(marks[OWN_REDUCES:]))
        parsed = parse_alpha(text)
        assert parsed is not None
        number, unit = parsed
        calibration = prediction.by_modules[False]
        return number * {"s": 1.0, "c": calibration.sub_block, "a": calibration.forward[0]}[unit]

    def rows(self, prediction: Prediction, text: str) -> list[BenchmarkRow]:
        alpha = float(self.mesh.world.broadcast_object(self._alpha_seconds(text, prediction)))
        self.interconnect.set_alpha(alpha)
        compared = [*self.variants, *self.bounds]
        times = self.time(compared, f"alpha {text}")
        standard = prediction.seconds(VARIANTS["standard"], alpha)
        rows = []
        for variant in compared:
            ratio = times.ratio("standard", variant.name)
            bound = times.ratio("standard", bound_of(variant).name)
            waited = statistics.median(self.waited[variant.name]) / self.shape.num_layers
            rows.append(
                BenchmarkRow(
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
                    exposed_seconds_per_layer=None if self.options.cuda_graph else waited,
                    verdict=ratio.verdict(bound.median + bound.spread).value,
                )
            )
        return rows


def run_rank(case: Case, options: BenchmarkOptions) -> None:
    """Run as one of the ranks; raise BadNumbersError if a ratio exceeds its maximum or is too noisy to judge."""
    place = read_rank_info()
    if options.device == "cpu":
        # One thread and, if there are enough cores, a dedicated core for each rank.
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= place.world_size:
            os.sched_setaffinity(0, {cores[place.local_rank]})
    with naming_lost_peers():
        rows = _measure(case, options, place)
    doubtful = [row for row in rows if row.verdict != RatioVerdict.SOUND.value]
    if doubtful and place.rank == 0:
        verdicts = (f"{row.wiring} of {row.size} at {row.alpha}: {row.verdict}" for row in doubtful)
        raise BadNumbersError("; ".join(verdicts))


def _measure(case: Case, options: BenchmarkOptions, place: RankInfo) -> list[BenchmarkRow]:
    device = _start_ranks(options, place)
    rows: list[BenchmarkRow] = []
    for size in options.sizes:
        benchmark = _Benchmark(case, options, size, place, device)
        prediction = benchmark.calibrate()
        if place.rank == 0:
            print(_heading(benchmark, prediction), flush=True)
        for text in (*options.alpha, *options.link_preset):
            new = benchmark.rows(prediction, text)
            rows += new
            if place.rank == 0:
                print(results_table(new), flush=True)
        benchmark.interconnect.close()
    for output in (options.json, options.plot):
        if place.rank == 0 and output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
    if place.rank == 0 and options.json is not None:
        write_atomically(options.json, json.dumps([vars(row) for row in rows], indent=1) + "\n")
    if place.rank == 0 and options.plot is not None:
        title = f"{case}, {rows[0].size}, {options.ranks} ranks, {rows[0].interconnect}"
        plot_speed_up(rows, title, prediction.by_modules[False].sub_block, options.plot)
    stop_process_group()
    return rows


def _heading(benchmark: _Benchmark, prediction: Prediction) -> str:
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
        f"{TABLE_HEAD}"
    )
