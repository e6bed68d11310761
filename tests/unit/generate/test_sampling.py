"""Filters and draws, compared with loops in plain Python."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.generate.sampling import (
    GREEDY,
    NO_TOKEN,
    Sampler,
    SamplingParameters,
    SamplingPlan,
    _draw_at,
    _keep_most_likely,
    _Rows,
    request_seed,
)

CPU = torch.device("cpu")


def new_sampler(
    *parameters: SamplingParameters, vocab_size: int = 3, prompts: Sequence[tuple[int, ...]] | None = None
) -> Sampler:
    """Return a sampler of one rank, by default for samples with empty prompts."""
    plan = SamplingPlan.of(parameters)
    sampler = Sampler(plan, len(parameters), vocab_size, 0, CommGroup.alone(), CPU)
    sampler.begin(parameters, prompts or [()] * len(parameters))
    return sampler


def tokens_of(sampler: Sampler, logits: Tensor) -> list[int]:
    uniform = torch.tensor(sampler.draw(len(logits)), dtype=torch.float64)
    tokens = [token for (token,) in sampler.read(sampler.choose(logits, uniform)).tokens]
    if NO_TOKEN not in tokens:
        sampler.count(torch.tensor(tokens).unsqueeze(1))
    return tokens


def allowed(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that can be drawn, by the definition."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = [math.exp(logits[token]) for token in ranked]
    kept: set[int] = set()
    together = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if (together < top_p or not kept) and weight >= min_p * weights[0]:
            kept.add(token)
        together += weight / sum(weights)
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.95, 0.0), (1, 1.0, 0.1), (5, 0.7, 0.0), (40, 0.3, 0.1), (1000, 0.01, 0.0)]
)
def test_filters_follow_their_definition(top_k: int, top_p: float, min_p: float) -> None:
    logits = (torch.randn(50, generator=torch.Generator().manual_seed(top_k)) * 3).double()
    weights = torch.exp(logits - logits.max()).unsqueeze(0)
    parameters = SamplingParameters(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = _keep_most_likely(weights, _Rows.of([parameters], CPU))[0]
    assert set(kept.nonzero().flatten().tolist()) == allowed(logits.tolist(), top_k, top_p, min_p)


def test_a_draw_ignores_padding_and_finds_the_last_token() -> None:
    logits = torch.tensor([[-1e9, -1e9, 0.0, 1e3, 1e3]])
    assert tokens_of(new_sampler(SamplingParameters()), logits) == [2]
    assert tokens_of(new_sampler(SamplingParameters(temperature=0.0)), logits) == [2]


def test_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    below_one = math.nextafter(1.0, 0.0)
    expected = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, below_one: 4, 1.0: 4}
    for uniform, token in expected.items():
        assert _draw_at(probabilities.cumsum(1), torch.tensor([[4 * uniform]], dtype=torch.float64)).item() == token


def test_seen_tokens_are_penalized_in_their_sample_only() -> None:
    """By the definition: 2.0 / 1.5 < 1.4, and -1 * 1.5 < -1.2."""
    penalized = SamplingParameters(temperature=0.0, repetition_penalty=1.5)
    sampler = new_sampler(penalized, GREEDY, penalized, prompts=[(0,), (0,), (1,)])
    logits = torch.tensor([[2.0, 1.4, 0.0], [2.0, 1.4, 0.0], [-1.2, -1.0, -9.0]])
    assert tokens_of(sampler, logits) == [1, 0, 0]
    assert tokens_of(sampler, logits) == [0, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_temperature_zero_takes_the_most_likely_token(temperature: float) -> None:
    sampler = new_sampler(SamplingParameters(temperature=temperature), SamplingParameters(temperature=50.0, top_k=1))
    assert tokens_of(sampler, torch.tensor([[1.0, 2.0, 1.999], [5.0, 1e4, -1e4]])) == [1, 1]


def test_seeds_differ_by_prompt_and_by_seed() -> None:
    seeds = [request_seed(1, (1, 2)), request_seed(1, (12,)), request_seed(2, (1, 2)), request_seed(1, (1, 2), 1)]
    assert len(set(seeds)) == 4
    assert request_seed(1, [1, 2]) == seeds[0]
    size = 100_000
    draws = [
        tokens_of(new_sampler(SamplingParameters(seed=seed), vocab_size=size), torch.zeros(1, size))[0]
        for seed in seeds
    ]
    assert len(set(draws)) == 4


@pytest.mark.parametrize(
    ("bad", "parameters"),
    [(math.nan, GREEDY), (math.inf, SamplingParameters()), (math.nan, SamplingParameters(top_k=2))],
)
def test_non_finite_logits_give_no_token(bad: float, parameters: SamplingParameters) -> None:
    found = tokens_of(new_sampler(parameters, parameters), torch.tensor([[-1e9, -1e9, 3.0], [1.0, bad, 0.0]]))
    assert found == [2, NO_TOKEN]


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    sampler = new_sampler(SamplingParameters(temperature=temperature, seed=5))
    logits = torch.tensor([[0.3, 1.5, -0.2]])
    counts = Counter(tokens_of(sampler, logits)[0] for _ in range(1000))
    weights = [math.exp(value / temperature) for value in logits[0].tolist()]
    for token, weight in enumerate(weights):
        probability = weight / sum(weights)
        spread = math.sqrt(probability * (1 - probability) / 1000)
        assert abs(counts[token] / 1000 - probability) < 4 * spread
