"""The report of a study: numbers, verdicts and sentences."""

import math
from pathlib import Path

from ladder_lab.markdown import markdown_table
from ladder_lab.study.report import _report_text, write_report
from ladder_lab.study.results import read_results
from ladder_lab.study.tables import mean_and_deviation, number
from tests.unit.ladder_lab.study.synthetic import made_up_study, write_all, write_run, write_study


def page(folder: Path) -> str:
    return _report_text(read_results(folder), {})


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """Map the first cell to the others, for all rows of the tables below a heading."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {name: others for name, *others in cells}


def test_the_report_of_a_finished_study(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {"ladder": 0.2, "parallel": 0.1})
    path = write_report(read_results(tmp_path), tmp_path / "page" / "deep")
    text = path.read_text()
    assert path == tmp_path / "page" / "deep" / "report.md" and "not finished" not in text
    assert sorted(one.name for one in path.parent.iterdir()) == ["curves-tiny.png", "differences-tiny.png", "report.md"]
    for expected in (
        "python tools/study.py run\npython tools/benchmark.py\n",
        "- **ladder** ends 0.1960 to 0.2016 nats worse than standard, also significant among 3 comparisons (Holm's",
        "- **ladder** ends 0.2001 to 0.2024 nats better than standard, also significant among 2 comparisons (Holm's",
        "- **hybrid** shows no significant difference from standard: ",
        "5,000,000 |",
        "![curves-tiny.png]",
        "an emulated wire (`--link 1.2c`), 2 tensor-parallel",
        "3.2009 ± 0.0994",
        "Seeds: 1, 2, 3",
        "torch: 2.13.0",
        "megatron_ladder: 0.1.0",
        "warm-up over 10%",
        "30 runs, 0.30 hours of steps in total, 0 interruptions",
    ):
        assert expected in text, expected
    assert text.count("torch") == 1


def test_tables_hold_sums_by_hand(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    for seed, above in ((1, 0.01), (2, 0.02), (3, 0.03)):
        write_run(tmp_path, "tokens", "standard", seed, 3 + 0.1 * seed)
        write_run(tmp_path, "tokens", "ladder", seed, 3 + 0.1 * seed + above)
        write_run(tmp_path, "time", "ladder", seed, 3 + 0.1 * seed - 0.1, iterations=150)
    text = page(tmp_path)
    tokens, time = text.split("\n## Equal time\n")
    assert "| standard | 3 | 3.2000 ± 0.1000 | 24.53 | – | – | – | – |" in tokens
    expected = "3.2200 ± 0.1100 | 25.03 | +0.0200 ± 0.0058 | −0.0048 to +0.0448 | no difference found | 0.074"
    assert f"| ladder | 3 | {expected} |" in tokens
    # The loss falls by 0.1 in ten steps, so it is 0.05 nats above its end five steps earlier.
    assert "| standard | 0.10 ± 0.00 (100%) | 0.10 ± 0.00 (95%) | 2,002 ± 1 |" in tokens
    assert "| ladder | not reached | 0.10 ± 0.00 (97%) | 2,002 ± 1 |" in tokens
    assert "| ladder | 150 | 3 | 3.1000 ± 0.1000 | 22.20 | −0.1000 ± 0.0000 |" in time
    assert "| ladder | 90 ± 0 (90%) | 85 ± 0 (85%) |" in time
    assert "| ladder | 40.00 | 1.500 | 0.030 |" in time


def test_equal_losses_show_no_difference(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {}, noise=0.0)
    summary = page(tmp_path).split("## Setup")[0]
    assert summary.count("no significant difference from standard: 0.0000 nats better to 0.0000 nats worse.") == 5
    assert "ends" not in summary


def test_a_difference_that_does_not_hold_among_several_is_marked(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    for seed, one, other in ((1, 0.08, 0.0), (2, 0.10, 0.1), (3, 0.15, -0.1)):
        write_run(tmp_path, "tokens", "standard", seed, 3.0)
        write_run(tmp_path, "tokens", "ladder", seed, 3 + one)
        write_run(tmp_path, "tokens", "parallel", seed, 3 + other)
    text = page(tmp_path)
    assert "but not significant among 2 comparisons (Holm's p 0.06" in text
    assert "| worse | 0.0" in text and "**worse**" not in text


def test_an_unfinished_report_lists_missing_trials(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study(step_times={}, chosen={}))
    path = write_report(read_results(tmp_path), tmp_path)
    text = path.read_text()
    assert "not finished" in text and "- tiny: the step times" in text and "No run is done yet." in text
    assert text.count("has no pair of runs with standard yet.") == 5 and not list(tmp_path.glob("*.png"))


def test_half_a_study_is_judged_by_its_pairs(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    for seed in (1, 2):
        write_run(tmp_path, "tokens", "standard", seed, 3 + 0.1 * seed)
        write_run(tmp_path, "tokens", "ladder", seed, 3.2 + 0.1 * seed + 0.001 * seed)
    write_run(tmp_path, "tokens", "ladder", 3, 9.0)
    write_run(tmp_path, "tokens", "parallel", 1, 3.0)
    text = write_report(read_results(tmp_path), tmp_path).read_text()
    # 12.706 standard errors of 0.0005 to either side.
    assert "+0.2015 ± 0.0005 | +0.1951 to +0.2079 |" in text
    assert "- **parallel** has no verdict from a single pair (difference −0.1000 nats)." in text
    assert "- tiny, equal tokens: standard (1), parallel (2), hybrid (3)" in text
    assert (tmp_path / "curves-tiny.png").exists()


def test_a_single_wiring_has_no_differences(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study(wirings=("standard",), timed_wirings=(), step_times={}))
    write_run(tmp_path, "tokens", "standard", 1, 3.0)
    assert "differences-tiny.png" not in write_report(read_results(tmp_path), tmp_path).read_text()
    assert [path.name for path in tmp_path.glob("*.png")] == ["curves-tiny.png"]


def test_a_diverged_run_gives_no_verdict_and_no_crash(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {"ladder": math.inf})
    text = write_report(read_results(tmp_path), tmp_path).read_text()
    assert "- **ladder** has no verdict, because a run of its 3 pairs diverged." in text
    assert "| ladder | 3 | inf | inf | +inf | – | no verdict: a run diverged | – |" in text


def test_a_loss_that_only_some_runs_reach_has_no_mean(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    for seed, above in ((1, 0.04), (2, 0.06), (3, -0.01)):
        write_run(tmp_path, "tokens", "standard", seed, 3.0)
        write_run(tmp_path, "tokens", "ladder", seed, 3 + above)
    assert "| ladder | 1 of 3 runs reach it | 2 of 3 runs reach it |" in page(tmp_path)


def test_learning_rates_at_the_edge_are_marked(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study(chosen={"tiny/ladder": 4e-3, "tiny/parallel": 2e-3, "tiny/standard": 1e-3}))
    for wiring in ("standard", "ladder", "parallel"):
        for rate in (1e-3, 2e-3):
            write_run(tmp_path, "tuning", wiring, 9, 4.0, iterations=40, rate=rate)
        last = math.inf if wiring == "parallel" else 3.0
        write_run(tmp_path, "tuning", wiring, 9, last, iterations=40, rate=4e-3)
    text = page(tmp_path)
    assert rows(text, "Learning rates") == {
        "wiring": ["0.001", "0.002", "0.004", "chosen"],
        "---": ["---:"] * 4,
        "standard": ["**4.0000**", "4.0000", "3.0000", "0.001 (edge)"],
        "ladder": ["4.0000", "4.0000", "**3.0000**", "0.004 (edge)"],
        "parallel": ["4.0000", "**4.0000**", "inf", "0.002"],
        "hybrid": ["–", "–", "–", "–"],
    }


def test_sizes_have_separate_sections_and_parameters_by_wiring(tmp_path: Path) -> None:
    study = made_up_study(sizes={"tiny": {"num_layers": 8}, "less": {"num_layers": 9}}, step_times={})
    write_study(tmp_path, study)
    write_run(tmp_path, "tokens", "standard", 1, 3.0)
    write_run(tmp_path, "tokens", "hybrid", 1, 3.0)
    write_run(tmp_path, "tokens", "parallel", 1, 3.0, parameters=4_999_000)
    text = page(tmp_path)
    assert "## Equal tokens (tiny)" in text and "## Equal tokens (less)" in text
    shapes = rows(text, "Setup")
    assert shapes["tiny"] == ["8", "5,000,000 (standard, hybrid); 4,999,000 (parallel)"]
    assert shapes["less"] == ["9", "–"]


def test_formats_of_numbers() -> None:
    assert number(-0.5, "+.2f") == "−0.50" and number(math.nan) == "–"
    assert mean_and_deviation([1.0, 3.0], ".1f") == "2.0 ± 1.4"
    assert mean_and_deviation([2.0], ".1f") == "2.0" and mean_and_deviation([]) == "–"
    assert markdown_table([{"a": "x|y", "b": "1"}]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"
