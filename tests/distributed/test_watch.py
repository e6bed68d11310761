"""Timeouts that become short after the first step, and the reports of ranks that wait too long."""

import contextlib
import io
import itertools
import re
import threading
import time
from datetime import timedelta
from typing import NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ladder.comm import watch
from megatron_ladder.comm.agreement import Host, Peers
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.watch import Watch, _recorded_collectives, naming_lost_peers
from megatron_ladder.errors import LostPeerError
from tests.helpers.patience import patient
from tests.helpers.pool import GlooPools

SHORT, LATE = 1.5, 2.0
"""Seconds: a timeout after the first step, and the delay of a late rank."""


def comes_late(seconds: float, mesh: ProcessMesh) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)
    mesh.tensor.all_reduce(torch.ones(2, 3))


def lives_with_a_late_peer() -> tuple[str, float, str, list[int]]:
    """Return per rank the report, the seconds until the last reduce failed, its error, and who does not seem to wait.

    Each rank has a board to itself.
    """
    board = dist.HashStore()  # type: ignore[attr-defined]
    mesh, peers = ProcessMesh.build(2), Peers([Host("a", "10.0.0.1"), Host("b", "10.0.0.2")], board)
    began, failure = 0.0, ""
    for rank in range(2):
        peers.beat(rank, 0)
    report = io.StringIO()
    with (
        contextlib.redirect_stderr(report),
        Watch(peers, startup=timedelta(seconds=30), running=timedelta(seconds=SHORT)) as watch,
    ):
        comes_late(LATE, mesh)
        watch.step_done()
        comes_late(0, mesh)
        with watch.patient():
            comes_late(LATE, mesh)
        assert report.getvalue() == ""
        began = time.monotonic()
        try:
            with naming_lost_peers(peers):
                comes_late(3 * SHORT, mesh)
        except LostPeerError as error:
            failure = str(error)
        seconds, silent = time.monotonic() - began, peers.silent([0, 1])
    return report.getvalue(), seconds, failure, silent


def test_timeouts_are_short_after_the_first_step(gloo_pools: GlooPools) -> None:
    (first, waited, failure, silent), (second, _, _, all_silent) = gloo_pools(2).run(lives_with_a_late_peer)
    assert 0.9 * SHORT < waited < patient(3 * SHORT)
    assert re.match(r"rank 1 on b \(10.0.0.2\) is gone or does not answer \(last heard of: rank 1: .*\): ", failure)
    # The one that waits says so, and for whom, and the one that it waits for says where it is instead.
    assert (silent, all_silent) == ([1], [0, 1])
    assert first.count("no progress for") == 1 and first.startswith("*** rank 0 on a (10.0.0.1): ")
    waits = "all_reduce 4 in group 'tensor' of ranks 0-1, Float[2, 3]; with rank"
    assert f"\nnot finished: {waits} 1 on b (10.0.0.2)\n" in first and "in all_reduce" in first
    assert second.count("no progress for") == 1 and second.startswith("*** rank 1 on b (10.0.0.2): ")
    assert "started last: all_reduce 3 in group 'tensor'" in second and "in all_reduce" not in second
    for report in (first, second):
        assert "in comes_late" in report and report.rstrip().endswith(f"of rank {int(report is second)}")


def limits_of_steps() -> list[float]:
    """Return the timeouts that a watch sets in steps of 9, 2, 200, 150 and 300 seconds, with an evaluation."""
    limits: list[float] = []
    now = [0.0]

    def set_limit(group: object, limit: timedelta) -> None:
        limits.append(limit.total_seconds())

    ProcessMesh.build(2)
    with (
        mock.patch.object(watch.time, "monotonic", lambda: now[0]),
        mock.patch.object(dist.ProcessGroup, "set_timeout", set_limit),
        Watch(Peers(), timedelta(minutes=10), timedelta(seconds=120)) as hang_watch,
    ):
        for step in (9, 2, 200, 150):
            now[0] += step
            hang_watch.step_done()
        with hang_watch.patient():
            now[0] += 1000
        now[0] += 300
        hang_watch.step_done()
    return [limit for limit, _ in itertools.groupby(limits)]


def test_a_timeout_includes_the_longest_step(gloo_pools: GlooPools) -> None:
    """NCCL times the reduce after a captured step from the launch of that step."""
    assert gloo_pools(2).run(limits_of_steps) == [[120, 122, 320, 600, 320, 420, 600]] * 2


def waits_for_a_dead_peer() -> str | None:
    """Wait in no collective, as in a captured step, for a rank whose heartbeats have stopped; return its error."""
    if dist.get_rank() == 1:
        return None
    peers = Peers([Host("a", "10.0.0.1"), Host("b", "10.0.0.2")], dist.HashStore())  # type: ignore[attr-defined]
    peers.beat(1, 7)
    errors, ended = list[LostPeerError](), threading.Event()

    def fail(error: LostPeerError) -> NoReturn:
        ended.set()
        raise SystemExit

    with (
        mock.patch.multiple(watch, BEAT_SECONDS=0.01, fail=fail),
        contextlib.redirect_stderr(io.StringIO()),
        Watch(peers, timedelta(seconds=30), timedelta(seconds=SHORT), errors.append) as hang_watch,
    ):
        hang_watch.step_done()
        assert ended.wait(patient(60))
    return str(errors[0])


