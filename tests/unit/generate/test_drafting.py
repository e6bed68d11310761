"""Drafting in one process, compared with recomputation of the whole text for every token and every draft."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate.drafting import Drafter
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import load_model, open_model
from megatron_ladder.generate.requests import Generation, GenerationRequest
from megatron_ladder.generate.sampling import GREEDY, Drafts, SamplingParameters
from megatron_ladder.tokenizers.kinds import ByteTokenizer
from tests.helpers.pairwise import usual_share
from tests.reference import ReferenceConfig, Weights, greedy_continuation, reference_logits
from tests.reference.mtp import greedy_drafts
from tests.unit.convert.test_mtp_heads import save_with_head
from tests.unit.generate.test_graph import Graphs, check_equal, noted_reads
from tests.unit.generate.tiny_model import (
    ALWAYS,
    MODELS,
    NEVER,
    PROMPTS,
    SOMETIMES,
    drafting_reference,
    tiny_config,
    tiny_engine,
    tiny_model,
)

HEAD = {"mtp_num_layers": 1}
ALL_WINDOWS = {"window_size": 4, "window_layers": (0, 1, 2)}
HEADS: dict[str, dict[str, Any]] = {
    name: MODELS[name] for name in ("standard", "lanes", "farskip", "windows", "sinks", "delta", "latent-ladder")
} | {
    "before the norm": {"mtp_before_final_norm": True, "residual_mode": "ladder", "ladder_layers": (0, 1, 2)},
    "all windows": ALL_WINDOWS,
    "all windows with sinks": ALL_WINDOWS | {"softmax_type": "learnable"},
    "longcat": MODELS["longcat"],
}


def steps_of_drafts(
    weights: Weights, config: ReferenceConfig, prompt: Sequence[int], ids: Sequence[int], draft_tokens: int
) -> list[list[int]]:
    """Return the drafts of each step in which greedy drafts become `ids`, of which the prompt gives the first."""
    steps, known = list[list[int]](), 1
    while known < len(ids):
        steps.append(greedy_drafts(weights, config, [*prompt, *ids[:known]], draft_tokens))
        agreed = [draft == token for draft, token in zip(steps[-1], ids[known:], strict=False)]
        known += 1 + (agreed.index(False) if False in agreed else len(agreed))
    return steps


def recorded_drafts(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """List the drafts of each step from here on, for each row."""
    steps: list[list[list[int]]] = []
    draft = Drafter.draft

    def recorded(*arguments: Any) -> Drafts:
        drafts = draft(*arguments)
        steps.append(drafts.tokens.tolist())
        return drafts

    monkeypatch.setattr(Drafter, "draft", recorded)
    return steps


@pytest.mark.parametrize(
    ("name", "draft_tokens", "prefill_chunk_size", "captured"),
    usual_share(
        [
            *((name, 1 + (row + more) % 3, None, False) for row, name in enumerate(HEADS) for more in (1, 2, 0)),
            *(
                (name, 3, chunk, True)
                for name in ("windows", "delta", "latent-ladder", "all windows")
                for chunk in (2, 1)
            ),
        ],
        3,
    ),
)
def test_greedy_text_and_drafts_are_those_of_recomputation(
    name: str, draft_tokens: int, prefill_chunk_size: int | None, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**HEADS[name], **HEAD)
    weights, reference = drafting_reference(config, *SOMETIMES)
    drafts = recorded_drafts(monkeypatch)
    engine = tiny_engine(config, weights, draft_tokens)
    engine.prefill_chunk_size = prefill_chunk_size
    engine.new_graph = Graphs() if captured else None
    requests = [GenerationRequest(prompt, 20 + row, GREEDY) for row, prompt in enumerate(PROMPTS)]
    found = engine.generate(requests)
    expected = [
        greedy_continuation(weights, reference, request.prompt_ids, request.max_new_tokens) for request in requests
    ]
    assert [list(generation.ids) for generation in found] == expected
    count = 0
    for row, (prompt, ids) in enumerate(zip(PROMPTS, expected, strict=True)):
        steps = steps_of_drafts(weights, reference, prompt, ids, draft_tokens)
        count += len(steps)
        # Captured steps run no Python.
        assert captured or [step[row] for step in drafts[: len(steps)]] == steps
    tokens = sum(map(len, expected)) - len(expected)
    assert found[0].timings.accepted_length == tokens / count
    assert 1.0 < tokens / count < 0.9 * (draft_tokens + 1)


@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
@pytest.mark.parametrize("how_often", [ALWAYS, NEVER], ids=["always", "never"])
def test_accepted_length_of_heads_that_are_always_or_never_right(
    draft_tokens: int, how_often: tuple[float, float]
) -> None:
    config = tiny_config(**MODELS["windows"], **HEAD)
    weights, reference = drafting_reference(config, *how_often)
    requests = [GenerationRequest(prompt, 25, GREEDY) for prompt in PROMPTS]
    found = tiny_engine(config, weights, draft_tokens).generate(requests)
    assert [list(one.ids) for one in found] == [greedy_continuation(weights, reference, one, 25) for one in PROMPTS]
    # 24 tokens after the first.
    assert {one.timings.accepted_length for one in found} == {1.0 + draft_tokens if how_often is ALWAYS else 1.0}


@pytest.mark.parametrize("draft_tokens", [1, 3])
@pytest.mark.parametrize("name", ["standard", "delta"])
def test_captured_drafting_gives_the_same_tokens_with_one_read_for_each_step(
    name: str, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**MODELS[name], **HEAD)
    weights, _ = drafting_reference(config, *SOMETIMES)
    penalised = SamplingParameters(repetition_penalty=1.3, top_p=0.8, logprobs=True)
    sampling = [GREEDY, SamplingParameters(), penalised, SamplingParameters(top_k=9, logprobs=True)]
    requests = [
        GenerationRequest(prompt, 9 + row, replace(sampling[row], seed=row)) for row, prompt in enumerate(PROMPTS)
    ]
    engine, graphs = tiny_engine(config, weights, draft_tokens), Graphs()
    expected = engine.generate(requests)
    # A sample does not depend on the others.
    check_equal([engine.generate([request])[0] for request in requests], expected)
    engine.new_graph = graphs
    reads = noted_reads(monkeypatch)
    for _ in range(2):
        check_equal(engine.generate(requests), expected)
    (graph,) = graphs.alive
    assert graph.captures == 1 and reads == ["cpu"] * (graph.replays + 2)
    assert graph.replays < 2 * (8 + 3)
    engine.close()


def in_bytes(config: ModelConfig, weights: Weights, draft_tokens: int) -> GenerationEngine:
    engine = tiny_engine(config, weights, draft_tokens)
    engine.tokenizer = ByteTokenizer()
    return engine


def test_every_end_of_a_text_is_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of accepted drafts: stop strings, end-of-text tokens and limits, and logprobs up to there."""
    config = tiny_config(vocab_size=128, max_position_embeddings=48, **HEAD)
    weights, _ = drafting_reference(config, *ALWAYS)
    plain, drafting = in_bytes(config, weights, 0), in_bytes(config, weights, 3)
    scored = replace(GREEDY, logprobs=True)
    (whole,) = plain.generate([GenerationRequest((65, 66), 40, scored)])
    assert whole.text is not None
    requests = [GenerationRequest((65, 66), count, scored) for count in (1, 2, 3, 4, 5, 6, 46)]
    requests += [GenerationRequest((65, 66), 40, scored, frozenset({token})) for token in whole.ids[:9]]
    requests += [GenerationRequest((65, 66), 40, scored, stop=(whole.text[at : at + 3],)) for at in range(9)]
    expected = plain.generate(requests)
    steps = [drafting.generate([request])[0] for request in requests]
    for found in (steps, drafting.generate(requests)):
        check_equal(found, expected)
        assert [(one.text, one.finish_reason) for one in found] == [(one.text, one.finish_reason) for one in expected]
    assert {one.finish_reason for one in expected} == {"length", "eos", "stop"}
    assert steps[6].timings.accepted_length == 45 / math.ceil(45 / 4)


