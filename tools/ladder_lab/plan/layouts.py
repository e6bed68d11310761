"""Finds all layouts of a model that fit a cluster, each with its memory and step time, fastest first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ladder_lab.cost.all_to_all import ALL_TO_ALLS, AllToAll
from ladder_lab.cost.layout import EXPERT_IMBALANCE, Layout
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.memory import RESERVED_BYTES, Memory, least_bytes, worst_memory
from ladder_lab.cost.training import LayerTime, StepTime, model_flop_utilisation, step_time
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.optimizers import OPTIMIZERS, optimizer_kind
from megatron_ladder.blueprint.tensors import parameter_count

MOST_NODES_OF_TENSOR = 2
"""Nodes that a tensor-parallel group spans at most."""
MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (2, 4, 8)
"""Numbers of ranges of layers of a stage whose schedule is interleaved."""
PLANNED_WIRINGS = tuple(name for name, wiring in NAMED_WIRINGS.items() if wiring.is_planned)
"""Those that `NamedWiring.is_planned` allows: the step time is that of identical layers."""
_LEAST_STATE_BYTES = 10 + 4 * min(len(moments) for kind in OPTIMIZERS for moments in kind.moments.values())
"""Bytes of weights, gradients, masters and moments of a parameter, over all GPUs."""
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
    optimizer: str = "adamw"
    all_to_all: AllToAll = ALL_TO_ALLS["nccl"]
    imbalance: float = EXPERT_IMBALANCE
    """Rows that the fullest expert-parallel rank receives, relative to the mean."""


@dataclass(frozen=True)
class LayoutPlan:
    """One layout in one wiring, with the share of all GPUs' peak that its model FLOPs reach."""

    layout: Layout
    wiring: str
    memory: Memory
    time: StepTime
    utilisation: float


