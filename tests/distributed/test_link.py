"""The emulated interconnect: sums match torch.distributed, ends follow the rule, and nothing is left behind.

Ends are compared with the rule and never with the speed of this machine: a rank reads the clock before and after each
launch, and the link's launch stamp must be between the two.
"""

import random
import time
from contextlib import closing
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.link.link import EmulatedLink, LinkWork
from megatron_ladder.comm.group import CommGroup
from tests.helpers.pool import GlooPools

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def everyone() -> CommGroup:
    return CommGroup(range(dist.get_world_size()), dist.get_rank(), dist.group.WORLD)


class Timing(NamedTuple):
    """One rank's view of one all-reduce, in nanoseconds of the monotonic clock that all ranks share."""

    before: int
    after: int
    wire: int
    end: int
    done: int


class Launched(NamedTuple):
    work: LinkWork
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
