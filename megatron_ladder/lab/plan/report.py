"""A plan as a table to read, as JSON, and as a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ladder.lab.cost.memory import Layout
from megatron_ladder.lab.plan.layouts import (
    Plan,
    Question,
    SweepRow,
    best_of_each_grid,
    pays_from,
    sweep,
    uncertainty,
    verdict,
)

GIGABYTE = 1e9


def describe_layout(layout: Layout) -> str:
    """In a few words."""
    extras = [
        f"micro-batch {layout.micro_batch}",
        "recompute" if layout.recompute else "",
        "sequence parallel" if layout.sequence_parallel else "",
    ]
    grid = f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data} ZeRO {layout.zero}"
    return ", ".join([grid, *filter(None, extras)])


def plans_table(question: Question, plans: Sequence[Plan], top: int) -> str:
    """The fastest plan of each grid of ranks, with memory and time split up."""
    head = (
        "| TP | PP | DP | ZeRO | micro-batch | recompute | seq. par. | wiring | GB: weights + gradients + optimizer "
        "+ activations | step s: compute + TP + PP + DP | MFU |\n" + "|---" * 11 + "|"
    )
    return "\n".join([head, *(_row(question, plan) for plan in best_of_each_grid(plans)[:top])])


def _row(question: Question, plan: Plan) -> str:
    layout, memory, time = plan.layout, plan.memory, plan.time
    parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
    gigabytes = " + ".join(f"{part / GIGABYTE:.1f}" for part in parts)
    seconds = " + ".join(f"{part:.2f}" for part in (time.compute, time.exposed_tensor, time.bubble, time.exposed_data))
    cells = [
        layout.tensor, layout.pipeline, layout.data, layout.zero, layout.micro_batch,
        "yes" if layout.recompute else "no", "yes" if layout.sequence_parallel else "no", plan.wiring,
        f"{memory.total / GIGABYTE:.1f} = {gigabytes}",
        f"{_range(time.total, uncertainty(question.cluster, layout), '.2f')} = {seconds}",
        _range(100 * plan.utilisation, uncertainty(question.cluster, layout), ".0f") + " %",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _range(value: float, uncertain: float, form: str) -> str:
    if uncertain == 0.0:
        return f"{value:{form}}"
    return f"{value * (1 - uncertain):{form}} to {value * (1 + uncertain):{form}}"


def layouts_verdict(plans: Sequence[Plan]) -> str:
    """Which grid wins, or that several tie."""
    named = [(describe_layout(plan.layout), plan.time.total) for plan in best_of_each_grid(plans)]
    return f"Layout: {verdict(named)}"


def tensor_parallel_layout(plans: Sequence[Plan]) -> Layout | None:
    """That of the fastest plan with tensor parallelism, for which a wiring makes a difference."""
    return next((plan.layout for plan in plans if plan.layout.tensor > 1), None)


def sweep_text(layout: Layout, rows: Sequence[SweepRow]) -> str:
    """Speed-ups over the standard wiring from fast to slow interconnects."""
    wirings = list(rows[0].seconds)
    lines = [
        f"Wirings of {describe_layout(layout)}, as speed-ups over standard; the fastest by more than 3 %, or a tie:",
        "",
        "| all-reduce | " + " | ".join(wirings) + " | fastest |",
        "|---" * (len(wirings) + 2) + "|",
    ]
    for row in rows:
        here = " (this cluster)" if row.factor == 1.0 else ""
        figures = " | ".join(f"{row.speed_up(wiring):.2f}" for wiring in wirings)
        lines.append(f"| {1e6 * row.reduce_seconds:.0f} us{here} | {figures} | {row.winner} |")
    return "\n".join(lines)


def borders_table(question: Question, plans: Sequence[Plan]) -> str:
    """For every tensor-parallel size, in its fastest layout: where each wiring begins to pay."""
    late = [wiring for wiring in question.wirings if wiring != "standard"]
    lines = [
        "Time of an all-reduce above which a wiring is faster than standard by more than 3 %:",
        "",
        "| TP | micro-batch | all-reduce here | " + " | ".join(late) + " | fastest here |",
        "|---" * (len(late) + 4) + "|",
    ]
    seen: set[int] = {1}
    for plan in plans:
        layout = plan.layout
        if layout.tensor not in seen:
            seen.add(layout.tensor)
            (here,) = sweep(question, layout, (1.0,))
            borders = " | ".join(_border(pays_from(question, layout, wiring)) for wiring in late)
            lines.append(
                f"| {layout.tensor} | {layout.micro_batch} | {1e6 * here.reduce_seconds:.0f} us | {borders} "
                f"| {here.winner} |"
            )
    return "\n".join(lines)


def _border(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return "always" if seconds == 0.0 else f"{1e6 * seconds:.0f} us"


def sources_text(question: Question) -> str:
    """Where the figures are from."""
    return "\n".join(f"  {name}: {source}" for name, source in question.cluster.sources.items())


def report_text(question: Question, plans: Sequence[Plan], top: int) -> str:
    """All that is printed."""
    cluster = question.cluster
    calibrated = "measured on this machine" if cluster.calibrated else "not measured here, so times are ranges"
    parts = [
        f"{question.gpus} GPUs of {cluster.name}, {question.global_batch} samples of {question.sequence} tokens a "
        f"step, bf16; figures {calibrated}.",
        plans_table(question, plans, top),
        layouts_verdict(plans),
    ]
    layout = tensor_parallel_layout(plans)
    if layout is not None:
        parts += [sweep_text(layout, sweep(question, layout)), borders_table(question, plans)]
    parts.append(f"Figures of {cluster.name}:\n{sources_text(question)}")
    return "\n\n".join(parts)


def report_json(question: Question, plans: Sequence[Plan]) -> str:
    """All plans, fastest first, and the sweep."""
    layout = tensor_parallel_layout(plans)
    rows = [] if layout is None else sweep(question, layout)
    report: dict[str, Any] = {
        "cluster": {name: value for name, value in asdict(question.cluster).items()},
        "gpus": question.gpus,
        "global_batch": question.global_batch,
        "sequence": question.sequence,
        "verdict": layouts_verdict(plans),
        "layouts": [
            {
                **asdict(plan.layout),
                "wiring": plan.wiring,
                "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
                "step_seconds": {**asdict(plan.time), "total": plan.time.total},
                "relative_uncertainty": uncertainty(question.cluster, plan.layout),
                "model_flop_utilisation": plan.utilisation,
            }
            for plan in plans
        ],
        "interconnects": {
            "layout": None if layout is None else asdict(layout),
            "rows": [{**asdict(row), "fastest": row.winner} for row in rows],
        },
    }
    return json.dumps(report, indent=1) + "\n"


def plot_sweep(question: Question, layout: Layout, path: Path) -> None:
    """Writes a PNG of the wirings' speed-ups over the time of an all-reduce.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not above: matplotlib comes with the extra [plot], and importing it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sweep(question, layout, [2 ** (exponent / 4) for exponent in range(-16, 17)])
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times = [1e6 * row.reduce_seconds for row in rows]
    for wiring in rows[0].seconds:
        axes.plot(times, [row.speed_up(wiring) for row in rows], label=wiring)
    here = next(1e6 * row.reduce_seconds for row in rows if row.factor == 1.0)
    axes.axvline(here, color="0.5", linestyle=":", label=question.cluster.name)
    axes.set_xscale("log")
    axes.set_xlabel("time of one all-reduce (us)")
    axes.set_ylabel("predicted speed-up over the standard wiring")
    axes.set_title(describe_layout(layout))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
