"""One process that plays rank 0 of eight: its collectives, their times, the order of its streams, and the kernel."""

import gc
import itertools
import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.bench import interconnect, workloads
from ladder_lab.bench.calibration import DeviceClock
from ladder_lab.bench.comparison import WiringComparison
from ladder_lab.bench.options import BenchmarkOptions, Case
from ladder_lab.bench.results import BenchmarkRow
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.bench.workloads import Workload, build_models
from ladder_lab.cost.links import WireModel
from ladder_lab.cost.machines import PRESETS
from ladder_lab.link import occupied
from ladder_lab.link.link import Message, NoCommGroup
from ladder_lab.link.occupied import OccupiedGroup, Occupy
from megatron_ladder.comm import launch
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine import graph
from megatron_ladder.engine.engine import Engine, ModelInputs
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.engine.optimizer import Updates, build_optimizer, parameter_groups
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel, LossScales
from megatron_ladder.model.stack import StackOptions
from tests.distributed.test_captured import RecordedGraph, played_graphs
from tests.helpers import races
from tests.helpers.races import Checker
from tests.unit.comm import fake_cuda
from tests.unit.engine.test_races import Rank, config_of, run_at_once
from tools import benchmark

CPU = torch.device("cpu")
SIZE, RANKS, HIDDEN = "2x64x128x8x8x1024", 8, 64
BATCH, SEQUENCE, TOKENS = 2, 16, 3
SUMS = {
    "standard": 4,
    "ladder": 4,
    "parallel": 2,
    "ladder-parallel": 2,
    "hybrid": 4,
    "staleness-2": 4,
    "desync-2x": 2,
    "desync-4x": 1,
    "no-comm": 0,
}
"""Sums of the outputs of sub-blocks in two layers."""


def comparison_of(wirings: tuple[str, ...], size: str = SIZE) -> WiringComparison:
    options = BenchmarkOptions(tp=RANKS, emulate=True, wirings=wirings, rounds=4)
    return WiringComparison(options, find_size(size), RankInfo(0, 1, 0), CPU)


def new_launches(group: OccupiedGroup, run: Callable[[], object]) -> dict[Message, int]:
    before = group.launches
    run()
    return {one: count - before.get(one, 0) for one, count in group.launches.items() if count != before.get(one, 0)}


def expected_messages(case: Case, wiring: str) -> dict[Message, int]:
    """Return the collectives of a pass: the stream's sums, and one gather of logits or of the loss.

    The embedding is summed as well, and in training the gradients of all inputs: of sub-blocks, and of the head. With
    a desync interval, the partial gradient of its first norm travels with that of its input.
    """
    if (sums := SUMS[wiring]) == 0:
        return {}
    tokens = BATCH * (1 if case == "decode" else SEQUENCE)
    stream = Message(4 * tokens * HIDDEN, RANKS)
    if case == "train":
        # Largest logit, sum of exponentials and the target's logit of each token.
        gather = Message(4 * 3 * tokens * RANKS, RANKS, 0.5)
        if "desync" in wiring:
            return {stream: sums + 2, Message(stream.num_bytes + 4 * HIDDEN, RANKS): sums, gather: 1}
        return {stream: 2 * sums + 2, gather: 1}
    # The largest logit of each sample and its token, as doubles.
    return {stream: sums + 1, Message(8 * 2 * BATCH * RANKS, RANKS, 0.5): 1}


@pytest.mark.parametrize("case", ["decode", "prefill", "train"])
def test_a_rank_starts_the_collectives_of_its_wiring(case: Case) -> None:
    comparison = comparison_of(tuple(SUMS))
    group = comparison.interconnect.emulated
    assert group is not None
    found = {}
    with comparison.prepare(Workload(case, BATCH, SEQUENCE, TOKENS), comparison.compared, 1) as passes:
        for name in SUMS:
            found[name] = new_launches(group, passes[name])
    units = TOKENS if case == "decode" else 1
    wanted = {name: expected_messages(case, name) for name in SUMS}
    assert found == {name: {one: units * count for one, count in of.items()} for name, of in wanted.items()}


