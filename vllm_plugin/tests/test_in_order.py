"""All-reduces in order: `overlap_all_reduces` of `--hf-overrides`, and the program that compares both."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_plugin.tests.models import NEW_TOKENS

REPOSITORY = Path(__file__).resolve().parents[2]


def test_sums_in_order_are_complete_when_they_are_launched(models: Path, references: Any, ranks: Any) -> None:
    for tokens, complete in ranks(sums_at_launch, models / "ladder"):
        assert tokens == references["ladder"]
        # The embedding and six sub-blocks of at least one step for each new token.
        assert len(complete) >= 7 * NEW_TOKENS and all(complete)


def sums_at_launch(folder: Path) -> tuple[list[list[int]], list[bool]]:
    """Continue all prompts in order; return the tokens, and whether each sum was complete before its wait."""
    from vllm_plugin.tests import engines

    llm = engines.build(folder, hf_overrides={"overlap_all_reduces": False})
    complete: list[bool] = []

    def record(model: torch.nn.Module) -> None:
        reduces = model.model.all_reduces
        launch = reduces.transport

        def start(partial: torch.Tensor) -> tuple[torch.Tensor, Any]:
            buffer, work = launch(partial)
            launched = buffer.clone()

            def wait() -> None:
                work.wait()
                complete.append(torch.equal(buffer, launched))

            return buffer, SimpleNamespace(wait=wait)

        reduces.transport = start

    llm.apply_model(record)
    tokens, _ = engines.continued(llm, engines.make_prompts())
    return tokens, complete


def test_both_are_bitwise_equal_on_a_cpu() -> None:
    shape = "--hidden 64 --intermediate 128 --heads 2 --kv-heads 2 --layers 2 --vocab 96 --steps 8"
    command = [sys.executable, "vllm_plugin/check_gpu.py", "--device", "cpu", *shape.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(
        r"^(\S+): bitwise equal; in order / overlapped: [\d.]+ [\d.]+ [\d.]+$", done.stdout, re.MULTILINE
    )
    assert lines == ["defaults", "eager"]
