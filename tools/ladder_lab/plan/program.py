"""`tools/plan.py layouts`: prints a plan as tables, and writes it as JSON."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ladder_lab.bench.sizes import find_size
from ladder_lab.cost.machines import TIME_RANGE
from ladder_lab.cost.memory import Layout
from ladder_lab.output import markdown_table, write_json
from ladder_lab.plan.layouts import (
    PLANNED_WIRINGS,
    SMALLEST_DIFFERENCE,
    LayoutPlan,
    PlanRequest,
    best_of_each_grid,
    fitting_plans,
    sweep,
    verdict,
)
from ladder_lab.plan.options import QUALITY, LayoutOptions, MachineOptions
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.command_line import flag_words
from megatron_ladder.errors import UserError

GIGABYTE = 1e9
_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))


def print_layouts(given: MachineOptions, options: LayoutOptions) -> None:
    """Print the plan and write the file that the options name; raise UserError if nothing fits."""
    model, machine = find_size(options.model), given.machine(options.gpus)
    possible = [name for name, wiring in NAMED_WIRINGS.items() if wiring.fits(model, wiring.fewest_ranks)]
    wirings = tuple(wiring for wiring in PLANNED_WIRINGS if wiring in options.wirings and wiring in possible)
    muon = options.optimizer == "muon"
    request = PlanRequest(model, machine, options.gpus, options.global_batch_size, options.seq_length, wirings, muon)
    plans = fitting_plans(request)
    if not plans:
        raise UserError(
            f"--gpus {options.gpus}: no layout of {options.model} fits {machine.gpu.memory_bytes / 1e9:.0f} GB a "
            f"GPU and divides --global-batch-size {options.global_batch_size} evenly: give more GPUs, or a batch size "
            "with more divisors"
        )
    # Wirings differ with tensor parallelism only.
    layout = next((plan.layout for plan in plans if plan.layout.tensor > 1), None)
    rows = [] if layout is None else sweep(request, layout)
    print(f"{options.model}, " + _report_text(request, plans, options.top, layout, rows), flush=True)
    write_json(options.json, _report_json(request, plans, layout, rows))


def tokens_per_second(request: PlanRequest, plan: LayoutPlan) -> float:
    """Return the training speed of a plan."""
    return request.global_batch * request.sequence / plan.time.total


def answer(request: PlanRequest, plans: Sequence[LayoutPlan]) -> str:
    """Say whether a wiring helps to train on this machine, how fast it is, and where its replicas are."""
    best, standards = plans[0], [plan for plan in plans if plan.wiring == "standard"]
    standard = (standards or fitting_plans(replace(request, wirings=("standard",))))[0]
    gain = standard.time.total / best.time.total
    if best.wiring != "standard" and gain > 1 + SMALLEST_DIFFERENCE:
        text = f"Answer: yes. {best.wiring} trains {gain:.2f} times as fast as the fastest layout of standard."
    else:
        alone = ", which needs no tensor parallelism" if standard.layout.tensor == 1 else ""
        text = f"Answer: no. No wiring is more than 3 % faster than the fastest layout of standard{alone}."
    speed, replica = tokens_per_second(request, best), best.layout.tensor * best.layout.pipeline
    per_box, seconds = request.machine.per_box, 1e9 / speed
    unit, size = next((one for one in _UNITS if seconds >= 2 * one[1]), _UNITS[-1])
    places = f"each replica spans {math.ceil(replica / per_box)} boxes"
    if replica <= per_box:
        places = "one replica per box" if replica == per_box else f"{per_box // replica} replicas per box"
    where = f", {places}" if request.gpus > per_box else ""
    return (
        f"{text} The first row trains {_range(speed, ',.0f')} tokens/s, a billion tokens in "
        f"{_range(seconds / size, ',.1f')} {unit}{where}. {QUALITY}"
    )


def _describe_layout(layout: Layout) -> str:
    ranks = f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data} ZeRO {layout.zero}"
    parts = [ranks, f"micro-batch {layout.micro_batch}"]
    parts += ["recompute"] * layout.recompute + ["sequence-parallel"] * layout.sequence_parallel
    # Without commas, which separate the layouts of a tie.
    return " ".join(parts)


def _plan_cells(plan: LayoutPlan) -> dict[str, str]:
    layout, memory, time = plan.layout, plan.memory, plan.time
    parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
    gigabytes = " + ".join(f"{part / GIGABYTE:.1f}" for part in parts)
    seconds = " + ".join(f"{part:.2f}" for part in (time.compute, time.exposed_tensor, time.bubble, time.exposed_data))
    sizes = {"TP": layout.tensor, "PP": layout.pipeline, "DP": layout.data, "ZeRO": layout.zero}
    return {name: str(size) for name, size in sizes.items()} | {
        "micro-batch": str(layout.micro_batch),
        "recompute": "yes" if layout.recompute else "no",
        "seq. par.": "yes" if layout.sequence_parallel else "no",
        "wiring": plan.wiring,
        "GB: weights + gradients + optimizer + activations": f"{memory.total / GIGABYTE:.1f} = {gigabytes}",
        "step s: compute + TP + PP + DP": f"{_range(time.total, '.2f')} = {seconds}",
        "MFU": _range(100 * plan.utilisation, ".0f") + " %",
    }


def _range(value: float, form: str) -> str:
    return f"{value * (1 - TIME_RANGE):{form}} to {value * (1 + TIME_RANGE):{form}}"


def _layouts_verdict(plans: Sequence[LayoutPlan]) -> str:
    named = [(_describe_layout(plan.layout), plan.time.total) for plan in best_of_each_grid(plans)]
    return f"Layout: {verdict(named)}"


def _sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return speed-ups over the standard wiring, from fast to slow interconnects."""
    table = []
    for row in rows:
        interconnect = f"{1e6 * row['reduce_seconds']:.0f} us" + (" (this machine)" if row["factor"] == 1.0 else "")
        speeds = {name: f"{row['seconds']['standard'] / seconds:.2f}" for name, seconds in row["seconds"].items()}
        table.append({"all-reduce": interconnect, **speeds, "fastest": row["fastest"]})
    return markdown_table(table)


