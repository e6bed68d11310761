"""How long a run waits for a peer, and what it tells when it has waited in vain.

Until the first step is done, processes start up and compile at their own pace, and a collective may wait long. After
it, a peer that is late by more than a short time is lost. Shortly before that time is over, every rank that makes no
progress tells where all its threads are and which collectives it has started and not finished: those that wait, and
the one that they wait for, which may be in no collective at all.

What was started comes from torch's flight recorder, which notes the collectives of everybody in the process,
DeepSpeed's own included.
"""

import contextlib
import faulthandler
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ladder.comm.agreement import Peers, name_ranks
from megatron_ladder.errors import LostPeerError, fail

TOLD_AT = 0.8
"""Part of the timeout after which a rank without progress tells where it is."""
GIVEN_UP_AT = 1.25
"""Part of the timeout after which the watch itself ends a process that still waits for a message."""
BEAT_SECONDS = 5.0
"""How often a rank says that it is alive."""
MOST_COLLECTIVES = 4
"""Unfinished collectives that are described, the oldest first: one waits for it, and the others behind it."""


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has started."""

    name: str
    """As torch calls it, such as all_reduce."""
    group: str
    """What its process group is for."""
    ranks: tuple[int, ...]
    """The global ranks of the group; empty if it is gone."""
    number: int
    """How many of the group were started, this one included."""
    shapes: str
    """Of the tensors that go in, with their dtypes."""
    started: float
    """Seconds since the epoch."""
    finished: bool
    """Whether it has ended, be it by a failure."""

    def __str__(self) -> str:
        members = f" of {name_ranks(self.ranks)}" if self.ranks else ""
        return f"{self.name} {self.number} in group {self.group!r}{members}, {self.shapes}"


def recorded_collectives() -> list[Collective]:
    """The newest collectives that this process has started, as many as the recorder keeps, in their order.

    TORCH_FR_BUFFER_SIZE is how many it keeps; with 0, or a torch that has no such recorder, the list is empty.
    """
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if on_gpu else "_dump_fr_trace_json", None)
    if dump is None:
        return []
    groups = {group.group_name: group for group in distributed_c10d._world.pg_map}
    found = []
    for entry in json.loads(dump()).get("entries", []):
        group_name, description = entry["process_group"]
        group = groups.get(group_name)
        inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
        found.append(
            Collective(
                name=entry["profiling_name"].partition(":")[2],
                group="world" if description == "default_pg" else description,
                ranks=() if group is None else tuple(dist.get_process_group_ranks(group)),
                number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
                shapes=", ".join(f"{dtype}{size}" for dtype, size in inputs) or "no data",
                started=entry["time_created_ns"] / 1e9,
                finished=entry["retired"],
            )
        )
    return found


def unfinished_collectives() -> list[Collective]:
    """Those that this rank has started and not finished; the last one if it has finished all.

    The recorder may call finished what has failed.
    """
    collectives = recorded_collectives()
    return [collective for collective in collectives if not collective.finished] or collectives[-1:]


def describe_unfinished(peers: Peers) -> str:
    """What this rank waits for or has started last, and who else takes part, a line each."""
    collectives = unfinished_collectives()
    lines = []
    for collective in collectives[:MOST_COLLECTIVES]:
        others = sorted({*collective.ranks} - {this_rank()})
        state = "started last" if collective.finished else "not finished"
        lines.append(f"{state}: {collective}" + (f"; with {peers.describe(others)}" if others else ""))
    if len(collectives) > MOST_COLLECTIVES:
        lines.append(f"not finished: {len(collectives) - MOST_COLLECTIVES} more; the last is {collectives[-1]}")
    return "\n".join(lines or ["no collective is recorded"])


def lost_peers(message: str, peers: Peers) -> list[int]:
    """Those whom a network error can mean, among the ranks in a collective with this one.

    Where its text has an address, those there; else those that have not said that they wait as well. If all partners
    wait too, they wait for one of the other ranks.
    """
    partners = sorted({rank for one in unfinished_collectives() for rank in one.ranks} - {this_rank()})
    at_address = [rank for rank in peers.named_in(message) if rank in partners]
    return at_address or silent_ranks(partners, peers)


def silent_ranks(partners: list[int], peers: Peers) -> list[int]:
    """Those of the partners that have not said that they wait, or else those of all ranks; or else the partners."""
    others = [rank for rank in range(len(peers.hosts)) if rank != this_rank()]
    return peers.silent(partners) or peers.silent(others) or partners


def describe_lost(lost: list[int], peers: Peers) -> str:
    """`rank 3 on node-b (10.0.0.2) is gone or does not answer`, and when those ranks last said that they are alive."""
    who = ("one of " if len(lost) > 1 else "") + peers.describe(lost) if lost else "another process"
    beats = peers.last_beats(lost)
    return f"{who} is gone or does not answer" + (f" (last heard of: {beats})" if beats else "")


def awaited_peer(thread: int) -> int | None:
    """The rank with which the thread of that identity is exchanging a single message, if it is.

    What passes between pipeline stages is not recorded, and gloo lets it wait as long as a group was allowed to when
    it was made: no later timeout counts.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_globals.get("__name__") != distributed_c10d.__name__:
        return None
    peer: int | None = frame.f_locals.get({"recv": "src", "send": "dst"}.get(frame.f_code.co_name, ""))
    return peer