def _layouts(request: PlanRequest, leanest: bool = False) -> Iterator[Layout]:
    """Yield all layouts that divide the GPUs and the batch evenly, whether they fit in memory or not.

    `leanest` leaves out those that need more memory than another one of the same ranks.
    """
    most_tensor = min(request.gpus, MOST_NODES_OF_TENSOR * request.machine.per_box)
    for tensor in _divisors(request.gpus, most_tensor):
        if tensor_parallel_errors(request.model, tensor):
            continue
        for pipeline in _divisors(request.gpus // tensor, request.model.num_layers):
            data = request.gpus // (tensor * pipeline)
            sequence_parallel = (False, True) if tensor > 1 and request.sequence % tensor == 0 else (False,)
            zeros = [1]
            if pipeline == 1 and data > 1:
                zeros = [1, 2] if optimizer_kind(request.optimizer).needs_whole_gradients else [1, 2, 3]
            chunks = _chunk_counts(request.model.num_layers, pipeline)
            least = MICRO_BATCHES[:1], (True,), chunks[:1]
            choices = least if leanest else (MICRO_BATCHES, (False, True), chunks)
            experts = [1, *_expert_parallel_sizes(request.model, tensor, data)]
            for micro_batch, recompute, count, zero, cut, size in product(*choices, zeros, sequence_parallel, experts):
                is_possible = size == 1 or (zero == 1 and (cut or tensor == 1))
                if is_possible and request.global_batch % (data * micro_batch) == 0:
                    layout = Layout(tensor, pipeline, data, zero, micro_batch, recompute, cut, request.optimizer)
                    yield replace(layout, chunks=count, experts=size, imbalance=request.imbalance)


def _expert_parallel_sizes(model: ModelConfig, tensor: int, data: int) -> list[int]:
    """Return the values of --expert-model-parallel-size that divide the experts, apart from 1."""
    if not model.num_experts:
        return []
    sizes = _divisors(tensor * data, model.num_experts)[1:]
    aligned = [size for size in sizes if size % tensor == 0 or tensor % size == 0]
    return [size for size in aligned if not tensor_parallel_errors(model, tensor, size)]


def _chunk_counts(layers: int, stages: int) -> list[int]:
    """Return the numbers of ranges of a stage that --num-layers-per-virtual-pipeline-stage can describe, and one."""
    counts = [1]
    for count in CHUNKS:
        ranges = stages * count
        longest = -(-layers // ranges)
        if stages > 1 and ranges <= layers and -(-layers // (stages * longest)) == count:
            counts.append(count)
    return counts


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _has(layout: Layout, wiring: str) -> bool:
    named = NAMED_WIRINGS[wiring]
    needs_stream = layout.sequence_parallel or layout.divides_experts
    return layout.tensor >= named.fewest_ranks and (named.shares_stream or not needs_stream)


def layer_time(request: PlanRequest, layout: Layout, wiring: str, reduce_factor: float = 1.0) -> LayerTime:
    """Return the times of the layers of a wiring in a layout; collectives take `reduce_factor` times as long."""
    model = NAMED_WIRINGS[wiring].of(request.model, layout.tensor)
    return LayerTime(model, request.machine, layout, request.sequence, reduce_factor, request.all_to_all)


def _pairs(
    request: PlanRequest, leanest: bool = False, only_fitting: bool = False
) -> Iterator[tuple[Layout, str, Memory]]:
    """Yield all layouts in all wirings that they can have, or only those that fit, and the memory of the fullest GPU.

    Layouts capture their passes unless the host waits in them or they fit only without graphs, as `--cuda-graph auto`.
    Without tensor and expert parallelism, wirings have no communication to hide, so only the first of the request is
    planned.
    """
    for layout, wiring in product(_layouts(request, leanest), request.wirings):
        if only_fitting and layout.zero == 1 and not _fits(request, least_bytes(request.model, layout)):
            continue
        communicates = layout.tensor > 1 or layout.divides_experts
        if _has(layout, wiring) and (communicates or wiring == request.wirings[0]):
            times = layer_time(request, layout, wiring)
            micro_batches = request.global_batch // (layout.data * layout.micro_batch)
            memory = worst_memory(times.model, layout, request.sequence, micro_batches)
            if layout.is_captured and (times.waits_for_choices or not _fits(request, memory.total)):
                layout = replace(layout, captures=False)
                memory = worst_memory(times.model, layout, request.sequence, micro_batches)
            if not only_fitting or _fits(request, memory.total):
                yield layout, wiring, memory


def _fits(request: PlanRequest, num_bytes: float) -> bool:
    return num_bytes + RESERVED_BYTES <= request.machine.gpu.memory_bytes


def fitting_plans(request: PlanRequest) -> list[LayoutPlan]:
    """Return every layout that fits, fastest first, in every wiring."""
    # The same for every pipeline, schedule and number of data-parallel ranks.
    layer_times: dict[tuple[Layout, str], LayerTime] = {}
    plans = []
    for layout, wiring, memory in _pairs(request, only_fitting=True):
        data = layout.pipeline * layout.data
        key = replace(layout, pipeline=1, chunks=1, data=data, captures=True), wiring
        if key not in layer_times:
            layer_times[key] = layer_time(request, *key)
        times = layer_times[key]
        time = step_time(times, layout, request.global_batch)
        utilisation = model_flop_utilisation(times, layout, request.global_batch, time.total)
        plans.append(LayoutPlan(layout, wiring, memory, time, utilisation))
    return sorted(plans, key=lambda plan: (plan.time.total, plan.memory.total))


def least_memory(request: PlanRequest) -> float | None:
    """Return the bytes of a GPU that some layout needs at least; None if no layout divides GPUs and batch."""
    totals = (memory.total + RESERVED_BYTES for _, _, memory in _pairs(request, leanest=True))
    return min(totals, default=None)


def nearest_gpus(request: PlanRequest) -> int | None:
    """Return the number of GPUs nearest to the request's, in full boxes, for which a layout fits; None if none does."""
    per_box = request.machine.per_box
    most_boxes = request.machine.network.known_ranks[-1]
    numbers = [*range(1, per_box), *range(per_box, per_box * most_boxes + 1, per_box)]
    fewest = _LEAST_STATE_BYTES * parameter_count(request.model).total / request.machine.gpu.memory_bytes
    possible = [number for number in numbers if number > fewest]
    for gpus in sorted(possible, key=lambda number: abs(number - request.gpus)):
        other = replace(request, gpus=gpus)
        if any(_pairs(other, leanest=True, only_fitting=True)):
            return gpus
    return None


def best_of_each_grid(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Return the fastest plan of each combination of ranks and ZeRO stage, in order."""
    best: dict[tuple[int, ...], LayoutPlan] = {}
    for plan in plans:
        layout = plan.layout
        best.setdefault((layout.tensor, layout.pipeline, layout.data, layout.zero, layout.experts), plan)
    return list(best.values())


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
    names = dict.fromkeys(("standard", *request.wirings))
    # The ranks of desync have no common stream to cut.
    layouts = {
        name: replace(layout, sequence_parallel=layout.sequence_parallel and NAMED_WIRINGS[name].shares_stream)
        for name in names
    }
    for factor in FACTORS:
        times = {name: layer_time(request, layouts[name], name, factor) for name in names}
        seconds = {name: step_time(times[name], layouts[name], request.global_batch).total for name in names}
        reduce_seconds = times["standard"].reduce_seconds
        fastest = verdict([*seconds.items()])
        rows.append({"factor": factor, "reduce_seconds": reduce_seconds, "seconds": seconds, "fastest": fastest})
    return rows
