"""A dry run of a whole run: builds its distinct ranks one by one, replays all of them, and prints a report.

Data-parallel ranks execute the same program in different groups, so one of them is built for each pipeline stage and
tensor-parallel rank, and the last ranks of the run to confirm that. The others follow by renumbering. Only the sums of
partial gradients differ in size, because tensor-parallel ranks sum what their data-parallel ranks own. So all ranks of
the last tensor-parallel group are built.
"""

import importlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.memory import Precision, stage_memory
from ladder_lab.dry_run.one_rank import STEPS, RankRecord, run_rank
from ladder_lab.dry_run.replay import Communicator, RankProgram, find_problems
from ladder_lab.output import write_json
from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.command_line import Settings
from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import raise_user_errors
from megatron_ladder.train.inputs import read_dry_run

KINDS = ("weights", "gradients", "optimizer", "buffers", "activations")
TOLERANCE = 0.1
"""Relative difference to the planner's memory that is reported."""


def dry_run(settings: Settings, ranks: int, output: Path | None = None) -> None:
    """Run two steps of every distinct rank without devices, and print what they allocate and communicate.

    `output` is a JSON file for both. Raises UserError if the flags are invalid, or the ranks' collectives do not match.
    """
    begin = time.monotonic()
    planned = read_dry_run(settings, ranks)
    raise_user_errors(_unsupported(planned))
    run = _shortened(planned)
    records = _run_ranks(run)
    programs = _all_programs(run, {rank: record.program for rank, record in records.items()})
    print("\n".join(_describe(planned, run, records)), flush=True)
    write_json(output, _to_json(records))
    problems = find_problems(programs)
    raise_user_errors(f"the dry run found: {problem}" for problem in problems)
    count = sum(len(program.collectives) for program in programs.values())
    groups = len({communicator for program in programs.values() for communicator in program.communicators})
    print(
        f"{count:,} launches of {run.world_size:,} ranks in {groups:,} communicators match; none waits in a circle "
        f"({time.monotonic() - begin:.0f} s)"
    )


def _unsupported(run: RunConfig) -> Iterator[str]:
    if run.parallel.offload_optimizer == "cpu":
        yield "--offload-optimizer cpu: a dry run counts no memory of the host: leave it out"
    capacity = run.parallel.moe_expert_capacity
    if capacity is not None:
        yield (
            f"--moe-expert-capacity {capacity}: a dry run chooses no experts, and so does not know whether a step is "
            "repeated: leave it out"
        )
    optimizer = run.optimizer.optimizer
    if optimizer_kind(optimizer).needs_whole_gradients:
        yield f"--optimizer {optimizer}: a dry run has no numbers, which it exchanges before it allocates: leave it out"
    if run.training.distill_from is not None:
        yield (
            f"--distill-from {run.training.distill_from}: a dry run reads no weights and would not count those of the "
            "teacher: leave it out"
        )


def _shortened(run: RunConfig) -> RunConfig:
    """Return the run with no more micro-batches than the first stage needs to hold most of them and release one.

    Interleaved stages hold the more, the larger the rest of their number divided by that of the stages, which is
    preserved. The optimizer is torch's, because apex needs a GPU.
    """
    stages = run.parallel.pipeline_model_parallel_size
    count = stages * run.chunks + 1
    if run.chunks > 1:
        count += (run.accumulation_steps - count) % stages
    count = min(run.accumulation_steps, count)
    size = count * run.training.micro_batch_size * run.data_parallel_size
    optimizer = replace(run.optimizer, optimizer_implementation="torch")
    return replace(run, accumulation_steps=count, global_batch_size=size, optimizer=optimizer)


def _run_ranks(run: RunConfig) -> dict[int, RankRecord]:
    if run.needs_deepspeed:
        # DeepSpeed does not know the meta device by this name. Processes share what is imported here.
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("ladder_lab.dry_run.meta_device")

    def run_alone(rank: int) -> RankRecord:
        """Run a rank in a process of its own, since DeepSpeed has global state."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            return process.submit(run_rank, run, rank).result()

    ranks = _distinct_ranks(run)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return dict(zip(ranks, threads.map(run_alone, ranks), strict=True))


def _distinct_ranks(run: RunConfig) -> list[int]:
    """Return the first data-parallel rank of each stage and tensor-parallel rank, and the run's last such ranks."""
    tensor = run.parallel.tensor_model_parallel_size
    stages = run.parallel.pipeline_model_parallel_size
    firsts = (stage * run.data_parallel_size * tensor + rank for stage in range(stages) for rank in range(tensor))
    return sorted({*firsts, *range(run.world_size - tensor, run.world_size)})