def this_rank() -> int:
    """This process's number; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def set_timeouts(timeout: timedelta) -> None:
    """Gives every process group of this rank, DeepSpeed's included, a timeout for the collectives to come."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


class HangWatch:
    """Shortens timeouts after the first step, and tells where the process is when it makes no progress.

    `with HangWatch(...) as watch:` around the loop, `watch.step_done()` in it, and `with watch.patient():` around
    what ranks may do at different speeds, such as writing files. Progress is a finished step or a collective
    started.
    """

    def __init__(
        self,
        peers: Peers,
        startup: timedelta,
        running: timedelta,
        on_loss: Callable[[LostPeerError], None] = lambda error: None,
    ) -> None:
        """`startup` is the timeout until the first step is done and in `patient`, `running` the one after it.

        `on_loss` hears why the watch ends the process, just before.
        """
        self._peers = peers
        self._on_loss = on_loss
        self._iteration = 0
        self._beaten = 0.0
        self._startup = startup
        self._running = min(startup, running)
        self._limit = startup
        self._rank = dist.get_rank()
        self._stepped = False
        self._progress = time.time()
        self._told = False
        self._worker = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> Self:
        self._worker = threading.get_ident()
        if dist.get_world_size() > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if kind is None:
            self._set_limit(self._startup)

    def step_done(self, iteration: int = 0) -> None:
        """To be called after every optimizer step."""
        self._progress, self._iteration = time.time(), iteration
        if not self._stepped:
            self._stepped = True
            self._set_limit(self._running)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """A stretch with the long timeout."""
        self._set_limit(self._startup)
        yield
        self._set_limit(self._running if self._stepped else self._startup)

    def _set_limit(self, limit: timedelta) -> None:
        self._progress = time.time()
        self._limit = limit
        set_timeouts(limit)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit.total_seconds() / 20)):
            limit = self._limit.total_seconds()
            if time.time() - self._beaten > BEAT_SECONDS:
                self._beaten = time.time()
                self._peers.beat(self._rank, self._iteration)
            # What is recorded is read only when no step has ended for long.
            if time.time() - self._progress < limit * TOLD_AT:
                self._take_back()
                continue
            collectives = recorded_collectives()
            progress = max(self._progress, collectives[-1].started if collectives else 0.0)
            silent = time.time() - progress
            if silent < limit * TOLD_AT:
                self._take_back()
            elif not self._told:
                self._told = True
                # One that is in no collective is waited for, and says nothing.
                if awaited_peer(self._worker) is not None or not all(one.finished for one in collectives):
                    self._peers.say_waiting(self._rank, True)
                self._tell(silent)
            peer = awaited_peer(self._worker)
            if silent >= limit * GIVEN_UP_AT and peer is not None:
                lost = silent_ranks([peer], self._peers)
                text = f"{describe_lost(lost, self._peers)}: nothing has come for {silent:.0f} s"
                self._end(LostPeerError(text, lost))

    def _end(self, error: LostPeerError) -> None:
        self._on_loss(error)
        fail(error)

    def _take_back(self) -> None:
        if self._told:
            self._told = False
            self._peers.say_waiting(self._rank, False)

    def _tell(self, seconds: float) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        where, peer = self._peers.describe([self._rank]), awaited_peer(self._worker)
        exchange = "" if peer is None else f"exchanges a message with {self._peers.describe([peer])}\n"
        # One write, since other ranks write to the same stream.
        sys.stderr.write(
            f"*** {where}: no progress for {seconds:.0f} s; in {self._limit.total_seconds() * (1 - TOLD_AT):.0f} s a "
            f"collective that still waits ends the run\n{exchange}{describe_unfinished(self._peers)}\n{stacks}"
            f"*** end of the stacks of rank {self._rank}\n"
        )
        sys.stderr.flush()
