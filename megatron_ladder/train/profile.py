"""Measurements of a run: --profile traces, and the memory that a forward pass keeps for backward.

Profiled ranks build their model with `record_function` as its `Span`, and with a tensor-parallel group that names its
collectives. Other ranks, and runs without --profile, pay nothing per step. All ranks wait until the profilers have
started, so that their start does not look like communication, and until the traces are written.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.spans import Span, name_collectives, no_span
from megatron_ladder.config.run import RunConfig


def named_for_profiler(run: RunConfig, mesh: ProcessMesh) -> tuple[ProcessMesh, Span]:
    """Return the mesh and the span with which this rank builds its model."""
    if not run.profile.profile or mesh.world.rank not in run.profile.profile_ranks:
        return mesh, no_span
    tensor, kv_replica = (name_collectives(group, record_function) for group in (mesh.tensor, mesh.kv_replica))
    # Data-parallel collectives run under sub-blocks without being theirs.
    data = name_collectives(mesh.data, lambda name: record_function(f"data {name}"))
    return replace(mesh, tensor=tensor, kv_replica=kv_replica, data=data), record_function


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
    if config.profile and first > last and world.rank == 0:
        print(f"*** --profile: steps up to {last} are done: nothing is profiled ***", flush=True)
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
        # Written under another name first, so that a trace of the final name is complete.
        temporary = path.with_name(f".{path.name}")
        profiler.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
        text = f"profile: {path}"
    except OSError as error:
        text = f"*** --profile: {path} cannot be written: {error.strerror} ***"
    with suppress(OSError):
        # The output may be on the same disk.
        print(text, flush=True)


class _NewStorages(TorchDispatchMode):
    """Records every storage that an operator creates, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self._seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        return sum(size for reference, size in self._seen.values() if not reference.expired())


class ActivationMeter:
    """Measures a model's first forward pass with gradients, by CUDA's allocator or by the tensors created."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.kept_bytes: int | None = None
        """Memory that the pass left occupied, including its output; None before it."""
        self._device = device
        self._before = 0
        self._storages: _NewStorages | None = None
        self._tracking, self._eager = ExitStack(), ExitStack()
        self._hooks = ExitStack()
        self._hooks.callback(model.register_forward_pre_hook(self._begin, prepend=True).remove)
        self._hooks.callback(model.register_forward_hook(self._end).remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._eager.close()

    def largest(self, world: CommGroup) -> int:
        """Return the maximum over all ranks, in bytes; all ranks must call it, after the pass and its backward."""
        self._eager.close()
        kept = torch.tensor(float(self.kept_bytes or 0), dtype=torch.float64, device=self._device)
        return int(world.all_reduce(kept, torch.distributed.ReduceOp.MAX))

    def _begin(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            # A dispatch mode cannot see into compiled functions. Recomputation in backward must run the same functions.
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
            self._storages = self._tracking.enter_context(_NewStorages())

    def _end(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        self._tracking.close()
        if self._storages is None:
            self.kept_bytes = torch.cuda.memory_allocated(self._device) - self._before
        else:
            self.kept_bytes = self._storages.alive()
        self._storages = None
        self._hooks.close()
