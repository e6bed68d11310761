"""The emulated interconnect: sums match torch.distributed, ends follow the rule, and nothing is left behind.

Ends are compared with the rule and never with the speed of this machine: a rank reads the clock before and after each
launch, and the link's launch stamp must be between the two.
"""

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.link.clocks import ProcessorClock
from ladder_lab.link.link import EmulatedLink, LinkWork, MessageWork
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.engine.schedule import Arrival, Pass, PassClock, Send, make_schedule, run_schedule
from tests.helpers.pool import GlooPools
from tests.helpers.schedules import played_seconds
from tests.helpers.sharded import mesh_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def everyone() -> CommGroup:
    return CommGroup(range(dist.get_world_size()), dist.get_rank(), dist.group.WORLD)


def all_stages() -> CommGroup:
    """Return all ranks as pipeline stages, whose messages in both directions are independent."""
    return mesh_of(1, pipeline_parallel=dist.get_world_size()).pipeline


class Timing(NamedTuple):
    """One rank's view of one collective, in nanoseconds of the monotonic clock that all ranks share."""

    before: int
    after: int
    wire: int
    end: int
    done: int


class Launched(NamedTuple):
    work: LinkWork | MessageWork
    before: int
    after: int


def launch(link: EmulatedLink, tensor: Tensor) -> Launched:
    before = time.monotonic_ns()
    work = link.start_all_reduce(tensor)
    after = time.monotonic_ns()
    assert isinstance(work, LinkWork)
    return Launched(work, before, after)


def finish(launched: Launched) -> Timing:
    launched.work.wait()
    done = time.monotonic_ns()
    return Timing(launched.before, launched.after, launched.work.wire_ns, launched.work.end_ns, done)


def assert_rule(ranks: list[list[Timing]], serial: bool) -> None:
    """Check timings in launch order: every end is the latest launch, or the previous end, plus the wire's time."""
    wire_free = 0
    for timings in zip(*ranks, strict=True):
        assert len({(timing.end, timing.wire) for timing in timings}) == 1, "the ranks disagree"
        assert all(timing.done >= timing.end for timing in timings), "a wait returned too early"
        begin = timings[0].end - timings[0].wire
        earliest, latest = max(timing.before for timing in timings), max(timing.after for timing in timings)
        if serial:
            earliest, latest = max(earliest, wire_free), max(latest, wire_free)
        assert earliest <= begin <= latest
        wire_free = timings[0].end


def random_traffic(seed: int, count: int, serial: bool) -> tuple[list[Tensor], list[Tensor], list[Timing]]:
    """Return each rank's sums over the link, sums by gloo, and timings. Ranks wait in different random orders."""
    common, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    tensors, expected, flying = [], [], {}
    timings: dict[int, Timing] = {}
    with closing(EmulatedLink(everyone(), 20e-6, 1e-10, serial=serial)) as link:
        for number in range(count):
            shape = common.choice([(), (0,), (1,), (7, 3), (1000,), (2, 3, 500), (40_000,)])
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(common.choice(DTYPES))
            tensors.append(tensor)
            expected.append(tensor.clone())
            dist.all_reduce(expected[-1])
            flying[number] = launch(link, tensor)
            while flying and own.random() < 0.45:
                chosen = own.choice(sorted(flying))
                timings[chosen] = finish(flying.pop(chosen))
        for chosen in own.sample(sorted(flying), len(flying)):
            timings[chosen] = finish(flying.pop(chosen))
    return tensors, expected, [timings[number] for number in range(count)]


@pytest.mark.parametrize(("world", "serial"), [(2, True), (2, False), (4, True)])
def test_sums_are_those_of_torch_and_ends_follow_the_rule(gloo_pools: GlooPools, world: int, serial: bool) -> None:
    results = gloo_pools(world).run(random_traffic, seed=world + serial, count=120, serial=serial)
    assert_rule([timings for _, _, timings in results], serial)
    for got, expected, _ in results:
        for ours, theirs, first in zip(got, expected, results[0][0], strict=True):
            assert ours.equal(first), "ranks got different bits"
            if world == 2:
                assert ours.equal(theirs)
            else:
                torch.testing.assert_close(ours, theirs, atol=0.05 if ours.dtype == torch.bfloat16 else 1e-5, rtol=0.02)


