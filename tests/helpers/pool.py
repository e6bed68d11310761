"""One pool of processes per world size for a whole test run: a test case is a message, not a launch.

The ranks are forks of the test process, so torch and the modules that it has imported cost them nothing. The test
process and each rank share one pipe. A message to a rank is the pickle of `(function, arguments, keyword arguments)`; a
function travels by reference, so it must be defined at the top level of an importable module. The rank answers
`(True, result)` or `(False, traceback)`. A rank without a case blocks on its pipe.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import psutil
import torch

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.config.run import SECTIONS
from megatron_ladder.flags import section_flags
from tests.helpers.commands import clean_environment, free_port, kill_tree
from tests.helpers.forks import fork
from tests.helpers.patience import patient

P = ParamSpec("P")
R = TypeVar("R")

CASE_TIMEOUT = 60.0
START_TIMEOUT = 300.0
"""Seconds for what a cold disk makes slow: importing the module of a case on every rank."""
STARTS = 3
"""Attempts to start ranks whose connections fail."""
FAILURE_GRACE = 0.3
"""Seconds that other ranks get to report as well once one has failed."""
STACKS_TIMEOUT = 5.0
"""Seconds that hanging ranks get to write their stacks."""
GROUPS_KEPT = 32
"""Process groups that a rank may hold before abandoned ones are destroyed."""
PRELOADED = (
    "deepspeed.module_inject.auto_ep_config",
    "numpy.ma",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "megatron_ladder.train.loop",
)
"""Imported once for all ranks on a CPU, which are forks of this process; together they take seconds."""


@functools.cache
def import_for_ranks() -> None:
    """Import what ranks need, for a CPU; once."""
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    # Reads the sources of these classes once.
    section_flags(*SECTIONS, ModelConfig)
    # A collection in a rank would copy all pages of what is imported.
    gc.freeze()
    gc.enable()


class RankPool:
    """`world_size` processes with a default process group, started at the first case.

    After a failed case the processes are ended and the next case gets new ones: ranks that are out of step
    cannot spoil other cases. Process groups that a case made and that nothing refers to any more are
    destroyed in time; a mesh that many cases need is best kept by `functools.cache` in their module.
    """

    def __init__(
        self, world_size: int, backend: Literal["gloo", "nccl"] = "gloo", variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are added to the environment of the ranks."""
        self.world_size = world_size
        self._backend = backend
        self._variables = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if backend == "gloo" else {}
        self._variables |= variables or {}
        self._processes: list[psutil.Process] = []
        self._pipes: list[Connection] = []
        self._imported: set[str] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `function` with the same arguments on every rank; return the results in rank order.

        Tensors travel as detached copies on the CPU. torch's generator is seeded alike before each case.

        Raises:
            AssertionError: a rank raised, died, or did not finish within `CASE_TIMEOUT`; the message names the ranks,
                with their tracebacks, or with the stacks of all that hang.
        """
        return self.run_within(patient(CASE_TIMEOUT), function, *args, **kwargs)

    def run_within(self, timeout: float, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`run` with another timeout, in seconds."""
        call = _dumps((function, args, kwargs))
        try:
            if not self._processes:
                self._start_patiently()
            if function.__module__ not in self._imported:
                self._exchange(_dumps((_import_module, (function.__module__,), {})), patient(START_TIMEOUT))
                self._imported.add(function.__module__)
            return self._exchange(call, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a later case starts new ones."""
        for process in self._processes:
            kill_tree(process)
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None
        self._imported.clear()

    def _start_patiently(self) -> None:
        """Start, and retry if gloo loses a connection while the ranks find each other.

        This happens now and then on a busy machine, before anything under test has run.
        """
        for _ in range(STARTS - 1):
            try:
                return self._start()
            except AssertionError as error:
                if "connectFullMesh" not in str(error):
                    raise
                self.close()
        return self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"gloo_pool_{self.world_size}_")
        folder = Path(self._folder.name)
        environment = (
            clean_environment()
            | {
                "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
                "GLOO_SOCKET_IFNAME": "lo",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
            }
            | self._variables
        )
        # DeepSpeed collects garbage in every step of some optimizers. Imported modules need no look then.
        gc.collect()
        gc.freeze()
        for rank in range(self.world_size):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            become = partial(_become_rank, rank, folder, own, tuple(self._pipes), theirs, self._backend)
            self._processes.append(psutil.Process(fork(become, own, folder / f"output.{rank}")))
            theirs.close()
        self._gather(patient(START_TIMEOUT))

    def _exchange(self, message: bytes, timeout: float) -> list[Any]:
        for pipe in self._pipes:
            # A rank that has died since its last case is reported by _gather, with its exit code.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(message)
        return self._gather(timeout)

    def _gather(self, timeout: float) -> list[Any]:
        """Return one answer of every rank, in rank order, or raise an AssertionError about those that gave none."""
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting:
            answered = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not answered:
                break
            for pipe in answered:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    succeeded, answer = False, self._obituary(rank)
                (results if succeeded else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + patient(FAILURE_GRACE))
        if failures:
            raise AssertionError(
                "\n".join(f"rank {rank} of {self.world_size}: {text}" for rank, text in failures.items())
            )
        if waiting:
            raise AssertionError(self._stacks(sorted(waiting.values()), timeout))
        return [results[rank] for rank in range(self.world_size)]

    def _obituary(self, rank: int) -> str:
        code = kill_tree(self._processes[rank])
        output = self._written("output", rank).splitlines()[-40:]
        return "\n".join([f"ended with exit code {code}; last of its output:", *output])

    def _stacks(self, ranks: Sequence[int], timeout: float) -> str:
        """Return what every thread of the given ranks is doing."""
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + patient(STACKS_TIMEOUT)
        before: list[str] = []
        stacks = [self._written("stacks", rank) for rank in ranks]
        while (not all(stacks) or stacks != before) and time.monotonic() < deadline:
            time.sleep(0.1)
            before, stacks = stacks, [self._written("stacks", rank) for rank in ranks]
        lines = [f"no answer within {timeout:g} s"]
        for rank, stack in zip(ranks, stacks, strict=True):
            lines += [f"rank {rank} of {self.world_size} hangs in:", stack]
        return "\n".join(lines)

    def _written(self, kind: str, rank: int) -> str:
        assert self._folder is not None
        return (Path(self._folder.name) / f"{kind}.{rank}").read_text(errors="replace")


class GlooPools:
    """The pools of a test run, one for each world size asked for; `pools(2)` is the pool of two ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """End every process of every pool."""
        for pool in self._pools.values():
            pool.close()


def _become_rank(
    rank: int, folder: Path, environment: Mapping[str, str], pipes: Sequence[Connection], pipe: Connection, backend: str
) -> NoReturn:
    """Make this fork of the test process a rank with a process environment as a launcher provides it."""
    for one in pipes:
        one.close()
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve(rank, pipe, backend)


def _serve(rank: int, pipe: Connection, backend: str) -> NoReturn:
    """Join the default process group, then answer cases until the parent closes its end of the pipe."""
    stacks = open(f"stacks.{rank}", "w")  # noqa: SIM115 (the signal's handler writes to it for life)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        _share_gloo_device()
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{Path('store').resolve()}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    probe = torch.distributed.new_group()
    fresh_references = _references(probe)
    torch.distributed.destroy_process_group(probe)
    del probe
    pipe.send_bytes(_dumps((True, None)))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            # An ordinary exit would wait for threads and peers that may be stuck.
            os._exit(0)
        _destroy_abandoned_groups(fresh_references)
        torch.manual_seed(0)
        pipe.send_bytes(_answer(message))


def _share_gloo_device() -> None:
    """Give all groups of this process one device: each looks for messages a hundred times a second."""
    gloo = torch.distributed.ProcessGroupGloo
    options, create = gloo._Options(), gloo.__init__
    options._devices = [gloo.create_default_device()]

    def create_on_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options._timeout = timeout
        create(self, store, rank, size, options)

    gloo.__init__ = create_on_device


def _answer(message: bytes) -> bytes:
    """Return the answer to one case; a separate function, so that no result outlives it."""
    try:
        function, args, kwargs = pickle.loads(message)
        return _dumps((True, function(*args, **kwargs)))
    except BaseException:
        # SystemExit as well: a case that exits must not take the rank's traceback with it.
        return _dumps((False, traceback.format_exc()))


def _import_module(name: str) -> None:
    importlib.import_module(name)


def _destroy_abandoned_groups(fresh_references: int) -> None:
    """Destroy the process groups that only torch's own tables still hold.

    torch keeps every group for ever, with seven descriptors and three polling threads each; hundreds of cases
    would exhaust both. All ranks have finished the last case when this runs, so no peer still uses such a group.
    Groups that a module keeps (a cached mesh, DeepSpeed's own) have more references and stay.
    """
    names: dict[Any, str] = torch.distributed.distributed_c10d._world.pg_names
    world = torch.distributed.group.WORLD
    groups = [group for group in torch.distributed.distributed_c10d._world.pg_map if group is not world]
    if len(groups) <= GROUPS_KEPT:
        return
    gc.collect()
    while groups:
        group = groups.pop()
        if _references(group) <= fresh_references:
            name = names[group]
            torch.distributed.destroy_process_group(group)
            # torch names a group that only its members make after the number of names so far, so none may be freed.
            names[object()] = name


def _references(group: Any) -> int:
    """Return the references to a process group, including the caller's and this function's."""
    return sys.getrefcount(group)


class _Pickler(pickle.Pickler):
    """Tensors as detached CPU copies: no shared memory, no autograd graph, no storage around a view."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        copy = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _dumps(message: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()
