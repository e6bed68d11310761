"""Detects lost peers and hangs, and reports where each rank waits.

Until the first step is done, processes start up and compile at different speeds, and a collective may wait long. After
it, a peer that is late by more than a short timeout counts as lost. Shortly before the timeout, every rank without
progress prints the stacks of its threads and its unfinished collectives. So both the waiting ranks and the rank that
they wait for, which may be in no collective at all, show where they are. A rank without progress:

    last progress         0.8 timeout          timeout             1.25 timeout
    |---------------------|--------------------|-------------------|
                          stacks; writes to    torch raises an     the watch ends a process that still waits
                          the board whether    error in the        for a message, or in a captured step for
                          it waits             collective          a rank without heartbeats

The collectives come from torch's flight recorder, which records all collectives of the process, including DeepSpeed's.

torch times a collective from its launch on the host, and knows no collectives in CUDA graphs. The host launches a
captured step at once, and what follows, such as the reduce of the gradient norm, while the step still runs. So the
timeout includes the time of a step. A rank that waits in the driver for a captured step has no timeout. It ends when
the heartbeats of another rank have stopped, however long its step takes.
"""

import contextlib
import faulthandler
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, Self

import torch.distributed as dist

from megatron_ladder.comm.agreement import Peers, name_ranks
from megatron_ladder.errors import LostPeerError, fail
from megatron_ladder.torch_private import process_groups, recorded_collectives

REPORT_AT = 0.8
"""Fraction of the timeout after which a rank without progress reports where it is."""
END_AT = 1.25
"""Fraction of the timeout after which the watch itself ends a process that still waits for a message, or in a captured
step for a rank that is gone."""
BEAT_SECONDS = 5.0
"""Time between two heartbeats of a rank."""
MOST_MISSED_BEATS = 12
"""Number of looks without a new heartbeat of a rank after which it counts as gone."""
GLOO_FAILURES = ("gloo/transport", "Application timeout caused pair closure")
"""Texts in the errors that gloo raises when a peer is gone or late; they have no separate type."""
MOST_COLLECTIVES = 4
"""Maximum number of unfinished collectives to describe, oldest first: the others wait for the oldest."""


class _RecordedCollective(NamedTuple):
    """A collective that this rank launched."""

    text: str
    """Name in torch, number in the process group (from 1), group, and the dtypes and shapes of the inputs."""
    ranks: Sequence[int]
    """Global ranks; none if the group no longer exists."""
    finished: bool
    """Whether it has ended; it may have failed."""


def _recorded_collectives() -> list[_RecordedCollective]:
    """Return the collectives in torch's flight recorder, in launch order.

    The recorder keeps the last TORCH_FR_BUFFER_SIZE collectives. The list is empty if that is 0 or if torch has no
    recorder.
    """
    groups = {group.group_name: group for group in process_groups()}
    collectives = []
    for entry in recorded_collectives().get("entries", []):
        name = entry["profiling_name"].partition(":")[2]
        group_name, group = entry["process_group"]
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        process_group = groups.get(group_name)
        ranks = [] if process_group is None else dist.get_process_group_ranks(process_group)
        members = f" of {name_ranks(ranks)}" if ranks else ""
        inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
        shapes = ", ".join(f"{dtype}{size}" for dtype, size in inputs) or "no data"
        text = f"{name} {number} in group {'world' if group == 'default_pg' else group!r}{members}, {shapes}"
        collectives.append(_RecordedCollective(text, ranks, entry["retired"]))
    return collectives


def _unfinished_collectives() -> list[_RecordedCollective]:
    """Return the unfinished collectives; the last one if none is, since it may have failed and count as finished."""
    collectives = _recorded_collectives()
    return [collective for collective in collectives if not collective.finished] or collectives[-1:]


def _describe_unfinished(peers: Peers) -> str:
    """Describe the collectives that this rank waits for, or the last one, with the other participants; one per line."""
    collectives = _unfinished_collectives()
    lines = []
    if peers.pipeline.awaited is not None:
        lines.append(f"exchanges a message with {peers.describe([peers.pipeline.awaited])}")
    for collective in collectives[:MOST_COLLECTIVES]:
        others = sorted({*collective.ranks} - {_this_rank()})
        state = "started last" if collective.finished else "not finished"
        lines.append(f"{state}: {collective.text}" + (f"; with {peers.describe(others)}" if others else ""))
    if len(collectives) > MOST_COLLECTIVES:
        lines.append(f"not finished: {len(collectives) - MOST_COLLECTIVES} more; the last is {collectives[-1].text}")
    return "\n".join(lines or ["no collective is recorded"])


