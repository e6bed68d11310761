"""tools/study.py: its command line, whole studies with fake training runs, and the statistics of its report."""

import functools
import itertools
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ladder_lab.bench.options import parse_benchmark
from ladder_lab.bench.sizes import SIZES
from ladder_lab.study import program, report, trials
from ladder_lab.study.figures import holm, paired, power_law, trend
from ladder_lab.study.options import GridOptions, Parsed, parse_study
from ladder_lab.study.trials import Request, Trial, resolve_size, resolve_trial, trial_flags
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.wiring import EXPERT_MODES
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import parse_run
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections
from megatron_ladder.train.directories import look_for_checkpoint
from tests.helpers.runs import errors_of

FIRST = "--output-dir out --sizes 4x32x64x4x2x300"
SIZE = "2x24x40x2x1x50"


@functools.cache
def parsed(words: str, first: str = f"run {FIRST}") -> Parsed:
    found = parse_study(f"{first} {words}".split())
    assert isinstance(found, Parsed)
    return found


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--wirings standard gated", "--wirings gated: expected one of standard, ladder"),
        ("--wirings ladder parallel", "--wirings ladder parallel: add standard, with which all others are compared"),
        ("--seeds 1 100", "--seeds 100: is the seed of the trials that choose a learning rate"),
        ("-- --train-iters 5", "--train-iters after --: a study sets this flag for each trial"),
        ("--global-batch-size 33", "--global-batch-size 33 is not a multiple of --micro-batch-size 32"),
        ("--tokens-per-parameter 2 --iterations 5", "--tokens-per-parameter 2.0 and --iterations exclude each other"),
        ("--transfer-rates", "--transfer-rates: --sizes has 1, expected at least 3: add larger ones"),
        (
            "--wirings standard late-linear-attention",
            "--wirings late-linear-attention: no layer of 4x32x64x4x2x300 would read late: leave it out",
        ),
    ],
)
def test_errors_name_the_flag(words: str, error: str) -> None:
    found = errors_of(parsed, words)
    assert any(one.startswith(error) for one in found), found


def matrices(wiring: str, seed: int = 3) -> dict[str, Tensor]:
    """Map canonical names to initial weights, except norms, whose number depends on the wiring."""
    run = resolve_trial(Request(Path("out"), {}, 1), Trial("tokens", SIZE, wiring, seed, 1e-3, 10))
    model = LanguageModel(run.model, ProcessMesh.single(), seed=run.training.seed)
    return {
        section.name: section.view(parameter).detach()
        for parameter, sections in parameter_sections(model)
        for section in sections
        if parameter.dim() == 2
    }


@pytest.mark.parametrize(
    "wiring",
    [name for name, wiring in NAMED_WIRINGS.items() if wiring.shares_stream and wiring.mode not in EXPERT_MODES],
)
def test_every_wiring_starts_from_the_weights_of_standard(wiring: str) -> None:
    standard, other = matrices("standard"), matrices(wiring)
    # Embedding, head, and in each layer q, k, v and o, gate, up and down.
    assert set(other) == set(standard) and len(standard) == 2 + 2 * 7
    assert all(torch.equal(other[name], weight) for name, weight in standard.items())
    name = "layers.0.attention.q_proj.weight"
    assert not torch.equal(matrices(wiring, seed=4)[name], standard[name])


TRAINER = """
import json, os, sys
folder, last, loss, code = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
os.makedirs(folder, exist_ok=True)
with open(folder + "/run.jsonl", "a") as file:
    for event in (
        {"event": "progress", "iteration": last, "tokens_per_second": 20.0 / loss},
        {"event": "evaluation", "iteration": last // 2, "loss": loss + 1},
        *([] if code else [{"event": "evaluation", "iteration": last, "loss": loss}]),
    ):
        file.write(json.dumps({"time": "2026-01-01T00:00:00+00:00", **event}) + "\\n")
print("went wrong" if code else "trains")
sys.exit(code)
"""
"""Writes the record of a run. Arguments: folder, steps, last loss, exit code."""
BENCHMARK = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"


