"""Checks at start-up, before any collective, that all ranks arrived and have the same settings.

Ranks communicate through one TCP store, which needs no process group and shows which ranks have arrived:

    every rank      writes its report, and its host with a digest of the report
    rank 0          waits for all digests, and reads the reports only if two digests differ
    rank 0          writes the verdict: the hosts of all ranks, or the errors
    every rank      reads the verdict

A start costs a few small messages per rank, and every rank ends with the same error messages.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import LostPeerError, UserError

LINGER_SECONDS = 5.0
"""Time for which rank 0 keeps serving the store to ranks that have not read a verdict with errors."""
BOARD_SECONDS = 2.0
"""Time limit for a request to the board."""
BEAT = "beat"
"""Prefix of board keys, followed by a rank: the time and iteration of the rank's last heartbeat."""
WAITING = "waiting"
"""Board key: the numbers of ranks that started to wait, and the bitwise complements of those that stopped."""
MOST_HOSTS = 8
"""Maximum number of hosts in a message."""
REPORT, DIGEST, VERDICT, READ = "start/report", "start/digest", "start/verdict", "start/read"
"""Keys of the store; all except the verdict are followed by a rank."""


@dataclass(frozen=True)
class Host:
    """The machine on which a rank runs."""

    name: str
    """Its host name."""
    address: str
    """The address from which it reaches rank 0."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass
class Peers:
    """The hosts of all ranks; empty until they are known."""

    hosts: list[Host] = field(default_factory=list)
    """In rank order."""
    board: Store | None = None
    """The store in which ranks report heartbeats and whether they wait; None before it is open."""
    _line: Store | None = None
    """A connection to the board with a short timeout. None before the first request, and after a request that timed
    out, because its late answer would be read as the answer to the next request."""
    _asking: threading.Thread | None = None
    """Thread that waits for the answer to the last request."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during a request, since two threads make requests."""

    def open_board(self, store: Store) -> None:
        """Use the store of the start-up as the board."""
        self.board = store
        self._ask(lambda board: board.append(WAITING, ""))

    def say_waiting(self, rank: int, waiting: bool) -> None:
        """Record that a rank started to wait for others, or stopped."""
        self._ask(lambda board: board.append(WAITING, f"{rank if waiting else ~rank} "))

    def beat(self, rank: int, iteration: int) -> None:
        """Record that a rank is alive after a step."""
        now = datetime.now(UTC)
        self._ask(lambda board: board.set(f"{BEAT}/{rank}", f"{now:%H:%M:%S} UTC after iteration {iteration}"))

    def last_beats(self, ranks: Iterable[int]) -> str:
        """Return the last heartbeats, by the ranks' own clocks: `rank 3: 12:00:05 UTC after iteration 7`."""
        shown = sorted(ranks)[:MOST_HOSTS]
        # `multi_get` respects the time limit; a check whether a key exists does not.
        beats = self._ask(lambda board: board.multi_get([f"{BEAT}/{rank}" for rank in shown]))
        return ", ".join(f"rank {rank}: {beat.decode()}" for rank, beat in zip(shown, beats or (), strict=False))

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the board's answer, or None if there is none in time.

        The store's own timeout does not work when the serving process is stopped: after the timeout the client waits,
        without limit, for confirmation that it cancelled its request. So each request runs in a thread. After a
        timeout the next request uses a new connection, and there is no new request while a thread still waits.
        """
        answers: list[Any] = []

        def ask(board: Any, line: Any) -> None:
            with contextlib.suppress(dist.DistError):
                if line is None:
                    line = board.clone()
                    line.set_timeout(timedelta(seconds=BOARD_SECONDS))
                answers.append((line, question(line)))

        with self._lock:
            if self.board is None or (self._asking is not None and self._asking.is_alive()):
                return None
            self._asking = threading.Thread(target=ask, args=(self.board, self._line), name="board", daemon=True)
            self._asking.start()
            self._asking.join(BOARD_SECONDS)
            self._line, answer = answers[0] if answers else (None, None)
            return answer

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that did not record that they wait; rank 0, the server of the board, if it is silent."""
        if self.board is None:
            return list(ranks)
        answer = self._ask(lambda board: board.get(WAITING))
        if answer is None:
            return [rank for rank in ranks if rank == 0]
        notes = [int(note) for note in answer.split()]
        state = {max(note, ~note): note >= 0 for note in notes}
        return [rank for rank in ranks if not state.get(rank, False)]

    def describe(self, ranks: Iterable[int]) -> str:
        """Format ranks with their hosts: `ranks 0-3 on node-a (10.0.0.1), rank 6 on node-b (10.0.0.2)`."""
        by_host: dict[Host | None, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts[rank] if rank < len(self.hosts) else None, []).append(rank)
        described = [
            name_ranks(members) + (f" on {host}" if host is not None else "") for host, members in by_host.items()
        ]
        more = len(described) - MOST_HOSTS
        return ", ".join(described[:MOST_HOSTS]) + (f" and on {more} more hosts" if more > 0 else "")

    def named_in(self, message: str) -> list[int]:
        """Return the ranks at the addresses that a network error contains in square brackets."""
        return [rank for rank, host in enumerate(self.hosts) if f"[{host.address}]" in message]


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks: `rank 3`, or `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@dataclass(frozen=True)
class RankReport:
    """The host and settings of a rank."""

    host: Host
    settings: Mapping[str, Any]
    """JSON-compatible values by label, such as a flag; all ranks must have the same."""
    errors: Sequence[str] = ()
    """Reasons why the rank cannot start."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RankReport":
        fields = json.loads(text)
        return RankReport(Host(**fields["host"]), fields["settings"], fields["errors"])

    @property
    def digest(self) -> str:
        """A hash that is equal for ranks with the same settings and errors, on any host."""
        content = json.dumps([self.settings, self.errors], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def open_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun serves.

    Raises:
        UserError: the port is in use.
        dist.DistError: rank 0 cannot be reached within the timeout.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun may already serve a store at that address; this variable indicates it.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            address, port, world_size, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(f"MASTER_PORT {port} is already in use: give the launcher another --master_port") from error
    # The store of torchrun outlives ranks that it restarts.
    return PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(store: Store, rank: int, world_size: int, report: RankReport, timeout: timedelta) -> list[Host]:
    """Return the hosts of all ranks after checking that all reports have the same settings and no errors.

    Raises:
        UserError: on every rank, with one message per difference or per error of another rank.
        LostPeerError: a rank did not arrive within the timeout.
    """
    if store.add(f"start/arrived/{rank}", 1) > 1:
        raise UserError(
            f"rank {rank} was started twice, the second time on {report.host}: give each host a different --node_rank, "
            "and all hosts the same hostfile"
        )
    store.set(f"{REPORT}/{rank}", report.to_json())
    store.set(f"{DIGEST}/{rank}", json.dumps([report.digest, asdict(report.host)]))
    verdict = _judge(store, world_size, timeout) if rank == 0 else _await_verdict(store, timeout)
    store.set(f"{READ}/{rank}", "")
    if rank == 0 and (verdict["missing"] or verdict["errors"]):
        _linger(store, world_size, verdict["missing"])
    if verdict["missing"]:
        raise LostPeerError(
            f"{name_ranks(verdict['missing'])} of {world_size} did not arrive within {timeout.total_seconds():g} s"
        )
    if verdict["errors"]:
        raise UserError(*verdict["errors"])
    if len(verdict["hosts"]) != world_size:
        raise UserError(
            f"rank {rank} on {report.host} was started as one of {world_size} processes, rank 0 as one of "
            f"{len(verdict['hosts'])}: give all hosts the same hostfile"
        )
    return [Host(**host) for host in verdict["hosts"]]


def _await_verdict(store: Store, timeout: timedelta) -> dict[str, Any]:
    # Rank 0 may itself wait until the timeout for another rank before it writes the verdict.
    store.wait([VERDICT], timeout + timedelta(seconds=LINGER_SECONDS))
    verdict: dict[str, Any] = json.loads(store.get(VERDICT))
    return verdict


def _judge(store: Store, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Compare all reports and write the verdict; called by rank 0."""
    digest_keys = [f"{DIGEST}/{rank}" for rank in range(world_size)]
    verdict: dict[str, Any] = {"missing": [], "errors": [], "hosts": []}
    try:
        store.wait(digest_keys, timeout)
    except dist.DistStoreError:
        verdict["missing"] = [rank for rank, key in enumerate(digest_keys) if not store.check([key])]
    if not verdict["missing"]:
        digests, hosts = zip(*map(json.loads, store.multi_get(digest_keys)), strict=True)
        verdict["hosts"] = hosts
        if len(set(digests)) > 1:
            texts = store.multi_get([f"{REPORT}/{rank}" for rank in range(world_size)])
            verdict["errors"] = _find_errors([RankReport.from_json(text.decode()) for text in texts])
    store.set(VERDICT, json.dumps(verdict))
    return verdict


def _linger(store: Store, world_size: int, missing: Sequence[int]) -> None:
    """Keep serving the store until all ranks have read the verdict."""
    present = [f"{READ}/{rank}" for rank in range(world_size) if rank not in missing]
    with contextlib.suppress(dist.DistError):
        store.wait(present, timedelta(seconds=LINGER_SECONDS))


def _find_errors(reports: Sequence[RankReport]) -> list[str]:
    """Return one line per error of a rank, or else per setting that differs; `reports` are in rank order."""
    peers = Peers([report.host for report in reports])
    reported: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for error in report.errors:
            reported.setdefault(error, []).append(rank)
    if reported:
        return [
            error if len(ranks) == len(reports) else f"{peers.describe(ranks)}: {error}"
            for error, ranks in reported.items()
        ]
    labels = dict.fromkeys(label for report in reports for label in report.settings)
    lines = []
    for label in labels:
        values: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            values.setdefault(json.dumps(report.settings.get(label)), []).append(rank)
        if len(values) > 1:
            shown = " but ".join(f"{value} for {peers.describe(ranks)}" for value, ranks in values.items())
            lines.append(f"{label} differs: {shown}: start all processes with the same settings")
    return lines


def raise_on_all_ranks(group: CommGroup, messages: Sequence[str]) -> None:
    """Raise a UserError on every rank of a group if any rank has messages; all ranks must call this.

    The error has the messages of all ranks, each once. Messages that only some ranks have name those ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, lines in zip(group.ranks, group.gather_objects(list(messages)), strict=False):
        for line in dict.fromkeys(lines):
            ranks.setdefault(line, []).append(rank)
    combined = [
        line if len(having) == group.size else f"{line} (on {name_ranks(having)})" for line, having in ranks.items()
    ]
    combined = group.broadcast_object(combined)
    if combined:
        raise UserError(*combined)


def report_errors(rank: int, world_size: int, host: Host, errors: Sequence[str], timeout: timedelta) -> None:
    """Inform ranks that can start that this rank cannot; return when they know, or after the timeout."""
    with contextlib.suppress(dist.DistError, UserError, LostPeerError, OSError):
        store = open_store(rank, world_size, timeout)
        agree(store, rank, world_size, RankReport(host, {}, errors), timeout)
