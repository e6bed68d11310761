"""The scheduler: from tickets to step plans."""

from collections.abc import Sequence

import pytest

from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.serve import scheduler as scheduler_module
from megatron_ladder.generate.serve.scheduler import PREFILL_TOKENS, Aborted, Event, Scheduler, StepPlan, Ticket


class RecordedScheduler:
    """A scheduler of three slots that records the events that it delivers."""

    def __init__(self, grace_seconds: float = 0.0) -> None:
        self.delivered: list[tuple[Ticket, Event]] = []
        self.scheduler = Scheduler(3, self._deliver, grace_seconds)

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        self.delivered += events

    def submit(self, *lengths: int) -> list[Ticket]:
        """Submit a ticket for each prompt length."""
        tickets = [Ticket(GenerationRequest((1,) * length, 5), lambda event: None) for length in lengths]
        for ticket in tickets:
            self.scheduler.submit(ticket)
        return tickets


def prompt_lengths(plan: StepPlan) -> dict[int, int]:
    return {slot: len(request.prompt_ids) for slot, request in plan.admit.items()}


def test_tickets_are_admitted_in_order_as_slots_become_free() -> None:
    recorded = RecordedScheduler()
    scheduler = recorded.scheduler
    tickets = recorded.submit(1, 2, 3, 4, 5)
    assert prompt_lengths(scheduler.next_plan()) == {0: 1, 1: 2, 2: 3}
    assert (scheduler.running, scheduler.waiting) == (3, 2)
    assert scheduler.next_plan() == StepPlan()
    tokens = [NewToken(0, 7, "", None), NewToken(1, 8, "", "eos"), NewToken(2, 9, "", None)]
    scheduler.deliver(tokens)
    assert recorded.delivered == list(zip(tickets, tokens, strict=False))
    assert prompt_lengths(scheduler.next_plan()) == {1: 4}
    scheduler.cancel(tickets[2])
    scheduler.cancel(tickets[1])
    plan = scheduler.next_plan()
    assert (plan.release, prompt_lengths(plan)) == ((2,), {2: 5})
    assert scheduler.next_plan().release == ()


def test_prefill_of_one_step_is_limited() -> None:
    """The limit includes the padding of shorter prompts."""
    recorded = RecordedScheduler()
    recorded.submit(10, PREFILL_TOKENS // 2, 1, PREFILL_TOKENS * 2)
    assert prompt_lengths(recorded.scheduler.next_plan()) == {0: 10, 1: PREFILL_TOKENS // 2}
    assert prompt_lengths(recorded.scheduler.next_plan()) == {2: 1}
    recorded.scheduler.deliver([NewToken(0, 7, "", "length")])
    assert prompt_lengths(recorded.scheduler.next_plan()) == {0: PREFILL_TOKENS * 2}


def test_idle_scheduler_returns_a_plan_at_every_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "HEARTBEAT_SECONDS", 0.01)
    assert RecordedScheduler().scheduler.next_plan() == StepPlan()


def test_samples_are_aborted_after_the_grace_period_or_by_a_second_stop() -> None:
    recorded = RecordedScheduler(grace_seconds=1000)
    scheduler = recorded.scheduler
    tickets = recorded.submit(1, 2, 3, 4)
    scheduler.stop()
    assert len(scheduler.next_plan().admit) == 3 and not recorded.delivered
    scheduler.stop()
    assert scheduler.next_plan() == StepPlan(release=(0, 1, 2))
    assert recorded.delivered == [(ticket, Aborted("the server is shutting down")) for ticket in tickets]
    scheduler.close()
    assert scheduler.next_plan() == StepPlan(stop=True)


def test_an_error_of_the_server_thread_ends_the_program() -> None:
    scheduler = RecordedScheduler().scheduler
    scheduler.close(OSError("no socket"))
    with pytest.raises(OSError, match="no socket"):
        scheduler.next_plan()