@dataclass
class Stand:
    """Studies with fake training runs, which make the higher of two learning rates the best one."""

    folder: Path
    started: Sequence[str] = ()
    code: Callable[[str], int] = lambda name: 0
    gap: Callable[[int], float] = lambda hidden_size: 0.1
    """Loss of ladder minus standard's."""

    def run(self, more: str = f"--sizes {SIZE} --iterations 10") -> dict[str, Any]:
        """Run a study, and return its `study.json`."""
        self.started = []
        words = f"--wirings standard ladder --seeds 1 2 --learning-rates 1e-3 2e-3 --evaluations 1 {more}"
        program.run_study(parsed(f"{words} -- --data-path x", f"run --output-dir {self.folder}"))
        return json.loads((self.folder / "study.json").read_text())

    def command(self, request: Request, flags: Sequence[str], ranks: int) -> list[str]:
        value = dict(itertools.pairwise(" ".join(flags).replace("=", " ").split()))
        name = Path(value["--save"]).parent.name
        self.started = [*self.started, name]
        loss = 3.0 + abs(float(value["--lr"]) - 2e-3)
        if value["--residual-mode"] != "standard":
            loss += self.gap(int(value["--hidden-size"]))
        arguments = (value["--save"], value["--train-iters"], loss, self.code(name))
        return [sys.executable, "-I", "-S", "-c", TRAINER, *map(str, arguments)]

    def execute(self, run: Any, command: Sequence[str], output: Path) -> Any:
        if "benchmark" not in str(command[1]):
            return run(command, output)
        link = {"alpha": "1.2c", "alpha_seconds": 0.001, "interconnect": "a wire", "verdict": "sound", "spread": 0.01}
        rows = [
            {"wiring": wiring, "ratio_to_standard": ratio, "median_seconds": 0.3 / ratio, **link}
            for wiring, ratio in {"standard": 1.0, "ladder": 1.5, "parallel": 1.2}.items()
        ]
        self.started = [*self.started, "benchmark"]
        target = parse_benchmark(command[2:])[1].json
        return run([sys.executable, "-c", BENCHMARK, str(target), json.dumps(rows)], output)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand(tmp_path / "study")
    original = trials.TrialRunner.execute
    monkeypatch.setattr(trials, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(report, "_draw", lambda curves, path: path.touch())
    monkeypatch.setattr(trials, "training_command", stand.command)
    monkeypatch.setattr(
        trials.TrialRunner,
        "execute",
        lambda runner, command, output: stand.execute(lambda *words: original(runner, *words), command, output),
    )
    return stand


def kinds(names: Sequence[str]) -> list[str]:
    return [name.split("-")[0] for name in names]


def test_a_study_runs_once_and_reports(stand: Stand) -> None:
    study = stand.run()
    # 2 wirings x 2 rates and 2 further ones, 2 x 2 seeds at equal tokens, ladder x 2 seeds at equal time.
    assert kinds(stand.started) == ["benchmark"] + ["tuning"] * 6 + ["tokens"] * 4 + ["time"] * 2
    assert ["lr0.004" in name for name in stand.started[5:7]] == [True, True]
    assert set(study["chosen"].values()) == {2e-3}
    assert all("ladder" in name and "it15" in name for name in stand.started[-2:])
    text = (stand.folder / "report.md").read_text()
    assert "| ladder | 10 | 2 | 3.1000 ± 0.0000 | +0.1000 |" in text and "| ladder | 15 | 2 |" in text
    assert "| ladder | 200.00 | 1.500 | 0.010 | a wire, an all-reduce takes 1.000 ms (1.2c) |" in text
    effective = (1.4 / 1.5) ** (1 / 0.0941)
    assert f"| ladder | {effective:.3f} | 1.500 | {1.5 * effective:.3f} | – | – |" in text
    assert list(stand.folder.glob("curves-*.png")) and not list(stand.folder.rglob("checkpoints"))
    stand.run()
    assert stand.started == []


def test_a_failed_trial_is_reported_and_runs_again(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    stand.code = lambda name: 1 if name.startswith("tokens") and "ladder-seed2" in name else 0
    with pytest.raises(SystemExit):
        stand.run()
    printed = capfd.readouterr()
    assert "went wrong" in printed.out and "exit code 1, or no last validation loss: see" in printed.err
    stand.code = lambda name: 0
    stand.run()
    assert kinds(stand.started) == ["tokens"]


def test_damaged_files_of_a_study_are_errors(stand: Stand) -> None:
    study = stand.run()
    path = stand.folder / "study.json"
    whole = path.read_bytes()
    for content, problem in (
        (whole[: len(whole) // 2], f"{path}: is not JSON"),
        (b"[]", f"{path}: found [], expected"),
        (json.dumps(study | {"chosen": {"a": "b"}}).encode(), f"{path}: chosen"),
    ):
        path.write_bytes(content)
        for read in (stand.run, lambda: report.write_report(stand.folder)):
            (error,) = errors_of(read)
            assert error.startswith(problem) and error.endswith("restore it, or give another --output-dir")
        assert path.read_bytes() == content
    path.write_bytes(whole)
    result = next(stand.folder.rglob("result.json"))
    result.write_text("{")
    for read in (stand.run, lambda: report.write_report(stand.folder)):
        (error,) = errors_of(read)
        assert error == f"{result}: is not JSON: remove it, so that its trial runs again"
    result.unlink()
    stand.run()
    assert stand.started == [result.parent.name]


def test_a_signal_stops_the_study_which_resumes(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(name: str) -> int:
        if name.startswith("tokens"):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.2)
        return 0

    stand.code = interrupt
    stand.run()
    assert "the same command resumes the study" in capfd.readouterr().out
    assert not (stand.folder / "report.md").exists()
    stand.code = lambda name: 0
    stand.run()
    assert "tuning" not in kinds(stand.started) and (stand.folder / "report.md").exists()


def test_a_trial_of_the_default_size_starts_from_scratch(tmp_path: Path) -> None:
    """Some of its numbers are the trainer's defaults, which --load requires all the same."""
    (size,) = GridOptions().sizes
    flags = trial_flags(Request(tmp_path, {}, 1), Trial("tokens", size, "ladder", 1, 1e-3, 10))
    assert look_for_checkpoint(parse_run(flags)) is None


@pytest.mark.parametrize("size", ["study-hybrid", "study-moe", "gpt-oss-20b", "deepseek-v2-lite"])
@pytest.mark.parametrize("wiring", ["standard", "hybrid", "ladder-attention"])
def test_trials_train_the_model_of_their_size(size: str, wiring: str) -> None:
    request = Request(Path("out"), {"seq_length": 64}, 1)
    model = replace(SIZES[size], max_position_embeddings=64)
    assert resolve_size(request, size) == model
    assert resolve_trial(request, Trial("tokens", size, wiring, 1, 1e-3, 10)).model == NAMED_WIRINGS[wiring].of(
        model, 1
    )


@pytest.mark.parametrize(
    ("wiring", "flags", "late"),
    [
        ("late-linear-attention", "--linear-attention-freq 4", (0, 1, 2, 4)),
        ("late-softmax-attention", "--linear-attention-freq 4", (3,)),
        ("late-softmax-attention", "--linear-attention-layers 1-3", (0, 4)),
    ],
)
def test_flags_of_trials_choose_the_late_layers(wiring: str, flags: str, late: tuple[int, ...]) -> None:
    size = "5x32x64x4x2x128"
    delta = "--experimental-attention-variant gated_delta_net --linear-num-key-heads 1 --linear-num-value-heads 2"
    words = f"--wirings standard {wiring} --tokens-per-parameter 4 -- {delta} --linear-key-head-dim 8 {flags}"
    study = parsed(words, f"run --output-dir out --sizes {size}")
    model = resolve_trial(study.request, Trial("tokens", size, wiring, 1, 1e-3, 10)).model
    assert (model.residual_mode, model.ladder_layers) == ("ladder-attention", late)
    parameters = sum(parameter.numel() for parameter in LanguageModel(model, ProcessMesh.single()).parameters())
    assert study.iterations(size) == round(4 * parameters / 4096)


def test_differences_over_sizes(stand: Stand) -> None:
    """The gap falls by 0.02 for each doubling of the width."""
    narrow, middle, wide = (f"2x{width}x64x2x2x64" for width in (16, 32, 64))
    stand.gap = lambda width: 0.2 - 0.02 * math.log2(width)
    more = "--timed-wirings none --tokens-per-parameter 64 --transfer-rates --sizes"
    study = stand.run(f"{more} {wide} {narrow} {middle}")
    assert {name.split("-")[1] for name in stand.started if name.startswith("tuning")} == {narrow, middle}
    assert study["chosen"][f"{middle}/ladder"] == 2e-3 and study["chosen"][f"{wide}/ladder"] == 1e-3
    # Both norms, four projections and three matrices in each layer, embedding, head and last norm.
    parameters = 2 * (2 * 64 + 4 * 64**2 + 3 * 64**2) + 2 * 64**2 + 64
    assert study["sizes"][wide] == {"parameters": parameters, "width": 64, "iterations": round(64 * parameters / 4096)}
    assert sum(f"{wide}-ladder" in name for name in stand.started) == 2
    text = (stand.folder / "report.md").read_text()
    assert "| ladder | 0.002 | 0.001 | 0.002 |" in text
    doublings = [math.log2(study["sizes"][size]["parameters"]) for size in (narrow, middle, wide)]
    slope = np.polyfit(doublings, [0.12, 0.10, 0.08], 1)[0]
    row = next(line for line in text.splitlines() if line.startswith("| ladder | +0.120"))
    assert row.startswith(f"| ladder | +0.120 | +0.100 | +0.080 | −{-slope:.3f} ± ") and row.endswith("| **falls** |")
    assert (stand.folder / "sizes.png").stat().st_size > 1000
    widest = "2x128x64x2x2x64"
    stand.run(f"{more} {wide} {narrow} {middle} {widest}")
    assert len(stand.started) == 4 and all(widest in name and "lr0.0005" in name for name in stand.started)


def test_a_trend_is_that_of_least_squares() -> None:
    positions = np.array([1.0, 1.0, 2.0, 3.0, 5.0])
    values = np.array([0.3, 0.1, 0.25, 0.2, 0.6])
    found = trend([*zip(positions, values, strict=True)])
    slope, intercept = np.polyfit(positions, values, 1)
    residuals = values - intercept - slope * positions
    deviation = math.sqrt(residuals @ residuals / 3 / ((positions - positions.mean()) ** 2).sum())
    half = 3.1824 * deviation
    assert [found[name] for name in ("slope", "low", "high")] == pytest.approx(
        [slope, slope - half, slope + half], 1e-4
    )
    assert math.isnan(trend([(1.0, 2.0), (2.0, 3.0)])["low"]) and math.isnan(trend([(1.0, 2.0)] * 4)["slope"])


def test_a_power_law_is_fitted_where_the_runs_determine_it() -> None:
    points = [(size, 1.5 + 2.0 * (size / 1e5) ** -0.4) for size in (1e5, 2e5, 4e5, 8e5)]
    errors = [1e-4, -1e-4, -2e-4, 2e-4]
    found = power_law([(size, loss + error) for (size, loss), error in zip(points, errors, strict=True)])
    assert found is not None
    for name, value in {"E": 1.5, "A": 2.0, "alpha": 0.4}.items():
        assert abs(found[name][0] - value) < found[name][1] < 0.1
    assert power_law(points[:3]) is None
    assert power_law([(size, loss + 1e3 * error) for (size, loss), error in zip(points, errors, strict=True)]) is None
    assert power_law([(size, 3.0 - 1e-6 * size) for size, _ in points]) is None


def test_paired_differences_are_those_of_a_paired_test() -> None:
    ours, theirs = {1: 3.01, 2: 3.12, 3: 3.25, 4: 9.0}, {1: 3.0, 2: 3.1, 3: 3.2, 5: 0.0}
    found = paired(ours, theirs)
    test = stats.ttest_rel([3.01, 3.12, 3.25], [3.0, 3.1, 3.2])
    low, high = test.confidence_interval(0.95)
    assert [found[name] for name in ("low", "high", "p")] == pytest.approx([low, high, test.pvalue])
    assert found["mean"] == pytest.approx(0.08 / 3)
    assert math.isnan(paired({1: math.inf, 2: 3.0}, {1: 3.0, 2: 3.0})["mean"])
    assert math.isnan(paired({1: 3.1}, {1: 3.0})["p"]) and paired({1: 3.1}, {1: 3.0})["mean"] == pytest.approx(0.1)


def test_holm_adjusts_as_in_its_paper() -> None:
    # 4 x 0.005, 3 x 0.011, 2 x 0.02, and 0.04 not below the one before.
    found = holm([0.011, 0.02, 0.005, math.nan, 0.04])
    assert found[:3] == pytest.approx([0.033, 0.04, 0.02]) and math.isnan(found[3]) and found[4] == pytest.approx(0.04)