def _command(request: PlanRequest, plan: LayoutPlan) -> str:
    """Return the command of a plan, without data and schedule."""
    layout = plan.layout
    flags = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "zero_stage": layout.zero,
        "seq_length": request.sequence,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": request.global_batch,
        "sequence_parallel": layout.sequence_parallel or None,
        "recompute_granularity": "full" if layout.recompute else None,
        "optimizer": "muon" if layout.muon else None,
        "bf16": True,
    }
    words = [*NAMED_WIRINGS[plan.wiring].of(request.model, layout.tensor).to_words(), *flag_words(flags)]
    per_node = request.machine.per_box
    launcher = f"--num_gpus {request.gpus}" if request.gpus <= per_node else "--hostfile HOSTS"
    lines, line = [], f"deepspeed --quiet {launcher} pretrain_ladder.py"
    for word in map(shlex.quote, words):
        if word.startswith("--") and len(line) + len(word) > 90:
            lines.append(line + " \\")
            line = "   "
        line += " " + word
    return "\n".join([*lines, line])


def _report_text(
    request: PlanRequest, plans: Sequence[LayoutPlan], top: int, layout: Layout | None, rows: Sequence[dict[str, Any]]
) -> str:
    parts = [
        f"{request.machine.place(request.gpus)}, {request.global_batch} samples of {request.sequence} tokens per step, "
        "bf16; figures not measured here, so times are ranges.",
        answer(request, plans),
        markdown_table([_plan_cells(plan) for plan in best_of_each_grid(plans)[:top]]),
        _layouts_verdict(plans),
        "Command of the first row; add --train-iters, --lr, the data and --save:",
        _command(request, plans[0]),
    ]
    if layout is not None:
        parts += [
            f"Wirings of {_describe_layout(layout)}, as speed-ups over standard; the fastest by more than 3 %, or a "
            "tie:",
            _sweep_table(rows),
        ]
    parts.append(f"Figures:\n{request.machine.describe(request.gpus)}")
    return "\n\n".join(parts)


def _report_json(
    request: PlanRequest, plans: Sequence[LayoutPlan], layout: Layout | None, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return all plans, fastest first, and the sweep as JSON."""
    machine = request.machine
    return {
        "machine": {"gpu": machine.gpu.name, "gpus_per_node": machine.per_box, "link": machine.link.name}
        | {"network": machine.network.name, "network_adapters": machine.adapters, "contention": machine.contention},
        "gpus": request.gpus,
        "global_batch": request.global_batch,
        "sequence": request.sequence,
        "answer": answer(request, plans),
        "tokens_per_second": tokens_per_second(request, plans[0]),
        "verdict": _layouts_verdict(plans),
        "command": _command(request, plans[0]),
        "layouts": [
            {
                **asdict(plan.layout),
                "wiring": plan.wiring,
                "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
                "step_seconds": {**asdict(plan.time), "total": plan.time.total},
                "relative_uncertainty": TIME_RANGE,
                "model_flop_utilisation": plan.utilisation,
            }
            for plan in plans
        ],
        "interconnects": {"layout": None if layout is None else asdict(layout), "rows": rows},
    }