@pytest.mark.parametrize(("case", "combines", "dispatches"), [("forward", 1, 1), ("train", 2, 2)])
def test_an_expert_parallel_rank_exchanges_balanced_rows(case: Case, combines: int, dispatches: int) -> None:
    """Each token leaves for two experts, with a weight for each, and half of a message is counted, as in a reduce."""
    wirings = ("standard", "farskip", "shortcut", "staleness-2", "no-comm")
    options = BenchmarkOptions(ep=RANKS, emulate=True, wirings=wirings, rounds=4)
    comparison = WiringComparison(options, find_size("small-ep"), RankInfo(0, 1, 0), CPU)
    group = comparison.interconnect.emulated
    assert group is not None
    rows = BATCH * SEQUENCE * 2
    layer = {
        Message(4 * 8 // 2, RANKS): 1,
        Message(4 * rows * 513 // 2, RANKS): dispatches,
        Message(4 * rows * 512 // 2, RANKS): combines,
    }
    with comparison.prepare(Workload(case, BATCH, SEQUENCE), comparison.compared, 1) as passes:
        for name in wirings:
            launches = new_launches(group, passes[name])
            assert launches == ({} if name == "no-comm" else {one: 4 * count for one, count in layer.items()})
        comparison.interconnect.no_comm.messages.clear()
        passes["no-comm"]()
    assert comparison.interconnect.no_comm.messages == {one: 4 * count for one, count in layer.items()}


def test_no_communication_leaves_every_rank_its_own_rows() -> None:
    rows, counts = torch.arange(12.0).view(6, 2), torch.tensor([[1, 2], [3, 0]])
    for group in (OccupiedGroup(2, CPU, 1), NoCommGroup(CommGroup(range(2), 0, None))):
        received, _ = group.start_all_to_all(counts, [1, 1], [1, 1])
        assert received.equal(counts)
        arriving, _ = group.start_all_to_all(rows, counts.sum(1).tolist(), received.sum(1).tolist())
        assert arriving.equal(rows)


@pytest.mark.parametrize("case", ["decode", "prefill", "train"])
def test_no_wiring_hides_the_collectives_of_embedding_and_head(case: Case) -> None:
    prediction = comparison_of(("standard",)).calibrate(Workload(case, BATCH, SEQUENCE, TOKENS))
    stream, gather = expected_messages(case, "standard")
    assert prediction.message == stream
    assert prediction.always_waiting == {stream: 2 if case == "train" else 1, gather: 1}


def test_each_message_takes_the_time_of_its_size() -> None:
    comparison = comparison_of(("standard",))
    prediction = replace(comparison.calibrate(Workload("decode", BATCH, SEQUENCE, TOKENS)), wire=WireModel())
    group = comparison.interconnect.emulated
    assert group is not None
    stream, gather = 4 * BATCH * HIDDEN, 8 * 2 * BATCH * RANKS
    times_of = PRESETS["nvlink"].seconds
    for text, skew, sum_seconds, gather_seconds in (
        ("nvlink", 3e-6, times_of(stream, RANKS), times_of(gather, RANKS) / 2),
        ("20us", 0.0, 20e-6, 10e-6),
        ("0", 8e-6, 0.0, 0.0),
    ):
        wire_times = comparison.wire_times(text, prediction, skew)
        comparison.interconnect.set_wire(wire_times)
        found = dict(zip(group._slots, group._durations.tolist(), strict=False))
        for message, seconds in ((Message(stream, RANKS), sum_seconds), (Message(gather, RANKS, 0.5), gather_seconds)):
            assert found[message] == pytest.approx(1e9 * (seconds + skew), abs=1)
        # On a serial wire, standard waits for two sums in each of two layers, and for the others.
        calibration = prediction.by_bound["no-comm"]
        waits = 5 * (sum_seconds + skew) + gather_seconds + skew
        standard = calibration.predict(
            VARIANTS["standard"], 0.0, replace(prediction.wire, launch_seconds=0, finish_seconds=0)
        )
        assert prediction.seconds(VARIANTS["standard"], wire_times) == pytest.approx(standard + waits)


def test_halves_of_all_reduces_and_copies() -> None:
    group = OccupiedGroup(4, CPU, blocks=1)
    group.set_wire(lambda message: message.share * 1e-6 * message.num_bytes)
    rows, whole = torch.arange(6.0).view(3, 2), torch.arange(24.0).view(12, 2)
    gathered, _ = group.start_all_gather(rows)
    assert torch.equal(gathered, rows.repeat(4, 1)) and torch.equal(group.all_gather(rows, 1), rows.repeat(1, 4))
    buffer = torch.cat([rows, torch.full((9, 2), torch.nan)])
    assert group.start_all_gather(buffer[:3], into=buffer)[0] is buffer and torch.equal(buffer, gathered)
    assert torch.equal(group.start_reduce_scatter(whole)[0], whole[:3])
    assert group.start_reduce_scatter(whole, into=whole[:3])[0].data_ptr() == whole.data_ptr()
    assert group.all_reduce(rows) is rows and group.broadcast(rows) is rows
    assert group.launches == {Message(96, 4, 0.5): 5, Message(24, 4): 1, Message(24, 4, 0.5): 1}
    assert group._durations[:4].tolist() == [48_000, 24_000, 12_000, 0]
    group.launch_seconds = 20e-6
    group.set_wire(lambda message: 24e-6 * message.share)
    assert group._durations[:4].tolist() == [0, 4_000, 0, 0]


@pytest.mark.parametrize(
    ("shape", "offset", "numbers"), [((16,), 0, 16), ((3, 7), 0, 16), ((16,), 1, 0), ((2, 2), 0, 0), ((), 0, 0)]
)
def test_the_kernel_moves_aligned_whole_pieces(shape: tuple[int, ...], offset: int, numbers: int) -> None:
    message = torch.randn(math.prod(shape) + offset)[offset:].view(shape)
    moved = occupied._whole_pieces(message)
    assert (moved.dtype, moved.numel()) == (torch.int32, numbers)
    assert torch.equal(moved.view(torch.float32), message.reshape(-1)[:numbers])


class PlayedKernel:
    """Counts in torch operators, which graphs record, how often and for how many nanoseconds it ran."""

    def __init__(self) -> None:
        self.nanoseconds = torch.zeros((), dtype=torch.int64)
        self.blocks: set[int] = set()

    def __call__(self, message: Tensor, scratch: Tensor, durations: Tensor, launches: Tensor, slot: int) -> None:
        self.blocks.add(len(scratch))
        launches[slot].add_(1)
        self.nanoseconds.add_(durations[slot])


class RecordedStep(RecordedGraph):
    """A `StepGraph` for a CPU, which repeats operators."""

    captures = 0

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        self.captures += 1
        step()
        with self.recording():
            return step().detach()

    close = RecordedGraph.reset


@pytest.mark.parametrize("case", ["decode", "train"])
@pytest.mark.parametrize("wiring", ["standard", "ladder", "ladder-parallel"])
def test_a_new_wire_needs_no_new_capture(case: Case, wiring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = RecordedStep()
    monkeypatch.setattr(workloads, "CudaStepGraph", lambda: captured)
    kernel = PlayedKernel()
    group = OccupiedGroup(RANKS, CPU, 16, kernel)
    mesh = replace(ProcessMesh.single(), tensor=group)
    made = build_models([VARIANTS[wiring]], find_size(SIZE), mesh, group, NoCommGroup(group), torch.float32, CPU)
    units = TOKENS if case == "decode" else 1
    with Workload(case, BATCH, SEQUENCE, TOKENS, cuda_graph=True).prepare(made[wiring], mesh, runs=3) as run:
        for microseconds in (5, 40, 0):
            seconds = 1e-6 * microseconds
            group.set_wire(lambda message, seconds=seconds: seconds * message.share)
            kernel.nanoseconds.zero_()
            launches = new_launches(group, run)
            assert launches == {one: units * count for one, count in expected_messages(case, wiring).items()}
            halves = sum(2 * one.share * count for one, count in launches.items())
            assert kernel.nanoseconds == 500 * microseconds * halves
    assert (captured.captures, captured.replays, kernel.blocks) == (1, 3 * units, {16})


@pytest.mark.parametrize("wiring", ["standard", "ladder-parallel"])
def test_captured_steps_exchange_gradients_and_weights(wiring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's passes and optimizer, in two data-parallel ranks of which this process plays one."""
    monkeypatch.setattr(graph, "_WARM_UP_STEPS", 2)
    tensor, data = OccupiedGroup(RANKS, CPU, 1), OccupiedGroup(2, CPU, 1)
    mesh = replace(ProcessMesh.single(), tensor=tensor, data=data)
    model = LanguageModel(VARIANTS[wiring].wiring.of(find_size(SIZE), RANKS), mesh, StackOptions(), seed=1)
    settings = OptimizerConfig(lr=1e-3, min_lr=0.0)
    sharded = ShardedOptimizer(model, parameter_groups(model, settings), mesh, torch.float32, 20_000)
    sharded.base, _ = build_optimizer(sharded.groups, settings, Updates(CPU))
    engine = Engine(model, sharded, mesh, CPU)
    passes = engine.passes = CapturedPasses(model, sharded, CommGroup.alone(), measures=False)
    ids = torch.arange(BATCH * (SEQUENCE + 1)).view(BATCH, -1)
    batch: ModelInputs = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, None, None, None)

    def step() -> None:
        engine.train([batch] * 2, LossScales(*torch.ones(3)))
        sharded.step()

    bytes_of_buckets = Counter(bucket.weights.nbytes for bucket in sharded.buckets)
    assert len(sharded.buckets) > 2
    of_pass = expected_messages("train", wiring)
    with played_graphs():
        for number in range(5):
            before = data.launches
            assert new_launches(tensor, step) == {one: 2 * count for one, count in of_pass.items()}
            exchanged = Counter(data.launches) - Counter(before)
            # Gradients are scattered once, and weights gathered once.
            assert exchanged == {Message(size, 2, 0.5): 2 * n for size, n in bytes_of_buckets.items()}, number
    assert len(passes._graphs) == 4


def played_group(size: int, kernel: Occupy) -> OccupiedGroup:
    """Return a group whose tensors are on the CPU, and whose stream is that of a played device."""
    group = OccupiedGroup(size, CPU, 1, kernel)
    group._side = CudaSideQueue(CPU)
    return group


def checked_group(size: int, checker: Checker) -> OccupiedGroup:
    def occupy(message: Tensor, scratch: Tensor, durations: Tensor, launches: Tensor, slot: int) -> None:
        written = [message, scratch, launches[slot]]
        checker.run_kernel("occupy", [message, durations[slot]], written, checker.current)  # type: ignore[arg-type]

    return played_group(size, occupy)


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    monkeypatch.setattr(graph, "_WARM_UP_STEPS", 2)
    played = Checker()
    played.install(monkeypatch)
    gc.freeze()
    yield played
    gc.unfreeze()


def decode_captured(checker: Checker, wiring: str) -> list[str]:
    """Return the faults of decoding on the played device."""
    with checker:
        group = checked_group(RANKS, checker)
        mesh = replace(ProcessMesh.single(), tensor=group)
        made = build_models([VARIANTS[wiring]], find_size(SIZE), mesh, group, NoCommGroup(group), torch.float32, CPU)
        with Workload("decode", BATCH, SEQUENCE, TOKENS, cuda_graph=True).prepare(made[wiring], mesh, runs=1) as run:
            run()
    return checker.faults


@pytest.mark.parametrize("wiring", ["standard", "ladder", "staleness-2", "ladder-parallel", "desync-2x"])
def test_decoding_neither_races_nor_breaks_a_capture(checker: Checker, wiring: str) -> None:
    assert decode_captured(checker, wiring) == [] and checker.kernels > 300


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("wiring", ["standard", "ladder", "ladder-parallel"])
def test_training_neither_races_nor_breaks_a_capture(checker: Checker, wiring: str, sequence_parallel: bool) -> None:
    rank = Rank(checker, config_of(wiring), sequence_parallel, 1, checked_group)
    assert rank.faults(micro_batches=2) == [] and checker.kernels > 1000


FAULTS: dict[str, tuple[object, str, object, str]] = {
    "a collective does not wait for its message": (CudaSideQueue, "run", run_at_once, "occupy reads before"),
    "nobody waits for a collective": (occupied._Occupation, "wait", lambda work: work.held.clear(), "before stream"),
    "a collective is not at its end when it is waited for": (
        races.Stream,
        "record_event",
        lambda stream: races._Event(dict(stream.checker.compute.clock), stream.capture),
        "before stream",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(checker: Checker, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, planted, found = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    Rank(checker, config_of("ladder"), False, 0, checked_group).faults(micro_batches=1)
    assert any(found in one for one in checker.faults)
    checker.faults.clear()
    assert any(found in one for one in decode_captured(checker, "ladder"))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("operation", "splits", "copies"), [("all_gather", [], 2), ("all_to_all", [[9, 55]] * 2, 1)])
def test_memory_of_a_message_is_not_reused_before_its_end(
    checker: Checker, monkeypatch: pytest.MonkeyPatch, operation: str, splits: list[list[int]], copies: int, keeps: bool
) -> None:
    if not keeps:
        monkeypatch.setattr(occupied, "_Occupation", lambda end, held, real=occupied._Occupation: real(end, []))
    with checker:
        group = checked_group(2, checker)
        message = torch.ones(64)
        whole, work = getattr(group, f"start_{operation}")(message, *splits)
        del message
        other = torch.ones(64)
        work.wait()
        assert whole.sum() == copies * other.sum()
    assert [one for one in checker.faults if "reuse of memory" not in one] == []
    assert bool(checker.faults) is not keeps


def test_a_size_that_a_capture_is_the_first_to_see_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    group = played_group(2, occupied.count_launch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group.all_reduce(torch.ones(4))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group.all_reduce(torch.ones(4))
    with pytest.raises(AssertionError, match="num_bytes=20.* is new in a capture"):
        group.all_reduce(torch.ones(5))


class FakeClock(DeviceClock):
    """Reads the time of a fake stream."""

    def __init__(self, device: fake_cuda.Device) -> None:
        super().__init__(CPU)
        self._device = device

    def mark(self) -> float:
        return self._device.current.now


def test_the_time_of_a_launch_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(interconnect, "CudaStepGraph", RepeatingGraph)

    def occupy(message: Tensor, scratch: Tensor, durations: Tensor, launches: Tensor, slot: int) -> None:
        device.current.now += 1e-9 * durations[slot].item() + 2.5e-6

    group = played_group(RANKS, occupy)
    assert device.streams[1].priority < 0
    group.launch_seconds = interconnect.measure_launch(group, FakeClock(device), torch.zeros(64))
    assert group.launch_seconds == pytest.approx(2.5e-6)
    group.set_wire(lambda message: 19e-6)
    began = device.compute.now
    work = group.start_all_reduce(torch.zeros(64))
    assert device.compute.now == began
    work.wait()
    assert device.compute.now - began == pytest.approx(19e-6)


class RepeatingGraph:
    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        self.replay = step
        return step()

    def close(self) -> None:
        pass


def test_an_expert_parallel_command_is_rehearsed_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "forward --emulate --device cpu --ep 8 --wirings shortcut --alpha nvlink 20us --sequence 16 --rounds 4"
    benchmark.main([*words.split(), "--json", str(tmp_path / "rows.json")])
    assert f"forward, small-ep, batch 1, rank 0 of {RANKS}" in capsys.readouterr().out
    rows = [BenchmarkRow(**row) for row in json.loads((tmp_path / "rows.json").read_text())]
    # Two experts for each of 16 tokens; the weight travels with the token.
    seconds = {"nvlink": PRESETS["nvlink"].seconds(4 * 16 * 2 * 513 // 2, RANKS), "20us": 20e-6}
    assert [(row.wiring, row.alpha_seconds) for row in rows] == [
        (wiring, pytest.approx(seconds[alpha]))
        for alpha in ("nvlink", "20us")
        for wiring in ("standard", "shortcut", "no-comm", "no-comm-shortcut")
    ]


@pytest.mark.parametrize("case", ["decode", "prefill", "train"])
def test_the_command_is_rehearsed_on_a_cpu(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = PlayedKernel()
    monkeypatch.setattr(interconnect, "count_launch", kernel)
    words = f"{case} --emulate --device cpu --tp {RANKS} --sizes {SIZE} --wirings standard ladder-parallel hybrid"
    words += (
        f" --alpha 0 nvlink 20us 1c --comm-sms 1 16 --skew 0us 3us --batch {BATCH} --sequence {SEQUENCE} --tokens 2"
    )
    benchmark.main([*words.split(), "--rounds", "4", "--json", str(tmp_path / "rows.json")])
    assert not dist.is_initialized() and kernel.blocks == {1, 16}
    printed = capsys.readouterr().out
    assert printed.startswith("--device cpu: a rehearsal of --emulate, whose times mean nothing\n")
    assert f"rank 0 of {RANKS}, float32 on cpu, emulated on one GPU" in printed and "SMs 16, skew 3 us" in printed
    rows = [BenchmarkRow(**row) for row in json.loads((tmp_path / "rows.json").read_text())]
    wirings = ["standard", "ladder-parallel", "hybrid", "no-comm", "no-comm-parallel"]
    wires = [*itertools.product((1, 16), ("0", "nvlink", "20us", "1c"), (0.0, 3e-6))]
    found = [((row.multiprocessors, row.alpha, pytest.approx(row.skew_seconds)), row.wiring) for row in rows]
    assert found == [*itertools.product(wires, wirings)]
    tokens = BATCH * (1 if case == "decode" else SEQUENCE)
    for row in rows:
        assert (row.case, row.verdict) == (case, "rehearsed on a CPU")
        assert (row.exposed_seconds_per_layer == 0) is row.wiring.startswith("no-comm")
        if row.alpha == "nvlink":
            assert row.alpha_seconds == pytest.approx(PRESETS["nvlink"].seconds(4 * tokens * HIDDEN, RANKS))
    with_wire = {row.wiring: row.predicted_ratio for row in rows if row.alpha == "1c" and not row.skew_seconds}
    assert with_wire["no-comm"] > 1.0


def test_one_process_and_for_cuda_a_gpu_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "decode --emulate --tp 4 --sizes 2x64x128x8x8x1024 --device".split()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch finds no GPU here"):
        benchmark.main([*words, "cuda"])
    for name, value in zip(launch.LAUNCHER_VARIABLES, ("1", "4", "1", "here", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--emulate needs processes: 1, but the launcher started 4"):
        benchmark.main([*words, "cpu"])


def test_ranks_that_share_key_value_heads_send_no_more_in_a_pass() -> None:
    found = []
    for size in ("2x64x128x8x8x1024", "2x64x128x8x4x1024"):
        comparison = comparison_of(("ladder",), size)
        group = comparison.interconnect.emulated
        assert group is not None
        with comparison.prepare(Workload("train", BATCH, SEQUENCE), comparison.compared, 1) as passes:
            found.append(new_launches(group, passes["ladder"]))
    assert found[0] == found[1] and sum(found[0].values()) > 8


def loops_of(ptx: str) -> list[str]:
    """Return the code of every loop: from a label to a branch back to it."""
    found = []
    for label in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE):
        branches = list(re.finditer(rf"bra(\.uni)?\s+{re.escape(label[1])};", ptx[label.end() :]))
        if branches:
            found.append(ptx[label.start() : label.end() + branches[-1].end()])
    return found


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_kernel_reads_the_clock_in_loops_and_fills_a_multiprocessor(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ladder_lab.link.occupying_kernel import WARPS, occupy_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = "*i32", "*i32", "i32", "*i64", "*i64", "i32", "constexpr"
    signature = dict(zip(occupy_kernel.arg_names, types, strict=True))
    # As the launcher finds them: all arguments but the slot.
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(5)}
    source = ASTSource(occupy_kernel, signature, {"BLOCK": occupied.BLOCK_NUMBERS}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS})
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx and len(compiled.asm["cubin"]) > 0
    # The whole message, each piece, and the end; the compiler may split a loop.
    assert sum("%globaltimer" in loop for loop in loops_of(ptx)) >= 3
    assert compiled.asm["llir"].count('asm sideeffect "mov.u64 $0, %globaltimer;"') == ptx.count("%globaltimer") >= 4
    # Its warps leave loops at different times.
    assert "bar.sync" not in ptx and "barrier" not in ptx
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", tmp_path / "kernel.cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    # A thread gets multiples of 8 of the 65,536 registers of a multiprocessor.
    assert math.ceil(found["REG"] / 8) * 8 * 32 * WARPS == 65_536 and found["STACK"] == 0
