"""The fit's accuracy on synthetic runs, and the errors of a table."""

import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ladder_lab.cost.serving import PARAMETERS, Setting, predict
from ladder_lab.plan.published import (
    GROUP_COLUMNS,
    SHAPES,
    _fit_table,
    _predict_table,
    _read_table,
    _relative_errors,
    _Table,
)
from megatron_ladder.errors import UserError

HEADER = "run,model,p2p,tensor_parallel,pipeline_parallel,batch,wiring,prefill_seconds,decode_511_tokens_seconds"
WIRINGS = ("standard", "ladder", "parallel", "no-comm")
NOISE = 0.01


def laboratory(seed: int) -> dict[str, float]:
    """Parameters of a machine that differs from the priors."""
    dice = random.Random(seed)
    return {parameter.name: parameter.at(dice.uniform(-1, 1)) for parameter in PARAMETERS}


def line(model: str, p2p: str, tensor: int, batch: int, wiring: str, values: Mapping[str, float], error: float) -> str:
    times = predict(Setting(SHAPES[model], p2p == "on", tensor, batch, wiring), values)
    return f"a,{model},{p2p},{tensor},1,{batch},{wiring},{times.prefill * error},{times.decode * error}"


def make_table(path: Path, seed: int) -> Path:
    """Settings like those of a paper, measured with noise."""
    dice, values = random.Random(seed), laboratory(seed)
    lines = [HEADER]
    for model in ("llama-3-8b", "llama-3-70b"):
        for p2p in ("on", "off"):
            for tensor in (1, 2, 4, 8):
                for batch in (1, 4, 16, 64):
                    for wiring in WIRINGS:
                        error = math.exp(dice.gauss(0, NOISE))
                        lines.append(line(model, p2p, tensor, batch, wiring, values, error))
    path.write_text("\n".join(lines) + "\n")
    return path


def halves(table: _Table, seed: int) -> tuple[_Table, _Table]:
    """Two tables that share no setting."""
    keys = [tuple(row[name] for name in GROUP_COLUMNS) for row in table.rows]
    chosen = set(random.Random(seed).sample(sorted(set(keys)), len(set(keys)) // 2))
    parts = []
    for inside in (True, False):
        places = [index for index, key in enumerate(keys) if (key in chosen) is inside]
        rows, settings = (tuple(of[index] for index in places) for of in (table.rows, table.settings))
        parts.append(replace(table, rows=rows, settings=settings))
    return parts[0], parts[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_half_of_a_laboratory_predicts_the_other_half(tmp_path: Path, seed: int) -> None:
    table = _read_table(make_table(tmp_path / "runs.csv", seed), "--fit", times=True)
    known, held_out = halves(table, seed)
    prior = {parameter.name: parameter.value for parameter in PARAMETERS}
    before = _relative_errors(_predict_table(held_out, prior))
    errors = _relative_errors(_predict_table(held_out, _fit_table(known)))
    for name, (median, high) in {
        "decode": (0.03, 0.08),
        "prefill": (0.03, 0.08),
        "ratio, P2P on": (0.02, 0.05),
        "ratio, P2P off": (0.04, 0.08),
    }.items():
        found = np.quantile(errors[name], (0.5, 0.9))
        assert found[0] < median and found[1] < high, (name, found)
    assert statistics.median(before["decode"]) > 2 * statistics.median(errors["decode"])


def test_predictions_are_added_to_the_columns_of_the_table(tmp_path: Path) -> None:
    values = laboratory(3)
    path = tmp_path / "predict.csv"
    path.write_text(
        "remark,model,p2p,tensor_parallel,batch,wiring\nfirst,Llama-3-8B,on,8,4,ladder\n,70b,off,2,1,ladder-parallel\n"
    )
    table = _read_table(path, "--predict", times=False)
    first, second = json.loads(json.dumps(_predict_table(table, values)))
    assert {name: first[name] for name in ("remark", "model", "tensor_parallel", "batch")} == {
        "remark": "first",
        "model": "Llama-3-8B",
        "tensor_parallel": 8,
        "batch": 4,
    }
    times = predict(Setting(SHAPES["llama-3-8b"], True, 8, 4, "ladder"), values)
    assert first["predicted_prefill_seconds"] == times.prefill
    assert first["predicted_decode_seconds"] == times.decode
    assert first["predicted_tokens_per_second"] == pytest.approx(4 * 512 / (times.prefill + times.decode))
    assert second["remark"] == "" and second["predicted_decode_seconds"] > 0
    assert _relative_errors([first, second]) == {}


def test_errors_of_ratios_are_paired() -> None:
    def row(wiring: str, measured: float, predicted: float, run: str = "a") -> dict[str, object]:
        return {
            "run": run,
            "p2p": "on",
            "wiring": wiring,
            "prefill_seconds": measured,
            "predicted_prefill_seconds": predicted,
            "decode_511_tokens_seconds": measured,
            "predicted_decode_seconds": predicted,
        }

    rows = [row("standard", 2.0, 4.0), row("ladder", 1.0, 2.0), row("ladder", 1.0, 1.0, "without standard")]
    errors = _relative_errors(rows)
    assert errors["decode"] == [1.0, 1.0, 0.0]
    assert errors["ratio, P2P on"] == [0.0], "twice as long in both, so the ratio is right"
    assert "ratio, P2P off" not in errors


def errors_of(path: Path, times: bool = True) -> list[str]:
    with pytest.raises(UserError) as caught:
        _read_table(path, "--fit", times)
    return list(caught.value.messages)


def test_errors_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    (found,) = errors_of(path)
    assert found == f"--fit {path}: cannot be read: No such file or directory"
    path.write_text("model,p2p,batch,wiring,prefill_seconds\n")
    (found,) = errors_of(path)
    assert "no column tensor_parallel, decode_511_tokens_seconds; found model, p2p" in found
    path.write_text(HEADER + "\n")
    (found,) = errors_of(path)
    assert "no rows" in found
    path.write_text(f"{HEADER}\na,gpt-5,on,8,1,1,ladder,1,1\na,70b,maybe,0,1,x,desync,1,1\na,70b,on,8,1,1,ladder,-1,\n")
    found = errors_of(path)
    assert len(found) == 7
    assert "row 1: model 'gpt-5' is not one of 1b, 3b" in found[0]
    assert [word in error for word, error in zip(("p2p", "wiring", "tensor", "batch"), found[1:5], strict=True)]
    assert "row 3: prefill_seconds is '-1', expected seconds above 0" in found[5]
    assert "decode_511_tokens_seconds is ''" in found[6]
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not a CSV file" in errors_of(path)[0]


def test_settings_that_a_fit_never_saw_are_predicted(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text(f"{HEADER}\n{line('llama-3-8b', 'on', 2, 1, 'standard', laboratory(4), 1.0)}\n")
    values = _fit_table(_read_table(path, "--fit", times=True))
    prior = {parameter.name: parameter.value for parameter in PARAMETERS}
    assert values["switch_rank"] == prior["switch_rank"] and values["network_base"] == prior["network_base"]
    setting = Setting(SHAPES["llama-3.1-405b"], False, 16, 4, "ladder-parallel")
    assert predict(setting, values).decode > 0
