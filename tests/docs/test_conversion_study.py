"""The report of docs/study/conversion.py, for results that are written by hand."""

import sys
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).resolve().parents[2] / "docs" / "study"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(STUDY))
    import conversion

    yield conversion
    for name in ("conversion", "results"):
        sys.modules.pop(name)


def test_a_search_goes_on_while_the_best_is_at_the_edge(study: Any, tmp_path: Path) -> None:
    results = study.Results(tmp_path / "results.json")

    def state() -> Any:
        return study.search(results, (0.1, 0.2, 0.4), str)

    assert state().missing == (0.1, 0.2, 0.4) and state().best is None
    for value, loss in ((0.1, 3.0), (0.2, 2.0), (0.4, 1.0)):
        results.add(str(value), {"loss": loss})
    assert state().missing == (0.8,) and state().best is None
    results.add("0.8", {"loss": 1.5})
    assert state().missing == () and state().best == 0.4 and not state().at_edge
    for value, loss in ((0.8, 0.9), (1.6, 0.8), (3.2, 0.7)):
        results.add(str(value), {"loss": loss})
    assert state().best == 3.2 and state().at_edge


def test_results_of_another_process_are_kept(study: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    ours, theirs = study.Results(path), study.Results(path)
    ours.add("a", {"loss": 1.0})
    theirs.add("b", {"loss": 2.0})
    ours.add("c", {"loss": 3.0})
    assert [study.Results(path).of(name) for name in "abc"] == [{"loss": loss} for loss in (1.0, 2.0, 3.0)]


def add_everything(study: Any, results: Any, gap: dict[tuple[str, str], float]) -> None:
    """Add results of two small models, such that a healed model is worse than its control by `gap` / percent."""
    for rate in study.RATES:
        results.add(study.Model("small", 1, rate).name, {"loss": abs(rate - study.RATES[1])})
    for run in (make(share) for make in study.tuned_runs(results).values() for share in study.SHARES):
        results.add(run.name, {"loss": 5 + abs(run.share - study.SHARES[1])})
    for model in study.models(results, ["small"], (1, 2)):
        for run in study.healings(results, model):
            control = 2.0 + model.seed / 10 - run.percent / 100
            increase = gap.get((run.selection, run.method), 0.0) / max(run.percent, 1) * (1 + 0.1 * model.seed)
            results.add(run.name, {"loss": control + increase})


def test_losses_are_compared_with_the_control_of_the_same_model(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = study.Results(tmp_path / "results.json")
    gap = {("upper", "plain"): 0.4, ("upper", "distill"): 0.1, ("cheapest", "plain"): 0.04, ("all", "plain"): 0.8}
    gap["cheapest", "own"] = 0.02
    add_everything(study, results, gap)
    models = list(study.models(results, ["small"], (1, 2)))
    assert {model.rate for model in models} == {study.RATES[1]} and not study.tuning_runs(results)
    found = study.differences(results, models, "upper", "plain", 10)
    assert list(found.values()) == pytest.approx([0.044, 0.048])
    study.report(results, models, tmp_path / "results.png")
    printed = capsys.readouterr().out
    # Two models: the half width is 12.7 standard errors.
    assert "| plain | +0.4600 ± 0.2541 | +0.4600 ± 0.2541 | +0.1533 ± 0.0847 | +0.0460 ± 0.0254 |" in printed
    assert "| own | +0.0230 ± 0.0127 | +0.0230 ± 0.0127 | +0.0077 ± 0.0042 | +0.0023 ± 0.0013 |" in printed
    # A quarter of the gap takes a quarter of the tokens; what reaches the aim at once has no number.
    share = next(line for line in printed.splitlines() if line.startswith("| small | distill, upper")).split(" | ")[2]
    assert 0.2 < float(share) < 0.3
    assert "| small | plain, cheapest layers | at most 0.10 | – |" in printed
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_nothing_is_presented_before_the_rates_are_known(study: Any, tmp_path: Path) -> None:
    results = study.Results(tmp_path / "results.json")
    results.add(study.Model("small", 1, study.RATES[0]).name, {"loss": 2.0})
    assert list(study.models(results, ["small"], (1,))) == []
    assert study.shares(results) == {}
    study.report(results, [], tmp_path / "results.png")
    assert not (tmp_path / "results.png").exists()
