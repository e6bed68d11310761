"""Gated DeltaNet with vLLM's own kernels for CPUs, which compute in bfloat16, and the states of sequences."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_plugin.tests.models import change_config, make_prompts
from vllm_plugin.tests.test_tokens import exported

BF16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize("rank_count", [1, 2])
def test_a_standard_model_equals_that_of_vllm(
    rank_count: int, models: Path, one: Any, ranks: Any, tmp_path: Path
) -> None:
    from vllm_plugin.tests import engines

    shutil.copytree(models / "delta-cpu", tmp_path / "standard")
    change_config(tmp_path / "standard", residual_mode="standard", ladder_layers=[])
    run = one if rank_count == 1 else ranks
    ours, theirs = (run(engines.tokens, path, BF16) for path in (tmp_path / "standard", models / "qwen3-5-cpu"))
    assert ours == theirs


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_late_model_chooses_likely_tokens(mode: str, models: Path, ranks: Any) -> None:
    """In bfloat16, almost equal logits can change their order. The largest is about two deviations above the mean."""
    from vllm_plugin.tests import engines

    module = exported(models / "delta-cpu")
    for continuations, _ in ranks(engines.tokens, models / "delta-cpu", BF16 | {"mode": mode}):
        for prompt, tokens in zip(make_prompts(), continuations, strict=True):
            with torch.no_grad():
                logits = module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1))
            assert ((logits.amax(1, keepdim=True) - chosen) < 0.05 * logits.std(1, keepdim=True)).all()


@pytest.mark.parametrize("rank_count", [1, 2])
def test_a_rank_has_the_states_of_its_heads(rank_count: int, models: Path, one: Any, ranks: Any) -> None:
    """Two key heads and four value heads of width 64; the type of the matrices is that of the directory."""
    from vllm_plugin.tests import engines

    shapes = [(3, (2 * 2 + 4) * 64 // rank_count), (4 // rank_count, 64, 64)]
    dtypes = [torch.bfloat16, torch.float32]
    for found in (one if rank_count == 1 else ranks)(engines.states, models / "delta-cpu", BF16):
        assert found == ([(shapes, dtypes)] * 2, (shapes, dtypes))
