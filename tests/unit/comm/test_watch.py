"""Lost ranks: their names in errors, and the end of a rank that waits in a captured step for one."""

import threading
from typing import NoReturn

import pytest

from megatron_ladder.comm import watch
from megatron_ladder.comm.agreement import Host, Peers
from megatron_ladder.comm.watch import MOST_MISSED_BEATS, Watch, _RecordedCollective, naming_lost_peers
from megatron_ladder.errors import LostPeerError
from tests.helpers.patience import patient


class Board(Peers):
    """The board of three ranks, of which this process is the first."""

    def __init__(self, silent: int | None) -> None:
        super().__init__([Host(f"node-{rank}", f"10.0.0.{rank}") for rank in range(3)])
        self.silent_rank = silent
        self.written = self.looks = 0
        self.was_busy = threading.Event()

    def beat(self, rank: int, iteration: int, waits: bool = False) -> None:
        self.written += 1
        if self.written == 3 * MOST_MISSED_BEATS:
            self.was_busy.set()

    def beats(self, ranks: object) -> list[str]:
        self.looks += 1
        return [f"{0 if rank == self.silent_rank else self.looks}" for rank in (1, 2)]

    def last_beats(self, ranks: object) -> str:
        return ""


# The watch's thread ends with the process.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_in_a_captured_step_ends_only_when_another_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, ended = list[Exception](), threading.Event()

    def fail(error: Exception) -> NoReturn:
        errors.append(error)
        ended.set()
        raise SystemExit

    monkeypatch.setattr(watch, "fail", fail)
    board = Board(silent=2)
    monkeypatch.setattr(watch, "BEAT_SECONDS", 1e-3)
    peers = Watch(board)
    assert board.was_busy.wait(patient(30)) and board.looks == 0, "only a captured step waits for others"
    board.was_busy.clear()
    board.silent_rank, board.written = None, 0
    with peers.waiting():
        assert board.was_busy.wait(patient(30)) and board.looks > MOST_MISSED_BEATS
        assert not errors, "a long step is no reason"
        board.silent_rank = 2
        assert ended.wait(patient(30))
    for thread in threading.enumerate():
        if thread.name == "watch":
            thread.join()
    assert str(errors[0]) == "rank 2 on node-2 (10.0.0.2) is gone or does not answer: no heartbeat any more"


def test_a_lost_rank_is_the_one_at_the_address_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that still compute do not report that they wait, either. Backward has many reduces in flight."""
    collectives = [_RecordedCollective(f"all_reduce {number}", range(3), finished=False) for number in range(1, 8)]
    monkeypatch.setattr(watch, "_recorded_collectives", lambda: collectives)
    peers = Peers([Host(f"node-{rank}", f"10.0.0.{rank}") for rank in range(3)])
    with pytest.raises(LostPeerError, match=r"^rank 2 on node-2 .* is gone") as caught, naming_lost_peers(peers):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:5031")
    assert caught.value.lost == (2,)
    first, *others, last = str(caught.value).splitlines()[1:]
    assert first.startswith("not finished: all_reduce 1; with rank 1 on node-1 (10.0.0.1), rank 2 on node-2 ")
    assert len(others) == 3 and last == "not finished: 3 more; the last is all_reduce 7"


def test_a_board_that_does_not_answer_means_that_rank_0_is_gone() -> None:
    missed = watch._MissedBeats(Peers([Host("a", "10.0.0.1")] * 3), this_rank=1)
    for _ in range(MOST_MISSED_BEATS):
        assert missed.error() is None
        missed.look()
    error = missed.error()
    assert error is not None and error.lost == (0,)
