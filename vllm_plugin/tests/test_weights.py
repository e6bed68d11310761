"""Adapters and quantised weights."""

from pathlib import Path
from typing import Any

import pytest

from vllm_plugin.tests.models import ADAPTED


@pytest.mark.parametrize("model", ADAPTED)
def test_an_adapter_of_all_matrices_equals_merged_weights(
    model: str, models: Path, references: Any, ranks: Any
) -> None:
    from vllm_plugin.tests import engines

    expected = (references[model], references[f"merged-{model}"])
    assert expected[0] != expected[1]
    assert ranks(engines.adapted_tokens, models / model, models / f"adapter-{model}") == [expected] * 2


def test_quantised_weights_equal_those_of_llama_in_vllm(models: Path, references: Any, ranks: Any) -> None:
    from vllm_plugin.tests import engines

    ours = ranks(engines.quantised_tokens, models / "standard-int8")
    llama = ranks(engines.quantised_tokens, models / "llama-int8")
    assert ours == llama
    assert [methods for _, methods in ours] == [{"CompressedTensorsLinearMethod"}] * 2
