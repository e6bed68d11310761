"""Serving over several ranks: step plans, and the command itself."""

import json
import signal
from pathlib import Path

import openai
import psutil
import pytest

from megatron_ladder.cli.generate import main
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.generate.serve.scheduler import PLAN_TIMEOUT, StepPlan, _share_plan, run_plans
from megatron_ladder.model.stack import StackOptions
from tests.helpers.patience import patient
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import build, mesh_of
from tests.reference import greedy_continuation
from tests.unit.generate.served import serving_command
from tests.unit.generate.tiny_model import reference_of, tiny_config, write_checkpoint_with_tokenizer

SAMPLING = SamplingParameters(temperature=0.5, seed=(1 << 64) - 1, logprobs=True)
PLANS = [
    StepPlan(),
    StepPlan(release=(3, 1)),
    StepPlan((0,), {2: GenerationRequest((1,) * 20, 5, SAMPLING, frozenset({7, 1}), ("\n", "größe"), True, "ä")}),
    StepPlan(admit={slot: GenerationRequest(tuple(range(1000)), 5, SAMPLING) for slot in range(3)}),
    StepPlan(stop=True),
]


def shared_plans() -> list[StepPlan]:
    """Return the plans that this rank receives."""
    mesh = mesh_of(2)
    group = mesh.tensor.over_gloo(PLAN_TIMEOUT)
    return [_share_plan(group, plan if group.rank == 0 else None) for plan in PLANS]


def test_plans_of_any_size_reach_every_rank(gloo_pools: GlooPools) -> None:
    assert gloo_pools(2).run(shared_plans) == [PLANS, PLANS]


def served_tokens() -> dict[tuple[int, ...], list[int]]:
    """Return this rank's tokens by prompt, while samples are admitted and released."""
    config = tiny_config(residual_mode="ladder", ladder_layers=(0, 1, 2))
    mesh = mesh_of(2)
    engine = GenerationEngine(build(config, reference_of(config)[0], 2, StackOptions()), mesh)
    batch = engine.new_batch(2, 40)
    first, second, third = (
        GenerationRequest(ids, count, SamplingParameters(temperature=0.0))
        for ids, count in (((5, 9, 3), 9), ((17,), 30), ((1, 2, 3, 4, 5), 4))
    )
    plans = iter(
        [
            StepPlan(admit={1: first}),
            StepPlan(admit={0: second}),
            StepPlan(),
            StepPlan(release=(0,)),
            StepPlan(admit={0: third}),
            *[StepPlan()] * 5,
            StepPlan(stop=True),
        ]
    )
    found: dict[tuple[int, ...], list[int]] = {}

    def record(tokens: list[NewToken]) -> None:
        for token in tokens:
            sample = batch.samples[token.sample]
            assert sample is not None
            found.setdefault(sample.request.prompt_ids, []).append(token.id)

    group = mesh.tensor.over_gloo(PLAN_TIMEOUT)
    run_plans(batch, group, plans.__next__ if mesh.tensor.rank == 0 else None, record)
    assert batch.samples == [None, None]
    return found


def test_every_rank_runs_the_plans(gloo_pools: GlooPools) -> None:
    weights, reference = reference_of(tiny_config(residual_mode="ladder", ladder_layers=(0, 1, 2)))
    expected = {
        ids: greedy_continuation(weights, reference, ids, count)
        for ids, count in (((5, 9, 3), 9), ((17,), 3), ((1, 2, 3, 4, 5), 4))
    }
    assert gloo_pools(2).run(served_tokens) == [expected, expected]


def test_two_ranks_serve_the_openai_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint_with_tokenizer(tmp_path)[0]
    main(["--model", str(model), "--prompt", "def größe", "--temperature", "0", "--max-new-tokens", "12", "--json"])
    expected = json.loads(capsys.readouterr().out)["text"]
    main(["--model", str(model), "--prompt", "def größe", "--score", "--logprobs", "--json"])
    scores = json.loads(capsys.readouterr().out)["logprobs"]
    with serving_command("--model", model, "--tp", "2") as (process, address):
        with openai.OpenAI(base_url=address, api_key="none", timeout=patient(30), max_retries=0) as client:
            answer = client.completions.create(model="run", prompt="def größe", temperature=0, max_tokens=12)
            stream = client.completions.create(
                model="run", prompt=["def größe", "class"], temperature=0, max_tokens=12, stream=True
            )
            scored = client.completions.create(model="run", prompt="def größe", max_tokens=0, echo=True, logprobs=2)
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["größe", "b"]}}}
            chosen = client.completions.create(
                model="run", prompt="def", max_tokens=30, extra_body={"response_format": form}
            )
            streamed = "".join(choice.text for piece in stream for choice in piece.choices if choice.index == 0)
        assert (answer.choices[0].text, streamed) == (expected, expected)
        assert json.loads(chosen.choices[0].text) in ("größe", "b") and chosen.choices[0].finish_reason == "stop"
        logprobs = scored.choices[0].logprobs
        assert scored.choices[0].text == "def größe" and logprobs is not None and logprobs.tokens is not None
        assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-4)
        assert [*zip(logprobs.tokens, logprobs.text_offset or (), strict=True)][-3:] == [
            (r"bytes:\xc3", 7),
            (r"bytes:\x9f", 7),
            ("e", 8),
        ]
        # The ranks, and the process that encodes prompts.
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert len(children) == 3 and not psutil.wait_procs(children, timeout=patient(20))[1]
