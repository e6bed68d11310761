"""The checks at start-up, with ranks as threads around one store."""

import json
import re
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import pytest
from torch._C._distributed_c10d import HashStore

from megatron_ladder.comm import agreement
from megatron_ladder.comm.agreement import Host, Peers, name_ranks
from megatron_ladder.comm.watch import _silent_ranks
from megatron_ladder.errors import LostPeerError, Problem, UserError
from tests.helpers.commands import free_port

HOSTS = [Host("node-a", "10.0.0.1"), Host("node-a", "10.0.0.1"), Host("node-b", "10.0.0.2"), Host("node-b", "10.0.0.2")]
SOON = timedelta(seconds=20)


class Rank(NamedTuple):
    host: Host
    settings: Mapping[str, object] = {}
    problems: Sequence[Problem] = ()


def meet(
    ranks: Sequence[Rank | None], sizes: Sequence[int] | None = None, timeout: timedelta = SOON
) -> list[list[Host] | Exception]:
    """Return the results or exceptions of `Peers.agree` on each rank; None is a rank that never arrives."""
    store = HashStore()

    def life(rank: int) -> list[Host] | Exception:
        arrived = ranks[rank]
        assert arrived is not None
        try:
            peers = Peers(board=store)
            peers.agree(rank, sizes[rank] if sizes else len(ranks), *arrived, timeout)
            return list(peers.hosts)
        except Exception as error:
            return error

    present = [rank for rank, arrived in enumerate(ranks) if arrived]
    with ThreadPoolExecutor(len(present)) as threads:
        return list(threads.map(life, present))


def messages(result: list[Host] | Exception) -> tuple[str, ...]:
    assert isinstance(result, UserError), result
    return result.messages


def test_ranks_with_equal_settings_know_all_hosts() -> None:
    equal: list[dict[str, object]] = [{"--lr": 0.1, "x": {"a": 1, "b": 2}}, {"x": {"b": 2, "a": 1}, "--lr": 0.1}] * 2
    assert meet([Rank(host, settings) for host, settings in zip(HOSTS, equal, strict=True)]) == [HOSTS] * 4


def test_every_difference_is_named_on_every_rank() -> None:
    values = [{"--lr": 0.1}, {"--lr": 0.1}, {"--lr": 0.2}, {"--lr": 0.2, "device": "cuda"}]
    results = meet([Rank(host, settings) for host, settings in zip(HOSTS, values, strict=True)])
    same = "on rank 0: start all processes with the same settings"
    assert [messages(result) for result in results] == [
        (
            f"ranks 2-3 on node-b (10.0.0.2): --lr differs: 0.2, and 0.1 {same}",
            f'rank 3 on node-b (10.0.0.2): device differs: "cuda", and null {same}',
        )
    ] * 4


@pytest.mark.parametrize("failing", [0, 3])
def test_all_ranks_raise_the_errors_of_one(failing: int) -> None:
    ranks = [Rank(host, {"--lr": 0.1}) for host in HOSTS]
    ranks[failing] = Rank(HOSTS[failing], {}, [Problem.of("no data"), Problem.of("no folder")])
    where = f"rank {failing} on {HOSTS[failing]}"
    assert [messages(result) for result in meet(ranks)] == [(f"{where}: no data", f"{where}: no folder")] * 4


def test_rank_0_serves_its_store_until_all_ranks_have_read_the_reports() -> None:
    """Otherwise torch prints the stack of each rank that still reads."""
    store = HashStore()
    store.add(f"{agreement.ARRIVED}/1", 1)
    store.set(f"{agreement.REPORT}/1", json.dumps([HOSTS[1], []]))

    def fail() -> None:
        with pytest.raises(UserError, match="no data"):
            Peers(board=store).agree(0, 2, HOSTS[0], {}, [Problem.of("no data")], SOON)

    serving = threading.Thread(target=fail)
    serving.start()
    store.wait([f"{agreement.READ}/0"], SOON)
    serving.join(0.2)
    assert serving.is_alive()
    store.set(f"{agreement.READ}/1", "")
    serving.join(30)
    assert not serving.is_alive()


@pytest.mark.parametrize("missing", ["1, 3", "0, 2"])
def test_a_missing_rank_is_named(missing: str) -> None:
    ranks = [None if str(rank) in missing else Rank(host) for rank, host in enumerate(HOSTS)]
    for result in meet(ranks, timeout=timedelta(seconds=0.3)):
        assert isinstance(result, LostPeerError)
        assert str(result) == f"ranks {missing} of 4 did not arrive within 0.3 s"


