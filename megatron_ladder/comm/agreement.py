"""What ranks tell one another at the start, before anything can hang: where they are, and what they were told to do.

Everything goes through one TCP store, which needs no process group and knows who has come:

    every rank      writes its report, and its host with a digest of the report
    rank 0          waits for all digests, and reads the reports only if two digests differ
    rank 0          writes the verdict: the hosts of all ranks, or what is wrong
    every rank      reads the verdict

so a start costs a few small messages for each rank, and every rank ends with the same words when something is wrong.
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
"""How long rank 0 serves the store to ranks that have not read a verdict that ends the run."""
BOARD_SECONDS = 2.0
"""How long the board may take to answer."""
BEAT = "beat"
"""Its keys, each followed by a rank: when the rank last said that it is alive, and in which step."""
WAITING = "waiting"
"""Its key: the numbers of ranks that began to wait, and the complements of those that no longer do."""
MOST_HOSTS = 8
"""Hosts that a message lists."""
REPORT, DIGEST, VERDICT, READ = "start/report", "start/digest", "start/verdict", "start/read"
"""Keys of the store; all but the verdict are followed by a rank."""


@dataclass(frozen=True)
class Host:
    """Where a rank runs."""

    name: str
    """What the machine calls itself."""
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
    """The store where ranks that make no progress say that they are still there, once there is such a place."""
    _line: Store | None = None
    """A connection to the board that does not wait for long; None before the first question, and after one that was
    not answered in time: a late answer would be taken for that to another question."""
    _asking: threading.Thread | None = None
    """Waits for the answer to the last question."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a question is asked: two threads ask."""

    def open_board(self, store: Store) -> None:
        """Takes the store at which ranks met as the board."""
        self.board = store
        self._ask(lambda board: board.append(WAITING, ""))

    def say_waiting(self, rank: int, waiting: bool) -> None:
        """Notes that a rank makes no progress, or makes it again."""
        self._ask(lambda board: board.append(WAITING, f"{rank if waiting else ~rank} "))

    def beat(self, rank: int, iteration: int) -> None:
        """Notes that a rank is alive after a step."""
        now = datetime.now(UTC)
        self._ask(lambda board: board.set(f"{BEAT}/{rank}", f"{now:%H:%M:%S} UTC after iteration {iteration}"))

    def last_beats(self, ranks: Iterable[int]) -> str:
        """When ranks last said that they are alive, by their own clocks: `rank 3: 12:00:05 UTC after iteration 7`."""
        shown = sorted(ranks)[:MOST_HOSTS]
        # One question, which has a time limit, unlike the one whether a key is there.
        beats = self._ask(lambda board: board.multi_get([f"{BEAT}/{rank}" for rank in shown]))
        return ", ".join(f"rank {rank}: {beat.decode()}" for rank, beat in zip(shown, beats or (), strict=False))

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """What the board answers, or None.

        The store's own time limit does not hold when the process that serves it is stopped: having waited in vain for
        a value, it waits without limit for the answer to its word that it waits no more. The next question after that
        has a new connection, so one slow answer costs itself alone; while the old one is still waited for, there is
        no next question.
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
        """Those that have not said that they wait; rank 0, which serves the board, where that does not answer."""
        if self.board is None:
            return list(ranks)
        answer = self._ask(lambda board: board.get(WAITING))
        if answer is None:
            return [rank for rank in ranks if rank == 0]
        notes = [int(note) for note in answer.split()]
        state = {max(note, ~note): note >= 0 for note in notes}
        return [rank for rank in ranks if not state.get(rank, False)]

    def describe(self, ranks: Iterable[int]) -> str:
        """`ranks 0-3 on node-a (10.0.0.1), rank 6 on node-b (10.0.0.2)`."""
        by_host: dict[Host | None, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts[rank] if rank < len(self.hosts) else None, []).append(rank)
        described = [
            name_ranks(members) + (f" on {host}" if host is not None else "") for host, members in by_host.items()
        ]
        more = len(described) - MOST_HOSTS
        return ", ".join(described[:MOST_HOSTS]) + (f" and on {more} more hosts" if more > 0 else "")

    def named_in(self, message: str) -> list[int]:
        """Ranks at an address that stands in square brackets in the text of a network error."""
        return [rank for rank, host in enumerate(self.hosts) if f"[{host.address}]" in message]


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-3, 6` of ascending numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@dataclass(frozen=True)
class Report:
    """What a rank says of itself."""

    host: Host
    settings: Mapping[str, Any]
    """JSON-able; a label (a flag, say) and its value. Ranks must have the same."""
    mistakes: Sequence[str] = ()
    """Why it cannot start."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Report":
        fields = json.loads(text)
        return Report(Host(**fields["host"]), fields["settings"], fields["mistakes"])

    @property
    def digest(self) -> str:
        """Equal for ranks that may start together, whatever their hosts."""
        told = json.dumps([self.settings, self.mistakes], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()


def open_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, served by rank 0 or by torchrun, to which all ranks connect.

    Raises:
        UserError: the port is in use.
        dist.DistError: rank 0 cannot be reached within the timeout.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun serves a store of its own at that address, and says so in this variable.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            address, port, world_size, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(f"MASTER_PORT {port} is in use: give the launcher another --master_port") from error
    # torchrun's store outlives ranks that it starts again.
    return PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(store: Store, rank: int, world_size: int, report: Report, timeout: timedelta) -> list[Host]:
    """Returns the hosts of all ranks when every rank's report has the same settings and no mistakes.

    Raises:
        UserError: on every rank, with a line for each difference or each other rank's mistake.
        LostPeerError: a rank has not come within the timeout.
    """
    if store.add(f"start/arrived/{rank}", 1) > 1:
        raise UserError(
            f"rank {rank} started twice, on {report.host} now: give each host its own --node_rank and all the same "
            "hostfile"
        )
    store.set(f"{REPORT}/{rank}", report.to_json())
    store.set(f"{DIGEST}/{rank}", json.dumps([report.digest, asdict(report.host)]))
    verdict = _judge(store, world_size, timeout) if rank == 0 else _await_verdict(store, timeout)
    store.set(f"{READ}/{rank}", "")
    if rank == 0 and (verdict["missing"] or verdict["mistakes"]):
        _linger(store, world_size, verdict["missing"])
    if verdict["missing"]:
        raise LostPeerError(
            f"{name_ranks(verdict['missing'])} of {world_size} did not come within {timeout.total_seconds():g} s"
        )
    if verdict["mistakes"]:
        raise UserError(*verdict["mistakes"])
    if len(verdict["hosts"]) != world_size:
        raise UserError(
            f"rank {rank} on {report.host} was started as one of {world_size} processes, rank 0 as one of "
            f"{len(verdict['hosts'])}: give all hosts the same hostfile"
        )
    return [Host(**host) for host in verdict["hosts"]]


def _await_verdict(store: Store, timeout: timedelta) -> dict[str, Any]:
    # Rank 0 may have waited just as long for another rank before it says so.
    store.wait([VERDICT], timeout + timedelta(seconds=LINGER_SECONDS))
    verdict: dict[str, Any] = json.loads(store.get(VERDICT))
    return verdict


def _judge(store: Store, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Rank 0: what follows from all reports, told to all."""
    digest_keys = [f"{DIGEST}/{rank}" for rank in range(world_size)]
    verdict: dict[str, Any] = {"missing": [], "mistakes": [], "hosts": []}
    try:
        store.wait(digest_keys, timeout)
    except dist.DistStoreError:
        verdict["missing"] = [rank for rank, key in enumerate(digest_keys) if not store.check([key])]
    if not verdict["missing"]:
        digests, hosts = zip(*map(json.loads, store.multi_get(digest_keys)), strict=True)
        verdict["hosts"] = hosts
        if len(set(digests)) > 1:
            texts = store.multi_get([f"{REPORT}/{rank}" for rank in range(world_size)])
            verdict["mistakes"] = find_mistakes([Report.from_json(text.decode()) for text in texts])
    store.set(VERDICT, json.dumps(verdict))
    return verdict


def _linger(store: Store, world_size: int, missing: Sequence[int]) -> None:
    """Keeps the store up until all have read why the run ends."""
    present = [f"{READ}/{rank}" for rank in range(world_size) if rank not in missing]
    with contextlib.suppress(dist.DistError):
        store.wait(present, timedelta(seconds=LINGER_SECONDS))


def find_mistakes(reports: Sequence[Report]) -> list[str]:
    """A line for each mistake of a rank or each setting in which ranks differ; `reports` are in rank order."""
    peers = Peers([report.host for report in reports])
    told: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for mistake in report.mistakes:
            told.setdefault(mistake, []).append(rank)
    if told:
        return [
            mistake if len(ranks) == len(reports) else f"{peers.describe(ranks)}: {mistake}"
            for mistake, ranks in told.items()
        ]
    labels = dict.fromkeys(label for report in reports for label in report.settings)
    lines = []
    for label in labels:
        values: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            values.setdefault(json.dumps(report.settings.get(label)), []).append(rank)
        if len(values) > 1:
            shown = " but ".join(f"{value} for {peers.describe(ranks)}" for value, ranks in values.items())
            lines.append(f"{label} differs: {shown}: all processes must be started alike")
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


def tell_mistakes(rank: int, world_size: int, host: Host, mistakes: Sequence[str], timeout: timedelta) -> None:
    """Lets ranks that could start know that this one cannot; returns when they do, or after the timeout."""
    with contextlib.suppress(dist.DistError, UserError, LostPeerError, OSError):
        store = open_store(rank, world_size, timeout)
        agree(store, rank, world_size, Report(host, {}, mistakes), timeout)
