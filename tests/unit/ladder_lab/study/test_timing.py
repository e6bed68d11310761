"""Step times, from a benchmark's rows or from the trials' tokens per second."""

import json
from pathlib import Path
from typing import Any

import pytest

from ladder_lab.bench.options import parse_options
from ladder_lab.study.commands import timing_command
from ladder_lab.study.options import RunOptions
from ladder_lab.study.outcome import read_step_times, times_of_trials
from ladder_lab.study.schema import Result, Trial
from tests.unit.ladder_lab.study.standing_in import SIZE, study_of


def row(wiring: str, ratio: float, verdict: str = "sound") -> dict[str, Any]:
    return {
        "wiring": wiring,
        "ratio_to_standard": ratio,
        "spread": 0.02,
        "median_seconds": 0.3,
        "verdict": verdict,
        "interconnect": "emulated serial wire",
        "alpha": "1.2c",
        "alpha_seconds": 0.0015,
    }


def test_the_benchmark_has_the_shape_and_batch_of_the_study() -> None:
    options = RunOptions(Path("out"), micro_batch_size=4, seq_length=64, link="2ms", timing_ranks=2, timing_rounds=9)
    command = timing_command(options, ("standard", "ladder", "staleness-2"), SIZE, Path("rows.json"))
    case, asked = parse_options(command[2:])
    assert Path(command[1]).is_file() and case == "train"
    assert (asked.sizes, asked.batch, asked.sequence, asked.tp, asked.rounds) == ((SIZE,), 4, 64, 2, 9)
    assert (asked.alpha, asked.json) == (("2ms",), Path("rows.json"))
    assert asked.wirings == ("standard", "ladder", "staleness-2")


@pytest.mark.parametrize("verdict", ["sound", "too noisy to judge"])
def test_rows_become_times(tmp_path: Path, verdict: str) -> None:
    rows = [row("standard", 1.0003, "sound"), row("ladder", 1.4, verdict), row("no-comm", 1.9, "too noisy to judge")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    times, doubts = read_step_times(tmp_path / "rows.json", ("standard", "ladder"), SIZE, ("benchmark.py", "--tp", "2"))
    assert times.speedup == {"standard": 1.0, "ladder": 1.4} and times.spread["ladder"] == 0.02 and times.ranks == 2
    assert times.interconnect.startswith("emulated serial wire, an all-reduce takes 1.500 ms (1.2c)")
    # The verdict on a bound does not concern a compared wiring.
    assert len(doubts) == (verdict != "sound") and ("in doubt" in times.interconnect) == bool(doubts)


def result(wiring: str, seed: int, speed: float, kind: Any = "tokens") -> Result:
    trial = Trial(kind, wiring, SIZE, seed, 1e-3, 100)
    return Result(trial, 1, 64, (), ((100, 3.0),), speed, 1.0, 1, (), {})


def test_own_times_are_paired_by_seed() -> None:
    results = [
        result("standard", 1, 100.0),
        result("ladder", 1, 150.0),
        result("standard", 2, 200.0),
        result("ladder", 2, 260.0),
        result("ladder", 3, 9000.0),
        result("parallel", 1, 120.0),
        result("ladder", 1, 1.0, "tuning"),
        result("hybrid", 1, 110.0),
    ]
    times = times_of_trials(results, study_of(), SIZE, 8)
    assert times is not None and times.ranks == 8
    # ladder: 1.5 and 1.3; the quartiles of two values are at a quarter and three quarters of their distance.
    assert times.speedup == pytest.approx({"standard": 1.0, "parallel": 1.2, "ladder": 1.4})
    assert times.spread == pytest.approx({"standard": 0.0, "parallel": 0.0, "ladder": 0.1})
    assert times.seconds["ladder"] == pytest.approx(64 / 205)
    assert times_of_trials(results[1:2], study_of(), SIZE, 1) is None
