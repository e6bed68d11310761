"""Streams and compiled graphs of GPUs, as far as a CPU shows them, and faults in them that these tests find."""

from pathlib import Path
from typing import Any

import pytest

from vllm_plugin.tests.test_order import by_interval, expected_order

STREAMS = ("ladder", "staleness-2", "lanes", "experts-farskip", "experts-shortcut", "experts-longcat")


@pytest.mark.quick
@pytest.mark.parametrize("model", STREAMS)
def test_every_access_is_ordered_between_streams(model: str, models: Path, references: Any, ranks: Any) -> None:
    from vllm_plugin.tests import engines

    for tokens, hazards, operators in ranks(engines.played_streams, models / model):
        assert (tokens, hazards) == (references[model], [])
        assert operators > 1000


@pytest.mark.parametrize(
    ("fault", "hazard"),
    [
        ("no fork", "aten::copy_ on side does not wait for a write"),
        ("no join", "the main stream does not wait for side"),
        ("reused buffer", "on main does not wait for a write"),
    ],
)
def test_missing_order_between_streams_is_found(fault: str, hazard: str, models: Path, ranks: Any) -> None:
    from vllm_plugin.tests import engines

    for _, hazards, _ in ranks(engines.played_streams, models / "ladder", fault):
        assert any(hazard in found for found in hazards)


@pytest.mark.parametrize("mode", ["pieces", "whole"])
def test_a_sum_that_is_used_after_its_norm_is_rejected(mode: str, models: Path, ranks: Any, tmp_path: Path) -> None:
    from vllm_plugin.tests import engines

    fault = ("a sum is used after its norm", tmp_path)
    with pytest.raises(AssertionError, match="is used again after the node"):
        ranks(engines.with_fault, *fault, engines.tokens, models / "ladder", {"mode": mode})


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        ("experts run before a shared expert", "experts-ladder"),
        ("a sub-block reads what experts have read", "experts-sigmoid"),
        ("a sub-block reads what experts have read", "experts-longcat"),
        ("no wait", "ladder"),
    ],
)
def test_reading_what_is_undefined_changes_tokens(
    fault: str, model: str, models: Path, references: Any, ranks: Any, tmp_path: Path
) -> None:
    from vllm_plugin.tests import engines

    for tokens, _ in ranks(engines.with_fault, fault, tmp_path, engines.tokens, models / model, {"mode": "whole"}):
        assert tokens != references[model]


def test_a_compiler_that_may_reorder_does_so(models: Path, references: Any, ranks: Any, tmp_path: Path) -> None:
    from vllm_plugin.tests import engines

    model, call = "staleness-2", (engines.recorded_passes, models / "staleness-2", {"mode": "whole"})
    for tokens, passes in ranks(engines.with_fault, "no hold", tmp_path, *call):
        assert tokens == references[model]
        assert expected_order(model) not in {by_interval(steps) for steps in passes}


@pytest.mark.parametrize("mode", ["pieces", "whole"])
def test_cached_graphs_compute_the_same(mode: str, models: Path, references: Any, ranks: Any, tmp_path: Path) -> None:
    from vllm_plugin.tests import engines

    for compiled, loaded in (1, 0), (0, 1):
        found = ranks(engines.cached_tokens, models / "staleness-2", mode, tmp_path)
        assert found == [(references["staleness-2"], compiled, loaded)] * 2
