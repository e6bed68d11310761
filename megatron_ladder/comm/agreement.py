"""Checks at start-up, before any collective, that all ranks arrived and have the same settings.

Ranks communicate through one TCP store per run (`Peers.open`), which needs no process group and shows which ranks have
arrived:

    rank 0          writes its settings
    every rank      writes its report: its host, and its errors or the settings that differ from those of rank 0
    every rank      reads all reports

So every rank ends with the same error messages.
"""

import collections
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import ErrorCollector, LostPeerError, Problem, UserError, raise_user_errors

LINGER_SECONDS = 5.0
"""Time for which rank 0 keeps serving the store to ranks that have not read reports with errors; torch prints the stack
of a rank whose store ends."""
SIGNAL_SECONDS = 5.0
"""Time that a rank at start-up still waits for others after a signal; launchers kill processes 30 s after theirs."""
BOARD_SECONDS = 2.0
"""Time limit for a request to the board."""
MOST_HOSTS = 8
"""Maximum number of hosts in a message."""
SETTINGS = "start/settings"
ARRIVED, REPORT, READ = "start/arrived", "start/report", "start/read"
"""Keys of the store that are followed by a rank."""

_RUNS: dict[tuple[str, int], Iterator[int]] = collections.defaultdict(itertools.count)
"""Numbers the runs of this process at each store's address: a script may leave a process group and start another."""

