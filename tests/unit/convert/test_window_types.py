"""Directories of Mistral, Qwen2, Qwen3 and dots.llm1 with sliding windows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import check_round_trip, config_of, save_model

WINDOW = {"sliding_window": 7}
UPPER = WINDOW | {"max_window_layers": 1}
LISTED = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
USED = {"use_sliding_window": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", WINDOW | {"head_dim": 10}),
    "qwen2": ("qwen2", USED | UPPER | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", USED | LISTED),
    "dots, windows": ("dots1", UPPER | {"moe_intermediate_size": 12}),
}


@pytest.mark.parametrize("name", quick_share(CASES, 2))
def test_round_trips_are_bitwise_and_logits_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, changes = CASES[name]
    check_round_trip(tmp_path, kind, torch.float32, kind, **changes)
    model = model_config_from_hf(config_of(tmp_path / "hf"))
    layers = {"mistral": (0, 1, 2, 3), "qwen3": (0, 2)}.get(kind, (1, 2, 3))
    assert (model.window_size, model.window_layers) == (7, layers)
    late = replace(model, residual_mode="ladder", ladder_layers=(2, 3))
    assert hf_type(late, kind) == "megatron_ladder"


@pytest.mark.parametrize(
    ("kind", "unused"),
    [("qwen2", {"use_sliding_window": False} | UPPER), ("qwen3", USED | {"max_window_layers": 4}), ("mistral", {})],
)
def test_models_whose_layers_have_no_windows(tmp_path: Path, kind: str, unused: dict[str, Any]) -> None:
    save_model(tmp_path, kind)
    plain = model_config_from_hf(config_of(tmp_path))
    assert model_config_from_hf({**config_of(tmp_path), "layer_types": None, **unused}) == plain
    written = hf_config(plain, dtype="float32")
    assert written.get("sliding_window") is None and not {"layer_types", "max_window_layers"} & written.keys()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mistral", LISTED, "layer_types: found ['sliding_attention', 'full_attention', 'sliding_attention'"),
        ("qwen2", LISTED, "use_sliding_window: found False, expected true, since layer_types has sliding_attention"),
        ("qwen3", USED | LISTED | {"sliding_window": None}, "sliding_window: found nothing, expected a number"),
        ("qwen3", USED | LISTED | {"sliding_window": 0}, "sliding_window: found 0, expected a number of positions"),
        ("mixtral", WINDOW, "sliding_window: found 7, expected null: sliding-window attention is not supported"),
        ("qwen3_moe", USED | WINDOW, "sliding_window: found 7, expected null: sliding-window attention is not supp"),
        ("llama", LISTED, "layer_types[0]: found 'sliding_attention', expected 'full_attention'"),
    ],
)
def test_contradictions_are_rejected(tmp_path: Path, kind: str, changes: dict[str, Any], words: str) -> None:
    save_model(tmp_path, kind)
    (error,) = errors_of(model_config_from_hf, config_of(tmp_path) | changes)
    assert words in error