@pytest.mark.parametrize("penalty", [0.5, 1.4])
def test_a_penalty_for_seen_tokens_counts_drafts_before_a_token(penalty: float) -> None:
    config = tiny_config(**HEAD)
    weights, _ = drafting_reference(config, *SOMETIMES)
    # The newest draft rarely decides, so it takes many prompts.
    prompts = [(number, 3 * number % 67) for number in range(1, 67, 2)]
    requests = [GenerationRequest(prompt, 12, replace(GREEDY, repetition_penalty=penalty)) for prompt in prompts]
    found = tiny_engine(config, weights, 3).generate(requests)
    check_equal(found, tiny_engine(config, weights).generate(requests))
    assert found[0].timings.accepted_length and found[0].timings.accepted_length > 1.05
    unpenalised = tiny_engine(config, weights).generate([replace(one, sampling=GREEDY) for one in requests])
    assert [one.ids for one in unpenalised] != [one.ids for one in found]


def test_a_head_with_bad_numbers_is_an_error() -> None:
    config = tiny_config(**HEAD)
    for sampling in (GREEDY, SamplingParameters(repetition_penalty=1.2)):
        weights, _ = drafting_reference(config, *SOMETIMES)
        weights[f"layers.{config.num_layers}.head_norm.weight"][3] = torch.nan
        with pytest.raises(BadNumbersError, match="the logits of prompt 0 "):
            tiny_engine(config, weights, 1).generate([GenerationRequest(prompt, 4, sampling) for prompt in PROMPTS])


