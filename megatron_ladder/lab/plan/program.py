"""What `tools/plan.py` does, but for measuring."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.cost.fit import median_and_quantile
from megatron_ladder.lab.cost.hardware import CLUSTERS, Cluster
from megatron_ladder.lab.cost.links import GIGABYTE_PER_SECOND, MICROSECOND
from megatron_ladder.lab.plan.calibration import apply_calibration, read_calibration
from megatron_ladder.lab.plan.files import write_text
from megatron_ladder.lab.plan.layouts import Question, fitting_plans
from megatron_ladder.lab.plan.options import LayoutOptions, PaperOptions
from megatron_ladder.lab.plan.published import (
    fit_table,
    predict_table,
    read_table,
    relative_errors,
    write_predictions,
)
from megatron_ladder.lab.plan.report import plot_sweep, report_json, report_text, tensor_parallel_layout

UNITS: Mapping[str, tuple[str, float]] = {
    "gpus_per_node": ("gpus_per_node", 1),
    "gpu_memory_gb": ("memory_bytes", 1e9),
    "peak_tflops": ("peak_flops", 1e12),
    "flops_share": ("flops_share", 1),
    "node_bandwidth_gbs": ("node_bytes_per_second", GIGABYTE_PER_SECOND),
    "network_latency_us": ("network_seconds", MICROSECOND),
    "network_bandwidth_gbs": ("network_bytes_per_second", GIGABYTE_PER_SECOND),
    "contention": ("contention", 1),
}
"""Flag -> the figure of the cluster that it replaces, and its unit."""


def print_layouts(options: LayoutOptions) -> None:
    """Plans, and says so.

    Raises:
        UserError: nothing fits, the calibration cannot be used, or a file cannot be written.
    """
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot: matplotlib is not installed: pip install matplotlib")
    question = Question(
        model=find_size(options.model),
        cluster=cluster_of(options),
        gpus=options.gpus,
        global_batch=options.global_batch_size,
        sequence=options.seq_length,
        wirings=tuple(wiring for wiring in SHARED_STREAM_MODES if wiring in options.wirings),
    )
    plans = fitting_plans(question)
    if not plans:
        raise UserError(
            f"--gpus {options.gpus}: no layout of {options.model} fits {question.cluster.memory_bytes / 1e9:.0f} GB a "
            f"GPU with --global-batch-size {options.global_batch_size} shared out evenly: give more GPUs, or a batch "
            "with more divisors"
        )
    print(f"{options.model}, " + report_text(question, plans, options.top), flush=True)
    if options.json is not None:
        write_text(options.json, report_json(question, plans))
    layout = tensor_parallel_layout(plans)
    if options.plot is not None and layout is not None:
        plot_sweep(question, layout, options.plot)


def cluster_of(options: LayoutOptions) -> Cluster:
    """The preset, with what was measured, and on top of it what the flags say."""
    cluster = CLUSTERS[options.cluster]
    if options.calibration is not None:
        cluster = apply_calibration(cluster, read_calibration(options.calibration), str(options.calibration))
    changed: dict[str, Any] = {}
    sources = dict(cluster.sources)
    for name, (field, unit) in UNITS.items():
        value = getattr(options, name)
        if value is not None:
            changed[field] = value * unit if unit != 1 else value
            sources[field] = "command line"
    if options.node_latency_us is not None:
        changed |= {"node_base_seconds": options.node_latency_us * MICROSECOND, "node_rank_seconds": 0.0}
        sources |= {"node_base_seconds": "command line", "node_rank_seconds": "command line"}
    return replace(cluster, sources=sources, **changed)


def print_paper(options: PaperOptions) -> None:
    """Fits, predicts, writes, and says how far off it is where the second table has times as well.

    Raises:
        UserError: a table cannot be read, or the result cannot be written.
    """
    mistakes: list[str] = []
    tables = []
    for path, flag, times in ((options.fit, "--fit", True), (options.predict, "--predict", False)):
        try:
            tables.append(read_table(path, flag, times))
        except UserError as error:
            mistakes += error.messages
    if mistakes:
        raise UserError(*mistakes)
    fitted, wanted = tables
    rows = predict_table(wanted, fit_table(fitted))
    write_predictions(rows, options.json)
    print(f"{len(fitted.rows)} rows fitted, {len(rows)} predicted: {options.json}")
    for name, errors in relative_errors(rows).items():
        median, high = median_and_quantile(errors, 0.9)
        print(f"  {name}: median error {100 * median:.1f} %, 90th percentile {100 * high:.1f} % of {len(errors)}")