_LOOK_SECONDS = 0.1
"""Time between two looks for a signal."""

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Host(NamedTuple):
    """The machine on which a rank runs, with the address from which it reaches rank 0."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class Peers:
    """The hosts of all ranks, and the board: a store to which each rank writes that it is alive, and whether it waits.

    `hosts` are in rank order, and empty until they are known. `board` is None until `open`. `pipeline` are the ranks
    that send messages to each other.
    """

    def __init__(self, hosts: Sequence[Host] = (), board: Store | None = None, received: Sequence[int] = ()) -> None:
        """`received` grows by signals that request a graceful shutdown."""
        self.hosts = hosts
        self.board = board
        self._received = received
        self.pipeline = CommGroup.alone()

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Connect to the store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun serves, unless it is connected.

        Raise a UserError if the port is in use, and a DistError if rank 0 cannot be reached within the timeout. A rank
        cannot know whether another program has the port, and then waits for an answer.
        """
        if self.board is not None:
            return self.board
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        # torchrun may already serve a store at that address; this variable indicates it.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

        def connect() -> TCPStore:
            return TCPStore(
                address, port, world_size, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )

        try:
            store = self.unless_ended(connect, f"rank 0 at {address}:{port}", timeout)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UserError(f"MASTER_PORT {port} is already in use: give the launcher another --master_port") from error
        # The store of torchrun outlives ranks that it restarts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.board = PrefixStore(f"attempt_{attempt}_{next(_RUNS[address, port])}", store)
        return self.board

    def unless_ended(self, call: Callable[[], Result], awaited: str, timeout: timedelta) -> Result:
        """Return what a call that blocks in torch returns; raise a LostPeerError soon after a signal, or the timeout.

        No handler of a signal runs while the main thread is in torch, so another thread makes the call. torch's own
        timeout does not end the wait for an answer of another program.
        """
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="start-up", daemon=True).start()
        deadline = time.monotonic() + timeout.total_seconds()
        while not future.done() and not self._received and time.monotonic() < deadline:
            wait([future], _LOOK_SECONDS)
        wait([future], SIGNAL_SECONDS)
        if not future.done():
            reason = f"{signal.Signals(self._received[0]).name} at start-up" if self._received else "timeout"
            raise LostPeerError(f"{reason}: ends without {awaited}, which did not answer")
        return future.result()

    def agree(
        self,
        rank: int,
        world_size: int,
        host: Host,
        settings: Mapping[str, Any],
        problems: Sequence[Problem],
        timeout: timedelta,
    ) -> None:
        """Learn the hosts of all ranks, and check that none has errors, or other settings than rank 0.

        Args:
            settings: JSON-compatible values by label, such as a flag.
            problems: reasons why this rank cannot start.

        Raises:
            UserError: on every rank, with one message per difference or error.
            LostPeerError: a rank did not arrive within the timeout, or soon after a signal.
        """
        store = self.open(rank, world_size, timeout)
        if store.add(f"{ARRIVED}/{rank}", 1) > 1:
            raise UserError(
                f"rank {rank} was started twice, the second time on {host}: give each host a different --node_rank, "
                "and all hosts the same hostfile"
            )
        settings = {"number of processes": world_size, **settings}
        if rank == 0:
            store.set(SETTINGS, json.dumps({} if problems else settings))
        keys = [f"{REPORT}/{number}" for number in range(world_size)]
        with contextlib.suppress(dist.DistStoreError):
            if not problems:
                self.unless_ended(partial(store.wait, [SETTINGS], timeout), "the settings of rank 0", timeout)
                problems = [*_differences(settings, json.loads(store.get(SETTINGS)))]
            store.set(keys[rank], json.dumps([host, list(map(vars, problems))]))
            self.unless_ended(partial(store.wait, keys, timeout), "other ranks", timeout)
        arrivals = [f"{ARRIVED}/{number}" for number in range(world_size)]
        missing: list[int] = []
        if not store.check(arrivals):
            missing = [number for number, key in enumerate(arrivals) if not store.check([key])]
        reports = [] if missing else [json.loads(report) for report in store.multi_get(keys)]
        store.set(f"{READ}/{rank}", "")
        self.hosts = [Host(*host) for host, _ in reports]
        by_problem = _group_ranks(
            (problem, number) for number, (_, sent) in enumerate(reports) for problem in map(Problem.read, sent)
        )
        if rank == 0 and (missing or by_problem):
            # Ends the wait of ranks that arrived later, while rank 0 still serves the store.
            for number in missing:
                store.set(keys[number], json.dumps([host, []]))
            present = [f"{READ}/{number}" for number in range(world_size) if number not in missing]
            with contextlib.suppress(dist.DistError):
                store.wait(present, timedelta(seconds=LINGER_SECONDS))
        if missing:
            text = f"{name_ranks(missing)} of {world_size} did not arrive within {timeout.total_seconds():g} s"
            raise LostPeerError(text, missing)
        raise_user_errors(
            problem if len(ranks) == world_size else problem.noted(f"{self.describe(ranks)}: ")
            for problem, ranks in by_problem.items()
        )

    def beat(self, rank: int, iteration: int, waits: bool = False) -> None:
        """Record that a rank is alive after a step, and whether it waits for others."""
        beat = f"{int(waits)}{datetime.now(UTC):%H:%M:%S} UTC after iteration {iteration}"
        self._ask(lambda board: board.set(f"beat/{rank}", beat))

    def last_beats(self, ranks: Iterable[int]) -> str:
        """Return the last heartbeats, by the ranks' own clocks: `rank 3: 12:00:05 UTC after iteration 7`."""
        shown = sorted(ranks)[:MOST_HOSTS]
        return ", ".join(f"rank {rank}: {beat[1:]}" for rank, beat in zip(shown, self.beats(shown), strict=False))

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that did not record that they wait; rank 0, the server of the board, if it is silent."""
        if self.board is None:
            return list(ranks)
        beats = self.beats(ranks)
        if not beats:
            return [rank for rank in ranks if rank == 0]
        return [rank for rank, beat in zip(ranks, beats, strict=True) if beat[0] == "0"]

    def beats(self, ranks: Sequence[int]) -> list[str]:
        """Return the last heartbeat of each rank, all different over time, or nothing if the board does not answer."""
        # `multi_get` respects the time limit; a check whether a key exists does not.
        beats = self._ask(lambda board: board.multi_get([f"beat/{rank}" for rank in ranks])) if ranks else None
        return [beat.decode() for beat in beats or ()]

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the board's answer, or None if there is none in time.

        The store's own timeout does not work when the serving process is stopped: after the timeout the client waits,
        without limit, for confirmation that it cancelled its request. So each request has a thread and a connection.
        """
        answers: list[Any] = []

        def ask(board: Any) -> None:
            with contextlib.suppress(dist.DistError):
                line = board.clone()
                line.set_timeout(timedelta(seconds=BOARD_SECONDS))
                answers.append(question(line))

        if self.board is not None:
            asking = threading.Thread(target=ask, args=(self.board,), name="board", daemon=True)
            asking.start()
            asking.join(BOARD_SECONDS)
        return answers[0] if answers else None

    def describe(self, ranks: Iterable[int]) -> str:
        """Format ranks with their hosts: `ranks 0-3 on node-a (10.0.0.1), rank 6 on node-b (10.0.0.2)`."""
        by_host = _group_ranks((self.hosts[rank] if rank < len(self.hosts) else None, rank) for rank in sorted(ranks))
        described = [name_ranks(members) + (f" on {host}" if host else "") for host, members in by_host.items()]
        more = len(described) - MOST_HOSTS
        return ", ".join(described[:MOST_HOSTS]) + (f" and on {more} more hosts" if more > 0 else "")

    def named_in(self, message: str) -> list[int]:
        """Return the ranks at the addresses that a network error contains in square brackets."""
        return [rank for rank, host in enumerate(self.hosts) if f"[{host.address}]" in message]


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks: `rank 3`, or `ranks 0-3, 6`."""
    # In a run of consecutive numbers, the difference from the position is constant.
    grouped = itertools.groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0])
    runs = [[rank for _, rank in run] for _, run in grouped]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _group_ranks(items: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    grouped: dict[Key, list[int]] = {}
    for key, rank in items:
        grouped.setdefault(key, []).append(rank)
    return grouped


def _differences(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem per setting that differs from that of rank 0; none if rank 0 has errors, and so no settings."""
    for label in dict.fromkeys([*expected, *settings]) if expected else ():
        ours, theirs = (json.dumps(values.get(label), sort_keys=True) for values in (settings, expected))
        if ours != theirs:
            reason = f"{label} differs: {{ours}}, and {{theirs}} on rank 0"
            yield Problem({}, reason, "start all processes with the same settings", ours=ours, theirs=theirs)


def raise_on_all_ranks(group: CommGroup, problems: Sequence[Problem]) -> None:
    """Raise a UserError on every rank of a group if any rank has problems; all ranks must call this.

    The error has the problems of all ranks, each once. Problems that only some ranks have name those ranks.
    """
    gathered = zip(group.ranks, group.gather_objects(list(problems)), strict=False)
    ranks = _group_ranks((problem, rank) for rank, found in gathered for problem in dict.fromkeys(found))
    combined = [
        problem if len(having) == group.size else problem.noted(after=f" (on {name_ranks(having)})")
        for problem, having in ranks.items()
    ]
    raise_user_errors(group.broadcast_object(combined))


@contextlib.contextmanager
def raising_on_all_ranks(group: CommGroup, field_name: str = "") -> Iterator[None]:
    """Raise a UserError that ends the block on any rank on all of them; see `ErrorCollector.collect` for the field."""
    errors = ErrorCollector()
    with errors.collect(field_name):
        yield
    raise_on_all_ranks(group, errors.problems)
