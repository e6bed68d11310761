"""The server of `vllm serve` with two ranks and the entry point, and clients that stream."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import free_port
from vllm_plugin.tests.models import NEW_TOKENS, SERVED, make_prompts

REQUESTS = 200
ATTEMPTS = 60
"""Attempts to reach a server that starts, up to 8 seconds apart; four processes import vLLM."""


@pytest.mark.parametrize("model", SERVED)
def test_two_hundred_concurrent_requests(model: str, models: Path, references: Any, tmp_path: Path) -> None:
    from openai import APIConnectionError

    port = free_port()
    log = tmp_path / "serve.txt"
    # The command `vllm` fails in the CPU build: it asks for the version of a package that has another name there.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / model)]
    command += f"--served-model-name ladder --tensor-parallel-size 2 --host 127.0.0.1 --port {port}".split()
    command += (
        "--dtype float32 --enforce-eager --disable-uvicorn-access-log --max-model-len 128 --max-num-seqs 16".split()
    )
    command += f"--max-num-batched-tokens 64 --block-size 32 --kv-cache-memory-bytes {1 << 24}".split()
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        found = asyncio.run(stream_all(port))
    except APIConnectionError:
        pytest.fail(f"the server did not answer; the end of its output:\n{log.read_text()[-4000:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert len(found) == REQUESTS
    for number, tokens in enumerate(found):
        prompt, length = choice(number)
        assert tokens == references[model][prompt][:length], number


def choice(number: int) -> tuple[int, int]:
    """Return the prompt of a request and how many tokens it asks for; all pairs differ until they repeat."""
    prompts = len(make_prompts())
    return number % prompts, 1 + number // prompts % NEW_TOKENS


async def stream_all(port: int) -> list[list[int]]:
    """Return the tokens of all requests, of which up to 32 are open at a time."""
    from openai import AsyncOpenAI

    prompts = make_prompts()
    places = asyncio.Semaphore(32)
    address = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=300) as client:
        await client.with_options(max_retries=ATTEMPTS).models.list()

        async def stream(number: int) -> list[int]:
            prompt, length = choice(number)
            async with places:
                chunks = await client.completions.create(
                    model="ladder",
                    prompt=prompts[prompt],
                    max_tokens=length,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                return [token async for chunk in chunks for one in chunk.choices for token in one.token_ids or ()]

        return await asyncio.gather(*(stream(number) for number in range(REQUESTS)))
