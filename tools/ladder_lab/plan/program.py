"""`tools/plan.py layouts`: prints a plan as tables, and writes it as JSON."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ladder_lab.cost.all_to_all import ALL_TO_ALLS
from ladder_lab.cost.layout import Layout, stage_chunks
from ladder_lab.cost.machines import TIME_RANGE
from ladder_lab.cost.memory import state_bytes
from ladder_lab.cost.placement import placement
from ladder_lab.cost.traffic import Sent, rank_traffic
from ladder_lab.effective_speed import PUBLISHED
from ladder_lab.output import markdown_table, write_json
from ladder_lab.plan.experts import experts_report
from ladder_lab.plan.layouts import (
    PLANNED_WIRINGS,
    SMALLEST_DIFFERENCE,
    LayoutPlan,
    PlanRequest,
    best_of_each_grid,
    fitting_plans,
    least_memory,
    nearest_gpus,
    sweep,
    verdict,
)
from ladder_lab.plan.options import QUALITY, LayoutOptions, MachineOptions
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.command_line import flag_words
from megatron_ladder.errors import UserError

GIGABYTE = 1e9
_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))


@dataclass(frozen=True)
class _Advice:
    """The plan to use."""

    plan: LayoutPlan
    answer: str
    """Whether a wiring helps, how fast the plan is, and where its replicas are."""
    traffic: Mapping[str, Sent]
    """The most bytes of each kind that a GPU sends in a step."""


def print_layouts(name: str, model: ModelConfig, machine_options: MachineOptions, options: LayoutOptions) -> None:
    """Print the plan of a model and write the file that the options name; raise UserError if nothing fits."""
    machine = machine_options.machine(options.gpus)
    if options.gpus > machine.per_box and options.gpus % machine.per_box:
        raise UserError(
            f"--gpus {options.gpus}: boxes of {machine.per_box} GPUs would not be full: give a multiple of "
            f"{machine.per_box}, or another --gpus-per-node"
        )
    named = {wiring: NAMED_WIRINGS[wiring] for wiring in PLANNED_WIRINGS}
    possible = [wiring for wiring, row in named.items() if row.fits(model, row.fewest_ranks)]
    wirings = tuple(wiring for wiring in possible if wiring in options.wirings)
    if not wirings:
        raise UserError(f"--wirings {' '.join(options.wirings)}: {name} can have {', '.join(possible)}")
    batch, optimizer = options.global_batch_size, options.optimizer
    request = PlanRequest(
        model,
        machine,
        options.gpus,
        batch,
        options.seq_length,
        wirings,
        optimizer,
        ALL_TO_ALLS[options.all_to_all],
        options.expert_imbalance,
    )
    plans = fitting_plans(request)
    if not plans:
        raise UserError(_nothing_fits(request, name))
    # Wirings differ with tensor and expert parallelism only; the second has its own table.
    layout = next((plan.layout for plan in plans if plan.layout.tensor > 1 and not plan.layout.divides_experts), None)
    rows = [] if layout is None else sweep(request, layout)
    experts, gains = experts_report(request, plans)
    advice = _advise(request, plans)
    affordable = _affordable_losses(request, plans, options.standard_loss)
    text = _report_text(request, plans, advice, options, affordable, layout, rows, experts)
    print(f"{name}, {machine_options.place(options.gpus)}, {text}", flush=True)
    report = _report_json(request, plans, advice, layout, rows) | {"experts": [asdict(gain) for gain in gains]}
    write_json(options.json, {**report, "standard_loss": options.standard_loss, "affordable_loss": affordable})


def _nothing_fits(request: PlanRequest, model: str) -> str:
    """Say why no layout fits, and how many GPUs would do."""
    needed = least_memory(request)
    if needed is None:
        cause = (
            f"not a product of tensor-, pipeline- and data-parallel sizes that suit {model}, its wirings and "
            f"--global-batch-size {request.global_batch}"
        )
    else:
        gpu = request.machine.gpu
        cause = (
            f"in every layout of {model} a GPU needs {needed / GIGABYTE:.0f} GB or more, but {gpu.name} has "
            f"{gpu.memory_bytes / GIGABYTE:.0f} GB"
        )
    enough = nearest_gpus(request)
    fix = "no number is enough; lower --seq-length"
    if enough is not None:
        fix = f"the nearest number of GPUs that is enough is {enough}"
    return f"--gpus {request.gpus}: {cause}: {fix}"


def tokens_per_second(request: PlanRequest, plan: LayoutPlan) -> float:
    """Return the training speed of a plan."""
    return request.global_batch * request.sequence / plan.time.total


def _fastest_standard(request: PlanRequest, plans: Sequence[LayoutPlan]) -> LayoutPlan | None:
    standards = [plan for plan in plans if plan.wiring == "standard"]
    return next(iter(standards or fitting_plans(replace(request, wirings=("standard",)))), None)


def _advise(request: PlanRequest, plans: Sequence[LayoutPlan]) -> _Advice:
    """Return the fastest plan if its wiring helps, and otherwise the fastest of standard."""
    best = plans[0]
    standard = _fastest_standard(request, plans)
    if standard is None:
        advised = best
        text = f"Answer: yes. {best.wiring} fits, and no layout of standard does."
    elif best.wiring != "standard" and standard.time.total > best.time.total * (1 + SMALLEST_DIFFERENCE):
        gain = standard.time.total / best.time.total
        text = f"Answer: yes. {best.wiring} trains {gain:.2f} times as fast as the fastest layout of standard."
        advised = best
    else:
        is_alone = standard.layout.tensor == 1 and not standard.layout.divides_experts
        alone = ", which needs no tensor parallelism" if is_alone else ""
        text = f"Answer: no. No compared wiring is more than 3 % faster than the fastest layout of standard{alone}."
        advised = standard
    speed = tokens_per_second(request, advised)
    replica = advised.layout.tensor * advised.layout.pipeline
    per_box = request.machine.per_box
    seconds = 1e9 / speed
    unit, size = next((row for row in _UNITS if seconds >= 2 * row[1]), _UNITS[-1])
    spanned = placement(advised.layout, per_box).boxes_of_replica
    places = f"each replica spans up to {spanned} boxes"
    if spanned == 1:
        places = "one replica per box" if replica == per_box else f"{per_box // replica} replicas per box"
    where = f"; {places}" if request.gpus > per_box else ""
    answer = (
        f"{text} {_describe_plan(advised)} trains {_range(speed, ',.0f')} tokens/s, a billion tokens in "
        f"{_range(seconds / size, ',.1f')} {unit}{where}. {QUALITY}"
    )
    return _Advice(advised, answer, _traffic(request, advised))


def _affordable_losses(request: PlanRequest, plans: Sequence[LayoutPlan], standard_loss: float) -> dict[str, float]:
    """Return by how many nats per token each faster wiring may end above standard, in the fastest layout of each."""
    standard = _fastest_standard(request, plans)
    if standard is None:
        return {}
    losses: dict[str, float] = {}
    for plan in plans:
        if plan.time.total < standard.time.total:
            losses.setdefault(
                plan.wiring, PUBLISHED.affordable_loss(standard_loss, standard.time.total / plan.time.total)
            )
    return losses


def _describe_affordable(losses: Mapping[str, float], standard_loss: float) -> list[str]:
    if not losses:
        return []
    listed = ", ".join(f"{wiring} {loss:.3f}" for wiring, loss in losses.items())
    return [
        f"Nats per token that a faster wiring may lose before it stops paying, after as many tokens, where standard's "
        f"loss is {standard_loss:g} (--standard-loss): {listed} (with {PUBLISHED})."
    ]


def _traffic(request: PlanRequest, plan: LayoutPlan) -> dict[str, Sent]:
    """Return the most bytes of each kind that a GPU sends in a step, in groups inside a box and over several boxes."""
    layout = plan.layout
    model = NAMED_WIRINGS[plan.wiring].of(request.model, layout.tensor)
    micro_batches = request.global_batch // (layout.data * layout.micro_batch)
    of_ranks = [
        rank_traffic(model, layout, request.sequence, micro_batches, request.machine.per_box, rank)
        for rank in range(layout.gpus)
    ]
    most: dict[str, Sent] = {}
    for kind in of_ranks[0]:
        sent = [of_rank[kind] for of_rank in of_ranks]
        most[kind] = Sent(max(rank_sent.inside for rank_sent in sent), max(rank_sent.across for rank_sent in sent))
    return most


def _describe_traffic(traffic: Mapping[str, Sent]) -> str:
    parts = [
        f"{kind} {sent.inside / GIGABYTE:.1f} + {sent.across / GIGABYTE:.1f}"
        for kind, sent in traffic.items()
        if any(sent)
    ]
    where = "in groups inside a box + in groups of several boxes"
    return f"GB that a GPU sends in a step, {where}: {', '.join(parts) or 'none'}."


def _describe_stages(layout: Layout) -> str:
    return f"{layout.pipeline} x {layout.chunks}" if layout.chunks > 1 else str(layout.pipeline)


def _describe_layout(layout: Layout) -> str:
    ranks = f"TP {layout.tensor} PP {_describe_stages(layout)} DP {layout.data} ZeRO {layout.zero}"
    parts = [ranks]
    if layout.divides_experts:
        parts.append(f"EP {layout.experts}")
    parts.append(f"micro-batch {layout.micro_batch}")
    if layout.recompute:
        parts.append("recompute")
    if layout.sequence_parallel:
        parts.append("sequence-parallel")
    # Without commas, which separate the layouts of a tie.
    return " ".join(parts)


def _describe_plan(plan: LayoutPlan) -> str:
    return f"{_describe_layout(plan.layout)} with wiring {plan.wiring}"


def _plan_cells(plan: LayoutPlan, has_experts: bool) -> dict[str, str]:
    layout = plan.layout
    memory = plan.memory
    time = plan.time
    parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
    gigabytes = " + ".join(f"{part / GIGABYTE:.1f}" for part in parts)
    seconds = " + ".join(f"{part:.2f}" for part in (time.compute, time.exposed_tensor, time.bubble, time.exposed_data))
    sizes = {"TP": layout.tensor, "PP": _describe_stages(layout), "DP": layout.data, "ZeRO": layout.zero}
    if has_experts:
        sizes["EP"] = layout.experts
    communication = "TP and EP" if has_experts else "TP"
    return {name: str(size) for name, size in sizes.items()} | {
        "micro-batch": str(layout.micro_batch),
        "recompute": "yes" if layout.recompute else "no",
        "seq. par.": "yes" if layout.sequence_parallel else "no",
        "wiring": plan.wiring,
        "GB: weights + gradients + optimizer + activations": f"{memory.total / GIGABYTE:.1f} = {gigabytes}",
        f"step s: compute + {communication} + PP + DP": f"{_range(time.total, '.2f')} = {seconds}",
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


def _pending_note(request: PlanRequest, layout: Layout, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Explain a late wiring that is slower than standard on this machine, if its stages send over the network."""
    seconds = next(row["seconds"] for row in rows if row["factor"] == 1.0)
    late = [name for name in seconds if WIRINGS[NAMED_WIRINGS[name].mode].late]
    slow = [name for name in late if seconds[name] > seconds["standard"] * (1 + SMALLEST_DIFFERENCE)]
    if not slow or all(spread.boxes == 1 for spread in placement(layout, request.machine.per_box).following):
        return []
    slowest = max(slow, key=lambda name: seconds[name])
    models = [NAMED_WIRINGS[name].of(request.model, layout.tensor) for name in ("standard", slowest)]
    standard, sent = (state_bytes(model, layout, request.sequence, 0) for model in models)
    return [
        "The stages of late wirings also send the pending outputs, unreduced, and here over the network: with "
        f"{slowest}, {sent / standard:.1f} times the bytes of standard."
    ]


