"""`tools/plan.py paper`: tables of runs of the paper's program, one to fit on and one to predict."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.sizes import LLAMA3_VOCABULARY, POSITIONS, SIZES
from megatron_ladder.lab.cost.serving import SERVED_WIRINGS, ServingTimes, Setting, fit_serving, predict
from megatron_ladder.lab.plan.files import write_text

SETTING_COLUMNS = ("model", "p2p", "tensor_parallel", "batch", "wiring")
TIME_COLUMNS = ("prefill_seconds", "decode_511_tokens_seconds")
GROUP_COLUMNS = ("run", "model", "p2p", "tensor_parallel", "pipeline_parallel", "batch")
"""Rows that are alike in these were taken together; a column that a table lacks does not tell them apart."""


def _mine(name: str, **changed: Any) -> ModelConfig:
    return replace(SIZES[name], **changed)


_BLOOM = ModelConfig(
    num_layers=70, hidden_size=14336, ffn_hidden_size=50176, num_attention_heads=112, num_key_value_heads=112,
    head_dim=128, vocab_size=250880, max_position_embeddings=POSITIONS,
)  # fmt: skip
SHAPES: dict[str, ModelConfig] = {
    "1b": _mine("paper-1.2b"),
    "3b": _mine("paper-3.5b", num_attention_heads=32, num_key_value_heads=32, head_dim=72),
    "llama-3.2-1b": _mine("llama-1b", num_key_value_heads=32),
    "llama-3.2-3b": _mine("llama-3b", num_key_value_heads=24),
    "llama-3-8b": _mine("llama-8b"),
    "34b": _mine("llama-34b"),
    "70b": _mine("llama-70b", vocab_size=32000),
    "llama-3-70b": _mine("llama-70b"),
    "llama-3.1-405b": _mine("llama-405b", num_key_value_heads=16, vocab_size=LLAMA3_VOCABULARY),
    "bloom-176b": _BLOOM,
    **SIZES,
}
"""Names in the tables, in lower case, as the authors' source has their shapes; and those of this package."""


@dataclass(frozen=True)
class Table:
    """A CSV file of runs."""

    path: Path
    rows: tuple[dict[str, str], ...]
    settings: tuple[Setting, ...]
    """Of the rows, in order."""


def read_table(path: Path, flag: str, times: bool) -> Table:
    """Reads a table.

    Args:
        flag: that named it, for what is said of it.
        times: whether it must have the measured times.

    Raises:
        UserError: it cannot be read, lacks a column or has no row, or a line holds what cannot be; all of it at once.
    """
    where = f"{flag} {path}"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
            columns = list(reader.fieldnames or ())
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{where}: is no CSV file: {error}") from None
    needed = [*SETTING_COLUMNS, *(TIME_COLUMNS if times else ())]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise UserError(
            f"{where}: no column {', '.join(missing)}; found {', '.join(columns) or 'none'}: name it in the first line"
        )
    if not rows:
        raise UserError(f"{where}: no rows below the first line")
    mistakes: list[str] = []
    settings = [_read_setting(row, f"{where}, row {number}", mistakes) for number, row in enumerate(rows, start=1)]
    if times:
        for number, row in enumerate(rows, start=1):
            for name in TIME_COLUMNS:
                if not _is_time(row[name]):
                    mistakes.append(f"{where}, row {number}: {name} is {row[name]!r}, expected seconds above 0")
    if mistakes:
        raise UserError(*mistakes)
    return Table(path, tuple(rows), tuple(setting for setting in settings if setting is not None))


def _read_setting(row: Mapping[str, str], where: str, mistakes: list[str]) -> Setting | None:
    before = len(mistakes)
    shape = SHAPES.get(row["model"].strip().lower())
    if shape is None:
        mistakes.append(f"{where}: model {row['model']!r} is not one of {', '.join(SHAPES)}")
    if row["p2p"] not in ("on", "off"):
        mistakes.append(f"{where}: p2p is {row['p2p']!r}, expected on or off")
    if row["wiring"] not in SERVED_WIRINGS:
        mistakes.append(f"{where}: wiring {row['wiring']!r} is not one of {', '.join(SERVED_WIRINGS)}")
    for name in ("tensor_parallel", "batch"):
        if not (row[name].isascii() and row[name].isdigit() and int(row[name]) > 0):
            mistakes.append(f"{where}: {name} is {row[name]!r}, expected a whole number of 1 or more")
    if shape is None or len(mistakes) > before:
        return None
    return Setting(shape, row["p2p"] == "on", int(row["tensor_parallel"]), int(row["batch"]), row["wiring"])


def _is_time(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def fit_table(table: Table) -> dict[str, float]:
    """Parameters fitted to all rows."""
    groups: dict[str, list[tuple[Setting, ServingTimes]]] = {}
    for row, setting in zip(table.rows, table.settings, strict=True):
        name = " ".join(row.get(column, "") for column in GROUP_COLUMNS)
        groups.setdefault(name, []).append((setting, ServingTimes(*(float(row[column]) for column in TIME_COLUMNS))))
    return fit_serving(groups)


def predict_table(table: Table, values: Mapping[str, float]) -> list[dict[str, Any]]:
    """The rows with their columns, numbers as numbers, and the three predictions."""
    predicted = []
    for row, setting in zip(table.rows, table.settings, strict=True):
        times = predict(setting, values)
        predicted.append(
            {key: _plain(value) for key, value in row.items()}
            | {
                "predicted_prefill_seconds": times.prefill,
                "predicted_decode_seconds": times.decode,
                "predicted_tokens_per_second": times.tokens_per_second(setting.batch),
            }
        )
    return predicted


def _plain(text: str) -> Any:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def relative_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """|predicted / measured - 1| of all times, and of all ratios to the standard row of the same group.

    Ratios are of tokens a second. Rows without measured times are left out.
    """
    errors: dict[str, list[float]] = {"prefill": [], "decode": [], "ratio, P2P on": [], "ratio, P2P off": []}
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if not all(isinstance(row.get(name), int | float) for name in TIME_COLUMNS):
            continue
        prefill, decode = (float(row[name]) for name in TIME_COLUMNS)
        errors["prefill"].append(abs(row["predicted_prefill_seconds"] / prefill - 1))
        errors["decode"].append(abs(row["predicted_decode_seconds"] / decode - 1))
        total = row["predicted_prefill_seconds"] + row["predicted_decode_seconds"]
        name = " ".join(str(row.get(column, "")) for column in GROUP_COLUMNS)
        groups.setdefault(f"ratio, P2P {row['p2p']}\n{name}", {})[str(row["wiring"])] = (prefill + decode, total)
    for name, group in groups.items():
        standard = group.pop("standard", None)
        for measured, predicted in group.values() if standard else ():
            assert standard is not None
            ratio = (standard[1] / predicted) / (standard[0] / measured)
            errors[name.partition("\n")[0]].append(abs(ratio - 1))
    return {name: found for name, found in errors.items() if found}


def write_predictions(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A JSON list, replaced as a whole."""
    write_text(path, json.dumps(rows, indent=1) + "\n")
