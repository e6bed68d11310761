"""The server under a long load of many clients, and its speed compared with the engine alone.

All connections use the loopback interface, and the load is limited in time and in number of requests.
"""

import contextlib
import json
import random
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest
import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import load_model, open_model
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from tests.helpers.patience import patient
from tests.unit.generate.served import serving, serving_command
from tests.unit.generate.tiny_model import (
    reference_of,
    tiny_config,
    tiny_engine,
    write_checkpoint_with_tokenizer,
)

CLIENTS, SECONDS, MOST_REQUESTS = 32, 60.0, 20_000
WARM_SECONDS = 20.0
"""Time after which the memory must not grow any further."""
GROWTH_BYTES = 16 << 20
"""Tolerated growth, because of the allocator."""
KEY = "the-key"
BATCH, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 8, 32, 48, 11
SHARE = 0.85


def engine_of(model: Path) -> GenerationEngine:
    stored = open_model(model, None, None)
    mesh = ProcessMesh.single()
    loaded = load_model(stored, mesh, torch.float32, torch.device("cpu"), overlap=True)
    return GenerationEngine(loaded, mesh, stored.tokenizer)


class Client:
    """One client."""

    def __init__(self, address: str, key: str = KEY) -> None:
        url = urlsplit(address)
        assert url.hostname is not None and url.port is not None
        self.place = (url.hostname, url.port)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def status(self, body: bytes) -> int:
        with contextlib.closing(HTTPConnection(*self.place, timeout=patient(60))) as connection:
            connection.request("POST", "/v1/completions", body, self._headers)
            response = connection.getresponse()
            assert response.status == 200 or "error" in json.loads(response.read())
            return response.status

    def pieces(self, parameters: dict[str, Any]) -> Iterator[str]:
        """Yield the texts of a stream; it must be complete, unless the caller stops early."""
        with contextlib.closing(HTTPConnection(*self.place, timeout=patient(60))) as connection:
            connection.request("POST", "/v1/completions", json.dumps(parameters | {"stream": True}), self._headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)["choices"][0]["text"]
            raise AssertionError("the stream is incomplete")

    def send_garbage(self) -> None:
        with socket.create_connection(self.place, timeout=patient(60)) as connection:
            connection.sendall(b"\x16\x03\x01 garbage\r\n\r\n")
            assert b"400" in connection.recv(1000)


def behave(address: str, seed: int, ends_at: float, texts: dict[int, str]) -> Counter[str]:
    """Send valid and invalid requests until a time; return their number by kind."""
    done: Counter[str] = Counter()
    choice = random.Random(seed)
    client, stranger = Client(address), Client(address, "another-key")
    while time.monotonic() < ends_at and done.total() < MOST_REQUESTS // CLIENTS:
        first = choice.choice(list(texts))
        parameters = {"model": "run", "prompt": [first, 9], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        invalid = ["large", "malformed", "stranger", "garbage", "unknown"]
        kind = choice.choice(["valid"] * 6 + ["disconnects"] * 2 + invalid)
        if kind == "valid":
            assert "".join(client.pieces(parameters)) == texts[first]
        elif kind == "disconnects":
            stream = client.pieces(parameters)
            for _ in range(choice.randrange(1, 5)):
                next(stream, None)
            stream.close()  # type: ignore[attr-defined]
        elif kind == "large":
            assert client.status(json.dumps(parameters | {"user": "a" * (1 << 20)}).encode()) == 413
        elif kind == "malformed":
            whole = json.dumps(parameters).encode()
            assert client.status(whole[: choice.randrange(len(whole))]) == 400
        elif kind == "stranger":
            assert stranger.status(json.dumps(parameters).encode()) == 401
        elif kind == "garbage":
            client.send_garbage()
        else:
            assert client.status(json.dumps(parameters | {"beams": 4}).encode()) == 400
        done[kind] += 1
    return done


@pytest.mark.slow
def test_one_minute_of_valid_and_invalid_clients(tmp_path: Path) -> None:
    model = write_checkpoint_with_tokenizer(tmp_path)[0]
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    engine = engine_of(model)
    requests = [GenerationRequest((first, 9), 40, GREEDY) for first in range(5, 25)]
    texts = {one.prompt_ids[0]: str(one.text) for one in engine.generate(requests)}
    flags = ["--model", model, "--api-key-file", keys, "--max-concurrent", CLIENTS]
    with serving_command(*map(str, flags)) as (process, address), ThreadPoolExecutor(CLIENTS) as threads:
        begun = time.monotonic()
        clients = [threads.submit(behave, address, seed, begun + SECONDS, texts) for seed in range(CLIENTS)]
        server = psutil.Process(process.pid)
        memory = []
        while any(client.running() for client in clients):
            time.sleep(0.5)
            memory.append((time.monotonic() - begun, server.memory_info().rss))
        done = sum((client.result() for client in clients), Counter[str]())
        warm = max(size for when, size in memory if when < WARM_SECONDS)
        last = memory[-1][1]
        assert all(done[kind] > 20 for kind in ("valid", "disconnects", "large", "malformed", "stranger", "garbage"))
        print(f"\n{dict(done)}; memory {warm / 2**20:.1f} MiB warm, {last / 2**20:.1f} MiB at the end")
        assert last - warm < GROWTH_BYTES
        parameters = {"model": "run", "prompt": [5, 9], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert "".join(Client(address).pieces(parameters)) == texts[5]
        assert server.num_threads() < 20 and server.num_fds() < 50
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_eight_clients_get_the_speed_of_the_engine() -> None:
    """A model of 134 million parameters continues eight prompts, alternately through the server and in one batch.

    The server shares the process, and thus the interpreter, with its clients, which makes it slower.
    """
    config = tiny_config(
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=2048,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=512,
    )
    engine = tiny_engine(config, reference_of(config)[0], packed=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, config.vocab_size, (BATCH, PROMPT_TOKENS), generator=generator).tolist()
    with serving(engine=engine, max_concurrent=BATCH) as running, ThreadPoolExecutor(BATCH) as threads:
        client = Client(f"http://127.0.0.1:{running.port}/v1")

        def serve() -> None:
            parameters = {"model": "tiny", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            requests = [parameters | {"prompt": ids} for ids in prompts]
            assert all(threads.map(lambda request: len(list(client.pieces(request))), requests))

        def generate() -> None:
            engine.generate([GenerationRequest(tuple(ids), NEW_TOKENS, GREEDY) for ids in prompts])

        timed(serve), timed(generate)
        rounds = [(timed(serve), timed(generate)) for _ in range(ROUNDS)]
    shares = [offline.wall / served.wall for served, offline in rounds]
    processor_shares = [offline.processor / served.processor for served, offline in rounds]
    rates = [BATCH * NEW_TOKENS / statistics.median(one.wall for one in column) for column in zip(*rounds, strict=True)]
    print(f"\nserved {rates[0]:.1f}, offline {rates[1]:.1f} tokens/s; {spread('share', shares)}")
    # Processor time includes the clients, but other processes of a busy machine do not affect it.
    print(spread("by processor time, clients included,", processor_shares))
    assert statistics.median(shares) >= SHARE


class Seconds(NamedTuple):
    wall: float
    processor: float


def timed(work: Callable[[], None]) -> Seconds:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def spread(name: str, shares: Sequence[float]) -> str:
    return f"{name} {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f} in {len(shares)} rounds)"
