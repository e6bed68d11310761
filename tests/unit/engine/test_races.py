"""Steps of every wiring on the streams, the allocator and the autograd of CUDA, played on a CPU; and planted faults."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.comm import stream
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.engine import sharded
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from tests.helpers.races import Checker, PlayedNccl
from tests.helpers.sharded import small_model

TENSOR, DATA = 2, 2
BUCKET_NUMBERS = 2000


class Rank:
    """A rank of a tensor-parallel and data-parallel run with ZeRO 1 and several buckets."""

    def __init__(self, checker: Checker, config: ModelConfig, sequence_parallel: bool, recompute_layers: int) -> None:
        tensor, data = (PlayedNccl(size, checker) for size in (TENSOR, DATA))
        mesh = replace(ProcessMesh.single(), tensor=tensor, data=data, sequence_parallel=sequence_parallel)
        self.checker = checker
        self.model = LanguageModel(config, mesh, StackOptions(recompute_layers=recompute_layers), seed=1)
        weights = [*self.model.parameters()]
        groups = [{"params": [one for one in weights if (one.dim() > 1) is is_matrix]} for is_matrix in (True, False)]
        self.optimizer = ShardedOptimizer(self.model, groups, mesh, torch.float32, BUCKET_NUMBERS)
        self.optimizer.optimizer = torch.optim.SGD(self.optimizer.groups, lr=1e-3, foreach=False)
        self.ids = torch.randint(0, config.vocab_size, (2, 13))

    def faults(self, steps: int = 2, micro_batches: int = 2) -> list[str]:
        with self.checker:
            for _ in range(steps):
                with self.optimizer.reducing(micro_batches):
                    for _ in range(micro_batches):
                        self.model(self.ids[:, :-1], self.ids[:, 1:]).backward()
                self.update()
        return self.checker.faults

    def update(self) -> None:
        for bucket in self.optimizer.buckets:
            assert bucket.master.grad is not None
            bucket.master.grad.mul_(0.5)
        self.optimizer.step()


def config_of(wiring: str, **changes: Any) -> ModelConfig:
    if WIRINGS[wiring].late:
        changes = {"ladder_layers": (0, 1, 2)} | changes
    if WIRINGS[wiring].stream == "per rank":
        changes |= {"desync_tp": TENSOR, "desync_interval": 2}
    return small_model(num_layers=3, num_key_value_heads=4, residual_mode=wiring, **changes)


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Checker:
    played = Checker()
    played.install(monkeypatch)
    return played


CASES: list[tuple[str, dict[str, Any], bool, int]] = [
    *((name, {}, False, 1) for name in WIRINGS),
    *((name, {}, True, 1) for name, wiring in WIRINGS.items() if wiring.stream == "shared"),
    *(("ladder", {}, True, recompute_layers) for recompute_layers in (0, 3)),
    ("ladder", {"lanes": 2 * TENSOR}, False, 1),
    ("ladder", {"residual_staleness": 2}, True, 1),
    ("ladder", {"ladder_layers": (1,), "add_mlp_bias": True, "qk_layernorm": True}, True, 1),
]


@pytest.mark.parametrize(("wiring", "changes", "sequence_parallel", "recompute_layers"), CASES)
def test_steps_do_not_race(
    checker: Checker, wiring: str, changes: dict[str, Any], sequence_parallel: bool, recompute_layers: int
) -> None:
    assert Rank(checker, config_of(wiring, **changes), sequence_parallel, recompute_layers).faults() == []
    assert checker.kernels > 1000 and len(checker.streams) == 4 + sequence_parallel


class Unwaited(InFlight):
    def wait(self) -> torch.Tensor:
        return self.partial


def run_at_once(queue: CudaSideQueue, chain: Callable[[], Any], uses: object) -> Any:
    queue._held.append(uses)
    with torch.cuda.stream(queue._stream):
        return chain()


RUN = CudaSideQueue.run
FAULTS: dict[str, tuple[object, str, object, str]] = {
    "a chain does not hold what it uses": (
        CudaSideQueue,
        "run",
        lambda queue, chain, uses: RUN(queue, chain, None),
        "reuse of memory",
    ),
    "a chain does not wait for the computation": (CudaSideQueue, "run", run_at_once, "reads before"),
    "a reduce on the side does not hold its tensor": (stream, "_Holding", lambda work, _: work, "reuse of memory"),
    "sums are read in flight": (InFlight, "wait", lambda sums: sums.partial, "reads before"),
    "weights are read while they are gathered": (ShardedOptimizer, "_wait_for", lambda *_: None, "reads before"),
    "gradients are updated while they are reduced": (
        sharded,
        "InFlight",
        Unwaited,
        "mul_ writes before",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_races_are_found(checker: Checker, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, planted, found = FAULTS[fault]
    rank = Rank(checker, config_of("ladder"), sequence_parallel=True, recompute_layers=2)
    monkeypatch.setattr(owner, name, planted)
    assert any(found in one for one in rank.faults())