def test_a_captured_step_does_not_wait_for_a_dead_peer(gloo_pools: GlooPools) -> None:
    error, _ = gloo_pools(2).run(waits_for_a_dead_peer)
    assert error.startswith("rank 1 on b (10.0.0.2) is gone or does not answer (last heard of: rank 1: ")
    assert error.endswith(" UTC after iteration 7): no heartbeat any more")


def waits_for_a_message() -> tuple[str, str, list[int]]:
    """Return the report of a pipeline stage whose neighbour sends nothing until it is named, the error, and the ranks
    that have not recorded that they wait."""
    mesh, message = ProcessMesh.build(1, 2), torch.ones(3)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["named"])
        mesh.pipeline.start_send(message, 0).wait()
        return "", "", []
    peers, report, errors = Peers([Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]), io.StringIO(), list[LostPeerError]()
    silent = list[int]()
    peers.board = dist.HashStore()  # type: ignore[attr-defined]
    for rank in range(2):
        peers.beat(rank, 7)
    peers.pipeline = mesh.pipeline

    def fail(error: LostPeerError) -> NoReturn:
        silent.extend(peers.silent([0, 1]))
        store.set("named", "")
        raise SystemExit

    timeouts = timedelta(seconds=30), timedelta(seconds=SHORT)
    with (
        mock.patch.object(watch, "fail", fail),
        contextlib.redirect_stderr(report),
        Watch(peers, *timeouts, errors.append) as hang_watch,
    ):
        hang_watch.step_done()
        mesh.pipeline.start_receive(message, 1).wait()
    store.delete_key("named")
    assert mesh.pipeline.awaited is None
    return report.getvalue(), str(errors[0]), silent


def test_a_message_that_never_comes_ends_the_run(gloo_pools: GlooPools) -> None:
    """torch neither records it nor ends it with the timeout of later collectives."""
    (report, error, silent), _ = gloo_pools(2).run(waits_for_a_message)
    assert silent == [1]
    assert "exchanges a message with rank 1 on b (10.0.0.2)\n" in report
    named = re.fullmatch(
        r"rank 1 on b \(10.0.0.2\) is gone or does not answer \(last heard of: .*\): no message for (\d+) s", error
    )
    assert named is not None and int(named[1]) > SHORT


def receives_nothing() -> tuple[str, list[int]]:
    """Return the error of a stage whose neighbour sends nothing, after a sum with a rank that is not to blame."""
    mesh = ProcessMesh.build(2, 2, timeout=timedelta(seconds=SHORT))
    mesh.tensor.all_reduce(torch.ones(2))
    if mesh.pipeline.rank == 1:
        return "", []
    peers = Peers([Host(name, "10.0.0.1") for name in "abcd"])
    peers.pipeline = mesh.pipeline
    with pytest.raises(LostPeerError) as caught, naming_lost_peers(peers):
        mesh.pipeline.start_receive(torch.ones(3), 1).wait()
    return str(caught.value), list(caught.value.lost)


def test_a_lost_message_names_its_sender(gloo_pools: GlooPools) -> None:
    for rank, (error, lost) in enumerate(gloo_pools(4).run(receives_nothing)[:2]):
        assert lost == [rank + 2]
        assert f"exchanges a message with rank {rank + 2} on {'cd'[rank]} (10.0.0.1)\n" in error


def exchanges_messages_slowly() -> tuple[str, list[LostPeerError]]:
    """Receive messages for longer than the timeout, each of them in time; return the report and the errors."""
    mesh, message = ProcessMesh.build(1, 2), torch.ones(3)
    peers, report, errors = Peers([Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]), io.StringIO(), list[LostPeerError]()
    peers.pipeline = mesh.pipeline
    timeouts = timedelta(seconds=30), timedelta(seconds=SHORT)
    with (
        mock.patch.object(watch, "fail", side_effect=SystemExit),
        contextlib.redirect_stderr(report),
        Watch(peers, *timeouts, errors.append) as hang_watch,
    ):
        hang_watch.step_done()
        for _ in range(6):
            if mesh.pipeline.rank == 1:
                time.sleep(SHORT / 3)
                mesh.pipeline.start_send(message, 0).wait()
            else:
                mesh.pipeline.start_receive(message, 1).wait()
    return report.getvalue(), errors


def test_messages_are_progress(gloo_pools: GlooPools) -> None:
    assert gloo_pools(2).run(exchanges_messages_slowly) == [("", [])] * 2


def records() -> list[tuple[str, bool]]:
    mesh = ProcessMesh.build(2, 1)
    mesh.tensor.all_reduce(torch.ones(3))
    work = mesh.tensor.start_all_reduce(torch.ones(2, 2, dtype=torch.bfloat16))
    assert work is not None
    work.wait()
    # As DeepSpeed starts its own.
    dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group=mesh.model.process_group)
    # The thread that ended it writes that down a moment later.
    time.sleep(0.3)
    return [(one.text, one.finished) for one in _recorded_collectives()[-3:]]


def test_collectives_of_other_libraries_are_recorded(gloo_pools: GlooPools) -> None:
    for found in gloo_pools(2).run(records):
        assert found[:2] == [
            ("all_reduce 1 in group 'tensor' of ranks 0-1, Float[3]", True),
            ("all_reduce 2 in group 'tensor' of ranks 0-1, BFloat16[2, 2]", True),
        ]
        assert "all_gather" in found[2][0] and found[2][0].endswith(" 1 in group 'model' of ranks 0-1, Float[2]")