def _all_programs(run: RunConfig, recorded: Mapping[int, RankProgram]) -> dict[int, RankProgram]:
    """Return the programs of all ranks; those that were not recorded are as the first data-parallel rank's."""
    tensor = run.parallel.tensor_model_parallel_size
    data = run.data_parallel_size
    programs = dict(recorded)
    for rank in range(run.world_size):
        if rank not in programs:
            replica = rank // tensor % data
            first = recorded[rank - replica * tensor]
            moved = [_moved(communicator, run, replica) for communicator in first.communicators]
            programs[rank] = RankProgram(moved, first.collectives)
    return programs


def _moved(communicator: Communicator, run: RunConfig, replica: int) -> Communicator:
    """Return the communicator that another data-parallel rank uses instead."""
    tensor = run.parallel.tensor_model_parallel_size
    experts = run.parallel.expert_model_parallel_size
    replicas = {rank // tensor % run.data_parallel_size for rank in communicator.ranks}
    distance = replica * tensor
    if replicas == {0}:
        return communicator.moved(distance)
    # Groups over all data-parallel ranks are their own.
    if len(replicas) == run.data_parallel_size:
        return communicator
    assert experts > tensor, f"{communicator} has a part of the data-parallel ranks"
    # Ranks that divide the experts are neighbours; the others have the same experts.
    are_neighbours = communicator.ranks[-1] - communicator.ranks[0] < len(communicator.ranks)
    return communicator.moved(distance - distance % experts if are_neighbours else distance % experts)


def _describe(planned: RunConfig, run: RunConfig, records: Mapping[int, RankRecord]) -> Iterator[str]:
    tensor = run.parallel.tensor_model_parallel_size
    stages = run.parallel.pipeline_model_parallel_size
    yield (
        f"dry run of {run.world_size:,} ranks (tensor {tensor} x pipeline {stages} x data {run.data_parallel_size}): "
        f"built {len(records)} of them, and ran {STEPS} steps of {run.accumulation_steps} of the "
        f"{planned.accumulation_steps} micro-batches"
    )
    yield "peak memory of a rank in the last step, GB (10^9 bytes):"
    yield f"{'stage':>5} {'rank':>6} " + "".join(f"{kind:>12}" for kind in KINDS) + f"{'total':>9}{'planner':>9}"
    firsts = [rank for rank in records if rank % tensor == 0 and rank // tensor % run.data_parallel_size == 0]
    for stage, rank in enumerate(firsts):
        memory = records[rank].memory
        total = sum(memory.values())
        plan = _planned_bytes(run, stage)
        # Buffers are in the planner's reserve.
        comparable = total - memory.get("buffers", 0)
        parts = "".join(f"{memory.get(kind, 0) / 1e9:>12.3f}" for kind in KINDS)
        planned_text = f"{plan / 1e9:.3f}" if plan else "-"
        yield f"{stage:>5} {rank:>6} {parts}{total / 1e9:>9.3f}{planned_text:>9}"
        if plan and abs(plan - comparable) > TOLERANCE * comparable:
            yield f"*** stage {stage}: the planner's estimate is off by {plan / comparable - 1:+.0%} ***"
    for stage, rank in enumerate(firsts):
        record = records[rank]
        collectives = record.program.collectives[record.last_step :]
        yield f"stage {stage}, rank {rank}, {len(collectives):,} collectives in a step, by first launch:"
        counts = Counter((launch.slot, launch.kind, launch.dtype, launch.size) for launch in collectives)
        for (slot, kind, dtype, size), count in counts.items():
            communicator = record.program.communicators[slot]
            yield f"  {count:>6} x {kind:<14} {size:>16,} bytes  {dtype:<9} {communicator}"
        for place, count in Counter(record.waits).items():
            often = "once" if count == 1 else f"{count} times"
            yield f"  the host waits for the device {often} in a step, in {place}"


def _planned_bytes(run: RunConfig, stage: int) -> float:
    """Return the planner's memory of a stage; 0 if it does not know the run's layout or a part of the model."""
    parallel = run.parallel
    training = run.training
    if parallel.pipeline_partition != "uniform" or run.recompute_layers not in (0, run.model.num_layers):
        return 0.0
    # Plans do not include a drafting head.
    if run.model.mtp_num_layers:
        return 0.0
    precision: Precision = "bf16" if training.bf16 else "fp32"
    layout = replace(Layout.of(run), captures=False)
    return stage_memory(run.model, layout, stage, training.seq_length, run.accumulation_steps, precision).total


def _to_json(records: Mapping[int, RankRecord]) -> dict[str, Any]:
    ranks = {}
    for rank, record in records.items():
        groups = [communicator._asdict() for communicator in record.program.communicators]
        last = [collective._asdict() for collective in record.program.collectives[record.last_step :]]
        ranks[str(rank)] = {"memory": record.memory, "waits": record.waits, "groups": groups, "last_step": last}
    return {"ranks": ranks}
