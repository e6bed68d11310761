"""The schedule of --anneal-staleness: the late layers of a model become late gradually, together or one after another.

With the lateness a of a layer, from 0 to 1, its late sub-blocks read

    stale + (1 - a) x (sum of the outputs that are missing from stale)

where `stale` is the stream that the wiring prescribes. With a = 0 the layer is standard, with a = 1 it is late.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.errors import UserError, raise_user_errors

AnnealSchedule = Literal["linear", "cosine"]
TOGETHER = "together"
"""The value of --convert-schedule with which all layers have the same lateness."""


def lateness_at(
    iteration: int, iters: int, schedule: AnnealSchedule, groups: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return the lateness of every layer in a step; the first step is 1.

    Each group of layers has an equal part of the `iters` steps, in which its lateness rises from 0. A step has the
    lateness that the steps before it have reached, so the first step has 0, and step `iters` + 1 has 1.
    """
    found: dict[int, float] = {}
    for place, layers in enumerate(groups):
        # Whole numbers, so that the lateness is exactly 0 before the part of a group and 1 after it.
        share = min(max((iteration - 1) * len(groups) - place * iters, 0), iters) / iters
        lateness = share if schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * share))
        found |= dict.fromkeys(layers, lateness)
    return found


def read_order(text: str, model: ModelConfig) -> tuple[int, ...]:
    """Return the late layers of a model in the order of --convert-schedule.

    `text` is a list such as `11,3,7`, or @FILE with the name of a JSON file whose key `order` is such a list. Other
    layers of the model may be in the list. Raises UserError if it cannot be read, or does not contain every late layer
    once.
    """
    named = f"--convert-schedule {text}"
    if text.startswith("@"):
        order = _read_file(Path(text[1:]), named)
    elif re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        order = [int(word) for word in text.split(",")]
    else:
        raise UserError(f"{named}: expected {TOGETHER}, layers such as 11,3,7, or @FILE with the name of a JSON file")
    late, errors = set(model.ladder_layers), []
    if repeated := sorted({layer for layer in order if order.count(layer) > 1}):
        errors.append(f"{named}: contains layers {repeated} more than once: give each layer once")
    if unknown := sorted({layer for layer in order if not 0 <= layer < model.num_layers}):
        errors.append(f"{named}: contains layers {unknown}, expected layers of 0-{model.num_layers - 1}: remove them")
    if missing := sorted(late - set(order)):
        errors.append(f"{named}: does not contain the late layers {missing}: give a place to every late layer")
    raise_user_errors(errors)
    return tuple(layer for layer in order if layer in late)


def _read_file(path: Path, named: str) -> list[int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{named}: {path} cannot be read: {error.strerror}: give an existing file") from None
    except ValueError as error:
        raise UserError(f"{named}: {path} is not JSON: {error}: give a JSON file with the key order") from None
    order = found.get("order") if isinstance(found, dict) else None
    if not isinstance(order, list) or any(type(layer) is not int for layer in order):
        raise UserError(f'{named}: {path} has no list of layers, expected {{"order": [11, 3, 7]}}')
    return order
