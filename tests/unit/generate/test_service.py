"""Places and counts of the samples that one answer is made of."""

from typing import Any

import pytest

from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.serve.questions import ApiError, Question
from megatron_ladder.generate.serve.scheduler import Ended, Scheduler
from megatron_ladder.generate.serve.service import Answer, Limits, Service
from tests.unit.generate.plain_tokenizers import Bytes

NEXT, LAST = NewToken(0, 7, "", None), NewToken(0, 8, "", "length")


def service_of(places: int) -> Service:
    rules: Any = None
    scheduler = Scheduler(1, lambda events: None, grace_seconds=0.0)
    return Service(scheduler, rules, Bytes(), Limits(places, body_bytes=100), ())


def answer_of(service: Service, samples: int) -> Answer:
    """Whose tokens nobody takes."""
    requests = (GenerationRequest((1,), 5),) * samples
    question = Question(requests, chat=False, stream=True, include_usage=False, logprobs=None, prompt_tokens=1)
    return Answer(service, question)


def test_every_sample_counts_once_as_begun_and_once_as_cancelled() -> None:
    service = service_of(3)
    answer = answer_of(service, 3)
    tickets = answer._tickets
    for event in (NEXT, NEXT, LAST):
        tickets[0].on_event(event)
    tickets[1].on_event(NEXT)
    tickets[2].on_event(Ended("no more"))
    metrics = service.metrics
    assert (metrics.first_tokens, metrics.generated_tokens, metrics.cancelled_samples) == (2, 4, 1)
    answer.close()
    # The slot empties before the next step, whose token is on its way.
    tickets[1].on_event(LAST)
    assert (metrics.first_tokens, metrics.generated_tokens, metrics.cancelled_samples) == (2, 4, 2)


def test_a_samples_last_event_frees_its_place_whether_or_not_it_is_sent() -> None:
    service = service_of(2)
    answer = answer_of(service, 2)
    with pytest.raises(ApiError, match="2 samples are under way"):
        service.enter(1)
    answer._tickets[0].on_event(LAST)
    service.enter(1)
    with pytest.raises(ApiError, match="2 samples are under way"):
        service.enter(1)
    answer.close()
    service.enter(1)
    with pytest.raises(ApiError, match="2 samples are under way"):
        service.enter(1)
