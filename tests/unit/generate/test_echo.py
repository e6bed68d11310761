"""Scores of prompts over HTTP, and the names, bytes and places of tokens in responses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.scoring import TokenScores
from megatron_ladder.generate.serve.protocol import ApiRequest
from megatron_ladder.generate.serve.responses import ResponseWriter
from tests.reference import greedy_continuation, reference_logits
from tests.unit.generate.plain_tokenizers import Bytes
from tests.unit.generate.served import REFERENCE, WEIGHTS, Served, body, serving

CONTEXTS = [[5, 9, 1], [17], [8, 8, 3, 100]]
CONTINUATIONS = [greedy_continuation(WEIGHTS, REFERENCE, CONTEXTS[0], 4), [60, 2], [9]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def reference_logprobs(ids: list[int]) -> torch.Tensor:
    return reference_logits(WEIGHTS, REFERENCE, torch.tensor([ids]))[0].log_softmax(-1)


def test_a_task_of_lm_eval_gets_the_log_likelihoods(served: Served) -> None:
    """The body is that of lm-eval 0.4's `local-completions`, and its choices are read in the same way."""
    prompts = [context + more for context, more in zip(CONTEXTS, CONTINUATIONS, strict=True)]
    values: dict[str, Any] = {
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    status, answer = served.post("/v1/completions", body(**values))
    assert status == 200, answer
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    found = []
    for choice, context in zip(choices, CONTEXTS, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        most_likely = [max(row.values()) for row in choice["logprobs"]["top_logprobs"][len(context) : -1]]
        found.append((sum(logprobs), logprobs == most_likely))
    expected = []
    for context, more in zip(CONTEXTS, CONTINUATIONS, strict=True):
        scores = reference_logprobs(context + more)[len(context) - 1 : -1]
        total = sum(row[token].item() for row, token in zip(scores, more, strict=True))
        expected.append((pytest.approx(total, abs=1e-3), scores.argmax(-1).tolist() == more))
    assert found == expected and [greedy for _, greedy in expected] == [True, False, False]
    assert answer["usage"] == {"prompt_tokens": 15, "completion_tokens": 3, "total_tokens": 18}


def test_a_prompt_is_scored_without_a_continuation(served: Served) -> None:
    """Prompts may have as many tokens as the model has positions."""
    long = [number % 255 + 1 for number in range(300)]
    parameters: dict[str, Any] = {"model": "tiny", "prompt": [[5, 9, 1, 60], [17], long], "max_tokens": 0}
    answer = served.client().completions.create(**parameters, echo=True, logprobs=3)
    for choice, prompt in zip(answer.choices, parameters["prompt"], strict=True):
        logprobs, expected = choice.logprobs, reference_logprobs(prompt)[:-1]
        assert choice.finish_reason == "length" and choice.text == " ".join(f"w{number}" for number in prompt)
        assert logprobs is not None and logprobs.tokens == [f"w{number}" for number in prompt]
        assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        places = range(len(prompt) - 1)
        targets = [expected[place, prompt[place + 1]].item() for place in places]
        assert logprobs.token_logprobs[1:] == pytest.approx(targets, abs=1e-3)
        for place, named in zip(places, logprobs.top_logprobs[1:], strict=True):
            values, ids = expected[place].topk(3)
            texts = [f"w{number}" if number else "token_id:0" for number in ids.tolist()]
            assert list(named)[:3] == texts and set(named) == {*texts, f"w{prompt[place + 1]}"}
            assert list(named.values())[:3] == pytest.approx(values.tolist(), abs=1e-3)
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    status, refused = served.post("/v1/completions", body(max_tokens=0))
    assert status == 400 and refused["error"]["message"] == "max_tokens: 0 requires echo: true"


def test_an_echo_precedes_the_continuation_in_text_and_in_streams(served: Served) -> None:
    parameters: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["\x05\x09", "\x11"],
        "max_tokens": 5,
        "temperature": 0,
        "echo": True,
        "n": 2,
        "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = served.client().completions.create(**parameters)
    alone = served.client().completions.create(**parameters | {"echo": False})
    texts = [text for text in parameters["prompt"] for _ in range(2)]
    assert [choice.text for choice in whole.choices] == [
        text + choice.text for text, choice in zip(texts, alone.choices, strict=True)
    ]
    streamed: list[dict[str, list[Any]]] = [{} for _ in texts]
    written = [""] * len(texts)
    for piece in served.client().completions.create(**parameters, stream=True):
        for choice in piece.choices:
            written[choice.index] += choice.text
            for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                streamed[choice.index].setdefault(name, []).extend(values)  # type: ignore[arg-type]
    assert written == [choice.text for choice in whole.choices]
    for found, choice in zip(streamed, whole.choices, strict=True):
        assert choice.logprobs is not None
        expected = choice.logprobs.to_dict()
        assert found["tokens"] == expected["tokens"] and found["text_offset"] == expected["text_offset"]
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
    unscored = served.client().completions.create(**parameters | {"max_tokens": 0, "logprobs": None, "n": 1})
    assert [(choice.text, choice.logprobs) for choice in unscored.choices] == [("\x05\x09", None), ("\x11", None)]


class Twins(Bytes):
    """Ids from 128 on have the texts of those 128 below, but for two bytes of é; 0 and 128 are control tokens."""

    def token_bytes(self, number: int) -> bytes:
        return bytes([number]) if number in (0xC3, 0xA9) else bytes([number % 128] if number % 128 else b"")

    def decode(self, ids: Any) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


PIECES = [
    NewToken(0, 0xC3, "", None, -0.5, ((0xC3, -0.5), (97, -0.7), (97 + 128, -0.8))),
    NewToken(0, 0xA9, "é", None, -0.6, ((97, -0.4), (98, -0.5), (128, -0.6))),
    NewToken(0, 98 + 128, "b", None, -3.0, ((98, -0.1), (0xA9, -2.0), (0xC3, -2.5))),
    NewToken(0, 300, "", "length", -0.1, ((300, -0.1), (128, -1.0), (0, -2.0))),
]


def written_logprobs(as_chat: bool) -> dict[str, Any]:
    scores = TokenScores((-0.2,), (((98, -0.2),),))
    request = ApiRequest(
        (GenerationRequest((97, 98), 4),),
        as_chat,
        stream=False,
        include_usage=False,
        logprobs=3,
        prompt_tokens=2,
        echoed=None if as_chat else ("ab",),
    )
    first = PIECES[0] if as_chat else PIECES[0]._replace(prompt_scores=scores)
    found: dict[str, Any] = ResponseWriter(request, "tiny", Twins()).complete([[first, *PIECES[1:]]])["choices"][0]
    if not as_chat:
        assert found["text"] == "abéb"
    return dict(found["logprobs"])


def test_tokens_that_decode_alike_and_parts_of_characters_stay_apart() -> None:
    logprobs = written_logprobs(as_chat=False)
    assert logprobs["tokens"] == ["a", "b", r"bytes:\xc3", r"bytes:\xa9", "b", "token_id:300"]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -0.2, -0.5, -0.6, -3.0, -0.1]
    assert logprobs["top_logprobs"] == [
        None,
        {"b": -0.2},
        {r"bytes:\xc3": -0.5, "a": -0.7, "token_id:225": -0.8},
        {"a": -0.4, "b": -0.5, "token_id:128": -0.6, r"bytes:\xa9": -0.6},
        {"b": -0.1, r"bytes:\xa9": -2.0, r"bytes:\xc3": -2.5, "token_id:226": -3.0},
        {"token_id:300": -0.1, "token_id:128": -1.0, "token_id:0": -2.0},
    ]


def test_bytes_of_a_chat_join_to_its_text() -> None:
    content = written_logprobs(as_chat=True)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "éb"
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [98], []]
    assert [entry["bytes"] for entry in content[0]["top_logprobs"]] == [[0xC3], [97], [97]]
