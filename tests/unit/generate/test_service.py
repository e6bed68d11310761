"""Room and counts of the samples of a request."""

from typing import Any

import pytest

from megatron_ladder.generate.options import ServeOptions
from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.serve.app import ServerSetup, Service, _ActiveRequest
from megatron_ladder.generate.serve.protocol import ApiError, ApiRequest
from megatron_ladder.generate.serve.scheduler import Aborted, Scheduler

NEXT, LAST = NewToken(0, 7, "", None), NewToken(0, 8, "", "length")


def new_service(room: int) -> Service:
    model: Any = None
    scheduler = Scheduler(1, lambda events: None, grace_seconds=0.0)
    options = ServeOptions(max_concurrent=1, max_queue=room - 1)
    return Service(scheduler, ServerSetup(options, model, model, (), None))


def start_request(service: Service, samples: int) -> _ActiveRequest:
    """Start a request whose tokens nobody takes."""
    service.acquire(samples)
    requests = (GenerationRequest((1,), 5),) * samples
    return _ActiveRequest(
        service, ApiRequest(requests, chat=False, stream=True, include_usage=False, logprobs=None, prompt_tokens=1)
    )


def test_each_sample_counts_once_as_begun_and_once_as_cancelled() -> None:
    service = new_service(3)
    active = start_request(service, 3)
    tickets = list(active._unfinished.values())
    for event in (NEXT, NEXT, LAST):
        tickets[0].on_event(event)
    tickets[1].on_event(NEXT)
    tickets[2].on_event(Aborted("no more"))
    metrics = service.metrics
    assert (metrics.first_tokens, metrics.generated_tokens, metrics.cancelled_samples) == (2, 4, 1)
    active.close()
    # The slot is released before the next step, whose token is already under way.
    tickets[1].on_event(LAST)
    assert (metrics.first_tokens, metrics.generated_tokens, metrics.cancelled_samples) == (2, 4, 2)


def test_last_event_of_a_sample_frees_its_room_before_it_is_sent() -> None:
    service = new_service(2)
    active = start_request(service, 2)
    with pytest.raises(ApiError, match="2 samples are in progress"):
        service.acquire(1)
    active._unfinished[0].on_event(LAST)
    service.acquire(1)
    with pytest.raises(ApiError, match="2 samples are in progress"):
        service.acquire(1)
    active.close()
    service.acquire(1)
    with pytest.raises(ApiError, match="2 samples are in progress"):
        service.acquire(1)
