"""The server over real sockets, with the openai client and raw HTTP."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.generate.options import parse_options
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters, request_seed
from megatron_ladder.generate.serve.protocol import parse_completion
from megatron_ladder.generate.serve.server import _handled_signals, _listen, _read_keys
from tests.helpers.patience import patient
from tests.unit.generate.served import EOS, HEAD, Served, body, chat, greedy_ids, ids_of, serving

PROMPTS = [(5, 9, 1), (17,), tuple(range(1, 31)), (60, 200, 2, 11, 9), (8, 8), (250, 1, 77), (100,)]
LONG = {"model": "tiny", "prompt": [5, 9], "max_tokens": 200, "ignore_eos": True}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with serving(files=(folder / "tokenizer.json",), max_body_bytes=5000) as running:
        yield running


def test_greedy_completions_equal_the_reference_in_any_company(served: Served) -> None:
    """Seven prompts share three slots; every second request samples."""
    client = served.client()

    def ask(index: int) -> list[int]:
        prompt = list(PROMPTS[index])
        sampling = {"temperature": 1.5, "n": 2} if index % 2 else {"temperature": 0}
        extra = {"ignore_eos": True}
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=5 + 3 * index, extra_body=extra, **sampling
        )
        return ids_of(answer.choices[0].text)

    with ThreadPoolExecutor(7) as threads:
        found = list(threads.map(ask, range(7)))
    for index in (0, 2, 4, 6):
        assert found[index] == greedy_ids(PROMPTS[index], 5 + 3 * index)


def test_a_seed_gives_the_same_tokens_as_the_engine(served: Served) -> None:
    common = {"temperature": 1.3, "top_p": 0.95}
    common |= {"presence_penalty": 0.3, "frequency_penalty": -0.2}
    more = {"top_k": 90, "min_p": 0.01, "repetition_penalty": 1.2}
    reported = {"logprobs": True, "top_logprobs": 2}
    answer = served.client().completions.create(
        model="tiny", prompt=[5, 9, 1], max_tokens=12, n=2, seed=7, extra_body=more, logprobs=2, **common
    )
    requests = [
        GenerationRequest(
            (5, 9, 1),
            12,
            SamplingParameters(**common, **more, **reported, seed=request_seed(7, (5, 9, 1), sample)),
            frozenset({EOS}),
        )
        for sample in range(2)
    ]
    generations = served.engine.generate(requests)
    assert generations[0].ids != generations[1].ids
    assert [choice.text for choice in answer.choices] == [generation.text for generation in generations]
    for choice, generation in zip(answer.choices, generations, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(generation.logprobs, abs=1e-4)
        assert choice.logprobs.top_logprobs is not None and generation.alternatives is not None
        for named, alternatives in zip(choice.logprobs.top_logprobs, generation.alternatives, strict=True):
            assert [ids_of(text) for text in named][:2] == [[token] for token, _ in alternatives]
            assert list(named.values())[:2] == pytest.approx([logprob for _, logprob in alternatives], abs=1e-4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(generation.ids) for generation in generations)
    unseeded = [
        served.client().completions.create(model="tiny", prompt=[5, 9, 1], max_tokens=12).choices[0].text
        for _ in range(2)
    ]
    assert unseeded[0] != unseeded[1]
    twice = served.client().completions.create(model="tiny", prompt=[[5, 9, 1]] * 2, max_tokens=12)
    assert twice.choices[0].text != twice.choices[1].text


def test_a_stream_is_the_response_in_chunks(served: Served) -> None:
    parameters: dict[str, Any] = {"model": "tiny", "prompt": [[5, 9, 1], [17]], "max_tokens": 9, "temperature": 0}
    whole = served.client().completions.create(**parameters)
    texts, reasons, usage = ["", ""], [None, None], []
    for piece in served.client().completions.create(**parameters, stream=True, stream_options={"include_usage": True}):
        usage.append(piece.usage)
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices] and all(texts)
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage[-1] == whole.usage and not any(usage[:-1])
    assert whole.usage is not None and whole.usage.prompt_tokens == 4


def test_finish_reasons(served: Served) -> None:
    ids = greedy_ids((17,), 12)
    stop = f" w{ids[4]}"
    stopped = served.client().completions.create(
        model="tiny", prompt=[17], max_tokens=12, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert ids_of(stopped.choices[0].text) == ids[: ids.index(ids[4])]
    ended = served.client().completions.create(model="tiny", prompt=[17], max_tokens=12, temperature=0)
    assert ended.choices[0].finish_reason == "stop" and ids_of(ended.choices[0].text) == ids[:7]
    assert ids[7] == EOS and ended.usage is not None and ended.usage.completion_tokens == 8
    limited = served.client().completions.create(model="tiny", prompt=[17], max_tokens=1, temperature=0)
    assert limited.choices[0].finish_reason == "length"


def test_a_chat_continues_the_rendered_template(served: Served) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    expected = greedy_ids(list(b"<system>be<user>ab<assistant>"), 6)
    client = served.client()
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=extra,
    )
    assert answer.choices[0].message.role == "assistant"
    assert ids_of(answer.choices[0].message.content or "") == expected
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 6 and all(-6 < entry.logprob < 0 for entry in logprobs.content)
    for entry in logprobs.content:
        first = entry.top_logprobs[0]
        assert (first.token, first.logprob, first.bytes) == (entry.token, entry.logprob, entry.bytes)
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[1].logprob <= entry.logprob
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, temperature=0, stream=True, extra_body=extra
    )
    pieces = [piece.choices[0] for piece in stream]
    assert pieces[0].delta.role == "assistant" and pieces[-1].finish_reason == "length"
    assert ids_of("".join(piece.delta.content or "" for piece in pieces)) == expected
    developer = [messages[0] | {"role": "developer"}, messages[1]]
    same = client.chat.completions.create(
        model="tiny", messages=developer, max_tokens=6, temperature=0, extra_body=extra
    )
    assert same.choices[0].message.content == answer.choices[0].message.content
    # lm-eval's `local-chat-completions` adds a type to every message.
    typed = [messages[0] | {"type": "text"}, messages[1]]
    same = client.chat.completions.create(model="tiny", messages=typed, max_tokens=6, temperature=0, extra_body=extra)
    assert same.choices[0].message.content == answer.choices[0].message.content
    # Without max_tokens, the chat continues to the end of the context.
    long = client.chat.completions.create(model="tiny", messages=messages, temperature=0, extra_body=extra)
    assert long.usage is not None and long.usage.total_tokens == 300


def test_a_conversation_accepts_the_message_of_a_response(served: Served) -> None:
    client = served.client()
    parameters: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    messages: list[Any] = [{"role": "user", "content": "a", "name": None}]
    messages.append(client.chat.completions.create(messages=messages, **parameters).choices[0].message)
    messages.append({"role": "user", "content": "b", "tool_calls": None})
    answer = client.chat.completions.create(messages=messages, **parameters)
    written = f"<user>a<assistant>{messages[1].content}<user>b<assistant>"
    assert ids_of(answer.choices[0].message.content or "") == greedy_ids(list(written.encode()), 3)


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"model": "\xff"}', 400, None),
        (b'{"prompt": "\\ud800"', 400, None),
        (b"[" * 4000, 400, None),
        (body(model="other"), 404, "model"),
        (body(model=...), 400, "model"),
        (body(prompt=...), 400, "prompt"),
        (body(prompt=""), 400, "prompt"),
        (body(prompt=[]), 400, "prompt"),
        (b'{"model": "tiny", "prompt": [5], "max_tokens": 2, "prompt": [6]}', 400, "prompt"),
        (b'{"model": "tiny", "prompt": [5], "stream": true, "stream_options": {"a": 1, "a": 2}}', 400, "a"),
        (b'{"seed": ' + b"9" * 4400 + b"}", 400, None),
        (body(prompt=[[]]), 400, "prompt"),
        (body(prompt=[256]), 400, "prompt"),
        (body(prompt=[-1]), 400, "prompt"),
        (body(prompt=["a", 1]), 400, "prompt"),
        (body(prompt=[1 << 70]), 400, "prompt"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(max_tokens=300), 400, "prompt"),
        (body(max_tokens="2"), 400, "max_tokens"),
        (body(temperature=-1), 400, "temperature"),
        (body(top_p=0), 400, "top_p"),
        (body(top_k=-1), 400, "top_k"),
        (body(min_p=2), 400, "min_p"),
        (body(repetition_penalty=0), 400, "repetition_penalty"),
        (body(repetition_penalty=1e-300), 400, "repetition_penalty"),
        (body(repetition_penalty=1e300), 400, "repetition_penalty"),
        (body(seed=1 << 63), 400, "seed"),
        (body(n=0), 400, "n"),
        (body(n=10**9), 400, "n"),
        (body(stop=""), 400, "stop"),
        (body(stop=["a"] * 17), 400, "stop"),
        (body(logprobs=21), 400, "logprobs"),
        (body(presence_penalty=2.5), 400, "presence_penalty"),
        (body(frequency_penalty=-2.5), 400, "frequency_penalty"),
        (body(logit_bias={"5": 1}), 400, "logit_bias"),
        (chat(top_logprobs=2), 400, "top_logprobs"),
        (body(echo=1), 400, "echo"),
        (chat(echo=True), 400, "echo"),
        (body(stream_options={"include_usage": True}), 400, "stream_options"),
        (body(stream=True, stream_options={"include_usage": True, "x": 1}), 400, "stream_options"),
        (body(max_token=5), 400, "max_token"),
        (chat(messages=[]), 400, "messages"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages"),
        (chat(messages=[{"role": "tool", "content": "a"}]), 400, "messages"),
        (chat(messages=[{"role": "user", "content": "a", "type": "image"}]), 400, "messages"),
        (chat(messages=[{"role": "user", "content": "a", "tool_calls": []}]), 400, "messages"),
        (chat(max_tokens=2, max_completion_tokens=3), 400, "max_completion_tokens"),
        (chat(tools=[{"type": "function"}]), 400, "tools"),
        (chat(response_format={"type": "xml"}), 400, "response_format"),
    ],
)
def test_invalid_requests_name_the_parameter(content: bytes, status: int, param: str, served: Served) -> None:
    path = "/v1/chat/completions" if b"messages" in content else "/v1/completions"
    found, answer = served.post(path, content)
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]


def test_values_without_effect_are_accepted(served: Served) -> None:
    neutral = {"presence_penalty": 0, "logit_bias": {}, "echo": False, "user": "somebody", "best_of": None}
    assert served.post("/v1/completions", body(**neutral))[0] == 200
    streamed = body(stream=True, stream_options={"include_usage": None})
    assert not parse_completion(streamed, served.server.service.model).complete([[5]]).include_usage
    # More than the vocabulary, and more than 64 bits.
    for top_k in (257, 1 << 63, 1 << 70):
        assert served.post("/v1/completions", body(top_k=top_k))[0] == 200
    parsed = parse_completion(body(top_k=1 << 70), served.server.service.model)
    assert parsed.complete(parsed.prompts).samples[0].sampling.top_k == 256


def test_paths_methods_types_and_sizes_are_limited(served: Served) -> None:
    assert served.post("/v1/nothing", b"{}")[0] == 404
    status, answer = served.post("/v1/completions", b"", method="GET")
    assert status == 405 and answer["error"]["type"] == "invalid_request_error"
    assert served.post("/v1/completions", body(), {"Content-Type": "text/plain"})[0] == 415
    assert served.post("/v1/completions", body(prompt="a" * 6000))[0] == 413
    with socket.create_connection(("127.0.0.1", served.port), timeout=patient(5)) as connection:
        connection.sendall(HEAD % 6000)
        assert b" 413 " in connection.recv(1000), "the server waits for a body that it will reject"
    pieces = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [b"a" * 1000] * 6)
    assert served.post("/v1/completions", pieces, {"Transfer-Encoding": "chunked"})[0] == 413
    assert [model.id for model in served.client().models.list()] == ["tiny"]
    assert served.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("other")


def send_request(served: Served, content: dict[str, Any]) -> socket.socket:
    """Send a request and return its connection."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=patient(20))
    data = json.dumps(content).encode()
    connection.sendall(HEAD % len(data) + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_slot_and_its_place_in_the_queue(stream: bool) -> None:
    with serving(step_seconds=0.02, max_concurrent=1, max_queue=2) as served:
        scheduler = served.server.scheduler
        first = send_request(served, LONG | {"stream": stream})
        served.wait_until(lambda: scheduler.running == 1)
        second = send_request(served, LONG | {"stream": stream})
        served.wait_until(lambda: scheduler.waiting == 1)
        with ThreadPoolExecutor(1) as threads:
            parameters = {"model": "tiny", "prompt": [17], "max_tokens": 3, "temperature": 0}
            third = threads.submit(lambda: served.client().completions.create(**parameters))
            served.wait_until(lambda: scheduler.waiting == 2)
            with pytest.raises(openai.RateLimitError) as refused:
                served.client().completions.create(**parameters)
            assert refused.value.code == "queue_full" and refused.value.response.headers["retry-after"] == "1"
            begun = time.monotonic()
            second.close()
            first.close()
            assert ids_of(third.result().choices[0].text) == greedy_ids((17,), 3)
        # The 200 tokens of one request would take 4 seconds.
        assert time.monotonic() - begun < patient(2)
        served.wait_until_idle()
        counted = served.metrics()
        assert counted["cancelled_samples_total"] == 2
        assert counted['responses_total{path="/v1/completions",status="429"}'] == 1
        assert 4 <= counted["generated_tokens_total"] < 100 and counted["prompt_tokens_total"] == 5
        assert served.client().completions.create(**parameters, n=3).choices[2].text


def test_stop_lets_requests_finish_within_the_grace_period() -> None:
    with serving(step_seconds=0.01, grace_seconds=20.0) as served:
        parameters: dict[str, Any] = {
            "model": "tiny",
            "prompt": [17],
            "max_tokens": 40,
            "temperature": 0,
            "stream": True,
        }
        stream = iter(served.client().completions.create(**parameters, extra_body={"ignore_eos": True}))
        pieces = [next(stream)]
        served.server.stop()
        pieces += stream
        assert ids_of("".join(piece.choices[0].text for piece in pieces)) == greedy_ids((17,), 40)
        served.worker.join(10)
        assert not served.worker.is_alive()
        with pytest.raises(openai.APIConnectionError):
            served.client().models.list()


def test_stop_aborts_requests_after_the_grace_period() -> None:
    with serving(step_seconds=0.02, grace_seconds=0.3, max_concurrent=1) as served:
        stream = iter(
            served.client().completions.create(
                model="tiny", prompt=[5], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(stream)
        waiting: list[int] = []
        thread = threading.Thread(target=lambda: waiting.append(served.post("/v1/completions", body())[0]))
        thread.start()
        served.wait_until(lambda: served.server.scheduler.waiting == 1)
        served.server.stop()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        thread.join(10)
        assert waiting == [503]
        served.worker.join(10)
        assert not served.worker.is_alive()


@pytest.mark.parametrize("ignored", [(), (signal.SIGINT,)])
def test_ignored_signals_stay_ignored(ignored: tuple[signal.Signals, ...]) -> None:
    """A rank ignores Ctrl-C, because its parent also sends SIGTERM, and a second signal would skip the grace period."""

    def stop(number: int, frame: object) -> None:
        pass

    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in both}
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        with _handled_signals(stop):
            assert [signal.getsignal(number) is stop for number in both] == [not ignored, True]
        assert [signal.getsignal(number) == signal.SIG_IGN for number in both] == [bool(ignored), False]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_all_errors_of_the_flags_are_reported(tmp_path: Path) -> None:
    words = "--model m --serve --port 70000 --max-concurrent 0 --max-queue -1 --max-request-tokens 1 --top-k 3 --json"
    with pytest.raises(UserError) as raised:
        parse_options(words.split())
    beginnings = ["--port 70000", "--max-concurrent 0", "--max-queue -1", "--max-request-tokens 1"]
    beginnings += ["--serve does not use the sampling flags", "--serve does not use the output flags"]
    assert [line.startswith(start) for line, start in zip(raised.value.messages, beginnings, strict=True)] == [True] * 6
    with pytest.raises(UserError, match="--port 80 requires --serve"):
        parse_options("--model m --tokens 1 --port 80".split())
    keys = tmp_path / "keys"
    for content, expected in ((b"\n \n", "contains no key"), (b"a\nb c\n", ":2: "), (b"\xc3\xa4\n", ":1: ")):
        keys.write_bytes(content)
        with pytest.raises(UserError, match=expected):
            _read_keys(keys)
    with pytest.raises(UserError, match="cannot be read"):
        _read_keys(tmp_path / "none")
    with _listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match="cannot listen"):
        _listen("127.0.0.1", taken.getsockname()[1])
