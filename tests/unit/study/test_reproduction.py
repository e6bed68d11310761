"""Two runs of one study, held against the spread that the first one states."""

from pathlib import Path

from megatron_ladder.study.reproduction import compare_studies
from tests.unit.study.synthetic import made_up_study, write_run, write_study


def test_each_mean_is_held_against_the_first_ones_deviation(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, ladder, hybrid in ((first, 0.0, 0.0), (second, 0.09, 0.11)):
        write_study(folder, made_up_study(command=(folder.name,)))
        for seed in (1, 2, 3):
            write_run(folder, "tokens", "ladder", seed, 3 + 0.1 * seed + ladder)
            write_run(folder, "tokens", "hybrid", seed, 3 + 0.1 * seed + hybrid)
            write_run(folder, "time", "ladder", seed, 3 + 0.1 * seed - ladder, iterations=150)
        write_run(folder, "tokens", "parallel", 1, 3.0)
    text = compare_studies(first, second)
    for row in (
        "| ladder | tiny | tokens | 3.2000 ± 0.1000 | 3.2900 ± 0.1000 | +0.0900 | yes |",
        "| hybrid | tiny | tokens | 3.2000 ± 0.1000 | 3.3100 ± 0.1000 | +0.1100 | **no** |",
        "| ladder | tiny | time | 3.2000 ± 0.1000 | 3.1100 ± 0.1000 | −0.0900 | yes |",
        "| parallel | tiny | tokens | 3.0000 | 3.0000 | +0.0000 | – |",
        "| standard | tiny | tokens | – | – | – | – |",
    ):
        assert row in text
    assert "not two runs" not in text


def test_studies_that_asked_for_something_else_are_told_so(tmp_path: Path) -> None:
    write_study(tmp_path / "a", made_up_study())
    write_study(tmp_path / "b", made_up_study(iterations=90, seeds=(1, 2)))
    text = compare_studies(tmp_path / "a", tmp_path / "b")
    assert text.startswith("These are not two runs of one study: seeds, iterations differ.")
