"""The server's limits, and clients that try to get around them, over real sockets."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from megatron_ladder.errors import UserError
from megatron_ladder.generate.serve import connection as connection_module
from tests.helpers.patience import patient
from tests.unit.generate.plain_tokenizers import Gated
from tests.unit.generate.served import CONFIG, HEAD, WEIGHTS, Served, body, chat, greedy_ids, ids_of, serving
from tests.unit.generate.tiny_model import tiny_engine

LONGER = tuple(range(1, 31))
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def test_ambiguous_lengths_and_foreign_hosts_are_rejected(served: Served) -> None:
    """Without a key, a page whose name resolves to this machine must not reach the server (DNS rebinding)."""

    def answer(*head: str) -> bytes:
        with socket.create_connection(("127.0.0.1", served.port), timeout=patient(5)) as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + b"0\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(10_000), b""))

    for start in ("GET /health", "POST /v1/completions"):
        both = ("Host: localhost", "Content-Length: 5", "Transfer-Encoding: chunked")
        found = answer(f"{start} HTTP/1.1", *both)
        assert b" 400 " in found and b"ambiguous_length" in found and found.count(b"HTTP/1.1") == 1
    for host, status in (
        ("attacker.example", b"403"),
        ("127.0.0.1.attacker.example:80", b"403"),
        ("93.184.216.34", b"403"),
        ("", b"403"),
        ("[::1", b"403"),
        ("[::1]:8000", b"200"),
        ("127.0.0.1:80", b"200"),
        ("LOCALHOST", b"200"),
    ):
        found = answer("GET /v1/models HTTP/1.1", f"Host: {host}", "Connection: close")
        assert found.startswith(b"HTTP/1.1 " + status), (host, found)


def test_connections_and_unfinished_bodies_are_limited() -> None:
    """Clients that do not finish their bodies must not use up the memory, and small bodies still arrive."""
    with serving(max_body_bytes=200_000, max_connections=40) as served, contextlib.ExitStack() as open_connections:
        service, connections = served.server.service, served.server._server.server_state.connections

        def connect() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", served.port), timeout=patient(5))
            return open_connections.enter_context(connection)

        # The first 64 KiB of a body are always accepted; the others share 16 bodies.
        held, room = 199_999 - (1 << 16), 16 * 200_000
        for count in range(1, room // held + 1):
            connect().sendall(HEAD % 200_000 + b" " * 199_999)
            served.wait_until(lambda expected=count * held: service._arriving_bytes == expected)
        status, answer = served.post("/v1/completions", body(user="a" * 199_000))
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert served.post("/v1/completions", body(user="a" * 60_000))[0] == 200
        served.wait_until(lambda: len(connections) == room // held)
        for _ in range(room // held, 40):
            connect()
        served.wait_until(lambda: len(connections) == 40)
        with socket.create_connection(("127.0.0.1", served.port), timeout=patient(5)) as connection:
            found = b"".join(iter(lambda: connection.recv(1000), b""))
            assert found.startswith(b"HTTP/1.1 503 ") and b"too many connections" in found
        open_connections.close()
        served.wait_until(lambda: service._arriving_bytes == 0)
        assert served.post("/v1/completions", body(user="a" * 199_000))[0] == 200
    with pytest.raises(UserError, match="--max-connections 999999: this process can open only"):
        serving(max_connections=999_999).__enter__()


def test_long_and_many_prompts_are_rejected_before_they_are_encoded() -> None:
    with serving() as served, ThreadPoolExecutor(10) as threads:
        long, many = body(prompt="a" * 1_000_000), body(prompt=["a"] * 200_000)
        for content, param, code in ((long, "prompt", "context_length_exceeded"), (many, "n", None)):
            for status, answer in threads.map(lambda _, content=content: served.post(PATH, content), range(10)):
                assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
        assert served.server.service.prompts._thread is None


def test_waiting_prompts_are_limited_and_dropped_with_their_clients(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with serving(tokenizer=Gated(gate), max_concurrent=1, max_queue=1) as served, ThreadPoolExecutor(1) as threads:
        service = served.server.service

        def send(prompt: str) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", served.port), timeout=patient(20))
            connection.sendall(HEAD % len(body(prompt=prompt)) + body(prompt=prompt))
            return connection

        with send("wait") as first, send("wait for longer") as second:
            served.wait_until(lambda: service._outstanding == 2)
            status, answer = served.post(PATH, body(prompt="a"))
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert served.post("/health", b"", method="GET")[0] == 200
            second.close()
            served.wait_until(lambda: service._outstanding == 1)
            third = threads.submit(served.post, PATH, body(prompt="a"))
            with gate.open("w"):
                pass
            assert first.recv(100).startswith(b"HTTP/1.1 200 ")
            assert third.result()[0] == 200
        served.wait_until(lambda: service._outstanding == 0)


def test_hostile_templates_are_errors_of_their_requests(tmp_path: Path) -> None:
    template = "{{ 1 // (messages | length - 1) }}{{ messages[0].content * 2000 }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with serving(files=(tmp_path / "tokenizer.json",)) as served:
        messages = [{"role": "user", "content": "a"}]
        long = "context_length_exceeded"
        for given, code in ((messages, None), (messages * 2, long), (messages * 301, long)):
            status, answer = served.post("/v1/chat/completions", chat(messages=given))
            error = answer["error"]
            found = (status, error["type"], error["param"], error["code"])
            assert found == (400, "invalid_request_error", "messages", code)
        assert served.post(PATH, body(prompt="a"))[0] == 200


def test_a_schema_delays_only_requests_with_schemas(served: Served) -> None:
    compiled = threading.Event()
    served.server.service._schema_compiler.submit(compiled.wait)
    with ThreadPoolExecutor(1) as threads:
        schema = threads.submit(served.post, PATH, body(response_format={"type": "json_object"}))
        served.wait_until(lambda: served.server.service._outstanding == 1)
        assert served.post(PATH, body())[0] == 200
        assert not schema.done()
        compiled.set()
        assert schema.result()[1]["error"]["param"] == "response_format"


def test_a_bug_is_reported_as_an_error_object(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.server.service, "acquire", lambda samples: 1 / 0)
    status, answer = served.post(PATH, body())
    assert (status, answer["error"]["type"]) == (500, "server_error")


def test_a_connection_without_a_request_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEADER_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=patient(5)) as connection:
        assert connection.recv(1) == b""


def test_all_paths_but_health_require_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key\n\nsecond-key\n")
    with serving(api_key_file=file) as served:
        for wrong in ("", "first", "first-key2", "none", "FIRST-KEY"):
            header = {"Authorization": f"Bearer {wrong}"}
            for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/metrics", "GET")):
                status, answer = served.post(path, body(), header, method)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert served.post("/v1/models", b"", {"Authorization": "Basic first-key"}, "GET")[0] == 401
        assert served.post("/v1/models", b"", method="GET")[0] == 401
        assert served.post("/health", b"", method="GET") == (200, {"status": "ok"})
        for key in ("first-key", "second-key"):
            assert served.client(key).completions.create(model="tiny", prompt=[5], max_tokens=2).choices


def test_a_sample_with_bad_numbers_fails_alone() -> None:
    """One token's embedding is not a number. The sample's cache must not reach the next sample of the slot."""
    weights = dict(WEIGHTS)
    weights["embedding.weight"] = weights["embedding.weight"].clone()
    weights["embedding.weight"][97] = torch.nan
    greedy: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    for slots in (1, 2):
        with serving(engine=tiny_engine(CONFIG, weights), max_concurrent=slots, step_seconds=0.01) as served:
            client = served.client()
            stream = client.completions.create(prompt=list(LONGER), max_tokens=40, stream=True, **greedy)
            pieces = [next(stream)]
            with pytest.raises(openai.InternalServerError, match="logits are not finite"):
                client.completions.create(prompt=[5] * 20 + [97], max_tokens=2, **greedy)
            # The next sample is shorter than the stream, so its attention covers later columns of its slot, masked.
            after = client.completions.create(prompt=[5, 9, 1], max_tokens=9, **greedy)
            assert ids_of(after.choices[0].text) == greedy_ids((5, 9, 1), 9)
            pieces += stream
            assert ids_of("".join(piece.choices[0].text for piece in pieces)) == greedy_ids(LONGER, 40)
