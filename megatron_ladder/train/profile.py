"""--profile: a trace of some steps, in which sub-blocks and all-reduces have names.

On the ranks that are profiled the model is built with `record_function` as its `Span` and with a tensor-parallel group
that names its collectives; on all others, and without --profile, nothing is named and nothing is asked at each step.
Every rank waits for the profilers to begin, so that their start is not taken for communication, and for the traces to
be written.
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
from megatron_ladder.comm.spans import RecordedGroup, Span, no_span
from megatron_ladder.config.run import RunConfig


def named_for_profiler(run: RunConfig, mesh: ProcessMesh) -> tuple[ProcessMesh, Span]:
    """The mesh and the names that a model is built with on this rank."""
    if not run.profile.profile or mesh.world.rank not in run.profile.profile_ranks:
        return mesh, no_span
    tensor, kv_replica = (RecordedGroup(group, record_function) for group in (mesh.tensor, mesh.kv_replica))
    return replace(mesh, tensor=tensor, kv_replica=kv_replica), record_function


def step_contexts(
    run: RunConfig,
    world: CommGroup,
    device: torch.device,
    first_iteration: int,
    pause: Callable[[], AbstractContextManager[object]],
) -> Callable[[int], AbstractContextManager[object]]:
    """What stands around each step, given its number; every rank must enter it alike.

    Args:
        first_iteration: the first step that this process takes; a resumed run may be beyond the profile.
        pause: stands around what is no training.
    """
    config = run.profile
    if not config.profile:
        return lambda iteration: nullcontext()
    first, last = max(config.profile_step_start + 1, first_iteration), config.profile_step_end
    if first > last:
        if world.rank == 0:
            print(f"*** --profile: steps up to {last} are done: nothing is profiled ***", flush=True)
        return lambda iteration: nullcontext()
    folder = config.folder(run.logging.tensorboard_dir)
    assert folder is not None
    path = folder / f"rank{world.rank}-steps{first}-{last}.pt.trace.json.gz"
    return _StepProfiler(path if world.rank in config.profile_ranks else None, first, last, world, device, pause)


class _StepProfiler:
    """Begins the profile before step `first`, and ends and writes it after step `last`."""

    def __init__(
        self,
        path: Path | None,
        first: int,
        last: int,
        world: CommGroup,
        device: torch.device,
        pause: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """`path`: of the trace; None on a rank that is not profiled."""
        self._path = path
        self._first = first
        self._last = last
        self._world = world
        self._pause = pause
        self._profiler: profile | None = None
        if path is not None:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._profiler = profile(activities=activities)

    @contextmanager
    def __call__(self, iteration: int) -> Iterator[None]:
        """Around a step; those of the profile get the name `iteration N`."""
        if not self._first <= iteration <= self._last:
            yield
            return
        if iteration == self._first:
            with self._pause():
                self._begin()
        with nullcontext() if self._profiler is None else record_function(f"iteration {iteration}"):
            yield
        if iteration == self._last:
            with self._pause():
                self._end()

    def _begin(self) -> None:
        if self._profiler is not None:
            self._profiler.start()
        self._world.barrier()

    def _end(self) -> None:
        if self._profiler is not None and self._path is not None:
            self._profiler.stop()
            try:
                write_trace(self._profiler, self._path)
                print(f"profile: {self._path}", flush=True)
            except OSError as error:
                # A run of days does not end for a trace.
                print(f"*** --profile: {self._path} cannot be written: {error.strerror} ***", flush=True)
            self._profiler = None
        self._world.barrier()


def write_trace(profiler: profile, path: Path) -> None:
    """Writes beside and renames, so that a trace of this name is whole.

    Raises:
        OSError: the file cannot be written.
    """
    beside = path.with_name(f".{path.name}")
    profiler.export_chrome_trace(str(beside))
    os.replace(beside, path)
