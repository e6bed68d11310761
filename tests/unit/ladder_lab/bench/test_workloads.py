"""The timed passes on a GPU: those that training and generation run by default."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ladder_lab.bench import throughput, workloads
from ladder_lab.bench.options import Case, ThroughputOptions
from ladder_lab.bench.program import select_case_operations
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.throughput import _ways
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.bench.workloads import Workload, build_models, training_pass
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.model import operations
from megatron_ladder.model.operations import Operations
from tests.unit.ladder_lab.bench.test_throughput import SMALL

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Graph:
    """A stand-in for `CudaStepGraph` that counts."""

    made: list["Graph"]

    def __init__(self) -> None:
        self.replays = 0
        self.closed = False
        Graph.made.append(self)

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        self.step = step
        return step()

    def replay(self) -> None:
        self.replays += 1
        self.step()

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    Graph.made = []
    monkeypatch.setattr(workloads, "CudaStepGraph", Graph)
    return Graph.made


@pytest.mark.parametrize(("case", "replays"), [("train", [2]), ("decode", [2 * 3]), ("prefill", [])])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_training_and_decode_steps_are_captured(
    graphs: list[Graph], case: Case, replays: list[int], cuda_graph: bool
) -> None:
    alone = CommGroup.alone()
    shape = replace(SMALL, max_position_embeddings=32)
    made = build_models([VARIANTS["ladder"]], shape, ProcessMesh.single(), alone, alone, torch.float32, CPU)
    with Workload(case, 1, 8, 3, cuda_graph).prepare(made["ladder"], ProcessMesh.single(), runs=2) as run:
        run()
        run()
        had_gradients = [one.grad is not None for one in made["ladder"].parameters()]
    assert [one.replays for one in graphs] == (replays if cuda_graph else [])
    assert all(one.closed for one in graphs)
    assert any(had_gradients) is (case == "train") and all(one.grad is None for one in made["ladder"].parameters())


def test_decode_steps_with_drafts_verify_them() -> None:
    alone = CommGroup.alone()
    shape = replace(SMALL, max_position_embeddings=32, mtp_num_layers=1)
    made = build_models([VARIANTS["ladder"]], shape, ProcessMesh.single(), alone, alone, torch.float32, CPU)
    model, lengths = made["ladder"], list[int]()
    model.stack.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with Workload("decode", 1, 8, 3, draft_tokens=2).prepare(model, ProcessMesh.single(), runs=2) as run:
        run()
        run()
    prompt, *steps = lengths
    assert prompt >= 8
    assert steps == [3] * 6


def test_a_pass_that_waits_for_experts_is_not_captured(monkeypatch: pytest.MonkeyPatch, graphs: list[Graph]) -> None:
    monkeypatch.setattr(workloads, "waits_for_choices", lambda model: True)
    weight = torch.nn.Linear(2, 2)
    with training_pass(weight, lambda: weight(torch.ones(2)).sum(), cuda_graph=True) as run:
        run()
    assert graphs == []


@pytest.mark.parametrize(
    ("case", "chosen", "compiled"),
    [("train", "auto", True), ("train", "false", False), ("prefill", "auto", False), ("decode", "true", True)],
)
def test_operations_are_those_of_training_or_generation(
    monkeypatch: pytest.MonkeyPatch, case: Case, chosen: str, compiled: bool
) -> None:
    marked = Operations()
    monkeypatch.setattr(operations, "_compiler_problem", lambda device: "")
    for module in ("megatron_ladder.model.operations", "ladder_lab.bench.program"):
        monkeypatch.setattr(f"{module}.compile_operations", lambda given: marked)
    found = select_case_operations(case, chosen, GPU)  # type: ignore[arg-type]
    assert (found is marked) is compiled


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_throughput_captures_our_models(monkeypatch: pytest.MonkeyPatch, graphs: list[Graph], cuda_graph: bool) -> None:
    """On a played GPU, where tensors stay on the CPU."""
    build, randn = throughput.build_models, torch.randn
    monkeypatch.setattr(throughput, "build_models", lambda *words: build(*words[:5], torch.float32, CPU, words[-1]))
    monkeypatch.setattr(torch, "randn", lambda *sizes, **_: randn(*sizes))
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(throughput.importlib.util, "find_spec", lambda name: None)
    options = ThroughputOptions(backend="none", matrix=8, cuda_graph=cuda_graph)
    with ExitStack() as stack:
        for run in _ways(options, replace(SMALL, max_position_embeddings=8), 8, GPU, stack).values():
            run()
        assert [one.replays for one in graphs] == [1, 1] * cuda_graph
    assert all(one.closed for one in graphs)


def test_variants_compute_gradients_of_weights_late_or_at_once() -> None:
    names = ("farskip", "farskip-early-weights")
    alone, shape = CommGroup.alone(), find_size("small-moe")
    variants = [VARIANTS[name] for name in names]
    made = build_models(variants, shape, ProcessMesh.single(), alone, alone, torch.float32, CPU)
    assert [made[name].stack.options.late_weight_gradients for name in names] == [True, False]


def test_a_model_that_does_not_fit_names_its_flag() -> None:
    alone, shape = CommGroup.alone(), find_size("1x1024x1024x8x8x1000000000000")
    with pytest.raises(UserError, match=r"--size: a rank's weights take 8,192,000 GB, .*: give fewer layers"):
        build_models([VARIANTS["standard"]], shape, ProcessMesh.single(), alone, alone, torch.float32, CPU)