def scattered_and_gathered(serial: bool) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return rows of a sum, joined rows and a whole sum, over the link and by torch, and the wire times of the rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    partial = torch.randn(2 * size, 3, generator=torch.Generator().manual_seed(rank))
    rows = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 + rank))
    with closing(EmulatedLink(everyone(), 4e-3, 1e-6, serial=serial)) as link:
        (own, scatter), (whole, gather) = link.start_reduce_scatter(partial), link.start_all_gather(rows)
        assert isinstance(scatter, LinkWork) and isinstance(gather, LinkWork)
        gather.wait()
        scatter.wait()
        whole_sum = link.all_reduce(partial.clone())
    sums, joined = partial.clone(), [torch.empty_like(rows) for _ in range(size)]
    dist.all_reduce(sums)
    dist.all_gather(joined, rows)
    expected = [sums.chunk(size)[rank], torch.cat(joined), sums]
    return [own, whole, whole_sum], expected, [scatter.wire_ns, gather.wire_ns, gather.end_ns - scatter.end_ns]


def test_the_halves_of_an_all_reduce(gloo_pools: GlooPools) -> None:
    for got, expected, (scatter_ns, gather_ns, apart) in gloo_pools(2).run(scattered_and_gathered, True):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        # 4 x 3 numbers of 4 bytes: half of 4 ms + 48 us.
        assert scatter_ns == gather_ns == 2_024_000
        assert apart == gather_ns, "a serial wire carries one after the other"


class Exchange(NamedTuple):
    """What this rank received over the link and from torch, its timing, and the bytes that it sends to others."""

    got: Tensor
    expected: Tensor
    timing: Timing
    sent_bytes: int


def random_exchanges(seed: int, count: int, serial: bool) -> list[Exchange]:
    """Exchange rows of uneven and empty splits, their numbers ahead of them; ranks wait in different random orders."""
    rank, size = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(seed), random.Random(1000 * seed + rank)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    flying: dict[int, Launched] = {}
    results: dict[int, Exchange] = {}
    pending: dict[int, tuple[Tensor, Tensor, int]] = {}

    def end(number: int) -> None:
        got, expected, sent_bytes = pending.pop(number)
        results[number] = Exchange(got, expected, finish(flying.pop(number)), sent_bytes)

    with closing(EmulatedLink(everyone(), 20e-6, 1e-9, serial=serial, slot_bytes=1 << 20)) as link:
        for number in range(count):
            # Some ranks send nothing, or nothing to some others.
            sent = [own.choice([0, 0, 1, 5, 300]) for _ in range(size)]
            if own.random() < 0.2:
                sent = [0] * size
            counts, work = link.start_all_to_all(torch.tensor(sent), [1] * size, [1] * size)
            assert isinstance(work, LinkWork)
            work.wait()
            received = counts.tolist()
            rows = torch.randn(sum(sent), *common.choice([(), (3,), (2, 17)]), generator=generator, dtype=torch.float64)
            rows = rows.to(common.choice(DTYPES))
            expected = rows.new_empty(sum(received), *rows.shape[1:])
            dist.all_to_all_single(expected, rows, received, sent)
            before = time.monotonic_ns()
            got, work = link.start_all_to_all(rows, sent, received)
            after = time.monotonic_ns()
            assert isinstance(work, LinkWork)
            rows.fill_(torch.nan)
            flying[number] = Launched(work, before, after)
            row_bytes = rows.itemsize * rows.shape[1:].numel()
            pending[number] = got, expected, row_bytes * (sum(sent) - sent[rank])
            while flying and own.random() < 0.45:
                end(own.choice(sorted(flying)))
        for number in own.sample(sorted(flying), len(flying)):
            end(number)
    return [results[number] for number in range(count)]


