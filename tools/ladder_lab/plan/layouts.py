"""Finds all layouts of a model that fit a cluster, each with its memory and step time, fastest first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ladder_lab.cost.machines import Machine
from ladder_lab.cost.memory import RESERVED_BYTES, Layout, Memory, worst_memory
from ladder_lab.cost.training import LayerTime, StepTime, model_flop_utilisation, step_time
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors

MOST_NODES_OF_TENSOR = 2
"""Nodes that a tensor-parallel group spans at most."""
MICRO_BATCHES = (1, 2, 4, 8)
PLANNED_WIRINGS = tuple(name for name, wiring in NAMED_WIRINGS.items() if wiring.is_planned)
"""Those that `NamedWiring.is_planned` allows: the step time is that of identical layers."""
SMALLEST_DIFFERENCE = 0.03
"""Relative difference below which two times tie."""


@dataclass(frozen=True)
class PlanRequest:
    """The model, the machine and the batch to plan for."""

    model: ModelConfig
    machine: Machine
    gpus: int
    global_batch: int
    sequence: int
    wirings: tuple[str, ...]
    muon: bool = False


@dataclass(frozen=True)
class LayoutPlan:
    """One layout in one wiring, with the share of all GPUs' peak that its model FLOPs reach."""

    layout: Layout
    wiring: str
    memory: Memory
    time: StepTime
    utilisation: float


def _layouts(request: PlanRequest) -> Iterator[Layout]:
    """Yield all layouts that divide the GPUs and the batch evenly, whether they fit in memory or not."""
    most_tensor = min(request.gpus, MOST_NODES_OF_TENSOR * request.machine.per_box)
    for tensor in _divisors(request.gpus, most_tensor):
        if tensor_parallel_errors(request.model, tensor):
            continue
        for pipeline in _divisors(request.gpus // tensor, request.model.num_layers):
            data = request.gpus // (tensor * pipeline)
            sequence_parallel = (False, True) if tensor > 1 and request.sequence % tensor == 0 else (False,)
            zeros = [1, 2, 3][: 2 if request.muon else 3] if pipeline == 1 and data > 1 else [1]
            for micro_batch, zero, recompute, cut in product(MICRO_BATCHES, zeros, (False, True), sequence_parallel):
                if request.global_batch % (data * micro_batch) == 0:
                    yield Layout(tensor, pipeline, data, zero, micro_batch, recompute, cut, muon=request.muon)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _has(layout: Layout, wiring: str) -> bool:
    named = NAMED_WIRINGS[wiring]
    return layout.tensor >= named.fewest_ranks and (named.shares_stream or not layout.sequence_parallel)


def _layer_time(request: PlanRequest, layout: Layout, wiring: str, reduce_factor: float = 1.0) -> LayerTime:
    named = NAMED_WIRINGS[wiring]
    return LayerTime(
        named.of(request.model, layout.tensor),
        request.machine,
        layout.tensor,
        request.sequence,
        layout.micro_batch,
        layout.recompute,
        layout.sequence_parallel and named.shares_stream,
        reduce_factor,
    )


def fitting_plans(request: PlanRequest) -> list[LayoutPlan]:
    """Return every layout that fits, fastest first, in every wiring.

    Without tensor parallelism, wirings have no communication to hide, so only the first of the request is planned.
    """
    # The same for every pipeline, number of data-parallel ranks and ZeRO stage.
    layer_times: dict[tuple[Layout, str], LayerTime] = {}
    plans = []
    for layout, wiring in product(_layouts(request), request.wirings):
        if not _has(layout, wiring) or (layout.tensor == 1 and wiring != request.wirings[0]):
            continue
        key = replace(layout, pipeline=1, data=1, zero=1), wiring
        if key not in layer_times:
            layer_times[key] = _layer_time(request, layout, wiring)
        times = layer_times[key]
        micro_batches = request.global_batch // (layout.data * layout.micro_batch)
        memory = worst_memory(times.model, layout, request.sequence, micro_batches)
        if memory.total + RESERVED_BYTES <= request.machine.gpu.memory_bytes:
            time = step_time(times, layout, request.global_batch)
            utilisation = model_flop_utilisation(times, layout, request.global_batch, time.total)
            plans.append(LayoutPlan(layout, wiring, memory, time, utilisation))
    return sorted(plans, key=lambda plan: (plan.time.total, plan.memory.total))


def best_of_each_grid(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Return the fastest plan of each combination of ranks and ZeRO stage, in order."""
    found: dict[tuple[int, ...], LayoutPlan] = {}
    for plan in plans:
        layout = plan.layout
        found.setdefault((layout.tensor, layout.pipeline, layout.data, layout.zero), plan)
    return list(found.values())


def verdict(times: Sequence[tuple[str, float]]) -> str:
    """Return the name of (name, seconds) pairs that nothing beats by more than `SMALLEST_DIFFERENCE`, or the tie."""
    fastest = min(seconds for _, seconds in times)
    leaders = [name for name, seconds in times if seconds <= fastest * (1 + SMALLEST_DIFFERENCE)]
    return leaders[0] if len(leaders) == 1 else f"tie: {', '.join(leaders)}"


FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def sweep(request: PlanRequest, layout: Layout) -> list[dict[str, Any]]:
    """Compare the step times of the wirings of one layout, including standard, on faster and slower interconnects.

    An all-reduce takes `factor` times as long as on the machine's; one of a micro-batch's stream, `reduce_seconds`.
    Wirings without sequence parallelism are compared without it.
    """
    rows = []
    for factor in FACTORS:
        times = {
            wiring: _layer_time(request, layout, wiring, factor)
            for wiring in dict.fromkeys(("standard", *request.wirings))
        }
        seconds = {wiring: step_time(one, layout, request.global_batch).total for wiring, one in times.items()}
        reduce_seconds = times["standard"].reduce_seconds
        fastest = verdict([*seconds.items()])
        rows.append({"factor": factor, "reduce_seconds": reduce_seconds, "seconds": seconds, "fastest": fastest})
    return rows