def _command(request: PlanRequest, plan: LayoutPlan) -> str:
    """Return the command of a plan, without data and schedule."""
    layout = plan.layout
    chunks = stage_chunks(request.model, layout, 0)
    flags = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.experts if layout.divides_experts else None,
        "num_layers_per_virtual_pipeline_stage": max(map(len, chunks)) if len(chunks) > 1 else None,
        "zero_stage": layout.zero,
        "seq_length": request.sequence,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": request.global_batch,
        "sequence_parallel": layout.sequence_parallel or None,
        "recompute_granularity": "full" if layout.recompute else None,
        "optimizer": layout.optimizer if layout.optimizer != Layout.optimizer else None,
        "bf16": True,
    }
    words = [*NAMED_WIRINGS[plan.wiring].of(request.model, layout.tensor).to_words(), *flag_words(flags)]
    per_node = request.machine.per_box
    launcher = f"--num_gpus {request.gpus}" if request.gpus <= per_node else "--hostfile HOSTS"
    lines = []
    line = f"deepspeed --quiet {launcher} pretrain_ladder.py"
    for word in map(shlex.quote, words):
        if word.startswith("--") and len(line) + len(word) > 90:
            lines.append(line + " \\")
            line = "   "
        line += " " + word
    return "\n".join([*lines, line])


