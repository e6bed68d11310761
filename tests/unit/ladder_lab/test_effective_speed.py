"""Effective speed by hand: the figure, its intervals in reports of studies, and what plans and the README state."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ladder_lab.effective_speed import PUBLISHED, ScalingLaw
from ladder_lab.study.over_sizes import scaling_law
from ladder_lab.study.report import _effective_speeds
from tests.docs.pages import read_page
from tools.plan import main as plan

LAW = ScalingLaw(0.5, 1.0, "planted")


def test_effective_speed_by_hand() -> None:
    assert LAW.effective_speed(3.0, 2.0, 1.5) == pytest.approx((2 / 1) ** 2 * 1.5)
    assert LAW.affordable_loss(3.0, 1.44) == pytest.approx(2 * (1.2 - 1))
    for loss in (1.0, 0.9, math.inf, math.nan):
        assert math.isnan(LAW.effective_speed(3.0, loss, 1.5)) and math.isnan(LAW.effective_speed(loss, 3.0, 1.5))


def test_the_readme_states_the_price_of_a_hundredth_of_a_nat() -> None:
    text = " ".join(read_page("README.md").split())
    (price,) = re.findall(r"at a loss of 3\.2, 0\.01 nats per token cost ([\d.]+) % of the compute", text)
    assert price == f"{100 * (1 - ((3.2 - 1.6) / (3.21 - 1.6)) ** (1 / 0.0941)):.1f}"


def study(losses: dict[tuple[str, str, int], float], iterations: dict[str, int]) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return a study at equal tokens and its runs, from losses by size, wiring and seed; sizes are numbers."""
    rows = [
        {"kind": "tokens", "size": size, "wiring": wiring, "seed": seed, "loss": loss}
        | {"learning_rate": 0.1, "iterations": iterations[size]}
        for (size, wiring, seed), loss in losses.items()
    ]
    sizes = {size: {"parameters": int(size), "iterations": steps} for size, steps in iterations.items()}
    return {"sizes": sizes, "chosen": {f"{row['size']}/{row['wiring']}": 0.1 for row in rows}}, pd.DataFrame(rows)


def test_the_interval_of_an_effective_speed_is_that_of_its_pairs() -> None:
    losses = {
        "standard": {1: 3.0, 2: 3.2, 3: 3.4},
        "ladder": {1: 3.2, 2: 3.2, 3: 3.5, 4: 9.0},
        "parallel": {1: 2.9, 2: 3.1, 3: 0.5},
        "untimed": {1: 3.0},
    }
    _, runs = study({("8", name, seed): loss for name, row in losses.items() for seed, loss in row.items()}, {"8": 10})
    times = {name: {"speedup": speed} for name, speed in {"standard": 1.0, "ladder": 1.5, "parallel": 1.2}.items()}
    text = _effective_speeds(runs, times, LAW)
    # Squares of 2 / 2.2, 2.2 / 2.2 and 2.4 / 2.5; Student's t of two degrees of freedom is 4.3027.
    logs = [math.log(ratio**2 * 1.5) for ratio in (2 / 2.2, 1.0, 2.4 / 2.5)]
    mean = sum(logs) / 3
    half = 4.3027 * math.sqrt(sum((value - mean) ** 2 for value in logs) / 2 / 3)
    low, middle, high = (f"{math.exp(value):.3f}" for value in (mean - half, mean, mean + half))
    compute = f"{math.exp(mean) / 1.5:.3f}"
    assert f"| ladder | {compute} | 1.500 | {middle} | {low} to {high} | **pays** |" in text
    assert "| parallel | – | 1.200 | – | – | – |" in text, "a loss below the limit"
    assert "| standard |" not in text and "untimed" not in text and "alpha 0.5 and L_inf 1, planted:" in text


def test_the_law_is_fitted_over_compute_where_the_runs_determine_it() -> None:
    iterations = {"100": 10, "200": 20, "400": 40, "800": 80}
    losses = {
        (size, "standard", seed): 1.5 + 2.0 * (int(size) * steps / 1000) ** -0.2 + 1e-4 * (-1) ** seed
        for size, steps in iterations.items()
        for seed in (1, 2)
    }
    law = scaling_law(*study(losses, iterations))
    assert (law.exponent, law.limit) == pytest.approx((0.2, 1.5), rel=0.01) and law.source.startswith("fitted")
    del iterations["800"]
    fewer = {key: loss for key, loss in losses.items() if key[0] in iterations}
    assert scaling_law(*study(fewer, iterations)) == PUBLISHED


def test_a_plan_states_what_faster_wirings_may_lose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    plan(f"--model 8b --batch 64 --standard-loss 2.6 --wirings standard ladder parallel --json {path}".split())
    report = json.loads(path.read_text(encoding="utf-8"))
    fastest: dict[str, float] = {}
    for row in report["layouts"]:
        fastest.setdefault(row["wiring"], row["step_seconds"]["total"])
    gains = {name: fastest["standard"] / seconds for name, seconds in fastest.items()}
    expected = {name: (2.6 - 1.6) * (gain**0.0941 - 1) for name, gain in gains.items() if gain > 1}
    assert expected and report["affordable_loss"] == pytest.approx(expected)
    printed = capsys.readouterr().out
    assert (
        f"is 2.6 (--standard-loss): {', '.join(f'{name} {loss:.3f}' for name, loss in expected.items())} (" in printed
    )
