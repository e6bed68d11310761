"""The wiring of converted models: flags override that of the source, and leave the rest of it unchanged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ladder.convert.options import ReshapeOptions
from megatron_ladder.convert.wiring import rewired
from megatron_ladder.flags import section_flags
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import convert, our_logits, save_model, small_config

STANDARD: dict[str, Any] = {}
LATE = {"residual_mode": "ladder", "ladder_layers": (1, 2), "residual_staleness": 2}
LANES = LATE | {"lanes": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 20, "moe_layers": (1, 2)}


@torch.no_grad()
@pytest.mark.parametrize("mask", [(), (0,), (1, 3), (2, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_hybrids_follow_the_recurrence(tmp_path: Path, mask: tuple[int, ...]) -> None:
    """With x_i the stream after transformers' sub-block i: x_i = x_{i-1} + h_i(x_{i-2}) in a ladder layer, and
    x_{i-1} + h_i(x_{i-1}) in others (arXiv 2501.06589)."""
    llama: Any = save_model(tmp_path / "hf")
    layers = "[" + ",".join(map(str, mask)) + "]" if mask else "none"
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", "--ladder-layers", layers)
    tokens = torch.randint(0, 301, (2, 20))
    newest = before = llama.model.embed_tokens(tokens)
    places = {
        "position_embeddings": llama.model.rotary_emb(newest, torch.arange(20).unsqueeze(0)),
        "attention_mask": torch.full((20, 20), float("-inf")).triu(1)[None, None],
    }
    for index, layer in enumerate(llama.model.layers):
        for norm, body in ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp)):
            normed = norm(before if index in mask else newest)
            output = body(normed) if body is layer.mlp else body(normed, **places)[0]
            newest, before = newest + output, newest
    torch.testing.assert_close(our_logits(tmp_path / "ours", tokens), llama.lm_head(llama.model.norm(newest)))


@pytest.mark.parametrize(
    ("source", "flags", "expected"),
    [
        (STANDARD, {"ladder_layers": "1"}, ("ladder", (2,), 1, 0)),
        (STANDARD, {"ladder_layers": "all", "residual_staleness": 2}, ("ladder", (0, 1, 2), 2, 0)),
        (STANDARD, {"lanes": 2}, ("ladder", (0, 1, 2), 1, 2)),
        (LATE, {"lanes": 2}, ("ladder", (1, 2), 2, 2)),
        (LATE, {"ladder_layers": "1"}, ("ladder", (2,), 2, 0)),
        (LANES, {}, ("ladder", (1, 2), 2, 2)),
        (LANES, {"lanes": 0}, ("ladder", (1, 2), 2, 0)),
        (LANES, {"ladder_layers": "1"}, ("ladder", (2,), 2, 2)),
        (LANES, {"residual_mode": "standard", "lanes": 0}, ("standard", (), 1, 0)),
        (EXPERTS, {"residual_mode": "farskip"}, ("farskip", (0, 1, 2), 1, 0)),
        (EXPERTS | LATE, {"residual_mode": "farskip", "ladder_layers": "1"}, ("farskip", (2,), 1, 0)),
    ],
)
def test_flags_override_one_property(source: dict[str, Any], flags: dict[str, Any], expected: object) -> None:
    options = ReshapeOptions(load=Path("run"), save=Path("new"), **flags)
    before = small_config(num_key_value_heads=4, **source)
    model, notes = rewired(before, options)
    assert (model.residual_mode, model.ladder_layers, model.residual_staleness, model.lanes) == expected
    assert len(notes) == (model != before)


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ({"residual_mode": "desync", "desync_interval": 4, "desync_tp": 4}, {"ladder_layers": "1"}, "source is desync"),
        ({}, {"residual_mode": "parallel"}, "every layer of the source has 2 norms, and this wiring needs 1"),
        ({}, {"residual_mode": "farskip"}, "farskip needs layers with experts"),
        (
            EXPERTS,
            {"residual_mode": "farskip", "residual_staleness": 2},
            "2 has no meaning with --residual-mode farskip",
        ),
        (EXPERTS, {"residual_mode": "longcat"}, "this wiring needs 4: give .* or farskip or shortcut"),
        (EXPERTS, {"residual_mode": "shortcut"}, "shortcut needs a shared expert"),
        (EXPERTS, {"lanes": 2}, "num_experts 4 with --lanes 2"),
        ({}, {"residual_mode": "farskip"}, "farskip needs layers with experts; a conversion changes only the wiring"),
        (
            {},
            {"residual_mode": "ladder-parallel", "ladder_layers": "1"},
            "give --residual-mode ladder or ladder-attention, or leave it out",
        ),
        ({}, {"residual_mode": "desync"}, "can only be trained from the start"),
        ({}, {"ladder_layers": "4"}, "the upper 4 layers of 3 do not exist"),
        ({}, {"residual_mode": "standard", "ladder_layers": "1"}, "has no meaning with --residual-mode standard"),
    ],
)
def test_a_wiring_that_needs_other_weights_is_rejected(
    source: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    options = ReshapeOptions(load=Path("run"), save=Path("new"), **flags)
    (error,) = errors_of(rewired, small_config(**source), options)
    assert re.search(message, error), error
    # Only flags of the program are named.
    assert {*re.findall(r"--[a-z-]+", error)} <= {one.name for one in section_flags(ReshapeOptions)}, error
