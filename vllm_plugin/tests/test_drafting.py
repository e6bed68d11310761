"""Drafts equal those of plain arithmetic and of vLLM's heads, and the tokens those without drafts."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vllm_plugin.tests.models import DELTA, HEADS, HEADS_OF_VLLM, LANES, make_prompts

_MODES = ("eager", "compiled", "pieces", "whole")


def _cases() -> Iterator[Any]:
    """Yield a model and how it runs: alone in eager mode, and as on GPUs on two ranks, unless it is slow."""
    for index, model in enumerate((*HEADS, "qwen3-5-ours", "qwen3-5-moe-ours")):
        for ranks, mode in product((2,) if model in LANES else (1, 2), _MODES):
            is_covered = mode == ("eager" if ranks == 1 else _MODES[2 + index % 2])
            yield pytest.param(model, ranks, mode, marks=() if is_covered else pytest.mark.slow)


def options_of(model: str) -> dict[str, Any]:
    """Return options: prompts are read in one step; gated DeltaNet with drafts cannot cache prefixes on a CPU."""
    has_delta = model in DELTA or model.startswith("qwen")
    return {"max_num_batched_tokens": 64, "enable_prefix_caching": not has_delta}


def expected_drafts(prompt: list[int], tokens: list[int], after: list[int]) -> list[int]:
    """Return the drafts of a sequence, given the draft after each of its tokens.

    After an accepted draft, the next step is two positions further.
    """
    sequence = prompt + tokens
    position, drafts = len(prompt) - 1, []
    while position < len(sequence) - 1:
        drafts.append(after[position])
        position += 2 if sequence[position + 2 : position + 3] == [after[position]] else 1
    return drafts


@pytest.mark.parametrize(("model", "rank_count", "mode"), [*_cases()])
def test_drafts_and_tokens_equal_those_of_plain_arithmetic(
    model: str, rank_count: int, mode: str, models: Path, references: Any, one: Any, ranks: Any
) -> None:
    from vllm_plugin.tests import engines

    name = model.removesuffix("-ours")
    after = json.loads((models / "drafts.json").read_text())[name]
    options = options_of(model) | {"mode": mode}
    for tokens, found in (one if rank_count == 1 else ranks)(engines.drafted, models / f"head-{model}", 1, options):
        assert tokens == references[name]
        expected = [*map(expected_drafts, make_prompts(), tokens, after)]
        # The last step of a sequence may draft a token behind its end.
        assert [drafts[: len(known)] for drafts, known in zip(found, expected, strict=True)] == expected
        steps = sum(map(len, expected))
        assert sum(map(len, found)) <= steps + len(expected)
        # About half of the steps or more accept their draft, but not all.
        assert 0.5 * sum(map(len, tokens)) < steps < 0.8 * sum(map(len, tokens))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("model", HEADS_OF_VLLM)
def test_drafts_equal_those_of_qwen_in_vllm(
    model: str, rank_count: int, count: int, models: Path, one: Any, ranks: Any
) -> None:
    """The last model runs with vLLM's own kernels of gated DeltaNet."""
    from vllm_plugin.tests import engines

    options = options_of(model) | ({"dtype": "bfloat16"} if model.endswith("cpu") else {})
    run = one if rank_count == 1 else ranks
    ours, theirs = (
        run(engines.drafted, models / name, count, options) for name in (f"head-{model}-ours", f"head-{model}")
    )
    assert ours == theirs


@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("model", ["ladder", "soft-cap", "experts-farskip", "latent-farskip", "delta-ladder"])
def test_several_drafts_of_a_batch_change_no_tokens(
    model: str, rank_count: int, models: Path, references: Any, one: Any, ranks: Any
) -> None:
    """Prompts are computed in chunks, next to sequences with drafts."""
    from vllm_plugin.tests import engines

    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    options = options_of(model) | {"max_num_batched_tokens": 32, "speculative_config": speculation, "mode": "compiled"}
    for tokens, _ in (one if rank_count == 1 else ranks)(engines.tokens, models / f"head-{model}", options):
        assert tokens == references[model]


def test_files_without_the_announced_head_are_rejected(models: Path, one: Any, tmp_path: Path) -> None:
    shutil.copytree(models / "head-ladder", tmp_path / "bare")
    path = tmp_path / "bare" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("mtp.")}
    save_file(tensors, path, metadata={"format": "pt"})
    (message,) = one(start_of_drafting, tmp_path / "bare")
    assert re.search(
        r"bare: config.json announces a drafting head \(mtp_num_hidden_layers\), but the files lack", message
    )


def start_of_drafting(folder: Path) -> str:
    """Return why an engine that drafts cannot start."""
    from vllm_plugin.tests import engines

    with pytest.raises(ValueError) as raised:
        engines.drafted(folder, 1, {})
    return str(raised.value)


def test_no_draft_is_a_part_of_a_piecewise_graph(models: Path, one: Any) -> None:
    """Such a graph cannot contain the head's all-reduces. vLLM would use it where the model's steps are captured."""
    assert one(graphs_of_drafts, models / "head-ladder") == [["NONE"]]


def graphs_of_drafts(folder: Path) -> list[str]:
    """Return the kinds of graphs of drafts that an engine which captures whole steps selects."""
    from vllm.config import CUDAGraphMode

    from vllm_plugin.tests import engines

    llm = engines.build(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1})

    def select(worker: Any) -> str:
        worker.vllm_config.compilation_config.cudagraph_capture_sizes = [1, 2, 4]
        worker.vllm_config.compilation_config.max_cudagraph_capture_size = 4
        worker.model_runner.drafter.initialize_cudagraph_keys(CUDAGraphMode.FULL)
        mode: CUDAGraphMode = worker.model_runner.drafter._determine_batch_execution_and_padding(2)[0]
        return mode.name

    found: list[str] = llm.collective_rpc(select)
    return found
