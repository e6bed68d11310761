"""All layouts of a model on a cluster that fit, each with its memory and step time, fastest first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.wiring import ResidualMode
from megatron_ladder.lab.cost.hardware import UNCALIBRATED_RANGE, Cluster
from megatron_ladder.lab.cost.memory import RESERVED_BYTES, Layout, Memory, worst_memory
from megatron_ladder.lab.cost.training import LayerTime, StepTime, model_flop_utilisation, step_time

MOST_NODES_OF_TENSOR = 2
"""A tensor-parallel group spans so many nodes at most."""
MICRO_BATCHES = (1, 2, 4, 8)
SMALLEST_DIFFERENCE = 0.03
"""Relative; below it nothing is called faster than something else."""


@dataclass(frozen=True)
class Question:
    """What a plan is made for."""

    model: ModelConfig
    cluster: Cluster
    gpus: int
    global_batch: int
    sequence: int
    wirings: tuple[ResidualMode, ...]


@dataclass(frozen=True)
class Plan:
    """One layout in one wiring."""

    layout: Layout
    wiring: ResidualMode
    memory: Memory
    time: StepTime
    utilisation: float
    """Model FLOPs over the peak of all GPUs."""


def uncertainty(cluster: Cluster, layout: Layout) -> float:
    """Relative, to either side; 0 where all that the layout depends on was measured."""
    return 0.0 if cluster.calibrated and layout.gpus <= cluster.gpus_per_node else UNCALIBRATED_RANGE


def layouts(question: Question) -> Iterator[Layout]:
    """All that share the GPUs and the batch out evenly, whether they fit or not."""
    most_tensor = min(question.gpus, MOST_NODES_OF_TENSOR * question.cluster.gpus_per_node)
    for tensor in _divisors(question.gpus, most_tensor):
        if tensor_parallel_errors(question.model, tensor):
            continue
        for pipeline in _divisors(question.gpus // tensor, question.model.num_layers):
            data = question.gpus // (tensor * pipeline)
            sequence_parallel = (False, True) if tensor > 1 and question.sequence % tensor == 0 else (False,)
            zeros = (1, 2, 3) if pipeline == 1 and data > 1 else (1,)
            for micro_batch, zero, recompute, sequence_cut in product(
                MICRO_BATCHES, zeros, (False, True), sequence_parallel
            ):
                if question.global_batch % (data * micro_batch) == 0:
                    yield Layout(tensor, pipeline, data, zero, micro_batch, recompute, sequence_cut)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def fitting_plans(question: Question) -> list[Plan]:
    """Every layout that fits, in every wiring, fastest first."""

    @cache
    def layer_time(wiring: ResidualMode, tensor: int, micro_batch: int, recompute: bool, cut: bool) -> LayerTime:
        model = question.model.in_wiring(wiring)
        return LayerTime(model, question.cluster, tensor, question.sequence, micro_batch, recompute, cut)

    plans = []
    for layout in layouts(question):
        for wiring in question.wirings:
            times = layer_time(wiring, layout.tensor, layout.micro_batch, layout.recompute, layout.sequence_parallel)
            plan = _plan(question, layout, wiring, times)
            if plan is not None:
                plans.append(plan)
    return sorted(plans, key=lambda plan: (plan.time.total, plan.memory.total))


def _plan(question: Question, layout: Layout, wiring: ResidualMode, times: LayerTime) -> Plan | None:
    """None if it does not fit."""
    micro_batches = question.global_batch // (layout.data * layout.micro_batch)
    memory = worst_memory(times.model, layout, question.sequence, micro_batches)
    if memory.total + RESERVED_BYTES > question.cluster.memory_bytes:
        return None
    time = step_time(times, layout, question.global_batch)
    utilisation = model_flop_utilisation(times, layout, question.global_batch, time.total)
    return Plan(layout, wiring, memory, time, utilisation)


def best_of_each_grid(plans: Sequence[Plan]) -> list[Plan]:
    """Of all plans with the same ranks and ZeRO stage, the fastest, in order."""
    found: dict[tuple[int, ...], Plan] = {}
    for plan in plans:
        layout = plan.layout
        found.setdefault((layout.tensor, layout.pipeline, layout.data, layout.zero), plan)
    return list(found.values())


def leaders(times: Sequence[tuple[str, float]]) -> list[str]:
    """Names of those that nothing else beats by more than `SMALLEST_DIFFERENCE`: a winner, or several in a tie.

    Args:
        times: (name, seconds).
    """
    fastest = min(seconds for _, seconds in times)
    return [name for name, seconds in times if seconds <= fastest * (1 + SMALLEST_DIFFERENCE)]


def verdict(times: Sequence[tuple[str, float]]) -> str:
    """The winner's name, or that there is none."""
    found = leaders(times)
    return found[0] if len(found) == 1 else f"tie: {', '.join(found)}"


@dataclass(frozen=True)
class SweepRow:
    """All wirings of one layout at one interconnect."""

    factor: float
    """Times that an all-reduce takes of what it does on the cluster."""
    reduce_seconds: float
    """Of a micro-batch's stream."""
    seconds: dict[str, float]
    """Wiring -> step time."""

    @property
    def winner(self) -> str:
        """By the step times."""
        return verdict(list(self.seconds.items()))

    def speed_up(self, wiring: str) -> float:
        """Over the standard wiring."""
        return self.seconds["standard"] / self.seconds[wiring]


BORDER_STEPS = 6
"""Halvings between two neighbouring factors: to 1 % or better."""
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def sweep(question: Question, layout: Layout, factors: Sequence[float] = FACTORS) -> list[SweepRow]:
    """The wirings of one layout, standard among them, at interconnects that are faster and slower."""
    rows = []
    for factor in factors:
        seconds: dict[str, float] = {}
        reduce_seconds = 0.0
        for wiring in dict.fromkeys(("standard", *question.wirings)):
            times = LayerTime(
                question.model.in_wiring(wiring), question.cluster, layout.tensor, question.sequence,
                layout.micro_batch, layout.recompute, layout.sequence_parallel, factor,
            )  # fmt: skip
            seconds[wiring] = step_time(times, layout, question.global_batch).total
            reduce_seconds = times.reduce_seconds
        rows.append(SweepRow(factor, reduce_seconds, seconds))
    return rows


def pays_from(question: Question, layout: Layout, wiring: ResidualMode) -> float | None:
    """Seconds of an all-reduce above which a wiring is faster than standard by more than `SMALLEST_DIFFERENCE`.

    None if it is not on any of the interconnects of `FACTORS`; 0 if it is without any reduce. A gain may fall again
    on interconnects so slow that reduces take longer than the computation: what counts is where it begins.
    """
    only = replace(question, wirings=(wiring,))

    def pays(factor: float) -> bool:
        (row,) = sweep(only, layout, (factor,))
        return row.speed_up(wiring) > 1 + SMALLEST_DIFFERENCE

    tried = (0.0, *FACTORS)
    first = next((index for index, factor in enumerate(tried) if pays(factor)), None)
    if first is None:
        return None
    if first == 0:
        return 0.0
    low, high = tried[first - 1], tried[first]
    for _ in range(BORDER_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    (row,) = sweep(only, layout, (high,))
    return row.reduce_seconds
