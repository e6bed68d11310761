"""Greedy tokens in vLLM, compared with `tools/generate.py` and with the exported module in transformers."""

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_plugin.tests.models import (
    DELTA,
    EXPERT_VARIANTS,
    EXPERTS,
    LANES,
    LATENT,
    PLAIN,
    VARIANTS,
    WINDOWS,
    WIRINGS,
    make_prompts,
)
from vllm_plugin.tests.test_order import ORDER

_ON_CPU = ("eager", "compiled")
_ON_CUDA = ("pieces", "whole")
_MODELS = (*WIRINGS, *LANES, *VARIANTS, *EXPERTS, *EXPERT_VARIANTS, *PLAIN, *LATENT, *WINDOWS, *DELTA)


def _cases() -> Iterator[Any]:
    """Yield a model and how it runs, with the marks of that case.

    As on GPUs, every wiring runs on two ranks, in pieces and whole; `test_order` compares the tokens of some.
    """
    for index, model in enumerate(_MODELS):
        is_wiring = model in WIRINGS or model in LANES or model in EXPERTS or model in LATENT
        for ranks, mode in product((2,) if model in LANES else (1, 2), (*_ON_CPU, *_ON_CUDA)):
            marks = []
            if mode in _ON_CPU:
                is_covered = model in LANES or mode == _ON_CPU[(index + ranks) % 2]
            elif ranks == 1:
                is_covered = mode == _ON_CUDA[index % 2]
            else:
                is_covered = model not in ORDER and (is_wiring or mode == _ON_CUDA[index % 2])
                if is_covered and mode == _ON_CUDA[index % 2] and (model in WIRINGS or model in LANES):
                    marks.append(pytest.mark.quick)
            if not is_covered:
                marks.append(pytest.mark.slow)
            yield pytest.param(model, (ranks, mode), marks=marks)


def test_the_references_distinguish_the_models(references: Any) -> None:
    twins = {("standard", "llama"), ("hybrid", "soft-cap"), ("qk-norm", "zero-centered")}
    for first, second in combinations(references, 2):
        if (first, second) not in twins:
            assert all(a != b for a, b in zip(references[first], references[second], strict=True)), (first, second)


@pytest.mark.parametrize(
    ("model", "how"), [*_cases()], ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value
)
def test_tokens_equal_those_of_the_generator(
    model: str, how: tuple[int, str], models: Path, references: Any, ranks: Any, one: Any
) -> None:
    from vllm_plugin.tests import engines

    rank_count, mode = how
    options = {"mode": mode}
    assert max(map(len, make_prompts())) > 2 * engines.CHUNK
    for tokens, cached in (one if rank_count == 1 else ranks)(engines.tokens, models / model, options):
        assert tokens == references[model]
        # One block of the cache for each of the two prompts that begin as an earlier one.
        assert cached == 64


@pytest.mark.parametrize("mode", [*_ON_CPU, *_ON_CUDA])
def test_tokens_with_a_cache_of_latents(mode: str, models: Path, references: Any, ranks: Any) -> None:
    """As on GPUs. vLLM's kernel for CPUs computes neither chunks of prompts nor from a cache of prefixes."""
    from vllm_plugin.tests import engines

    for tokens, cached in ranks(engines.tokens_from_latents, models / "cached-latents", {"mode": mode}):
        assert tokens == references["cached-latents"]
        assert cached == 0


_STAGED = [
    ("hybrid", "1,2"),
    ("hybrid", "2,1"),
    ("ladder", "1,2"),
    ("staleness-2", "2,1"),
    ("tied-head", "2,1"),
    ("experts-farskip", "1,2"),
    ("experts-shortcut", "2,1"),
    ("latent-farskip", "2,1"),
    ("delta-four", "2,2"),
]


@pytest.mark.parametrize(
    ("model", "partition", "mode"),
    [
        pytest.param(*staged, mode, marks=pytest.mark.slow if mode == _ON_CUDA[index % 2] else ())
        for index, staged in enumerate(_STAGED)
        for mode in ("compiled", *_ON_CUDA)
    ],
)
def test_tokens_with_pipeline_stages(
    model: str, partition: str, mode: str, models: Path, references: Any, ranks: Any
) -> None:
    """The first cut of the hybrid is at its border; the others are between layers that read late."""
    from vllm_plugin.tests import engines

    assert ranks(engines.staged_tokens, models / model, partition, mode) == [references[model]] * 2


@pytest.mark.parametrize("mode", _ON_CUDA)
def test_tokens_with_stages_of_two_ranks(mode: str, models: Path, references: Any, four: Any) -> None:
    """The second stage adds sums that it has received while its first all-reduces are in flight."""
    from vllm_plugin.tests import engines

    assert four(engines.staged_tokens, models / "staleness-2", "2,1", mode) == [references["staleness-2"]] * 4


@pytest.mark.parametrize("mode", ["eager", *_ON_CUDA])
@pytest.mark.parametrize("model", ["experts-ladder", "experts-farskip", "experts-glm"])
def test_tokens_with_experts_divided_among_the_ranks(
    model: str, mode: str, models: Path, references: Any, ranks: Any
) -> None:
    from vllm_plugin.tests import engines

    options = {"mode": mode, "enable_expert_parallel": True}
    for tokens, _ in ranks(engines.tokens, models / model, options):
        assert tokens == references[model]


@pytest.mark.parametrize("model", [*WIRINGS, *LANES, *VARIANTS, *EXPERTS, *EXPERT_VARIANTS, *LATENT, *WINDOWS, *DELTA])
def test_the_exported_module_chooses_the_same_tokens(model: str, models: Path, references: Any) -> None:
    module = exported(models / model)
    for prompt, tokens in zip(make_prompts(), references[model], strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("model", ["soft-cap", "biases"])
def test_logits_equal_those_of_the_exported_module(model: str, models: Path, one: Any) -> None:
    from vllm_plugin.tests import engines

    prompt = make_prompts()[2]
    ((tokens, found),) = one(engines.logits, models / model, prompt)
    with torch.no_grad():
        expected = exported(models / model)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def exported(folder: Path) -> Any:
    """Return the module of the directory's own code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = "modeling_megatron_ladder.MegatronLadderForCausalLM"
    module_class = get_class_from_dynamic_module(name, str(folder))
    return module_class.from_pretrained(str(folder), dtype=torch.float32).eval()
