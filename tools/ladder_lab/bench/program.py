"""One rank of `tools/benchmark.py`: calibrates, measures round by round, and compares with the step-time model."""

import statistics
from typing import Literal

import torch

from ladder_lab.bench.calibration import Prediction
from ladder_lab.bench.comparison import WiringComparison
from ladder_lab.bench.interconnect import start_ranks
from ladder_lab.bench.options import BenchmarkOptions, Case
from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.bench.results import BenchmarkRow, results_table
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.variants import VARIANTS, bound_of
from ladder_lab.bench.workloads import Workload
from ladder_lab.output import write_json
from megatron_ladder.comm.launch import RankInfo, naming_lost_peers, read_rank_info, stop_process_group
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.model.operations import Operations, compile_operations, require_compiler, select_operations


def run_rank(case: Case, options: BenchmarkOptions) -> None:
    """Run as one of the ranks; raise BadNumbersError if a ratio exceeds its maximum or is too noisy to judge."""
    place = read_rank_info()
    with naming_lost_peers():
        rows = _measure(case, options, place)
    doubtful = [row for row in rows if row.verdict != RatioVerdict.SOUND.value]
    if doubtful and place.rank == 0:
        verdicts = (f"{row.wiring} of {row.size} at {row.alpha}: {row.verdict}" for row in doubtful)
        raise BadNumbersError("; ".join(verdicts))


def _measure(case: Case, options: BenchmarkOptions, place: RankInfo) -> list[BenchmarkRow]:
    device = start_ranks(options, place)
    workload = Workload(case, options.batch, options.sequence, options.tokens, options.cuda_graph)
    operations = select_case_operations(case, options.compile_sub_blocks, device)
    rows: list[BenchmarkRow] = []
    for size in options.sizes:
        comparison = WiringComparison(options, find_size(size), place, device, operations)
        prediction = comparison.calibrate(workload)
        if place.rank == 0:
            print(_heading(comparison, workload, size, prediction), flush=True)
        for text in options.alpha:
            new = _rows(comparison, workload, size, prediction, text)
            rows += new
            if place.rank == 0:
                print(f"\n{results_table(new)}", flush=True)
        comparison.interconnect.close()
    if place.rank == 0:
        write_json(options.json, [vars(row) for row in rows])
    stop_process_group()
    return rows


def select_case_operations(case: Case, compiled: Literal["auto", "true", "false"], device: torch.device) -> Operations:
    """Return the operations that training, or generation, uses on this device."""
    if compiled == "true":
        require_compiler("--compile-sub-blocks", device)
    if case == "train":
        return select_operations("auto", compiled, device)[0]
    return compile_operations(Operations()) if compiled == "true" else Operations()


def _rows(
    comparison: WiringComparison, workload: Workload, size: str, prediction: Prediction, text: str
) -> list[BenchmarkRow]:
    """Measure all wirings at one interconnect time."""
    alpha = comparison.reduce_seconds(workload, text, prediction)
    comparison.interconnect.set_wire(alpha)
    times = comparison.time(workload, comparison.compared, f"alpha {text}")
    standard, layers = prediction.seconds(VARIANTS["standard"], alpha), comparison.shape.num_layers
    rows = []
    for variant in comparison.compared:
        ratio = times.ratio("standard", variant.name)
        bound = times.ratio("standard", bound_of(variant).name)
        waited = comparison.waited[variant.name]
        rows.append(
            BenchmarkRow(
                case=workload.case,
                size=size,
                wiring=variant.name,
                interconnect=comparison.interconnect.name,
                alpha=text,
                alpha_seconds=alpha,
                median_seconds=times.median(variant.name) / workload.units,
                ratio_to_standard=ratio.median,
                spread=ratio.spread,
                predicted_ratio=standard / prediction.seconds(variant, alpha),
                exposed_seconds_per_layer=statistics.median(waited) / layers if waited else None,
                verdict=ratio.verdict(bound.median + bound.spread).value,
            )
        )
    return rows


def _heading(comparison: WiringComparison, workload: Workload, size: str, prediction: Prediction) -> str:
    calibration, over = prediction.by_bound["no-comm"], comparison.interconnect
    parts = ", ".join(f"{kind.value} {1e3 * one.forward:.3f}" for kind, one in calibration.kinds.items())
    return (
        f"{workload.case}, {size}, batch {workload.batch}, {comparison.options.tp} processes, "
        f"{str(over.dtype).removeprefix('torch.')} on {over.device.type}, {over.name}\n"
        f"{parts} ms forward, the rest of a pass {1e3 * calibration.head:.3f} ms, "
        f"a collective costs its processor {2e3 * prediction.wire.launch_seconds:.3f} ms"
    )
