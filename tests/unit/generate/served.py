"""A server in the test process, with a tiny model and a tokenizer whose texts show the ids."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai

from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import StoredModel
from megatron_ladder.generate.options import ServeOptions
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.scheduler import run_plans
from megatron_ladder.generate.serve.server import _ServerThread, prepare_server
from tests.helpers.commands import REPOSITORY_ROOT, clean_environment, kill_tree
from tests.helpers.patience import patient
from tests.reference import greedy_continuation
from tests.unit.generate.plain_tokenizers import Bytes, Words
from tests.unit.generate.tiny_model import reference_of, tiny_config, tiny_engine

CONFIG = tiny_config(vocab_size=256, residual_mode="ladder", ladder_layers=(1, 2), max_position_embeddings=300)
WEIGHTS, REFERENCE = reference_of(CONFIG)
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
EOS = 226
"""The eighth id of the greedy continuation of 17."""


def body(**changes: Any) -> bytes:
    """Return the body of a completion; `...` removes a parameter."""
    values = {"model": "tiny", "prompt": [5], "max_tokens": 2} | changes
    return json.dumps({name: value for name, value in values.items() if value is not ...}).encode()


def chat(**changes: Any) -> bytes:
    """Return the body of a chat; see `body`."""
    return body(**{"prompt": ..., "messages": [{"role": "user", "content": "a"}]} | changes)


def ids_of(text: str) -> list[int]:
    """Return the ids of a text that `Words` decoded, without zeros."""
    return [int(number) for number in re.findall(r"w(\d+)", text)]


def greedy_ids(prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy continuation of the reference, without zeros, which have no text."""
    return [number for number in greedy_continuation(WEIGHTS, REFERENCE, prompt, count) if number]


@dataclass
class Served:
    """A running server."""

    server: _ServerThread
    engine: GenerationEngine
    port: int
    worker: threading.Thread

    def client(self, key: str = "none") -> openai.OpenAI:
        address = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=patient(20))

    def post(
        self, path: str, body: bytes | Iterator[bytes], headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of the response."""
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=patient(20))) as connection:
            kind = {"Content-Type": "application/json"}
            connection.request(method, path, body, kind | dict(headers or {}), encode_chunked=False)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def metrics(self) -> dict[str, float]:
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=patient(20))) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.removeprefix("megatron_ladder_"): float(value) for name, _, value in pairs}

    def wait_until(self, holds: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + patient(10)
        while not holds():
            assert time.monotonic() < ends_at, "the condition did not become true"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.server.scheduler.running == self.server.scheduler.waiting == 0)


@contextlib.contextmanager
def serving(
    step_seconds: float = 0.0,
    files: tuple[Path, ...] = (),
    engine: GenerationEngine | None = None,
    tokenizer: Bytes | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Run a server on a free port; at the end of the block, abort its requests and stop it.

    Args:
        step_seconds: additional duration of each step.
        files: files of the tokenizer.
        engine: replaces the tiny model.
        tokenizer: replaces `Words`.
    """
    engine = engine or tiny_engine(CONFIG, WEIGHTS)
    config = engine.model.config
    eos_ids = frozenset({EOS} if tokenizer is None else {tokenizer.eod_id})
    engine.tokenizer = tokenizer = tokenizer or Words()
    tokenizer.files, tokenizer.vocab_size = files, config.vocab_size
    stored = StoredModel(Path("tiny"), config, tokenizer, eos_ids, (), lambda model: None)
    flags = ServeOptions(**{"serve": True, "port": 0, "max_concurrent": 3, "grace_seconds": 0.0} | options)
    setup = prepare_server(RankInfo(0, 1, 0), flags, stored, Path("/models/tiny"))
    assert setup.listener is not None
    port = setup.listener.getsockname()[1]
    server = _ServerThread(setup, setup.listener)
    batch = engine.new_batch(flags.max_concurrent, setup.model.positions)

    def deliver(tokens: Sequence[NewToken]) -> None:
        time.sleep(step_seconds)
        server.scheduler.deliver(tokens)

    work = (batch, engine.group, server.scheduler.next_plan, deliver)
    worker = threading.Thread(target=run_plans, args=work, daemon=True)
    server.start()
    worker.start()
    try:
        yield Served(server, engine, port, worker)
    finally:
        server.stop()
        worker.join(15)
        server.join(15)
        assert not worker.is_alive() and not server.is_alive(), "the server does not stop"


@contextlib.contextmanager
def serving_command(*flags: str | Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start the program with --serve on a free port; yield its process and address, and kill it at the end."""
    program = [sys.executable, str(REPOSITORY_ROOT / "tools" / "generate.py"), "--serve", "--port", "0"]
    process = subprocess.Popen(
        [*program, *map(str, flags)], stderr=subprocess.PIPE, text=True, env=clean_environment(), start_new_session=True
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in iter(process.stderr.readline, ""):
            lines.append(line)
            if found := re.match(r"serving \S+ at (http://127\S+):", line):
                yield process, found[1]
                return
        raise AssertionError("".join(lines))
    finally:
        kill_tree(process)
        process.stderr.close()
