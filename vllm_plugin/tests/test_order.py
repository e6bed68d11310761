"""The order of launches and waits of the all-reduces in a forward pass."""

from pathlib import Path
from typing import Any

import pytest

ORDER = {
    "standard": "s0 w0 s1 w1 s2 w2 s3 w3 s4 w4 s5 w5",
    "ladder": "s0 s1 w0 s2 w1 s3 w2 s4 w3 s5 w4 w5",
    "hybrid": "s0 w0 s1 s2 w1 s3 w2 s4 w3 s5 w4 w5",
    "staleness-2": "s0 s1 s2 w0 s3 w1 s4 w2 s5 w3 w4 w5",
    "ladder-parallel": "s0 s1 w0 s2 w1 w2",
    "ladder-attention": "s0 w0 s1 s2 w1 w2 s3 s4 w3 w4 s5 w5",
}
"""`s` is a launch and `w` a wait, each with the number of its sub-block."""


@pytest.mark.parametrize(
    ("model", "mode"), [*((model, "eager") for model in ORDER), ("ladder", "compiled"), ("staleness-2", "compiled")]
)
def test_launches_and_waits(model: str, mode: str, models: Path, references: Any, ranks: Any) -> None:
    from vllm_plugin.tests import engines

    results = ranks.run(engines.communication, models / model, {"enforce_eager": mode == "eager"})
    # vLLM's own all-reduce of the embedding precedes all launches, and its gather of the logits follows all waits. A
    # graph that was compiled for a CPU contains the all-reduce itself, not the call that is recorded.
    expected = f"r {ORDER[model]} g" if mode == "eager" else f"{ORDER[model]} g"
    for tokens, passes in results:
        assert tokens == references[model]
        assert set(passes) == {expected}
