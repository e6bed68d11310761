"""CUDA groups: NCCL options and shared memory, tested without a GPU."""

import itertools
import os
import socket
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import megatron_ladder
from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.symmetric import (
    MOST_BYTES,
    AllReduceChoice,
    SymmetricMemoryGroup,
    check_peers,
    select_all_reduce,
)
from megatron_ladder.errors import LostPeerError, Problem, UserError
from megatron_ladder.train import setup
from tests.helpers.steps import RECIPE
from tests.helpers.training import run_of
from tests.unit.comm import fake_cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def nccl_options(is_high_priority_stream: bool) -> SimpleNamespace:
    """The attributes of torch's NCCL options, which CPU builds lack."""
    config = SimpleNamespace(max_ctas=None)
    return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config, _timeout=None)


def test_nccl_starts_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits four times the third one before it ends a rank, 60 s by default."""
    names = ("NCCL_ALGO", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    for name in (*names, "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch, "use_deterministic_algorithms", Mock())
    monkeypatch.setattr(setup, "_shared_settings", Mock())
    monkeypatch.setattr(setup, "select_operations", Mock(return_value=(None, "")))
    monkeypatch.setattr(RankInfo, "device", lambda self: GPU)
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=LostPeerError("started")))

    def settings(*words: str) -> list[str | None]:
        inputs: Any = SimpleNamespace(run=run_of([*RECIPE, *words], 1))
        with pytest.raises(LostPeerError, match="started"):
            setup.build_trainer(inputs, RankInfo(0, 1, 0), Peers())
        return [os.environ.get(name) for name in names]

    assert settings() == [None, "1", "2000"]
    assert settings("--deterministic-mode") == ["^NVLS,NVLSTree", "1", "2000"]
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert settings("--deterministic-mode")[0] == "Ring"


@pytest.mark.parametrize(
    ("words", "value", "device", "flags"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "1", GPU, "--sequence-parallel"),
        ("--pipeline-model-parallel-size 2", "1", GPU, "--pipeline-model-parallel-size 2"),
        ("--tensor-model-parallel-size 2", "1", GPU, ""),
        ("--pipeline-model-parallel-size 2", "8", GPU, ""),
        ("--pipeline-model-parallel-size 2", None, GPU, ""),
        ("--pipeline-model-parallel-size 2", "1", CPU, ""),
    ],
)
def test_one_queue_for_all_streams_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    value: str | None,
    device: torch.device,
    flags: str,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    setup._warn_about_one_queue(run_of([*RECIPE, *words.split()], 2).parallel, RankInfo(0, 2, 0), device)
    printed = capsys.readouterr().out
    assert printed.startswith(f"*** CUDA_DEVICE_MAX_CONNECTIONS=1: with {flags}, ") if flags else not printed


def test_no_process_group_is_bound_to_a_device() -> None:
    """One stream would carry all messages of a rank, each of which would wait for those with other ranks before it."""
    sources = {path: path.read_text(encoding="utf-8") for path in Path(megatron_ladder.__file__).parent.rglob("*.py")}
    assert any("new_group(" in source for source in sources.values())
    assert [path for path, source in sources.items() if "device_id=" in source] == []


def join_by_nvlink(monkeypatch: pytest.MonkeyPatch, gpus: set[int]) -> None:
    """Join some of eight GPUs by NVLink, and the others by PCIe only."""
    matrix = [[18 * ({one, other} <= gpus and one != other) for other in range(8)] for one in range(8)]
    detect = Mock(return_value=SimpleNamespace(matrix=matrix))
    monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", detect)


class Torch:
    """Fakes torch's one-shot reduce over two ranks with equal values."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, multicast: bool = False, sums_in_switches: bool = False
    ) -> None:
        self.device = fake_cuda.install(monkeypatch)
        self.by_nccl: list[torch.Tensor] = []
        self.one_shot: list[int] = []
        self.rendezvous: list[tuple[int, object]] = []
        self.group = SimpleNamespace(group_name="tensor", allreduce=lambda tensors, _: self.by_nccl.extend(tensors))
        monkeypatch.setattr(symmetric_memory, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
        self.multicast = multicast
        self.error: Exception | None = None
        monkeypatch.setattr(symmetric_memory, "rendezvous", self.meet)
        kernels = [f"{prefix}one_shot_all_reduce_out" for prefix in ("", "multimem_")]
        for kernel in kernels:
            right = kernel == kernels[sums_in_switches]
            monkeypatch.setattr(torch.ops.symm_mem, kernel, self.reduce if right else None, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
        join_by_nvlink(monkeypatch, {0, 1})
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: self.by_nccl.append(tensor))

    def meet(self, tensor: torch.Tensor, group: object) -> SimpleNamespace:
        self.rendezvous.append((tensor.numel(), group))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(multicast_ptr=1 << 40 if self.multicast else 0)

    def reduce(self, shared: torch.Tensor, op: str, name: str, out: torch.Tensor) -> None:
        assert (op, name) == ("sum", "tensor") and shared.data_ptr() != out.data_ptr()
        assert self.device.current is not self.device.compute, "runs on the side stream"
        out.copy_(2 * shared)
        self.one_shot.append(out.numel())
        self.device.current.now += 5e-6


def test_a_chain_runs_after_earlier_work_and_alongside_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda.install(monkeypatch)
    queue = CudaSideQueue(GPU)
    device.compute.now = 5.0

    def chain() -> None:
        assert device.current.now == 5.0, "its inputs might not be ready"
        device.current.now += 3.0

    queue.run(chain, uses=())
    device.compute.now += 1.0
    queue.join()
    assert device.compute.now == 8.0


def make_group(fake: Torch, equal_sums: bool = False) -> SymmetricMemoryGroup:
    group: Any = fake.group
    return SymmetricMemoryGroup(CommGroup([0, 1], 0, group), GPU, torch.bfloat16, equal_sums)


@pytest.mark.parametrize(
    ("multicast", "equal_sums", "sums_in_switches"),
    [(False, False, False), (True, False, True), (True, True, False)],
    ids=["without multicast", "with multicast", "with multicast, for experts"],
)
def test_small_sums_are_one_shot(
    monkeypatch: pytest.MonkeyPatch, multicast: bool, equal_sums: bool, sums_in_switches: bool
) -> None:
    fake = Torch(monkeypatch, multicast, sums_in_switches)
    group = make_group(fake, equal_sums)
    assert fake.rendezvous == [(MOST_BYTES // 2, fake.group)]
    assert fake.device.streams[1].priority < 0, "it would wait for multiprocessors behind the product"
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    expected = 2 * tensor
    work = group.start_all_reduce(tensor)
    assert work is not None and fake.device.compute.now == 0
    work.wait()
    assert tensor.equal(expected) and fake.device.compute.now == pytest.approx(5e-6)
    assert group.all_reduce(tensor).equal(2 * expected) and fake.device.compute.now == pytest.approx(10e-6)
    assert (fake.one_shot, fake.by_nccl) == ([12, 12], [])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(MOST_BYTES // 2 + 1, dtype=torch.bfloat16),
        torch.ones(4),
        torch.ones(0, dtype=torch.bfloat16),
        torch.ones(9, dtype=torch.bfloat16)[1:],
        torch.ones(9, dtype=torch.bfloat16),
    ],
    ids=["large", "another dtype", "nothing", "not aligned", "half a load"],
)
def test_other_sums_use_nccl(monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor) -> None:
    fake = Torch(monkeypatch)
    group = make_group(fake)
    group.start_all_reduce(tensor)
    group.all_reduce(tensor)
    assert fake.one_shot == [] and len(fake.by_nccl) == 2


def test_one_shot_sums_need_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="found a CPU: use --tp-all-reduce nccl"):
        check_peers(2, CPU, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match="found 4 GPUs for 8 ranks"):
        check_peers(8, GPU, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    # This build of torch has no CUDA, or finds no driver.
    with pytest.raises(UserError, match="found an error of torch: .*(not available|driver)"):
        check_peers(3, GPU, torch.bfloat16)
    lines = "CUDA error: no driver\nSearch for it."
    with monkeypatch.context() as patch, pytest.raises(UserError, match="torch: CUDA error: no driver: use --tp-all"):
        patch.setattr("megatron_ladder.comm.symmetric.has_nvlink", Mock(side_effect=RuntimeError(lines)))
        check_peers(3, GPU, torch.bfloat16)
    join_by_nvlink(monkeypatch, {0, 1})
    check_peers(2, GPU, torch.bfloat16)
    with pytest.raises(UserError, match=r"found no NVLink between GPU 0 and \[2\]"):
        check_peers(3, GPU, torch.bfloat16)
    join_by_nvlink(monkeypatch, {0, 1, 2, 3})
    check_peers(3, GPU, torch.bfloat16)
    with pytest.raises(UserError, match=r"GPU 0 cannot read the memory of \[3\]"):
        check_peers(4, GPU, torch.bfloat16)
    with pytest.raises(UserError, match="found torch.float16 instead of fp32 or bf16"):
        check_peers(3, GPU, torch.float16)


def test_symmetric_memory_is_used_only_if_every_rank_can(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    handle: Any = fake.group
    group, others = CommGroup([0, 1], 0, handle), {str: "a", list: list[Problem]()}
    another_cannot_map = list[Problem]()

    def gather(self: CommGroup, value: object) -> list[object]:
        return [value, others[type(value)] or (another_cannot_map if fake.rendezvous else [])]

    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(CommGroup, "gather_objects", gather)
    monkeypatch.setattr(CommGroup, "broadcast_object", lambda self, value: value)

    def select(choice: AllReduceChoice, dtype: torch.dtype = torch.bfloat16) -> bool:
        return isinstance(select_all_reduce(choice, group, GPU, dtype, False), SymmetricMemoryGroup)

    def assert_impossible(message: str) -> None:
        fake.rendezvous.clear()
        assert not select("auto")
        fake.rendezvous.clear()
        with pytest.raises(UserError, match=message):
            select("symmetric")

    assert select("auto") and select("symmetric") and not select("nccl")
    assert not select("auto", torch.float16)
    another_cannot_map.append(Problem.of("invalid device"))
    assert_impossible("invalid device")
    another_cannot_map.clear()
    fake.error = RuntimeError("no memory")
    assert_impossible("no memory")
    others[str] = "b"
    assert_impossible("found 2 machines")
    others |= {str: "a", list: [Problem.of("GPU 1 cannot read")]}
    assert_impossible("GPU 1 cannot read")
    assert fake.rendezvous == [], "the other rank does not join this collective"
    others[list] = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    assert_impossible("cannot read the memory")
    alone = CommGroup.alone()
    assert select_all_reduce("symmetric", alone, CPU, torch.float32, True) is alone


class FakeGroup:
    """A process group that carries nothing.

    Attributes:
        messages: the number of each message among all of the rank, and its ranks.
    """

    def __init__(self, ranks: Sequence[int], options: Any) -> None:
        self.ranks, self.options = tuple(ranks), options
        self.messages: list[tuple[int, tuple[int, int]]] = []


def fake_groups(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> list[FakeGroup]:
    """Make one process a rank whose groups carry nothing; return the groups that it creates."""
    made: list[FakeGroup] = []
    numbers = itertools.count()

    def new_group(ranks: list[int], timeout: timedelta | None = None, pg_options: Any = None, **_: Any) -> FakeGroup:
        made.append(FakeGroup(ranks, pg_options))
        return made[-1]

    def send(tensor: torch.Tensor, group: FakeGroup, group_dst: int) -> Mock:
        group.messages.append((next(numbers), (group.ranks.index(rank), group_dst)))
        return Mock()

    def receive(tensor: torch.Tensor, group: FakeGroup, group_src: int) -> Mock:
        group.messages.append((next(numbers), (group_src, group.ranks.index(rank))))
        return Mock()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=nccl_options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "isend", send)
    monkeypatch.setattr(dist, "irecv", receive)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    return made


def test_groups_that_overlap_with_computation_have_priority_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_groups(monkeypatch, rank=5, world_size=8)
    minute = timedelta(minutes=1)
    mesh = ProcessMesh.build(2, 2, timeout=minute, tp_comm_max_ctas=8)
    with_options = [group for group in made if group.options is not None]
    pipelines = [(0, 4), (0, 4), (1, 5), (1, 5), (2, 6), (2, 6), (3, 7), (3, 7)]
    tensor_and_data = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7)]
    assert [group.ranks for group in with_options] == [*pipelines, *tensor_and_data]
    assert len({id(group.options) for group in with_options}) == 16, "torch writes to a group's options"
    for group in with_options:
        options = group.options
        assert (options.is_high_priority_stream, options.config.max_ctas, options._timeout) == (True, 8, minute)
    groups = [mesh.tensor, mesh.data, mesh.pipeline, mesh.model]
    assert [group.ranks for group in groups] == [(4, 5), (5, 7), (1, 5), (0, 1, 4, 5)]
    process_groups = [mesh.pipeline.descending, *(group.process_group for group in groups)]
    assert len({id(group) for group in process_groups}) == 5, "separate communicators"
    made.clear()
    ProcessMesh.build(2, 2)
    (unbounded, *_) = (group.options for group in made if group.options is not None)
    assert (unbounded.config.max_ctas, unbounded._timeout) == (None, None)
    made.clear()
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    ProcessMesh.build(2, 2, timeout=minute, tp_comm_max_ctas=8)
    assert made and not any(group.options for group in made)


@pytest.mark.parametrize(("chunks", "closes_ring"), [(1, False), (2, True)])
@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_communicators_of_pairs_are_created_with_the_groups(
    monkeypatch: pytest.MonkeyPatch, stages: int, chunks: int, closes_ring: bool
) -> None:
    """Each rank waits in each message until the other rank has arrived, as NCCL does when it creates a communicator."""
    lines = []
    for rank in range(stages):
        with monkeypatch.context() as patch:
            made = fake_groups(patch, rank, stages)
            mesh = ProcessMesh.build(1, stages, chunks=chunks)
            ascending, descending = mesh.pipeline.process_group, mesh.pipeline.descending
            messages = [message for group in made for message in group.messages]
        lines.append(deque(pair for _, pair in sorted(messages)))
        assert {ascending, descending} >= {group for group in made if group.messages}
        assert all(source < target for _, (source, target) in ascending.messages)
        assert all(source > target for _, (source, target) in descending.messages)
    neighbours = {*pairwise(range(stages))} | ({(0, stages - 1)} if closes_ring else set())
    found = set()
    while any(lines):
        heads = Counter(line[0] for line in lines if line)
        meeting = [pair for pair, count in heads.items() if count == 2]
        assert meeting, "ranks wait in a circle"
        for source, target in meeting:
            assert lines[source].popleft() == lines[target].popleft() == (source, target)
        found.update(meeting)
    assert found == {pair for lower, higher in neighbours for pair in ((lower, higher), (higher, lower))}
