"""Schedules by NCCL's rules: no rank waits for ever, transfers run under passes, and planted faults are found."""

from collections.abc import Callable
from graphlib import CycleError

import pytest

from megatron_ladder.engine.schedule import Pass, Slot, make_schedule
from tests.helpers.nccl_rules import DisagreementError, Rules, programs_of
from tests.helpers.pairwise import pairwise

STAGES = {f"{stages} stages": stages for stages in (2, 3, 4, 6)}
CHUNKS = {f"{chunks} chunks": chunks for chunks in (1, 2, 3)}
WORK = {"training": True, "evaluation": False}
LAUNCHES = {
    "launches": (Rules(0.05), True),
    "launches in one queue": (Rules(0.05, one_queue=True), True),
    "launches that block": (Rules(0.05, blocks=True), False),
}
"""Rules, and whether receives start early."""


COUNTS = {"few": lambda stages: range(1, stages + 1), "many": lambda stages: range(stages + 1, 3 * stages + 1)}
"""Numbers of micro-batches for a number of stages."""


MESSAGES = {"one message": 1, "two messages": 2, "three messages": 3}


@pytest.mark.parametrize(
    ("stages", "chunks", "trains", "launches", "counts", "messages"),
    pairwise(STAGES, CHUNKS, WORK, LAUNCHES, COUNTS, MESSAGES),
)
def test_no_rank_waits_for_ever(
    stages: int, chunks: int, trains: bool, launches: tuple[Rules, bool], counts: Callable[[int], range], messages: int
) -> None:
    rules, receives_early = launches
    for count in counts(stages):
        schedule = make_schedule(stages, chunks, count, trains)
        programs = programs_of(schedule, receives_early, messages=messages)
        # Forward and backward of each chunk, on a rank that waits for nothing.
        assert rules.play(programs) >= (1 + trains) * chunks * count


def excess(stages: int, chunks: int, receives_early: bool, has_two_groups: bool) -> float:
    """Return the time of a step with transfers, relative to one in which they wait for their senders' passes only.

    For all chunks of a rank together, forward of a micro-batch takes 20 times as long as a transfer, backward 40 times.
    """

    def seconds(work: Pass) -> float:
        return (1.0 if work.is_forward else 2.0) / chunks

    programs = programs_of(make_schedule(stages, chunks, 3 * stages), receives_early, seconds, has_two_groups)
    return Rules(0.05).play(programs) / Rules(0.05, bound=True).play(programs) - 1


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 1), (4, 4), (8, 4)])
def test_a_step_takes_as_long_as_its_data_need(stages: int, chunks: int) -> None:
    assert excess(stages, chunks, True, True) == pytest.approx(0, abs=1e-9)


def test_late_receives_in_one_group_are_slower() -> None:
    assert excess(4, 4, False, True) > 0.05
    assert excess(4, 4, False, False) > 0.1


@pytest.mark.parametrize("trains", [True, False])
def test_a_pass_begins_with_the_first_message_of_the_one_before_it(trains: bool) -> None:
    """With two messages, each pass but the first begins when half of the time of the one before it is over."""
    stages = 4
    schedule = make_schedule(stages, 1, 1, trains)
    passes = (1 + trains) * stages
    for messages, receives_early, seconds in ((1, True, passes), (2, True, 1 + (passes - 1) / 2), (2, False, passes)):
        programs = programs_of(schedule, receives_early, messages=messages)
        # Backward of the last stage receives nothing, and begins when its forward pass ends.
        waits_for_loss = trains and seconds != passes
        assert Rules().play(programs) == pytest.approx(seconds + waits_for_loss / 2)


def reversed_on_rank(schedule: list[list[Slot]], rank: int) -> list[list[Slot]]:
    """Return the schedule, of whose rank the transfers of each slot start in the opposite order."""
    return [
        [slot._replace(transfers=slot.transfers[::-1]) for slot in slots] if number == rank else slots
        for number, slots in enumerate(schedule)
    ]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_faults_hang(stages: int, chunks: int) -> None:
    schedule = make_schedule(stages, chunks, 2 * stages)
    with pytest.raises(CycleError):
        Rules().play(programs_of(schedule, has_two_groups=False))
    with pytest.raises(CycleError):
        Rules(blocks=True).play(programs_of(schedule))
    faulty = programs_of(reversed_on_rank(schedule, stages // 2), receives_early=False)
    with pytest.raises(CycleError):
        Rules(blocks=True).play(faulty)
    # Without early receives, one group suffices, unless one rank has another order.
    Rules().play(programs_of(schedule, receives_early=False, has_two_groups=False))
    faulty = programs_of(reversed_on_rank(schedule, stages // 2), receives_early=False, has_two_groups=False)
    with pytest.raises(CycleError):
        Rules().play(faulty)


def test_a_rank_that_swaps_passes_is_found() -> None:
    """Its neighbour takes the state of one micro-batch for that of another."""
    schedule = make_schedule(3, 1, 6)
    first, second, *others = schedule[0]
    assert first.work is not None and second.work is not None
    schedule[0] = [first._replace(work=second.work), second._replace(work=first.work), *others]
    with pytest.raises(DisagreementError, match=r"'ascending', 0, 1"):
        Rules().play(programs_of(schedule))
