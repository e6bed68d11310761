"""The traces of --profile.

Profiled ranks build their model with `record_function` as its `Span`, and with a tensor-parallel group that names its
collectives. Other ranks, and runs without --profile, pay nothing per step. All ranks wait until the profilers have
started, so that their start does not look like communication, and until the traces are written.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.spans import Span, name_collectives, no_span
from megatron_ladder.config.run import RunConfig
from megatron_ladder.config.sections import ProfileConfig
from megatron_ladder.errors import Problem
from megatron_ladder.progress import print_if_possible, print_rank_0


def named_for_profiler(config: ProfileConfig, mesh: ProcessMesh) -> tuple[ProcessMesh, Span]:
    """Return the mesh and the span with which this rank builds its model."""
    if not config.profile or mesh.world.rank not in config.profile_ranks:
        return mesh, no_span
    tensor = name_collectives(mesh.tensor, record_function)
    replicas = {count: name_collectives(group, record_function) for count, group in mesh.head_replicas.items()}
    experts = name_collectives(mesh.experts, record_function)

    def of_data(name: str) -> AbstractContextManager[object]:
        # Data-parallel collectives run under sub-blocks without being theirs.
        return record_function(f"data {name}")

    data = name_collectives(mesh.data, of_data)
    experts_data = name_collectives(mesh.experts_data, of_data)
    groups = replace(mesh, tensor=tensor, head_replicas=replicas, experts=experts)
    return replace(groups, data=data, experts_data=experts_data), record_function


def step_contexts(
    run: RunConfig,
    world: CommGroup,
    device: torch.device,
    first_iteration: int,
    pause: Callable[[], AbstractContextManager[object]],
) -> Callable[[int], AbstractContextManager[object]]:
    """Return a function from a step's number to its context, which every rank must enter.

    `first_iteration` is the first step of this process; `pause` is the context for work that is not training,
    which begins without communication in flight.
    """
    config = run.profile
    first, last = max(config.profile_step_start + 1, first_iteration), config.profile_step_end
    if config.profile and first > last:
        note = Problem({"profile": None}, f"{{}}: steps up to {last} are done: nothing is profiled")
        print_rank_0(f"*** {note} ***", world.rank)
    if not config.profile or first > last:
        return lambda iteration: nullcontext()
    folder = config.folder(run.logging.tensorboard_dir)
    assert folder is not None
    path = folder / f"rank{world.rank}-steps{first}-{last}.pt.trace.json.gz"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(activities=activities) if world.rank in config.profile_ranks else None

    @contextmanager
    def profiled(iteration: int) -> Iterator[None]:
        if not first <= iteration <= last:
            yield
            return
        if iteration == first:
            with pause():
                if profiler is not None:
                    profiler.start()
                world.barrier()
        with nullcontext() if profiler is None else record_function(f"iteration {iteration}"):
            yield
        if iteration == last:
            with pause():
                if profiler is not None:
                    profiler.stop()
                    _write_trace(profiler, path)
                world.barrier()

    return profiled


def _write_trace(profiler: profile, path: Path) -> None:
    """Write a trace; a failure is only reported, because a trace is not worth ending a run for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first, so that a trace of the final name is complete.
        temporary = path.with_name(f".{path.name}")
        profiler.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
        text = f"profile: {path}"
    except OSError as error:
        note = Problem({"profile": None}, f"{{}}: {{path}} cannot be written: {error.strerror}", path=path)
        text = f"*** {note} ***"
    # The output may be on the same disk.
    print_if_possible(text)
