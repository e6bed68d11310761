"""Steps that replay captured passes: a graph of recorded operators and collectives plays those of CUDA."""

import contextlib
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_ladder.api import TrainingRun
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.engine import graph
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.errors import UserError
from megatron_ladder.train.step import train_step
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.races import EnoughMemory
from tests.helpers.sharded import Pieces
from tests.helpers.steps import DELTA, LATENT, RECIPE, Batch, check_same, launch_of, steps_of_batches, take_steps, train
from tests.helpers.training import build_trainer_here, own_batches, weight_pieces

WARM_UP, CAPTURED = 1, 3
EXPERTS = (
    "--bf16 --num-experts 8 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 16 "
    "--moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid"
)
MOVED, ROWS, SHARDED = "--expert-model-parallel-size", "--moe-expert-capacity", "--sequence-parallel"

WINDOWS = "--window-size 3 --window-layers [1] --softmax-type learnable"


class Pool:
    """The memory of graphs. Before a replay, all of it changes but what was in use when the graph was captured."""

    def __init__(self) -> None:
        self._storages: dict[int, Tensor] = {}
        """By address of the storage: its bytes."""
        self._recorded = Counter[int]()
        """How many tensors of each storage the graphs keep."""

    def record(self, tensors: Iterable[object], made: bool = False) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if made and storage._cdata not in self._storages:
                self._storages[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._recorded[storage._cdata] += 1
            self._recorded[storage._cdata] += 1

    def in_use(self) -> set[int]:
        count: Callable[[int], int] = torch._C._storage_Use_Count
        return {address for address in self._storages if count(address) > self._recorded[address]}

    def overwrite(self, kept: set[int]) -> None:
        for address, whole in self._storages.items():
            if address not in kept:
                whole.fill_(255)


class RecordedGraph(TorchDispatchMode):
    """Plays `torch.cuda.CUDAGraph`. A replay repeats operators on the same tensors; a capture leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self._operators: list[tuple[Any, Any, Any, list[Any]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made = set[int]()
        self._pool = Pool()
        self._kept: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = set[int]()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                read.add(storage._cdata)
                if storage._cdata not in self._before and storage._cdata not in self._made:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._before[storage._cdata] = whole, whole.clone()
        result = func(*args, **(kwargs or {}))
        args, kwargs, recorded = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, tree_leaves(result)))
        self._operators.append((func, args, kwargs, recorded))
        self._pool.record(tree_leaves((args, kwargs)))
        for one in recorded:
            if isinstance(one, Tensor):
                is_made = one.untyped_storage()._cdata not in read
                self._pool.record([one], is_made)
                if is_made:
                    self._made.add(one.untyped_storage()._cdata)
        return result

    @contextmanager
    def recording(self, pool: Pool | None = None) -> Iterator[None]:
        self._pool = pool or self._pool
        self._kept = self._pool.in_use()
        try:
            with self:
                yield
        finally:
            for whole, before in self._before.values():
                whole.copy_(before)
            self._before.clear()
            self._made.clear()

    def replay(self) -> None:
        self.replays += 1
        self._pool.overwrite(self._kept)
        for func, args, kwargs, recorded in self._operators:
            for old, new in zip(recorded, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                elif isinstance(old, torch.ScriptObject):
                    new.wait()

    def reset(self) -> None:
        self._operators.clear()


@contextmanager
def played_graphs() -> Iterator[None]:
    def capture(recorded: RecordedGraph, stream: None, pool: Pool) -> Any:
        return recorded.recording(pool)

    def wait(work: dist.Work) -> bool:
        # A wait for gloo copies the result, which is a part of the collective.
        with _disable_current_modes():
            return wait_of_torch(work)

    wait_of_torch = dist.Work.wait
    with (
        mock.patch.multiple(torch.cuda, CUDAGraph=RecordedGraph, Stream=mock.Mock(), graph_pool_handle=Pool),
        mock.patch.multiple(graph, capturing=capture, PeakMemory=EnoughMemory),
        mock.patch.object(dist.Work, "wait", wait),
    ):
        yield


def histories(
    argv: list[str], batches: list[list[Batch]], frozen: str = "$^", frozen_steps: Collection[int] = ()
) -> list[tuple[list[Any], Pieces]]:
    """On each rank: losses, norms and extra losses of all steps, and final weights, without and with graphs.

    Parameters with names that match `frozen` are frozen in some steps. A step is captured unless others train in it
    than in the one before.
    """
    found = []
    frozen_in = [False] * WARM_UP + [step in frozen_steps for step in range(WARM_UP + 1, len(batches) + 1)]
    expected = [False] * WARM_UP + [before == now for before, now in itertools.pairwise(frozen_in[WARM_UP - 1 :])]
    for captures in (False, True):
        trainer = build_trainer_here([*argv, "--cuda-graph", "false"])
        with ExitStack() as stand_ins:
            stand_ins.enter_context(mock.patch.object(graph, "_WARM_UP_STEPS", WARM_UP))
            if trainer.device.type == "cpu":
                stand_ins.enter_context(played_graphs())
            if captures:
                sharded = trainer.engine.optimizer
                trainer.engine.passes = CapturedPasses(trainer.model, sharded, trainer.mesh.world, measures=False)
            history: list[Any] = []
            captured = []
            for iteration, batch in enumerate(batches, start=1):
                own = own_batches(trainer, batch)
                for name, parameter in trainer.model.named_parameters():
                    parameter.requires_grad_(not (frozen_in[iteration - 1] and re.search(frozen, name)))
                trainer.engine.follow_frozen()
                result = train_step(trainer, own, iteration)
                history.append((result.loss, result.gradient_norm, dict(result.extra_losses)))
                losses, _ = trainer.engine.run_passes(own[:1], trains=False)
                history += [loss.item() for loss in losses]
                captured.append(trainer.engine.passes is not None and bool(trainer.engine.passes._graphs))
        if trainer.engine.passes is not None:
            graphs: list[Any] = [one for key, one in trainer.engine.passes._graphs.items() if key is not None]
            replays = sum(one.replays for one in graphs if isinstance(one, RecordedGraph))
            passes = 2 * trainer.model.chunks * len(own)
            uses = len(list(itertools.takewhile(bool, reversed(expected))))
            assert len(graphs) <= passes and replays == uses * passes * (trainer.device.type == "cpu")
            assert captured == expected
            trainer.engine.close()
        found.append((history, weight_pieces(trainer)))
    return found


def batches_of_steps(micro_batches: int) -> list[list[Batch]]:
    return steps_of_batches(WARM_UP + CAPTURED, micro_batches)


def check_captured(results: list[list[tuple[list[Any], Pieces]]]) -> None:
    """Compare what `histories` returned on all ranks."""
    check_same(*zip(*results, strict=True))
    for (eager, _), _ in results:
        steps = [one[0] for one in eager if isinstance(one, tuple)]
        assert len({*steps}) == len(steps) > WARM_UP


@pytest.mark.parametrize(
    ("words", "micro_batches"),
    usual_share(
        [
            ("--residual-mode standard --tensor-model-parallel-size 2 --sequence-parallel --z-loss-coeff 1e-3", 4),
            ("--residual-mode ladder --tensor-model-parallel-size 2 --sequence-parallel --bf16", 3),
            ("--residual-mode ladder --lanes 2 --tensor-model-parallel-size 2", 2),
            ("--residual-mode ladder-parallel --bf16 --recompute-granularity full", 1),
            (f"{LATENT} --residual-mode ladder --tensor-model-parallel-size 2 --bf16 --attention-output-gate", 2),
            (f"{WINDOWS} --residual-mode ladder --tensor-model-parallel-size 2 --sequence-parallel --bf16", 2),
            (f"{DELTA} --residual-mode ladder --tensor-model-parallel-size 2 --bf16", 2),
            (f"{EXPERTS} --residual-mode farskip --tensor-model-parallel-size 2 --sequence-parallel", 3),
            (f"{EXPERTS} --residual-mode ladder --recompute-granularity full --expert-sharding experts", 2),
            (f"{EXPERTS} {MOVED} 2 {ROWS} 24 --residual-mode farskip --recompute-granularity full", 2),
            (f"{EXPERTS} {MOVED} 4 {ROWS} 12 --residual-mode ladder --tensor-model-parallel-size 2 {SHARDED}", 3),
            ("--residual-mode ladder --tensor-model-parallel-size 2 --bf16 --mtp-num-layers 1", 2),
            ("--residual-mode ladder --tensor-model-parallel-size 2 --bf16 --mtp-num-layers 1 --mtp-depths 3", 2),
        ],
        2,
    ),
)
def test_captured_steps_are_bitwise_those_without_graphs(gloo_pools: GlooPools, words: str, micro_batches: int) -> None:
    data_parallel = 4 // (2 if "tensor" in words else 1)
    argv = [*RECIPE, *words.split(), "--num-layers", "2", "--global-batch-size", str(2 * data_parallel * micro_batches)]
    check_captured(gloo_pools(4).run(histories, argv, batches_of_steps(data_parallel * micro_batches)))


CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
PIPELINES = [
    # Layout, layers, micro-batches, and flags.
    ("1x2x2", 4, 3, f"--residual-mode ladder {CHUNKS} --tie-embeddings --bf16"),
    ("1x2x1", 6, 1, f"--residual-mode standard {CHUNKS} --z-loss-coeff 1e-3"),
    ("2x2x1", 4, 5, f"--residual-mode ladder {CHUNKS} --sequence-parallel --recompute-granularity full --bf16"),
    ("1x3x1", 6, 4, f"--residual-mode ladder-attention {CHUNKS} --tie-embeddings --zero-stage 0"),
    ("1x4x1", 4, 7, f"{EXPERTS} --residual-mode ladder"),
    ("1x2x2", 4, 3, f"{EXPERTS} {MOVED} 2 {ROWS} 24 --residual-mode ladder"),
    ("2x2x1", 4, 3, f"{EXPERTS} --residual-mode ladder --mtp-num-layers 1 --mtp-depths 2"),
]


def check_pipeline(gloo_pools: GlooPools, layout: str, layers: int, micro_batches: int, flags: str) -> None:
    ranks, words = launch_of(layout, flags)
    data_parallel = int(layout.rpartition("x")[2])
    argv = [*RECIPE, *words, *f"--num-layers {layers} --global-batch-size {2 * data_parallel * micro_batches}".split()]
    check_captured(gloo_pools(ranks).run(histories, argv, batches_of_steps(data_parallel * micro_batches)))


@pytest.mark.parametrize(("layout", "layers", "micro_batches", "flags"), usual_share(PIPELINES, 2))
def test_captured_pipelines_are_bitwise_those_without_graphs(
    gloo_pools: GlooPools, layout: str, layers: int, micro_batches: int, flags: str
) -> None:
    check_pipeline(gloo_pools, layout, layers, micro_batches, flags)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1x2x2", "2x2x1", "1x3x1", "1x4x1"])
@pytest.mark.parametrize("micro_batches", [2, 3, 8])
@pytest.mark.parametrize(
    "flags",
    [
        f"{CHUNKS} --residual-mode ladder --tie-embeddings --bf16",
        f"{CHUNKS} --residual-mode ladder-parallel --zero-stage 0 --recompute-granularity full",
        f"{EXPERTS} --residual-mode farskip --recompute-granularity full --recompute-num-layers 2",
        "--residual-mode standard --zero-stage 0 --tie-embeddings",
    ],
)
def test_captured_pipelines_of_all_layouts(gloo_pools: GlooPools, layout: str, micro_batches: int, flags: str) -> None:
    tensor, stages, _ = layout.split("x")
    words = f"{flags} --sequence-parallel" if tensor == "2" else flags
    check_pipeline(gloo_pools, layout, 2 * int(stages), micro_batches, words)


@pytest.mark.parametrize(
    ("layout", "frozen", "words"),
    [
        ("1x1x2", r"layers\.1|final_norm", "--residual-mode ladder --bf16"),
        ("2x1x2", r"embedding|layers\.0", "--residual-mode ladder --sequence-parallel --zero-stage 0"),
        # Nothing trains on the first stage, or in its first chunk; or nothing at all.
        ("1x2x1", r"embedding|layers\.[01]\.", "--residual-mode standard --bf16"),
        ("1x2x2", "embedding", f"--residual-mode ladder {CHUNKS} --tie-embeddings"),
        ("1x2x1", r"embedding|layers\.0", f"--residual-mode ladder {CHUNKS}"),
        ("1x2x1", "", "--residual-mode ladder"),
    ],
)
def test_frozen_parameters_change_the_captured_passes(
    gloo_pools: GlooPools, layout: str, frozen: str, words: str
) -> None:
    ranks, words_of_layout = launch_of(layout, words)
    data_parallel = int(layout.rpartition("x")[2])
    argv = [*RECIPE, *words_of_layout, *f"--num-layers 4 --global-batch-size {6 * data_parallel}".split()]
    batches = steps_of_batches(WARM_UP + 5, 3 * data_parallel)
    check_captured(gloo_pools(ranks).run(histories, argv, batches, frozen, (3, 4)))


def gathers_of_steps(argv: list[str], batches: list[list[Batch]], from_python: bool) -> tuple[list[int], Any]:
    """On each rank: the gathers in each captured pass, and the outcome, of the Python API's steps or the program's."""
    trainer = build_trainer_here(argv)
    sharded = trainer.engine.optimizer
    trainer.engine.passes = CapturedPasses(trainer.model, sharded, trainer.mesh.world, measures=False)
    with played_graphs(), mock.patch.object(graph, "_WARM_UP_STEPS", WARM_UP):
        if from_python:
            rank_batches = mock.MagicMock()
            rank_batches.__next__.side_effect = [own_batches(trainer, batch) for batch in batches]
            opened: Any = mock.Mock(trainer=trainer, batches=rank_batches, iteration=0)
            run = TrainingRun(contextlib.nullcontext(opened))
            results = [run.step() for _ in batches]
            history = [(result.loss, result.gradient_norm) for result in results]
        else:
            history = take_steps(trainer, batches)
    graphs: list[Any] = [*trainer.engine.passes._graphs.values()]
    found = [sum("allgather" in str(func) for func, *_ in one._operators) for one in graphs]
    return found, (history, weight_pieces(trainer))


def test_weights_are_gathered_once_in_a_step(gloo_pools: GlooPools) -> None:
    """A caller of the Python API reads them after a step, so that no pass needs to gather them again."""
    argv = [*RECIPE, *"--residual-mode ladder --global-batch-size 8 --cuda-graph false".split()]
    expected = gloo_pools(2).run(train, argv, None, batches_of_steps(4))
    for from_python in (False, True):
        results = gloo_pools(2).run(gathers_of_steps, argv, batches_of_steps(4), from_python)
        gathers, outcomes = zip(*results, strict=True)
        check_same(outcomes, expected)
        assert all((first == 0) is from_python and not any(rest) for first, *rest in gathers)


class FailingGraph(RecordedGraph):
    """Fails in the middle of backward on all ranks, or at the end of the capture on one."""

    def __init__(self, failing_rank: int | None) -> None:
        super().__init__()
        self._failing_rank = failing_rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._failing_rank is None and len(self._operators) == 100:
            raise RuntimeError("operation not permitted")
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def recording(self, pool: Pool | None = None) -> Iterator[None]:
        with super().recording(pool):
            yield
        if dist.get_rank() == self._failing_rank:
            raise RuntimeError("the capture is invalid")


class TooLittleMemory(EnoughMemory):
    def capture_problem(self, pool_of: object) -> str:
        return "too little memory" * (dist.get_rank() == 1)


def failing(
    argv: list[str], batches: list[list[Batch]], measures: bool, failing_rank: int | None, has_memory: bool = True
) -> Any:
    """On each rank: the output and the outcome of a run whose last graph fails, or the error that ends it.

    Without memory on rank 1, no rank makes a graph.
    """
    trainer = build_trainer_here(argv)
    made = iter([*(RecordedGraph() for _ in range(5)), FailingGraph(failing_rank)] if has_memory else [])
    with (
        played_graphs(),
        mock.patch.object(torch.cuda, "CUDAGraph", lambda: next(made)),
        mock.patch.multiple(graph, _WARM_UP_STEPS=WARM_UP, _MEASURED_STEPS=1),
        mock.patch.object(graph, "PeakMemory", EnoughMemory if has_memory else TooLittleMemory),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        sharded = trainer.engine.optimizer
        trainer.engine.passes = CapturedPasses(trainer.model, sharded, trainer.mesh.world, measures)
        try:
            history = take_steps(trainer, batches)
        except UserError as error:
            return str(error)
    return printed.getvalue(), (history, weight_pieces(trainer))


@pytest.mark.parametrize(("failing_rank", "has_memory"), [(None, True), (1, True), (1, False)])
def test_a_failed_capture_leaves_a_run_without_graphs(
    gloo_pools: GlooPools, failing_rank: int | None, has_memory: bool
) -> None:
    words = "--residual-mode ladder --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel --bf16"
    argv = [*RECIPE, *words.split(), *"--global-batch-size 8 --cuda-graph false".split()]
    found = gloo_pools(2).run(failing, argv, batches_of_steps(4), True, failing_rank, has_memory)
    output, outcomes = zip(*found, strict=True)
    check_same(outcomes, gloo_pools(2).run(train, argv, None, batches_of_steps(4)))
    text = "RuntimeError: the capture is invalid" if failing_rank else "RuntimeError: operation not permitted"
    text = text if has_memory else "too little memory"
    where = f"a step cannot be captured on rank {failing_rank or 0}: {text}"
    line = f"*** --cuda-graph auto: no graphs, because {where} ***\n"
    assert output == (line, "")
    errors = gloo_pools(2).run(failing, argv, batches_of_steps(4), False, failing_rank, has_memory)
    assert errors == [f"--cuda-graph true: {where}; use auto or false"] * 2


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, True), (2.0, False)])
def test_graphs_are_kept_if_steps_are_faster_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, kept: bool
) -> None:
    clock = itertools.accumulate([0.0] + [1.0] * 8 + [seconds] * 6)
    monkeypatch.setattr(graph.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(graph, "PeakMemory", EnoughMemory)
    sharded: Any = SimpleNamespace(gathers_late=True)
    module: Any = SimpleNamespace(device=torch.device("cpu"), mtp_depths=0, new_step_stats=lambda: None)
    passes = CapturedPasses(module, sharded, CommGroup.alone(), measures=True)
    assert [passes._uses_graphs() for _ in range(20)] == [False] * 8 + [True] * 6 + [kept] * 6
    assert sharded.gathers_late is kept
    times = f"{1000 * seconds} ms with graphs, 1000.0 ms without"
    assert capsys.readouterr().out == f"--cuda-graph auto: steps take {times}: {'keeps' if kept else 'drops'} them\n"


def outgrown(argv: list[str], batches: list[list[Batch]]) -> tuple[list[int | None], list[bool], tuple[Any, Pieces]]:
    """On each rank: capacities with which steps were repeated, which steps left graphs, and the outcome."""
    trainer = build_trainer_here([*argv, "--cuda-graph", "false"])
    capacities, captured, history = [], [], []
    with played_graphs(), mock.patch.object(graph, "_WARM_UP_STEPS", WARM_UP):
        sharded = trainer.engine.optimizer
        passes = trainer.engine.passes = CapturedPasses(trainer.model, sharded, trainer.mesh.world, measures=False)
        for iteration, batch in enumerate(batches, start=1):
            result = train_step(trainer, own_batches(trainer, batch), iteration)
            capacities.append(result.expert_capacity)
            captured.append(bool(passes._graphs))
            history.append((result.loss, result.gradient_norm, *result.extra_losses.values()))
    return capacities, captured, (history, weight_pieces(trainer))


@pytest.mark.parametrize(("rows", "repeated_with"), [(23, 24 + 3), (24, None)])
def test_a_captured_step_that_needs_more_rows_is_repeated_without_graphs(
    gloo_pools: GlooPools, rows: int, repeated_with: int | None
) -> None:
    """In the third of five steps all tokens are equal, so that all choose the same experts."""
    words = f"{EXPERTS} {MOVED} 2 --residual-mode farskip --global-batch-size 8"
    batches = steps_of_batches(5, 4)
    batches[2] = [(torch.ones_like(tokens), torch.ones_like(labels), mask) for tokens, labels, mask in batches[2]]
    found = gloo_pools(2).run(outgrown, [*RECIPE, *words.split(), ROWS, str(rows)], batches)
    for capacities, captured, _ in found:
        assert capacities == [None, None, repeated_with, None, None]
        assert captured == [False, True, repeated_with is None, True, True]
    check_same([outcome for *_, outcome in found], gloo_pools(2).run(train, [*RECIPE, *words.split()], None, batches))
