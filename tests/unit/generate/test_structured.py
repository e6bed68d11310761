"""Answers that follow a JSON schema, with a random model whose tokens are bytes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from megatron_ladder.generate import structured
from tests.unit.generate.plain_tokenizers import Bytes
from tests.unit.generate.served import Served, body, chat, serving


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=6)
    count: int = pydantic.Field(ge=0, le=999)
    kind: Literal["é", "b"]


def schema(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": values, "strict": None}}


SCHEMA = schema(Answer.model_json_schema())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    with serving(files=(folder / "tokenizer.json",), tokenizer=Bytes()) as running:
        yield running


def test_answers_are_parsed_by_the_openai_client(served: Served) -> None:
    """Next to unrestricted samples in the same batch; a seed gives the same answer again."""
    messages: list[Any] = [{"role": "user", "content": "a"}]
    found = []
    filters = {"seed": 4, "top_p": 0.9, "extra_body": {"top_k": 30}}
    for parameters in ({"temperature": 0}, {"seed": 3}, {"seed": 3}, filters):
        answer = served.client().chat.completions.parse(
            model="tiny", messages=messages, response_format=Answer, n=2, max_tokens=200, **parameters
        )
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        assert all(isinstance(choice.message.parsed, Answer) for choice in answer.choices)
        found.append([choice.message.content for choice in answer.choices])
    assert found[1] == found[2] and len({text for texts in found for text in texts}) > 4
    free = served.client().completions.create(model="tiny", prompt="a", max_tokens=20, seed=1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(free.choices[0].text)


def test_any_object_and_any_schema(served: Served) -> None:
    for wanted, kind in (({"type": "json_object"}, dict), ({"type": "text"}, None)):
        status, answer = served.post("/v1/chat/completions", chat(max_tokens=250, seed=8, response_format=wanted))
        assert status == 200
        (choice,) = answer["choices"]
        if kind is not None:
            # A random object need not end, but it begins as one.
            assert choice["message"]["content"].lstrip(" ").startswith("{")
    numbers = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
    _, answer = served.post("/v1/completions", body(max_tokens=50, seed=1, response_format=schema(numbers)))
    values = json.loads(answer["choices"][0]["text"])
    assert len(values) == 3 and set(values) <= {1, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_format": {"type": "xml"}}, "Invalid enum value 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "the type json_schema requires json_schema"),
        ({"response_format": SCHEMA | {"x": 1}}, "contains unknown field `x`"),
        ({"response_format": schema({"type": "foo"})}, "Invalid type: foo"),
        ({"response_format": SCHEMA, "ignore_eos": True}, "remove ignore_eos"),
        ({"response_format": schema({"enum": [f"a{number}" for number in range(9000)]})}, "larger than 65536"),
        # llguidance would compile it for hours, and cannot be interrupted.
        ({"response_format": schema({"allOf": [{"pattern": f"a{{{n},}}b"} for n in range(60)]})}, "too much time"),
    ],
)
def test_invalid_formats_are_explained(changes: dict[str, Any], message: str, served: Served) -> None:
    status, answer = served.post("/v1/completions", body(**changes))
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert message in answer["error"]["message"]


def test_a_schema_is_tried_again_after_a_timeout(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"response_format": schema({"enum": ["only here"]}), "max_tokens": 30}
    with monkeypatch.context() as busy:
        busy.setattr(structured, "_COMPILE_SECONDS", 0.0)
        status, answer = served.post("/v1/completions", body(**changes))
        assert status == 400 and "too long to compile" in answer["error"]["message"]
    status, answer = served.post("/v1/completions", body(**changes))
    assert status == 200 and json.loads(answer["choices"][0]["text"]) == "only here"


def test_a_schema_that_exceeds_the_librarys_limits_later_fails_its_sample(served: Served) -> None:
    """llguidance compiles it, but gives up after the opening brace, and then allows only the end of the text."""
    optional = {f"key{number}": {"type": "string", "maxLength": 2000} for number in range(700)}
    changes = {"response_format": schema({"type": "object", "properties": optional}), "n": 3, "max_tokens": 9}
    status, answer = served.post("/v1/completions", body(**changes))
    error = answer["error"]
    assert (status, error["param"]) == (400, "response_format") and "too complex" in error["message"]
    assert served.post("/v1/completions", body())[0] == 200


def test_the_missing_package_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, answer = served.post("/v1/completions", body(response_format=SCHEMA))
    assert status == 400 and "pip install llguidance" in answer["error"]["message"]


def test_tools_are_left_to_vllm(served: Served) -> None:
    _, answer = served.post("/v1/chat/completions", chat(tools=[{"type": "function"}]))
    assert answer["error"]["param"] == "tools" and "vLLM" in answer["error"]["message"]