@contextlib.contextmanager
def naming_lost_peers(peers: Peers | None = None) -> Iterator[None]:
    """Convert the error of a collective whose peer is gone or does not respond to a LostPeerError.

    Its message lists the unfinished collectives, and the participants that are lost: those at the address in torch's
    message, or else the ones that did not record that they wait.
    """
    peers = peers or Peers()
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not isinstance(error, dist.DistError) and not any(words in message for words in GLOO_FAILURES):
            raise
        members = {rank for collective in _unfinished_collectives() for rank in collective.ranks}
        partners = sorted(members - {_this_rank()})
        if peers.pipeline.awaited is not None:
            partners = [peers.pipeline.awaited]
        at_address = [rank for rank in peers.named_in(message) if rank in partners]
        lost = at_address or _silent_ranks(partners, peers)
        # The errors of gloo, of NCCL's watchdog and of the store: "Timed out waiting", "timeout".
        timed_out = re.search(r"timed out|timeout", message, re.IGNORECASE) is not None
        text = f"{_describe_lost(lost, peers)}: {message}\n{_describe_unfinished(peers)}"
        raise LostPeerError(text, lost, timed_out) from error


def _silent_ranks(partners: list[int], peers: Peers) -> list[int]:
    """Return the partners that did not record that they wait, or else any such ranks, or else all partners."""
    others = [rank for rank in range(len(peers.hosts)) if rank != _this_rank()]
    return peers.silent(partners) or peers.silent(others) or partners


def _describe_lost(lost: list[int], peers: Peers) -> str:
    """Describe lost ranks and their last heartbeats: `rank 3 on node-b (10.0.0.2) is gone or does not answer`."""
    some = "one of " if len(lost) > 1 else ""
    who = some + (peers.describe(lost) or "another process")
    beats = peers.last_beats(lost)
    return f"{who} is gone or does not answer" + (f" (last heard of: {beats})" if beats else "")


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class _MissedBeats:
    """Counts how often in a row a look at the board found no new heartbeat of each rank.

    Looks are counted instead of time, because this process may itself have been stopped for a while.
    """

    def __init__(self, peers: Peers, this_rank: int) -> None:
        self._peers = peers
        self._others = [rank for rank in range(len(peers.hosts)) if rank != this_rank]
        self._last: dict[int, str] = {}
        self._missed = dict.fromkeys(self._others, 0)

    def look(self) -> None:
        beats = dict(zip(self._others, self._peers.beats(self._others), strict=False))
        for rank in self._others:
            # If the board does not answer, only rank 0, which serves it, may be gone.
            is_new = beats[rank] != self._last.get(rank) if beats else rank != 0
            self._missed[rank] = 0 if is_new else self._missed[rank] + 1
        self._last |= beats

    def error(self) -> LostPeerError | None:
        """Return the error about the ranks that are gone, if there are any."""
        gone = [rank for rank, missed in self._missed.items() if missed >= MOST_MISSED_BEATS]
        return LostPeerError(f"{_describe_lost(gone, self._peers)}: no heartbeat any more", gone) if gone else None


