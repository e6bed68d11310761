"""`tools/plan.py paper`: fits the serving model to one table of the paper's runs and predicts another."""

import contextlib
import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.serving import SERVED_WIRINGS, ServingTimes, Setting, fit_serving, predict
from ladder_lab.plan.options import PaperOptions, write_output
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.errors import ErrorCollector, UserError, raise_user_errors

SETTING_COLUMNS = ("model", "p2p", "tensor_parallel", "batch", "wiring")
TIME_COLUMNS = ("prefill_seconds", "decode_511_tokens_seconds")
GROUP_COLUMNS = ("run", "model", "p2p", "tensor_parallel", "pipeline_parallel", "batch")
"""Rows with equal values in these columns were measured together; columns that a table lacks are ignored."""


SHAPES: dict[str, ModelConfig] = {
    "1b": SIZES["paper-1.2b"],
    "3b": SIZES["paper-3.5b-tp8"],
    "llama-3.2-1b": replace(SIZES["llama-1b"], num_key_value_heads=32),
    "llama-3.2-3b": replace(SIZES["llama-3b"], num_key_value_heads=24),
    "llama-3-8b": SIZES["llama-8b"],
    "34b": SIZES["llama-34b"],
    "70b": replace(SIZES["llama-70b"], vocab_size=32000),
    "llama-3-70b": SIZES["llama-70b"],
    "llama-3.1-405b": replace(SIZES["llama-405b"], num_key_value_heads=16),
    **SIZES,
}
"""Shapes by lower-case name: those of the authors' source, and those of this package."""


@dataclass(frozen=True)
class _Table:
    """The rows of a CSV file, and the setting of each."""

    rows: tuple[dict[str, str], ...]
    settings: tuple[Setting, ...]


def print_paper(options: PaperOptions) -> None:
    """Fit, predict, write the predictions, and print their errors where the second table has measured times."""
    collector = ErrorCollector()
    tables = []
    for path, flag, times in ((options.fit, "--fit", True), (options.predict, "--predict", False)):
        with collector.collect():
            tables.append(_read_table(path, flag, times))
    collector.raise_if_any()
    fitted, wanted = tables
    rows = _predict_table(wanted, _fit_table(fitted))
    write_output(options.json, json.dumps(rows, indent=1) + "\n")
    print(f"{len(fitted.rows)} rows fitted, {len(rows)} predicted: {options.json}")
    for name, errors in _relative_errors(rows).items():
        median, high = np.quantile(errors, (0.5, 0.9)).tolist()
        print(f"  {name}: median error {100 * median:.1f} %, 90th percentile {100 * high:.1f} % of {len(errors)}")


def _read_table(path: Path, flag: str, times: bool) -> _Table:
    """Read the table that a flag names, with or without measured times; raise UserError with one line per error."""
    where = f"{flag} {path}"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
            columns = list(reader.fieldnames or ())
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{where}: is not a CSV file: {error}") from None
    needed = [*SETTING_COLUMNS, *(TIME_COLUMNS if times else ())]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise UserError(
            f"{where}: no column {', '.join(missing)}; found {', '.join(columns) or 'none'}: name it in the first line"
        )
    if not rows:
        raise UserError(f"{where}: no rows below the first line")
    errors: list[str] = []
    settings = [_read_setting(row, f"{where}, row {number}", errors) for number, row in enumerate(rows, start=1)]
    for number, row in enumerate(rows, start=1):
        for name in TIME_COLUMNS if times else ():
            seconds = _to_number(row[name])
            if isinstance(seconds, str) or seconds <= 0:
                errors.append(f"{where}, row {number}: {name} is {row[name]!r}, expected seconds above 0")
    raise_user_errors(errors)
    return _Table(tuple(rows), tuple(setting for setting in settings if setting is not None))


def _read_setting(row: Mapping[str, str], where: str, errors: list[str]) -> Setting | None:
    shape = SHAPES.get(row["model"].strip().lower())
    found = []
    if shape is None:
        found.append(f"model {row['model']!r} is not one of {', '.join(SHAPES)}")
    if row["p2p"] not in ("on", "off"):
        found.append(f"p2p is {row['p2p']!r}, expected on or off")
    if row["wiring"] not in SERVED_WIRINGS:
        found.append(f"wiring {row['wiring']!r} is not one of {', '.join(SERVED_WIRINGS)}")
    for name in ("tensor_parallel", "batch"):
        if not (row[name].isascii() and row[name].isdigit() and int(row[name]) > 0):
            found.append(f"{name} is {row[name]!r}, expected a whole number of 1 or more")
    errors += [f"{where}: {error}" for error in found]
    if shape is None or found:
        return None
    return Setting(shape, row["p2p"] == "on", int(row["tensor_parallel"]), int(row["batch"]), row["wiring"])


def _to_number(text: str) -> int | float | str:
    """Return a finite number as a number, and anything else as it is."""
    for kind in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            number: int | float = kind(text)
            return number if math.isfinite(number) else text
    return text


def _fit_table(table: _Table) -> dict[str, float]:
    groups: dict[str, list[tuple[Setting, ServingTimes]]] = {}
    for row, setting in zip(table.rows, table.settings, strict=True):
        name = " ".join(row.get(column, "") for column in GROUP_COLUMNS)
        groups.setdefault(name, []).append((setting, ServingTimes(*(float(row[column]) for column in TIME_COLUMNS))))
    return fit_serving(groups)


def _predict_table(table: _Table, values: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the rows with all their columns, numbers as numbers, and the three predictions."""
    predicted = []
    for row, setting in zip(table.rows, table.settings, strict=True):
        times = predict(setting, values)
        predictions: dict[str, Any] = {
            "predicted_prefill_seconds": times.prefill,
            "predicted_decode_seconds": times.decode,
            "predicted_tokens_per_second": times.tokens_per_second(setting.batch),
        }
        predicted.append({**{key: _to_number(value) for key, value in row.items()}, **predictions})
    return predicted


def _relative_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return |predicted / measured - 1| of all times, and of all ratios to the standard row of the same group.

    Ratios are of tokens per second. Rows without measured times are ignored.
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
