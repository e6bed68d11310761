"""One rank of `tools/benchmark.py`: calibrates, measures round by round, and compares with the step-time model."""

import itertools
import statistics
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from ladder_lab.bench.calibration import Prediction
from ladder_lab.bench.comparison import Passes, WiringComparison
from ladder_lab.bench.interconnect import start_ranks
from ladder_lab.bench.options import TRAINING, BenchmarkOptions, Case, parse_alpha
from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.bench.results import BenchmarkRow, results_table
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.variants import VARIANTS, bound_of
from ladder_lab.bench.workloads import Workload
from ladder_lab.output import write_json
from megatron_ladder.comm.launch import RankInfo, read_rank_info, stop_process_group
from megatron_ladder.comm.watch import naming_lost_peers
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.model.operations import Operations, compile_operations, require_compiler, select_operations

JUDGED = (RatioVerdict.SOUND.value, RatioVerdict.REHEARSED.value)
"""Verdicts of rows without an error of measurement."""


class Wire(NamedTuple):
    """An interconnect to measure: the time of an all-reduce by its name on the command line.

    If emulated on one GPU, also the multiprocessors of a collective, and by how much the latest rank prolongs it.
    """

    alpha: str
    multiprocessors: int | None = None
    skew_seconds: float = 0.0


def run_rank(case: Case, options: BenchmarkOptions) -> None:
    """Run as one of the ranks; raise BadNumbersError if a ratio exceeds its maximum or is too noisy to judge."""
    rank_info = read_rank_info()
    with naming_lost_peers():
        rows = _measure(case, options, rank_info)
    doubtful = [row for row in rows if row.verdict not in JUDGED]
    if doubtful and rank_info.rank == 0:
        verdicts = (f"{row.wiring} of {row.size} at {row.alpha}: {row.verdict}" for row in doubtful)
        raise BadNumbersError("; ".join(verdicts))


def _measure(case: Case, options: BenchmarkOptions, rank_info: RankInfo) -> list[BenchmarkRow]:
    device = start_ranks(options, rank_info)
    drafts = options.draft_tokens or 0
    workload = Workload(case, options.batch, options.sequence, options.tokens, options.cuda_graph, drafts)
    operations = select_case_operations(case, options.compile_sub_blocks, device)
    rows: list[BenchmarkRow] = []
    for size in options.sizes:
        shape = find_size(size)
        if drafts:
            shape = replace(shape, mtp_num_layers=1)
        comparison = WiringComparison(options, shape, rank_info, device, operations)
        prediction = comparison.calibrate(workload)
        if rank_info.rank == 0:
            print(_heading(comparison, workload, size, prediction), flush=True)
        for wires in _wires(options):
            if comparison.interconnect.emulated:
                comparison.interconnect.emulated.set_blocks(wires[0].multiprocessors or 1)
            with comparison.prepare(workload, comparison.compared, len(wires)) as passes:
                for wire in wires:
                    new = _rows(comparison, passes, workload, size, prediction, wire)
                    rows += new
                    if rank_info.rank == 0:
                        print(f"\n{results_table(new)}", flush=True)
        comparison.interconnect.close()
    if rank_info.rank == 0:
        write_json(options.json, [vars(row) for row in rows])
    stop_process_group()
    return rows


def _wires(options: BenchmarkOptions) -> list[list[Wire]]:
    """Return the interconnects to measure; those of a list share captured passes."""
    if not options.emulate:
        return [[Wire(alpha)] for alpha in options.alpha]
    skews = [parsed[0] for parsed in map(parse_alpha, options.skew) if parsed is not None]
    settings = [*itertools.product(options.alpha, skews)]
    return [[Wire(alpha, count, skew) for alpha, skew in settings] for count in options.comm_sms]


def select_case_operations(case: Case, compiled: Literal["auto", "true", "false"], device: torch.device) -> Operations:
    """Return the operations that training, or generation, uses on this device."""
    if compiled == "true":
        require_compiler("--compile-sub-blocks", device)
    if case in TRAINING:
        return select_operations("auto", compiled, device)[0]
    return compile_operations(Operations()) if compiled == "true" else Operations()


def _rows(
    comparison: WiringComparison, passes: Passes, workload: Workload, size: str, prediction: Prediction, wire: Wire
) -> list[BenchmarkRow]:
    """Measure all wirings on one interconnect."""
    wire_times = comparison.wire_times(wire.alpha, prediction, wire.skew_seconds)
    comparison.interconnect.set_wire(wire_times)
    times = comparison.time(passes, f"alpha {wire.alpha}")
    standard = prediction.seconds(VARIANTS["standard"], wire_times)
    layers = comparison.shape.num_layers
    rows = []
    for variant in comparison.compared:
        ratio = times.ratio("standard", variant.name)
        bound = times.ratio("standard", bound_of(variant).name)
        exposed = comparison.waited[variant.name]
        if wire.multiprocessors is not None:
            pairs = zip(times.seconds[variant.name], times.seconds[bound_of(variant).name], strict=True)
            exposed = [(seconds - without) / workload.units for seconds, without in pairs]
        verdict = ratio.verdict(bound.median + bound.spread)
        rows.append(
            BenchmarkRow(
                case=workload.case,
                size=size,
                wiring=variant.name,
                interconnect=comparison.interconnect.name,
                alpha=wire.alpha,
                alpha_seconds=wire_times(prediction.message) - wire.skew_seconds,
                median_seconds=times.median(variant.name) / workload.units,
                ratio_to_standard=ratio.median,
                spread=ratio.spread,
                predicted_ratio=standard / prediction.seconds(variant, wire_times),
                exposed_seconds_per_layer=statistics.median(exposed) / layers if exposed else None,
                verdict=(RatioVerdict.REHEARSED if comparison.is_rehearsal else verdict).value,
                multiprocessors=wire.multiprocessors,
                skew_seconds=wire.skew_seconds,
            )
        )
    return rows


def _heading(comparison: WiringComparison, workload: Workload, size: str, prediction: Prediction) -> str:
    calibration = prediction.by_bound["no-comm"]
    interconnect = comparison.interconnect
    ranks = f"{interconnect.wire.size} processes"
    if interconnect.emulated:
        ranks = f"rank 0 of {interconnect.wire.size}"
    warning = "--device cpu: a rehearsal of --emulate, whose times mean nothing\n" if comparison.is_rehearsal else ""
    sub_blocks = calibration.by_computation.items()
    parts = ", ".join(f"{computation.name} {1e3 * seconds.forward:.3f}" for computation, seconds in sub_blocks)
    return (
        f"{warning}{workload.case}, {size}, batch {workload.batch}, {ranks}, "
        f"{str(interconnect.dtype).removeprefix('torch.')} on {interconnect.device.type}, {interconnect.name}\n"
        f"{parts} ms forward, the rest of a pass {1e3 * calibration.head:.3f} ms, "
        f"a collective costs its processor {2e3 * prediction.wire.launch_seconds:.3f} ms"
    )