class Watch:
    """A thread that reports where the process is when it makes no progress, and ends it if it waits for a lost peer.

    A training loop gives two timeouts and calls `step_done` after each step; `with watch.patient():` is for work that
    ranks do at different speeds, such as writing files. Progress means that a step finished, a collective was
    launched, or a message between pipeline stages arrived. Without timeouts, only peers are watched, inside
    `with watch.waiting():`.
    """

    def __init__(
        self,
        peers: Peers,
        startup: timedelta = timedelta.max,
        running: timedelta = timedelta.max,
        on_loss: Callable[[LostPeerError], None] = lambda error: None,
    ) -> None:
        """Start to watch; every rank has written a heartbeat to the board before.

        gloo applies to messages between pipeline stages the timeout that their group had when it was created, and
        ignores later changes, so the watch ends a rank that waits too long for one.

        Args:
            startup: timeout until the first step is done, and in `patient`.
            running: timeout of later steps, to which the time of a step is added.
            on_loss: receives the error with which the watch ends the process, immediately before it does.
        """
        self._peers = peers
        self._on_loss = on_loss
        # Later, the process group may not exist any more.
        self._rank = _this_rank()
        self._startup = startup
        self._running = min(startup, running)
        self._limit = startup
        self._iteration = 0
        self._stepped = False
        self._longest_step = timedelta()
        """The time of the longest step after the first one."""
        self._progress = time.monotonic()
        self._step_began = self._progress
        self._last_beat = -math.inf
        self._reported = False
        """Whether this rank has reported where it is since the last progress."""
        self._waits = False
        """Whether this rank waited for others when it reported."""
        self._in_captured_step = threading.Event()
        self._stop = threading.Event()
        if len(peers.hosts) > 1:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._stop.set()
        if kind is None:
            self._set_limit(self._startup)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """End the process inside the block, in which it waits for a captured step, as soon as a peer is gone."""
        self._in_captured_step.set()
        try:
            yield
        finally:
            self._in_captured_step.clear()

    def step_done(self, iteration: int = 0) -> None:
        """Record progress; call this after every optimizer step."""
        self._progress = time.monotonic()
        self._iteration = iteration
        step = timedelta(seconds=self._progress - self._step_began)
        self._step_began = self._progress
        if not self._stepped:
            # The first step includes compilation, so its time is not typical of other steps.
            self._stepped = True
            self._set_limit(self._running)
        elif step > self._longest_step:
            self._longest_step = step
            self._set_limit(self._running + step)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Use the start-up timeout inside the block."""
        self._set_limit(self._startup)
        yield
        self._set_limit(self._running + self._longest_step if self._stepped else self._startup)
        self._step_began = self._progress

    def _set_limit(self, limit: timedelta) -> None:
        self._progress = time.monotonic()
        self._limit = limit
        for group in process_groups():
            group.set_timeout(limit)

    def _watch(self) -> None:
        launched = self._launched()
        missed = _MissedBeats(self._peers, self._rank)
        while not self._stop.wait(min(1.0, BEAT_SECONDS, self._running.total_seconds() / 20)):
            now = time.monotonic()
            before, launched = launched, self._launched()
            if launched != before:
                self._progress = now
            seconds = now - self._progress
            limit = self._limit.total_seconds()
            if (seconds >= limit * REPORT_AT) != self._reported:
                self._change_report(now)
            is_due = now - self._last_beat > BEAT_SECONDS
            if is_due:
                self._beat(now)
            # Peers are counted as gone only while this rank seems to wait for them.
            captured = self._in_captured_step.is_set()
            if not (captured or self._reported):
                missed = _MissedBeats(self._peers, self._rank)
                continue
            if is_due:
                missed.look()
            error = self._no_message(seconds) or missed.error()
            if error is not None and (captured or seconds >= limit * END_AT):
                self._on_loss(error)
                fail(error)

    def _launched(self) -> tuple[dict[str, int], int]:
        """Return the number of the last collective in each process group, and that of messages.

        The recorder's times are those of the wall clock, which may be set, so they measure no duration.
        """
        groups = recorded_collectives(details=False).get("pg_status", {})
        collectives = {name: status["last_enqueued_collective"] for name, status in groups.items()}
        return collectives, self._peers.pipeline.transferred

    def _change_report(self, now: float) -> None:
        """Report that there is no progress, or write to the board that there is some again."""
        self._reported = not self._reported
        # A rank in no collective is the one that others wait for, so it does not report that it waits.
        is_in_collective = not all(collective.finished for collective in _recorded_collectives())
        self._waits = self._reported and (is_in_collective or self._peers.pipeline.awaited is not None)
        self._beat(now)
        if self._reported:
            self._report(now - self._progress)

    def _no_message(self, seconds: float) -> LostPeerError | None:
        """Return the error about the rank whose message does not arrive, if a report has said so."""
        sender = self._peers.pipeline.awaited
        if not self._reported or sender is None:
            return None
        lost = _silent_ranks([sender], self._peers)
        return LostPeerError(f"{_describe_lost(lost, self._peers)}: no message for {seconds:.0f} s", lost, True)

    def _beat(self, now: float) -> None:
        self._last_beat = now
        self._peers.beat(self._rank, self._iteration, self._waits)

    def _report(self, seconds: float) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        where = self._peers.describe([self._rank])
        # A single write, because other ranks write to the same stream.
        sys.stderr.write(
            f"*** {where}: no progress for {seconds:.0f} s; in {self._limit.total_seconds() * (1 - REPORT_AT):.0f} s a "
            f"collective that still waits ends the run\n{_describe_unfinished(self._peers)}\n{stacks}"
            f"*** end of the stacks of rank {self._rank}\n"
        )
        sys.stderr.flush()
