"""Steps of every wiring on the streams, the allocator and the autograd of CUDA, played on a CPU; and planted faults."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.comm import stream
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.engine import graph, sharded
from megatron_ladder.engine.engine import Engine, ModelInputs
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.engine.state import GROUP_MOMENTS, sum_partial_gradients
from megatron_ladder.model.backward import ForwardRecord
from megatron_ladder.model.language_model import LanguageModel, LossScales
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.stats import StepStats
from tests.helpers.pairwise import quick_share
from tests.helpers.races import Checker, PlayedNccl
from tests.helpers.sharded import small_model

TENSOR, DATA = 2, 2
BUCKET_NUMBERS = 2000


class Rank:
    """A rank of a tensor-parallel and data-parallel run with ZeRO 1 and several buckets."""

    def __init__(
        self,
        checker: Checker,
        config: ModelConfig,
        sequence_parallel: bool,
        recompute_layers: int,
        new_group: Callable[[int, Checker], CommGroup] = PlayedNccl,
        tensor_parallel: int = TENSOR,
        expert_parallel: int = 1,
        expert_capacity: int | None = None,
    ) -> None:
        tensor, data = (new_group(size, checker) for size in (tensor_parallel, DATA))
        mesh = replace(ProcessMesh.single(), tensor=tensor, data=data, sequence_parallel=sequence_parallel)
        if expert_parallel > 1:
            experts, experts_data = (new_group(size, checker) for size in (expert_parallel, DATA))
            mesh = replace(mesh, experts=experts, experts_data=experts_data)
        self.checker = checker
        self.mesh = mesh
        options = StackOptions(recompute_layers=recompute_layers)
        experts = ExpertOptions(balancing=1e-2, z_loss=1e-3, capacity=expert_capacity)
        self.model = LanguageModel(config, mesh, options, seed=1, z_loss_coeff=1e-3, experts=experts)
        weights = [*self.model.parameters()]
        groups = [
            {"params": [one for one in weights if (one.dim() > 1) is is_matrix], GROUP_MOMENTS: ()}
            for is_matrix in (True, False)
        ]
        self.optimizer = ShardedOptimizer(self.model, groups, mesh, torch.float32, BUCKET_NUMBERS)
        self.optimizer.base = torch.optim.SGD(self.optimizer.groups, lr=1e-3, foreach=False)
        ids = torch.randint(0, config.vocab_size, (2, 13))
        self.batch: ModelInputs = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, None, None, None)

    def faults(self, micro_batches: int) -> list[str]:
        """Return the faults of two steps without graphs, and of two that replay captured passes."""
        engine = Engine(self.model, self.optimizer, self.mesh, torch.device("cpu"))
        if self.mesh.experts.size == 1 or self.model.expert_capacity is not None:
            engine.passes = CapturedPasses(self.model, self.optimizer, CommGroup.alone(), measures=False)
        with self.checker:
            for _ in range(4):
                engine.train([self.batch] * micro_batches, LossScales(*torch.ones(3)))
                sum_partial_gradients(self.optimizer.gradients(), self.mesh, torch.device("cpu"))
                for _, gradient in self.optimizer.gradients():
                    gradient.mul_(0.5)
                self.optimizer.step()
        return self.checker.faults


def config_of(wiring: str, **changes: Any) -> ModelConfig:
    if WIRINGS[wiring].late:
        changes = {"ladder_layers": (0, 1)} | changes
    if WIRINGS[wiring].needs_experts:
        changes = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layers": (0, 1)} | changes
        changes["moe_shared_expert_intermediate_size"] = 0 if wiring == "longcat" else 8
    if WIRINGS[wiring].stream == "per rank":
        changes |= {"desync_tp": TENSOR, "desync_interval": 2}
    return small_model(num_layers=2, num_key_value_heads=4, residual_mode=wiring, **changes)


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    monkeypatch.setattr(graph, "_WARM_UP_STEPS", 2)
    played = Checker()
    played.install(monkeypatch)
    # The collector need not look at the objects of all tests before.
    gc.freeze()
    yield played
    gc.unfreeze()


CASES: list[tuple[str, dict[str, Any], bool, int, int]] = [
    *((name, {}, False, 1, 2) for name in WIRINGS),
    *((name, {}, True, 1, 2) for name, wiring in WIRINGS.items() if wiring.stream == "shared"),
    *(("ladder", {}, True, recompute_layers, micro_batches) for recompute_layers, micro_batches in ((0, 1), (2, 4))),
    ("ladder", {"lanes": 2 * TENSOR}, False, 1, 4),
    ("ladder", {"residual_staleness": 2}, True, 0, 1),
    ("ladder", {"ladder_layers": (1,), "add_mlp_bias": True, "qk_layernorm": True}, True, 1, 2),
]


@pytest.mark.parametrize(
    ("wiring", "changes", "sequence_parallel", "recompute_layers", "micro_batches"), quick_share(CASES, 8)
)
def test_steps_neither_race_nor_break_a_capture(
    checker: Checker,
    wiring: str,
    changes: dict[str, Any],
    sequence_parallel: bool,
    recompute_layers: int,
    micro_batches: int,
) -> None:
    rank = Rank(checker, config_of(wiring, **changes), sequence_parallel, recompute_layers)
    assert rank.faults(micro_batches) == []
    assert checker.kernels > 1000 and len(checker.streams) == 4 + sequence_parallel
    gc.collect()
    assert not any(type(one) is ForwardRecord for one in gc.get_objects()), "backward is never freed"


@pytest.mark.parametrize("recompute_layers", [0, 2])
@pytest.mark.parametrize(("tensor", "experts", "capacity"), [(1, 2, None), (2, 2, None), (2, 4, None), (2, 4, 12)])
@pytest.mark.parametrize("wiring", ["standard", "ladder", "farskip", "shortcut", "longcat"])
def test_tokens_that_move_do_not_race(
    checker: Checker, wiring: str, tensor: int, experts: int, capacity: int | None, recompute_layers: int
) -> None:
    """Passes with a fixed number of rows are captured, too."""
    changes = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layers": (0, 1)}
    config = config_of(wiring, **changes)
    rank = Rank(
        checker,
        config,
        tensor > 1,
        recompute_layers,
        tensor_parallel=tensor,
        expert_parallel=experts,
        expert_capacity=capacity,
    )
    assert rank.faults(2) == []
    gc.collect()
    assert not any(type(one) is ForwardRecord for one in gc.get_objects()), "backward is never freed"


STAGE, CHUNKS = 1, [range(1, 2), range(4, 5)]
"""The second of three stages of two chunks."""


def faults_of_a_stage(checker: Checker, wiring: str, micro_batches: int, experts: int = 1) -> list[str]:
    """Return the faults of a pipeline stage with tensor parallelism: of two steps, two captured ones, and a forward
    pass. With expert-parallel ranks, the stream is sharded, and no step is captured."""
    tensor, pipeline = PlayedNccl(TENSOR, checker), PlayedNccl(3, checker)
    pipeline.rank = STAGE
    mesh = replace(ProcessMesh.single(), tensor=tensor, pipeline=pipeline)
    config = replace(config_of(wiring), num_layers=6)
    if experts > 1:
        mesh = replace(mesh, experts=PlayedNccl(experts, checker), sequence_parallel=True)
        config = replace(config, ladder_layers=range(6), num_experts=4, moe_ffn_hidden_size=8, moe_layers=range(6))
    model = LanguageModel(config, mesh, chunks=CHUNKS, seed=1)
    group = {"params": [*model.parameters()], GROUP_MOMENTS: ()}
    optimizer = ShardedOptimizer(model, [group, {"params": [], GROUP_MOMENTS: ()}], mesh, torch.float32, BUCKET_NUMBERS)
    optimizer.base = torch.optim.SGD(optimizer.groups[:1], lr=1e-3, foreach=False)
    engine = Engine(model, optimizer, mesh, torch.device("cpu"))
    if experts == 1:
        engine.passes = CapturedPasses(model, optimizer, CommGroup.alone(), measures=False)
    ids = torch.randint(0, 101, (2, 13))
    batches: list[Any] = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, None, None, None)] * micro_batches
    scales = LossScales(*torch.ones(3))

    with checker:
        for _ in range(4):
            engine.train(batches, scales)
            sum_partial_gradients(engine.optimizer.gradients(), mesh, torch.device("cpu"))
            engine.optimizer.step()
        engine.run_passes(batches, trains=False)
    return checker.faults


@pytest.mark.parametrize("micro_batches", quick_share([2, 1, 5], 3))
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_transfers_between_stages_do_not_race(checker: Checker, wiring: str, micro_batches: int) -> None:
    assert faults_of_a_stage(checker, wiring, micro_batches) == []


@pytest.mark.parametrize("experts", [2, 4])
@pytest.mark.parametrize("wiring", ["ladder", "farskip"])
def test_outputs_of_experts_between_stages_do_not_race(checker: Checker, wiring: str, experts: int) -> None:
    assert faults_of_a_stage(checker, wiring, 3, experts) == []


@pytest.mark.parametrize(
    ("message", "in_training", "found"),
    quick_share(
        [("recv", True, "before stream"), ("send", True, "reuse of memory"), ("send", False, "reuse of memory")], 3
    ),
)
def test_a_message_that_nobody_waits_for_is_found(
    checker: Checker, monkeypatch: pytest.MonkeyPatch, message: str, in_training: bool, found: str
) -> None:
    """The checker reports a receive whose tensor is read too early, and a send whose memory is reused too early."""
    start = PlayedNccl._start

    def start_late(group: PlayedNccl, name: str, *others: Any) -> Any:
        work = start(group, name, *others)
        if name == message and torch.is_grad_enabled() == in_training:
            work.end.clock.clear()
        return work

    monkeypatch.setattr(PlayedNccl, "_start", start_late)
    assert any(found in fault for fault in faults_of_a_stage(checker, "ladder", 5))


def without_wait(partial: torch.Tensor, *_: object) -> InFlight:
    return InFlight(partial, None)


def run_at_once(queue: CudaSideQueue, chain: Callable[[], Any], uses: object) -> Any:
    queue._held.append(uses)
    with torch.cuda.stream(queue._stream):
        return chain()


def swap_sum(stats: StepStats) -> None:
    stats.loss = torch.zeros_like(stats.loss)


def read(norm: RMSNorm, *args: Any, **kwargs: Any) -> Any:
    normed = NORM(norm, *args, **kwargs)
    assert (normed[0] if isinstance(normed, tuple) else normed).isfinite().all().item()
    return normed


def keep(model: LanguageModel, *args: Any, **others: Any) -> Any:
    KEPT.append(COMPUTE(model, *args, **others))
    return KEPT[-1]


KEPT: list[Any] = []
RUN, NORM, COMPUTE = CudaSideQueue.run, RMSNorm.forward, LanguageModel.stage
FAULTS: dict[str, tuple[object, str, object, str]] = {
    "a chain does not hold what it uses": (
        CudaSideQueue,
        "run",
        lambda queue, chain, uses: RUN(queue, chain, None),
        "reuse of memory",
    ),
    "a chain does not wait for the computation": (CudaSideQueue, "run", run_at_once, "reads before"),
    "a sum on the side holds no tensor": (stream, "InFlight", lambda *sums: InFlight(*sums[:2]), "reuse of memory"),
    "sums are read in flight": (InFlight, "wait", lambda sums: sums.partial, "reads before"),
    "weights are read while they are gathered": (ShardedOptimizer, "_wait_for", lambda *_: None, "reads before"),
    "gradients are updated while they are reduced": (sharded, "InFlight", without_wait, "mul_ writes before"),
    "the host reads a norm": (RMSNorm, "forward", read, "host takes part in a capture: _local_scalar_dense"),
    "a chain runs on a stream that is not captured": (CudaSideQueue, "run", run_at_once, "outside of the capture"),
    "gathers before a capture": (ShardedOptimizer, "gather_late", lambda _: None, "across the border of a capture"),
    "reduces go on after a capture": (sharded, "InFlight", without_wait, "not joined at the end of a capture"),
    "autograd nodes live on": (LanguageModel, "stage", keep, "across the border of a capture"),
    "captured sums are replaced": (StepStats, "clear", swap_sum, "memory that was freed"),
}


@pytest.mark.parametrize("fault", quick_share(FAULTS, 6))
def test_planted_faults_are_found(checker: Checker, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, planted, found = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    for staleness in (1, 2):
        config = config_of("ladder", residual_staleness=staleness)
        Rank(checker, config, sequence_parallel=True, recompute_layers=0).faults(micro_batches=1)
    assert any(found in one for one in checker.faults)
