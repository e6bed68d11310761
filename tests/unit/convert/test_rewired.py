"""The wiring of a converted model: flags override that of the source, and leave the rest of it unchanged."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.convert.options import ReshapeOptions
from megatron_ladder.convert.wiring import rewired
from tests.unit.convert.saved_models import small_config

STANDARD: dict[str, Any] = {}
LATE = {"residual_mode": "ladder", "ladder_layers": (1, 2), "residual_staleness": 2}
LANES = LATE | {"lanes": 2}


@pytest.mark.parametrize(
    ("source", "flags", "expected"),
    [
        (STANDARD, {"lanes": 0}, ("standard", (), 1, 0)),
        (STANDARD, {"lanes": 2}, ("ladder", (0, 1, 2), 1, 2)),
        (STANDARD, {"lanes": 2, "residual_mode": "ladder-attention"}, ("ladder-attention", (0, 1, 2), 1, 2)),
        (LATE, {"lanes": 2}, ("ladder", (1, 2), 2, 2)),
        (LATE, {"lanes": 0}, ("ladder", (1, 2), 2, 0)),
        (LATE, {"ladder_layers": "1"}, ("ladder", (2,), 2, 0)),
        (LANES, {}, ("ladder", (1, 2), 2, 2)),
        (LANES, {"lanes": 0}, ("ladder", (1, 2), 2, 0)),
        (LANES, {"residual_staleness": 3}, ("ladder", (1, 2), 3, 2)),
        (LANES, {"ladder_layers": "1"}, ("ladder", (2,), 2, 2)),
        (LANES, {"residual_mode": "ladder-attention"}, ("ladder-attention", (0, 1, 2), 1, 0)),
        (LANES, {"residual_mode": "standard"}, ("standard", (), 1, 0)),
        (LANES, {"residual_mode": "standard", "lanes": 0}, ("standard", (), 1, 0)),
        (LANES, {"ladder_layers": "none"}, ("standard", (), 1, 0)),
    ],
)
def test_flags_override_one_property(source: dict[str, Any], flags: dict[str, Any], expected: object) -> None:
    options = ReshapeOptions(load=Path("run"), save=Path("new"), **flags)
    before = small_config(num_key_value_heads=4, **source)
    model, notes = rewired(before, options)
    assert (model.residual_mode, model.ladder_layers, model.residual_staleness, model.lanes) == expected
    assert len(notes) == (model != before)