def distribution(logits: Tensor, sampling: SamplingParameters, seen: Sequence[int]) -> Tensor:
    """Return the probabilities of the next token, by the definition."""
    logits = logits.double().clone()
    for token in {*seen}:
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    weights = (logits / sampling.temperature).exp()
    if sampling.top_k:
        weights[weights < weights.sort(descending=True).values[sampling.top_k - 1]] = 0
    return weights / weights.sum()


def continuations(
    weights: Weights, config: ReferenceConfig, prompt: tuple[int, ...], count: int, sampling: SamplingParameters
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the probability of every continuation by `count` tokens."""
    for ids in product(range(config.vocab_size), repeat=count):
        rows = reference_logits(weights, config, torch.tensor([[*prompt, *ids]]))[0]
        probability = 1.0
        for number, token in enumerate(ids, start=len(prompt)):
            probability *= float(distribution(rows[number - 1], sampling, [*prompt, *ids][:number])[token])
        yield ids, probability


DRAWS = 20_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft_tokens", "sampling"),
    usual_share(
        [
            (2, SamplingParameters(temperature=0.7, top_k=4, repetition_penalty=1.3)),
            (1, SamplingParameters()),
            (3, SamplingParameters(temperature=1.5, repetition_penalty=0.7)),
        ],
        3,
    ),
)
def test_drawn_tokens_have_the_distribution_of_the_model(draft_tokens: int, sampling: SamplingParameters) -> None:
    """The second and third token of a text, which drafts precede: chi-squared of 20,000 texts, at 1e-3."""
    config = tiny_config(vocab_size=6, num_layers=1, **HEAD)
    weights, reference = drafting_reference(config, 0.4, 3.0)
    engine, prompt = tiny_engine(config, weights, draft_tokens), (3, 1)
    expected: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for (_, *ids), probability in continuations(weights, reference, prompt, 3, sampling):
        expected[tuple(ids)] += probability
    batches = [range(first, first + 2000) for first in range(0, DRAWS, 2000)]
    texts: list[Generation] = []
    for seeds in batches:
        texts += engine.generate([GenerationRequest(prompt, 3, replace(sampling, seed=seed)) for seed in seeds])
    found = Counter(text.ids[1:] for text in texts)
    assert found.keys() <= {ids for ids, probability in expected.items() if probability > 0}
    cells = {ids: DRAWS * probability for ids, probability in expected.items() if DRAWS * probability >= 5}
    assert sum(cells.values()) > 0.99 * DRAWS and len(cells) > 10
    statistic = sum((found[ids] - count) ** 2 / count for ids, count in cells.items())
    assert statistic < chi2.ppf(1 - 1e-3, len(cells) - 1)
    assert texts[0].timings.accepted_length and texts[0].timings.accepted_length > 1.2


def test_half_precision_and_packed_weights() -> None:
    config = tiny_config(**MODELS["delta"], **HEAD)
    weights, _ = drafting_reference(config, *ALWAYS)
    requests = [GenerationRequest(prompt, 25, GREEDY) for prompt in PROMPTS]
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(config, weights, packed=True, dtype=dtype)
        plain, drafting = (GenerationEngine(model, ProcessMesh.single(), draft_tokens=count) for count in (0, 2))
        found = drafting.generate(requests)
        check_equal(found, plain.generate(requests))
        assert found[0].timings.accepted_length == 3.0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_heads_of_hugging_face_directories(kind: str, tmp_path: Path) -> None:
    save_with_head(tmp_path, kind)
    found = []
    for draft, count in ((None, 0), ("mtp", 2)):
        stored = open_model(tmp_path, None, None, draft=draft)
        assert stored.config.mtp_num_layers == (0 if draft is None else 1)
        model = load_model(stored, ProcessMesh.single(), torch.float32, torch.device("cpu"), overlap=True)
        engine = GenerationEngine(model, ProcessMesh.single(), draft_tokens=count)
        requests = [GenerationRequest(prompt, 20, GREEDY) for prompt in PROMPTS]
        found.append([one.ids for one in engine.generate(requests)])
    assert found[0] == found[1]
