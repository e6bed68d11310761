"""Drafting over several ranks: the text of the reference, the draws of one process, and as many accepted drafts."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY, SamplingParameters
from megatron_ladder.model.stack import StackOptions
from tests.distributed.test_generate import sampled_requests
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import build, mesh_of
from tests.reference import greedy_continuation
from tests.unit.generate.tiny_model import (
    LATENT,
    MODELS,
    PROMPTS,
    SOMETIMES,
    drafting_reference,
    tiny_config,
    tiny_engine,
)

HEAD = {"mtp_num_layers": 1}
DRAFTING: dict[str, dict[str, Any]] = {
    name: MODELS[name] for name in ("ladder", "farskip", "windows", "delta", "latent-ladder", "lanes")
} | {"desync": LATENT | {"residual_mode": "desync", "desync_interval": 4, "desync_tp": 2}}

Drafted = list[tuple[tuple[int, ...], float | None]]


def drafted(engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> Drafted:
    """Return tokens, and the accepted length of the batch."""
    return [(one.ids, one.timings.accepted_length) for one in engine.generate(requests)]


def drafted_here(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    ranks: int,
    draft_tokens: int,
    batches: Sequence[Sequence[GenerationRequest]],
) -> list[Drafted]:
    """Run on each rank."""
    model = build(config, weights, ranks, StackOptions(), packed=True)
    mesh = mesh_of(ranks, head_replicas(config, ranks))
    engine = GenerationEngine(model, mesh, draft_tokens=draft_tokens)
    return [drafted(engine, requests) for requests in batches]


@pytest.mark.parametrize(
    ("name", "draft_tokens"),
    usual_share([(name, 1 + (row + more) % 3) for row, name in enumerate(DRAFTING) for more in range(3)], 3),
)
def test_two_ranks_draft_and_accept_the_same_tokens(name: str, draft_tokens: int, gloo_pools: GlooPools) -> None:
    config = tiny_config(**DRAFTING[name], **HEAD)
    weights, reference = drafting_reference(config, *SOMETIMES)
    penalised = SamplingParameters(temperature=0.0, repetition_penalty=1.2)
    batches = [
        [GenerationRequest(prompt, 20 + row, sampling) for row, prompt in enumerate(PROMPTS)]
        for sampling in (GREEDY, penalised)
    ]
    batches.append(sampled_requests(seed=1))
    found = gloo_pools(2).run(drafted_here, config, weights, 2, draft_tokens, batches)
    assert found[0] == found[1]
    greedy = found[0][0]
    assert [list(ids) for ids, _ in greedy] == [
        greedy_continuation(weights, reference, request.prompt_ids, request.max_new_tokens) for request in batches[0]
    ]
    assert greedy[0][1] is not None and 1.0 < greedy[0][1] < draft_tokens + 1
    if name != "desync":
        engine = tiny_engine(config, weights, draft_tokens)
        assert found[0] == [drafted(engine, requests) for requests in batches]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", *DRAFTING])
def test_500_tokens_are_those_of_the_reference(name: str, gloo_pools: GlooPools) -> None:
    config = tiny_config(**{**MODELS, **DRAFTING}[name], **HEAD)
    weights, reference = drafting_reference(config, *SOMETIMES)
    dice = random.Random(1)
    prompts = [tuple(dice.choices(range(config.vocab_size), k=1 + number % 11)) for number in range(25)]
    expected = [tuple(greedy_continuation(weights, reference, prompt, 20)) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 30
    requests = [GenerationRequest(prompt, 20, GREEDY) for prompt in prompts]
    for ranks in (2,) if name == "desync" else (1, 2):
        for draft_tokens in (1, 2, 3):
            arguments = config, weights, ranks, draft_tokens, [requests]
            for (found,) in gloo_pools(ranks).run(drafted_here, *arguments):
                assert [tokens for tokens, _ in found] == expected