def _report_text(
    request: PlanRequest,
    plans: Sequence[LayoutPlan],
    advice: _Advice,
    options: LayoutOptions,
    affordable: Mapping[str, float],
    layout: Layout | None,
    rows: Sequence[dict[str, Any]],
    experts: Sequence[str],
) -> str:
    parts = [
        f"{request.global_batch} samples of {request.sequence} tokens per step, bf16; figures not measured here, so "
        "times are ranges.",
        advice.answer,
        *_describe_affordable(affordable, options.standard_loss),
        markdown_table(
            [_plan_cells(plan, request.model.num_experts > 0) for plan in best_of_each_grid(plans)[: options.top]]
        ),
        "MFU: 6 operations for each weight that a token is multiplied with, and attention over whole scores, relative "
        "to the peak below; torchtitan counts the same.",
        _layouts_verdict(plans),
        f"Command of {_describe_plan(advice.plan)}; add --train-iters, --lr, the data and --save:",
        _command(request, advice.plan),
        _describe_traffic(advice.traffic),
    ]
    if layout is not None:
        parts += [
            f"Wirings of {_describe_layout(layout)}, as speed-ups over standard; the fastest by more than 3 %, or a "
            "tie:",
            _sweep_table(rows),
            *_pending_note(request, layout, rows),
        ]
    parts += experts
    parts.append(f"Figures:\n{request.machine.describe(request.gpus)}")
    return "\n\n".join(parts)


def _report_json(
    request: PlanRequest,
    plans: Sequence[LayoutPlan],
    advice: _Advice,
    layout: Layout | None,
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return all plans, fastest first, and the sweep as JSON."""
    machine = request.machine
    return {
        "machine": {"gpu": machine.gpu.name, "gpus_per_node": machine.per_box, "link": machine.link.name}
        | {"network": machine.network.name, "network_adapters": machine.adapters, "contention": machine.contention},
        "gpus": request.gpus,
        "global_batch": request.global_batch,
        "sequence": request.sequence,
        "answer": advice.answer,
        "tokens_per_second": tokens_per_second(request, advice.plan),
        "verdict": _layouts_verdict(plans),
        "command": _command(request, advice.plan),
        "traffic_bytes": {kind: sent._asdict() for kind, sent in advice.traffic.items()},
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
