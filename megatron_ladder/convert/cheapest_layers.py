"""The file of `convert_checkpoint.py sensitivity`: what it costs to let layers of a model read the stream late.

`sensitivity.py` measures and writes it. `--ladder-layers best:N@FILE` takes the first N layers of its order.
"""

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import LATE_MODES
from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.files import write_atomically

BEST = "best:"
"""How a value of --ladder-layers begins that refers to such a file."""


class Price(NamedTuple):
    """A difference of two losses, in nats per token."""

    increase: float
    standard_error: float


@dataclass(frozen=True)
class Sensitivity:
    """The increases of a model's loss, without training, when some of its layers read late.

    Attributes:
        model: the directory that was measured.
        num_layers: its number of layers.
        residual_mode, residual_staleness: the wiring of the late layers.
        data: prefix of the token file.
        tokens: target tokens of each measurement.
        loss: the loss without a late layer, in nats per token.
        layers: for each layer, the price when it alone reads late.
        order: all layers, the cheapest first.
        greedy_layers: how many layers of `order` were chosen by measuring every remaining layer together with those
            before it. The others follow by the last of these measurements.
        cheapest: for each n from 1 to `greedy_layers`, the price of the first n layers of `order`.
        upper: the same for the upper n layers.
    """

    model: str
    num_layers: int
    residual_mode: str
    residual_staleness: int
    data: str
    tokens: int
    loss: float
    layers: tuple[Price, ...]
    order: tuple[int, ...]
    greedy_layers: int
    cheapest: tuple[Price, ...]
    upper: tuple[Price, ...]


def write_sensitivity(path: Path, found: Sensitivity) -> None:
    """Replace the file."""
    write_atomically(path, json.dumps(asdict(found), indent=1) + "\n")


def _read_sensitivity(path: Path) -> Sensitivity:
    """Read a file that `write_sensitivity` wrote. Raises UserError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        read = {field.name: values[field.name] for field in fields(Sensitivity)}
        for name in ("layers", "cheapest", "upper"):
            read[name] = tuple(Price(*price) for price in read[name])
        found = Sensitivity(**read | {"order": tuple(read["order"])})
        if sorted(found.order) != list(range(found.num_layers)):
            raise ValueError(f"order {found.order} does not contain each of {found.num_layers} layers once")
        if found.residual_mode not in LATE_MODES:
            raise ValueError(f"residual_mode {found.residual_mode!r} is not among {', '.join(LATE_MODES)}")
        if type(found.residual_staleness) is not int or found.residual_staleness < 1:
            raise ValueError(f"residual_staleness {found.residual_staleness!r} is not a positive integer")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give the --output of convert_checkpoint.py sensitivity") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a file of convert_checkpoint.py sensitivity: {error!r}: run it again, or give another file"
        ) from None
    return found


def cheapest_layers(
    text: str, model: ModelConfig, mode: str | None, staleness: int | None
) -> tuple[list[int], str, int]:
    """Return the layers that `best:N@FILE` names, and the wiring for which the file was measured.

    Raises UserError if the file does not belong to a model of so many layers, or to another requested wiring.
    """
    match = re.fullmatch(rf"{BEST}(\d+)@(.+)", text)
    if match is None:
        raise UserError(f"--ladder-layers {text}: expected {BEST}N@FILE, such as {BEST}16@sensitivity.json")
    count, path = int(match[1]), Path(match[2])
    found = _read_sensitivity(path)
    measured = {
        "layers": (found.num_layers, model.num_layers),
        "--residual-mode": (found.residual_mode, mode or found.residual_mode),
        "--residual-staleness": (found.residual_staleness, staleness or found.residual_staleness),
    }
    errors = [
        f"--ladder-layers {text}: {path} was measured with {name} {before}, not {now}: measure this model and wiring"
        for name, (before, now) in measured.items()
        if before != now
    ]
    if not errors and count > found.num_layers:
        errors.append(f"--ladder-layers {text}: the model has only {found.num_layers} layers")
    raise_user_errors(errors)
    return sorted(found.order[:count]), found.residual_mode, found.residual_staleness