@pytest.mark.parametrize(("world", "serial"), [(2, True), (2, False), (4, True)])
def test_rows_are_those_of_torch_and_ends_follow_the_rule(gloo_pools: GlooPools, world: int, serial: bool) -> None:
    results = gloo_pools(world).run(random_exchanges, seed=world + serial, count=120, serial=serial)
    assert_rule([[exchange.timing for exchange in exchanges] for exchanges in results], serial)
    for exchanges in zip(*results, strict=True):
        assert all(exchange.got.equal(exchange.expected) for exchange in exchanges)
        # A ring of n ranks reduces b bytes by sending 2 (n - 1) / n b.
        reduced = max(exchange.sent_bytes for exchange in exchanges) * world / (2 * (world - 1))
        assert exchanges[0].timing.wire == round(20_000 + reduced)


def counts_on_a_busy_wire() -> tuple[list[int], list[int], int]:
    """Return numbers of rows that arrive under an all-reduce, and the times of both on the wire and between ends."""
    with closing(EmulatedLink(everyone(), 50e-3)) as link:
        reduce = launch(link, torch.ones(3)).work
        counts, work = link.start_all_to_all(torch.tensor([1, 2]) + 10 * dist.get_rank(), [1, 1], [1, 1])
        assert isinstance(work, LinkWork)
        work.wait()
        reduce.wait()
        return counts.tolist(), [work.wire_ns, reduce.wire_ns], reduce.end_ns - work.end_ns


def test_numbers_of_rows_take_no_time_on_the_wire(gloo_pools: GlooPools) -> None:
    for rank, (counts, wire, apart) in enumerate(gloo_pools(2).run(counts_on_a_busy_wire)):
        assert counts == [1 + rank, 11 + rank]
        assert wire == [0, 50_000_000] and apart > 0


def too_many_rows() -> None:
    with closing(EmulatedLink(everyone(), slot_bytes=1 << 10)) as link, pytest.raises(ValueError, match="1028 bytes"):
        link.start_all_to_all(torch.ones(257), [257, 0], [257, 257])


def test_rows_without_room_are_an_error(gloo_pools: GlooPools) -> None:
    gloo_pools(2).run(too_many_rows)