def test_rank_0_names_missing_ranks_to_those_that_arrived_later() -> None:
    """The later ones would still wait when rank 0 ends, and its store with it."""
    store = HashStore()

    def miss(rank: int, timeout: timedelta) -> None:
        with pytest.raises(LostPeerError, match="^rank 2 of 3 did not arrive within"):
            Peers(board=store).agree(rank, 3, HOSTS[rank], {}, (), timeout)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(miss, 1, SOON)
        store.set(agreement.SETTINGS, "{}")
        store.wait([f"{agreement.REPORT}/1"], SOON)
        miss(0, timedelta(seconds=0.3))
        assert store.check([f"{agreement.READ}/1"])
        waiting.result()


def test_hostfiles_of_different_lengths_are_found() -> None:
    """Rank 0 expects two ranks and ignores the third."""
    results = meet([Rank(host) for host in HOSTS[:3]], sizes=[2, 2, 3])
    assert results[:2] == [HOSTS[:2]] * 2
    assert "rank 2 on node-b (10.0.0.2): number of processes differs: 3, and 2 on rank 0" in str(results[2])


def test_two_hosts_cannot_be_the_same_rank() -> None:
    store = HashStore()
    store.add(f"{agreement.ARRIVED}/1", 1)
    with pytest.raises(UserError, match="rank 1 was started twice, .* on node-b .* a different --node_rank"):
        Peers(board=store).agree(1, 2, HOSTS[2], {}, (), SOON)


def test_a_signal_ends_a_rank_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has the port, or a rank does not arrive."""
    monkeypatch.setattr(agreement, "SIGNAL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        received = list[int]()
        signalled = threading.Timer(0.2, received.append, [signal.SIGTERM])
        signalled.start()
        with pytest.raises(LostPeerError, match="SIGTERM at start-up: ends without rank 0 at 127.0.0.1:.*"):
            Peers(received=received).open(1, 2, SOON)
        with pytest.raises(LostPeerError, match="timeout: ends without rank 0 at 127.0.0.1:.*"):
            Peers().open(1, 2, timedelta(seconds=0.2))
    with pytest.raises(LostPeerError, match="SIGINT at start-up: ends without other ranks, which did not answer"):
        Peers(board=HashStore(), received=[signal.SIGINT]).agree(0, 2, HOSTS[0], {}, (), SOON)


def test_a_signal_leaves_the_others_time_to_arrive() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Peers(board=store, received=[signal.SIGTERM]).agree, 0, 2, HOSTS[0], {}, (), SOON)
        Peers(board=store).agree(1, 2, HOSTS[2], {}, (), SOON)
        assert first.result() is None


def test_a_run_has_one_store_with_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may leave a process group and start another one at the same address."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    first, second = Peers(), Peers()
    store = first.open(0, 1, SOON)
    assert first.open(0, 1, SOON) is store
    first.beat(0, 3)
    assert store.check(["beat/0"]) and not second.open(0, 1, SOON).check(["beat/0"])


def test_ranks_are_named_by_their_hosts() -> None:
    peers = Peers(HOSTS)
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8" and name_ranks([4]) == "rank 4"
    assert peers.describe([3, 0]) == "rank 0 on node-a (10.0.0.1), rank 3 on node-b (10.0.0.2)"
    assert Peers().describe([2, 3]) == "ranks 2-3"
    assert peers.named_in("Connection closed by peer [10.0.0.2]:5031.") == [2, 3]
    many = Peers([Host(f"n{number}", f"10.0.1.{number}") for number in range(agreement.MOST_HOSTS + 3)])
    assert many.describe(range(len(many.hosts))).endswith("rank 7 on n7 (10.0.1.7) and on 3 more hosts")


def test_ranks_that_do_not_report_waiting_are_silent() -> None:
    peers = Peers(HOSTS)
    assert peers.silent([1, 2, 3]) == [1, 2, 3]
    peers.board = HashStore()
    for rank, waits in ((0, True), (1, True), (3, True), (3, False), (2, True), (0, False)):
        peers.beat(rank, 7, waits)
    assert peers.silent([0, 1, 2, 3]) == [0, 3]
    assert re.fullmatch(r"rank 2: \d\d:\d\d:\d\d UTC after iteration 7", peers.last_beats([2]))


def test_a_board_that_does_not_answer_means_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "BOARD_SECONDS", 0.05)
    peers = Peers(HOSTS, HashStore())
    assert peers.silent([0, 3]) == [0] and peers.silent([2, 3]) == []


def test_if_all_partners_wait_another_rank_is_lost() -> None:
    """Groups are (0, 2) and (1, 3), and rank 3 is stopped: rank 0 waits for rank 2, which waits for rank 3."""
    peers = Peers([*HOSTS], HashStore())
    for rank in range(4):
        peers.beat(rank, 7, rank in (1, 2))
    assert _silent_ranks([2], peers) == [3] and _silent_ranks([3], peers) == [3]
    peers.beat(3, 7, True)
    assert _silent_ranks([2], peers) == [2], "all wait, so all partners are returned"
