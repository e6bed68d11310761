"""From tickets to plans."""

from collections.abc import Sequence

import pytest

from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.serve import scheduler as scheduler_module
from megatron_ladder.generate.serve.plans import Plan
from megatron_ladder.generate.serve.scheduler import PREFILL_TOKENS, Ended, Event, Scheduler, Ticket


class Desk:
    """A scheduler of three slots, and what it tells."""

    def __init__(self, grace_seconds: float = 0.0) -> None:
        self.told: list[tuple[Ticket, Event]] = []
        self.scheduler = Scheduler(3, self._deliver, grace_seconds)

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        self.told += events

    def submit(self, *lengths: int) -> list[Ticket]:
        """Tickets with prompts so long."""
        tickets = [Ticket(GenerationRequest((1,) * length, 5), lambda event: None) for length in lengths]
        for ticket in tickets:
            self.scheduler.submit(ticket)
        return tickets


def prompt_lengths(plan: Plan) -> dict[int, int]:
    return {slot: len(request.prompt_ids) for slot, request in plan.admit.items()}


def test_tickets_enter_in_order_as_slots_become_free() -> None:
    desk = Desk()
    tickets = desk.submit(1, 2, 3, 4, 5)
    assert prompt_lengths(desk.scheduler.next_plan()) == {0: 1, 1: 2, 2: 3}
    assert (desk.scheduler.running, desk.scheduler.waiting) == (3, 2)
    assert desk.scheduler.next_plan() == Plan()
    tokens = [NewToken(0, 7, "", None), NewToken(1, 8, "", "eos"), NewToken(2, 9, "", None)]
    desk.scheduler.tell(tokens)
    assert desk.told == list(zip(tickets, tokens, strict=False))
    assert prompt_lengths(desk.scheduler.next_plan()) == {1: 4}
    desk.scheduler.cancel(tickets[2])
    desk.scheduler.cancel(tickets[1])
    plan = desk.scheduler.next_plan()
    assert (plan.gone, prompt_lengths(plan)) == ((2,), {2: 5})
    assert desk.scheduler.next_plan().gone == ()


def test_one_step_prefills_only_so_much() -> None:
    """Counted as the prompts lie side by side, filled up to the longest."""
    desk = Desk()
    desk.submit(10, PREFILL_TOKENS // 2, 1, PREFILL_TOKENS * 2)
    assert prompt_lengths(desk.scheduler.next_plan()) == {0: 10, 1: PREFILL_TOKENS // 2}
    assert prompt_lengths(desk.scheduler.next_plan()) == {2: 1}
    desk.scheduler.tell([NewToken(0, 7, "", "length")])
    assert prompt_lengths(desk.scheduler.next_plan()) == {0: PREFILL_TOKENS * 2}


def test_an_idle_scheduler_gives_a_plan_at_every_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "HEARTBEAT_SECONDS", 0.01)
    assert Desk().scheduler.next_plan() == Plan()


def test_the_end_comes_after_the_grace_or_with_the_second_stop() -> None:
    desk = Desk(grace_seconds=1000)
    tickets = desk.submit(1, 2, 3, 4)
    desk.scheduler.stop()
    assert len(desk.scheduler.next_plan().admit) == 3 and not desk.told
    desk.scheduler.stop()
    assert desk.scheduler.next_plan() == Plan(gone=(0, 1, 2))
    assert desk.told == [(ticket, Ended("the server is shutting down")) for ticket in tickets]
    desk.scheduler.close()
    assert desk.scheduler.next_plan() == Plan(stop=True)


def test_a_fault_of_the_servers_thread_ends_the_program() -> None:
    desk = Desk()
    desk.scheduler.close(OSError("no socket"))
    with pytest.raises(OSError, match="no socket"):
        desk.scheduler.next_plan()