def busy(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def processor_times() -> tuple[float, float]:
    """Return the milliseconds of a pass and of its waits, on a clock that leaves out what other processes do.

    On a wire of 40 ms, rank 0 computes for 20 ms before and for 30 ms after a launch, and rank 1 for 50 ms before it.
    Then both compute for 60 ms while a second sum is in flight.
    """
    with closing(EmulatedLink(everyone(), 40e-3, spin_seconds=1.0, clock=ProcessorClock())) as link:
        for _ in range(2):
            link.barrier()
            link.restart()
            busy(0.02 if dist.get_rank() == 0 else 0.05)
            # Other processes have the core of rank 1, while rank 0 polls.
            time.sleep(0.2 * dist.get_rank())
            work = link.start_all_reduce(torch.ones(3))
            assert work is not None
            busy(0.03 * (1 - dist.get_rank()))
            work.wait()
            work = link.start_all_reduce(torch.ones(3))
            assert work is not None
            busy(0.06)
            work.wait()
        return link.clock.now_ns() * 1e-6, link.waited_seconds * 1e3


def test_a_processor_clock_jumps_to_the_end_of_a_collective(gloo_pools: GlooPools) -> None:
    for pass_ms, waited_ms in gloo_pools(2).run(processor_times):
        assert pass_ms == pytest.approx(150, abs=5)
        assert waited_ms == pytest.approx(40, abs=5)


def random_messages(seed: int, count: int, serial: bool) -> tuple[list[bool], list[tuple[int, int, Timing]]]:
    """Return whether each message that this rank received was the sent one, and the pairs and timings of all messages.

    Ranks wait in different random orders, and sums run in between.
    """
    common, own, rank = random.Random(seed), random.Random(1000 * seed + dist.get_rank()), dist.get_rank()
    flying: dict[int, tuple[int, int, Launched]] = {}
    timings: dict[int, tuple[int, int, Timing]] = {}
    buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def end(number: int) -> None:
        source, target, launched = flying.pop(number)
        timings[number] = source, target, finish(launched)

    with closing(EmulatedLink(all_stages(), 20e-6, 1e-9, serial=serial)) as link:
        for number in range(count):
            source, target = common.sample(range(dist.get_world_size()), 2)
            sent = torch.randn(common.choice([1, 1000, 40_000]), generator=torch.Generator().manual_seed(number))
            if common.random() < 0.2:
                link.all_reduce(torch.ones(3))
            if rank in (source, target):
                buffer = sent.clone() if rank == source else torch.zeros_like(sent)
                before = time.monotonic_ns()
                work = link.start_send(buffer, target) if rank == source else link.start_receive(buffer, source)
                after = time.monotonic_ns()
                assert isinstance(work, MessageWork)
                flying[number] = source, target, Launched(work, before, after)
                buffers[number] = buffer, sent
            while flying and own.random() < 0.45:
                end(own.choice(sorted(flying)))
        for number in own.sample(sorted(flying), len(flying)):
            end(number)
    return [buffer.equal(sent) for buffer, sent in buffers.values()], [timings[number] for number in sorted(timings)]


@pytest.mark.parametrize(("world", "serial"), [(2, True), (3, False), (3, True)])
def test_messages_arrive_and_their_ends_follow_the_rule(gloo_pools: GlooPools, world: int, serial: bool) -> None:
    results = gloo_pools(world).run(random_messages, seed=world + serial, count=120, serial=serial)
    assert all(all(arrived) for arrived, _ in results)
    for pair in itertools.permutations(range(world), 2):
        ends = [[timing for *ranks, timing in results[rank][1] if (*ranks,) == pair] for rank in pair]
        assert len(ends[0]) == len(ends[1]) > 10
        assert_rule(ends, serial)


FORWARD, BACKWARD = 0.04, 0.08
"""Seconds of the passes of all chunks of a stage, which sleeps instead of computing."""


def pipeline_steps(chunks: int, count: int, latency: float) -> list[tuple[float, float]]:
    """Run some steps over the link; return the seconds of this rank's passes in each, without and with waits."""

    def sleep(seconds: float) -> None:
        time.sleep(seconds / chunks)

    def run_pass(work: Pass, arrivals: Sequence[Arrival], send: Send) -> Sequence[Tensor]:
        sleep(FORWARD if work.is_forward else BACKWARD)
        return [torch.ones(3)]

    results = []
    with closing(EmulatedLink(all_stages(), latency)) as link:
        slots = make_schedule(link.size, chunks, count)[link.rank]
        for _ in range(4):
            clock = PassClock(is_cuda=False)
            link.barrier()
            run_schedule(slots, link, run_pass, lambda work: [torch.empty(3)], clock)
            results.append(clock.seconds())
    return results


def bubble_cases() -> list[Any]:
    """Return chunks, micro-batches and latencies; all cases but one are slow."""
    cases = itertools.product((1, 2), (4, 8, 16), (0.0, 0.01))
    return [pytest.param(*case, marks=() if case == (2, 4, 0.01) else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("chunks", "count", "latency"), bubble_cases())
def test_the_bubble_of_a_pipeline_is_the_planned_one(
    gloo_pools: GlooPools, chunks: int, count: int, latency: float
) -> None:
    """Computed as in the log of a run, from the best of some steps, because other processes may delay a step."""
    stages = 4
    schedule = make_schedule(stages, chunks, count)
    busy = count * (FORWARD + BACKWARD)
    planned = played_seconds(schedule, FORWARD / chunks, BACKWARD / chunks, latency) / busy - 1
    if not latency:
        assert planned == pytest.approx((stages - 1) / (chunks * count))
    steps = zip(*gloo_pools(stages).run(pipeline_steps, chunks, count, latency), strict=True)
    measured = min(stages * ranks[0][1] / sum(passes for passes, _ in ranks) - 1 for ranks in steps)
    assert measured == pytest.approx(planned, rel=0.1)
