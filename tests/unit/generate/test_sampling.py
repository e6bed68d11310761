"""Filters and draws, held against loops in plain Python."""

import math
from collections import Counter

import pytest
import torch

from megatron_ladder.generate.sampling import (
    NO_TOKEN,
    Sampler,
    SamplingParameters,
    draw,
    keep_most_likely,
    request_seed,
)

CPU = torch.device("cpu")


def sampler(*parameters: SamplingParameters) -> Sampler:
    return Sampler(parameters, CPU)


def allowed(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """Which tokens may be drawn, by the definition."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = [math.exp(logits[token]) for token in ranked]
    kept: set[int] = set()
    together = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if together < top_p or not kept:
            kept.add(token)
        together += weight / sum(weights)
    return kept


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("top_k", [1, 5, 40, 1000])
def test_filters_keep_what_the_definition_keeps(top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(top_k)) * 3
    filtered = keep_most_likely(logits, torch.full((3, 1), top_k), torch.full((3, 1), top_p))
    for row, kept in zip(logits, filtered, strict=True):
        tokens = set(torch.nonzero(kept > -math.inf).flatten().tolist())
        assert tokens == allowed(row.tolist(), top_k, top_p)
        assert torch.equal(kept[list(tokens)], row[list(tokens)])


def test_rows_have_filters_of_their_own() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, 3)
    kept = keep_most_likely(logits, torch.tensor([[1], [2], [9]]), torch.tensor([[2.0], [2.0], [0.9]])) > -math.inf
    assert kept.tolist() == [[False, True, False], [False, True, True], [False, True, True]]


def test_equal_logits_go_by_id() -> None:
    kept = keep_most_likely(torch.zeros(1, 5000), torch.tensor([[2]]), torch.tensor([[2.0]]))
    assert torch.nonzero(kept[0] > -math.inf).flatten().tolist() == [0, 1]


def test_all_tokens_can_be_drawn_when_nothing_is_filtered() -> None:
    """The probability of the many before the last ones rounds to one."""
    logits = torch.cat([torch.full((1, 30), 20.0), torch.zeros(1, 3)], dim=1)
    everything = Sampler([SamplingParameters(top_k=33)], CPU)
    assert torch.isfinite(keep_most_likely(logits, everything._top_k, everything._top_p)).all()


def test_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    below_one = math.nextafter(1.0, 0.0)
    expected = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, below_one: 4}
    for uniform, token in expected.items():
        assert draw(probabilities, torch.tensor([[uniform]], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    choose = sampler(SamplingParameters(temperature=temperature, seed=5))
    logits = torch.tensor([[0.3, 1.5, -0.2]])
    counts = Counter(choose(logits).item() for _ in range(3000))
    weights = [math.exp(value / temperature) for value in logits[0].tolist()]
    for token, weight in enumerate(weights):
        probability = weight / sum(weights)
        spread = math.sqrt(probability * (1 - probability) / 3000)
        assert abs(counts[token] / 3000 - probability) < 4 * spread


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_takes_the_most_likely(temperature: float) -> None:
    choose = sampler(SamplingParameters(temperature=temperature), SamplingParameters(temperature=50.0, top_k=1))
    assert choose(torch.tensor([[1.0, 2.0, 1.999], [5.0, 1e4, -1e4]])).tolist() == [1, 1]


def test_a_request_draws_the_same_in_any_batch() -> None:
    parameters = [
        SamplingParameters(seed=1),
        SamplingParameters(seed=2, top_k=10),
        SamplingParameters(seed=1, temperature=0.0),
        SamplingParameters(seed=3, top_p=0.8, temperature=1.3),
    ]
    steps = torch.randn(12, 4, 80, generator=torch.Generator().manual_seed(0))
    together = sampler(*parameters)
    batch = [together(logits).tolist() for logits in steps]
    for row, own in enumerate(parameters):
        alone = sampler(own)
        assert [alone(logits[row : row + 1]).item() for logits in steps] == [tokens[row] for tokens in batch]


def test_seeds_differ_by_prompt_and_by_seed() -> None:
    seeds = [request_seed(1, (1, 2)), request_seed(1, (12,)), request_seed(2, (1, 2))]
    assert len(set(seeds)) == 3
    assert request_seed(1, [1, 2]) == seeds[0]
    draws = [sampler(SamplingParameters(seed=seed))(torch.zeros(1, 100_000)).item() for seed in seeds]
    assert len(set(draws)) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(bad: float, temperature: float) -> None:
    choose = sampler(*[SamplingParameters(temperature=temperature, top_k=1)] * 2)
    assert choose(torch.tensor([[1.0, 2.0, 3.0], [1.0, bad, 0.0]])).tolist() == [2, NO_TOKEN]
