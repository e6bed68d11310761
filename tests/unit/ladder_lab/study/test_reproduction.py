"""Two runs of the same study, compared with the spread of the first one."""

from dataclasses import replace
from pathlib import Path

from ladder_lab.study.report import _compare_studies
from ladder_lab.study.results import read_results
from tests.unit.ladder_lab.study.synthetic import made_up_study, write_run, write_study


def test_means_are_compared_with_the_first_deviation(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, ladder, hybrid in ((first, 0.0, 0.0), (second, 0.09, 0.11)):
        write_study(folder, made_up_study(command=(folder.name,)))
        for seed in (1, 2, 3):
            write_run(folder, "tokens", "ladder", seed, 3 + 0.1 * seed + ladder)
            write_run(folder, "tokens", "hybrid", seed, 3 + 0.1 * seed + hybrid)
            write_run(folder, "time", "ladder", seed, 3 + 0.1 * seed - ladder, iterations=150)
        write_run(folder, "tokens", "parallel", 1, 3.0)
    text = _compare_studies(read_results(first), read_results(second))
    for row in (
        "| ladder | tiny | tokens | 100 | 3 | 3.2000 ± 0.1000 | 3.2900 ± 0.1000 | +0.0900 | yes |",
        "| hybrid | tiny | tokens | 100 | 3 | 3.2000 ± 0.1000 | 3.3100 ± 0.1000 | +0.1100 | **no** |",
        "| ladder | tiny | time | 150 | 3 | 3.2000 ± 0.1000 | 3.1100 ± 0.1000 | −0.0900 | yes |",
        "| parallel | tiny | tokens | 100 | 1 | 3.0000 | 3.0000 | +0.0000 | – |",
        "| standard | tiny | tokens | 100 | 0 | – | – | – | – |",
    ):
        assert row in text
    assert "not runs of the same study" not in text and "learning rates differ" not in text


def test_an_unfinished_repetition_is_compared_by_its_seeds(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    times = made_up_study().step_times["tiny"]
    slower = replace(times, speedup={**times.speedup, "ladder": 1.4})
    write_study(first, made_up_study())
    write_study(second, made_up_study(step_times={"tiny": slower}))
    for seed in (1, 2, 3):
        write_run(first, "tokens", "ladder", seed, 3 + 0.1 * seed)
    write_run(second, "tokens", "ladder", 3, 3.3)
    write_run(first, "time", "ladder", 1, 3.0, iterations=150)
    write_run(second, "time", "ladder", 1, 3.2, iterations=140)
    text = _compare_studies(read_results(first), read_results(second))
    # The seed with the largest loss is unchanged.
    assert "| ladder | tiny | tokens | 100 | 1 | 3.3000 | 3.3000 | +0.0000 | yes |" in text
    assert "| ladder | tiny | time | 150, 140 | 1 | 3.0000 | 3.2000 | +0.2000 | – |" in text


def test_different_learning_rates_are_reported(tmp_path: Path) -> None:
    write_study(tmp_path / "a", made_up_study())
    write_study(tmp_path / "b", made_up_study(chosen={**made_up_study().chosen, "tiny/ladder": 4e-3}))
    text = _compare_studies(read_results(tmp_path / "a"), read_results(tmp_path / "b"))
    assert text.startswith("The chosen learning rates differ: tiny/ladder (0.002, then 0.004).")


def test_different_studies_are_reported(tmp_path: Path) -> None:
    write_study(tmp_path / "a", made_up_study())
    write_study(tmp_path / "b", made_up_study(iterations=90, seeds=(1, 2)))
    text = _compare_studies(read_results(tmp_path / "a"), read_results(tmp_path / "b"))
    assert text.startswith("The two folders are not runs of the same study: seeds, iterations differ.")
