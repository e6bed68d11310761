"""Tables of runs: the accuracy on a made-up laboratory, and what is wrong with a table."""

import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.lab.cost.fit import median_and_quantile
from megatron_ladder.lab.cost.serving import PARAMETERS, Setting, predict
from megatron_ladder.lab.plan.published import (
    GROUP_COLUMNS,
    SHAPES,
    Table,
    fit_table,
    predict_table,
    read_table,
    relative_errors,
    write_predictions,
)

HEADER = "run,model,p2p,tensor_parallel,pipeline_parallel,batch,wiring,prefill_seconds,decode_511_tokens_seconds"
WIRINGS = ("standard", "ladder", "parallel", "no-comm")
NOISE = 0.01


def laboratory(seed: int) -> dict[str, float]:
    """Parameters of a machine that is not the one that is believed in."""
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


def halves(table: Table, seed: int) -> tuple[Table, Table]:
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
    table = read_table(make_table(tmp_path / "runs.csv", seed), "--fit", times=True)
    known, held_out = halves(table, seed)
    believed = {parameter.name: parameter.value for parameter in PARAMETERS}
    before = relative_errors(predict_table(held_out, believed))
    errors = relative_errors(predict_table(held_out, fit_table(known)))
    for name, (median, high) in {
        "decode": (0.03, 0.08), "prefill": (0.03, 0.08), "ratio, P2P on": (0.02, 0.05), "ratio, P2P off": (0.04, 0.08),
    }.items():  # fmt: skip
        found = median_and_quantile(errors[name], 0.9)
        assert found[0] < median and found[1] < high, (name, found)
    assert statistics.median(before["decode"]) > 2 * statistics.median(errors["decode"])


def test_predictions_stand_beside_what_the_table_has(tmp_path: Path) -> None:
    values = laboratory(3)
    path = tmp_path / "predict.csv"
    path.write_text(
        "remark,model,p2p,tensor_parallel,batch,wiring\n"
        "first,Llama-3-8B,on,8,4,ladder\n"
        ",70b,off,2,1,ladder-parallel\n"
    )
    table = read_table(path, "--predict", times=False)
    out = tmp_path / "out.json"
    write_predictions(predict_table(table, values), out)
    first, second = json.loads(out.read_text())
    assert {name: first[name] for name in ("remark", "model", "tensor_parallel", "batch")} == {
        "remark": "first", "model": "Llama-3-8B", "tensor_parallel": 8, "batch": 4,
    }  # fmt: skip
    times = predict(Setting(SHAPES["llama-3-8b"], True, 8, 4, "ladder"), values)
    assert first["predicted_prefill_seconds"] == times.prefill
    assert first["predicted_decode_seconds"] == times.decode
    assert first["predicted_tokens_per_second"] == pytest.approx(4 * 512 / (times.prefill + times.decode))
    assert second["remark"] == "" and second["predicted_decode_seconds"] > 0
    assert relative_errors([first, second]) == {}


def test_errors_of_ratios_are_paired() -> None:
    def row(wiring: str, measured: float, predicted: float, run: str = "a") -> dict[str, object]:
        return {
            "run": run, "p2p": "on", "wiring": wiring,
            "prefill_seconds": measured, "predicted_prefill_seconds": predicted,
            "decode_511_tokens_seconds": measured, "predicted_decode_seconds": predicted,
        }  # fmt: skip

    rows = [row("standard", 2.0, 4.0), row("ladder", 1.0, 2.0), row("ladder", 1.0, 1.0, "without standard")]
    errors = relative_errors(rows)
    assert errors["decode"] == [1.0, 1.0, 0.0]
    assert errors["ratio, P2P on"] == [0.0], "twice as long in both, so the ratio is right"
    assert "ratio, P2P off" not in errors


def mistakes_of(path: Path, times: bool = True) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_table(path, "--fit", times)
    return list(caught.value.messages)


def test_what_is_wrong_with_a_table(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    (found,) = mistakes_of(path)
    assert found == f"--fit {path}: cannot be read: No such file or directory"
    path.write_text("model,p2p,batch,wiring,prefill_seconds\n")
    (found,) = mistakes_of(path)
    assert "no column tensor_parallel, decode_511_tokens_seconds; found model, p2p" in found
    path.write_text(HEADER + "\n")
    (found,) = mistakes_of(path)
    assert "no rows" in found
    path.write_text(
        f"{HEADER}\na,gpt-5,on,8,1,1,ladder,1,1\na,70b,maybe,0,1,x,desync,1,1\na,70b,on,8,1,1,ladder,-1,\n"
    )
    found = mistakes_of(path)
    assert len(found) == 7
    assert "row 1: model 'gpt-5' is not one of 1b, 3b" in found[0]
    assert [word in mistake for word, mistake in zip(("p2p", "wiring", "tensor", "batch"), found[1:5], strict=True)]
    assert "row 3: prefill_seconds is '-1', expected seconds above 0" in found[5]
    assert "decode_511_tokens_seconds is ''" in found[6]
    path.write_bytes(b"\xff\xfe\x00")
    assert "is no CSV file" in mistakes_of(path)[0]


def test_settings_that_a_fit_never_saw_are_predicted(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text(f"{HEADER}\n{line('llama-3-8b', 'on', 2, 1, 'standard', laboratory(4), 1.0)}\n")
    values = fit_table(read_table(path, "--fit", times=True))
    believed = {parameter.name: parameter.value for parameter in PARAMETERS}
    assert values["switch_rank"] == believed["switch_rank"] and values["network_base"] == believed["network_base"]
    setting = Setting(SHAPES["llama-3.1-405b"], False, 16, 4, "ladder-parallel")
    assert predict(setting, values).decode > 0
