"""Combinations that the engine does not support."""

import pytest

from megatron_ladder.config.run import RunConfig
from tests.helpers.runs import run_or_errors

BASE = "--train-iters 100 --lr 1e-3 --seq-length 128 --hidden-size 64 --num-attention-heads 4"


def read(words: str) -> tuple[RunConfig, list[str]]:
    return run_or_errors(f"{BASE} {words}".split(), 1000, 4)


@pytest.mark.parametrize("stage", "0123")
@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize("offload", ["", "--offload-optimizer cpu"])
def test_every_supported_stage_is_accepted(stage: str, precision: str, offload: str) -> None:
    found = read(f"--zero-stage {stage} {precision} {offload}")[1]
    assert len(found) == (stage == "0") * (bool(precision) + bool(offload)), found


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--bf16 --zero-stage 0", ["--bf16 needs --zero-stage 1, 2 or 3"]),
        ("--offload-optimizer cpu --zero-stage 0", ["--offload-optimizer cpu needs --zero-stage 1, 2 or 3"]),
        ("--optimizer-implementation apex --zero-stage 3", ["--optimizer-implementation apex miscounts steps"]),
        ("--optimizer-implementation apex --offload-optimizer cpu", ["--optimizer-implementation apex needs a GPU"]),
    ],
)
def test_unsupported_combinations_are_rejected(words: str, messages: list[str]) -> None:
    found = read(words)[1]
    assert [line.startswith(start) for line, start in zip(found, messages, strict=True)] == [True] * len(found), found


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--zero-stage 2", ["--zero-stage 2 with --pipeline-model-parallel-size 2: a stage needs"]),
        ("--zero-stage 3", ["--zero-stage 3 with --pipeline-model-parallel-size 2: a stage needs"]),
        ("--zero-stage 1 --bf16", []),
        ("--offload-optimizer cpu", ["--offload-optimizer cpu with --pipeline-model-parallel-size is not supported"]),
    ],
)
def test_pipeline_restrictions(words: str, messages: list[str]) -> None:
    found = read(f"--pipeline-model-parallel-size 2 {words}")[1]
    assert [line.startswith(start) for line, start in zip(found, messages, strict=True)] == [True] * len(found), found
