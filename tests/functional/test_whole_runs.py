"""Every scalar that whole runs log, in each layout, compared with one process, whose scalars equal a plain model's."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.train.record import read_record
from tests.chaos.ranks import Job
from tests.helpers.commands import launch, run_command
from tests.helpers.pairwise import pairwise
from tests.helpers.plain_runs import expected_curves
from tests.helpers.whole_runs import (
    DATA,
    LAYOUTS,
    MODELS,
    TEACHER,
    Curves,
    assert_equal_curves,
    command_line,
    curves_in,
    scalars_in,
    write_corpus,
)

RECORDED = {
    "train/lm loss": "loss",
    "train/load balancing loss": "load_balancing_loss",
    "train/router z loss": "router_z_loss",
    "train/largest expert load": "largest_expert_load",
    "train/expert load entropy": "expert_load_entropy",
    "train/dead experts": "dead_experts",
}
"""Fields of the record that the log's curves contain as well."""
MORE = {
    ("softmax", "conversations", "pp3"),
    ("sigmoid", "conversations", "tp2-dp2"),
    ("distilled", "answers", "tp2"),
    ("distilled", "documents", "dp2"),
    ("distilled", "conversations", "tp2-dp2"),
}
"""Models, data and layouts of every test run in addition to a pairwise cover."""
SECONDS = 60
"""Time limit of a run, also on a busy machine."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the data and of a teacher."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    run(folder, command_line(folder, TEACHER, DATA["texts"], f"--save {folder}/teacher"), 1)
    return folder


def run(folder: Path, argv: list[str], ranks: int) -> Curves:
    """Return what a run logs."""
    job = Job([[*argv, "--tensorboard-dir", str(folder / "curves")]] * ranks, folder / "output")
    try:
        codes = job.wait(SECONDS)
    finally:
        job.kill()
    assert set(codes.values()) == {0}, job.output
    return curves_in(folder / "curves")


@pytest.fixture(scope="module")
def in_one_process(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Curves]:
    """Return what a model logs about its data in one process, where it runs once."""

    @functools.cache
    def find(model: str, data: str) -> Curves:
        return run(tmp_path_factory.mktemp("one"), command_line(corpus, MODELS[model], DATA[data]), 1)

    return find


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", [name for name in DATA if name != "stream"])
def test_one_process_logs_what_a_plain_model_computes(
    corpus: Path, in_one_process: Callable[[str, str], Curves], model: str, data: str
) -> None:
    expected = expected_curves(command_line(corpus, MODELS[model], DATA[data]))
    assert_equal_curves(in_one_process(model, data), expected)


def cases() -> Iterator[Any]:
    """Yield models, data and layouts, of which all but a pairwise cover and `MORE` are slow.

    The last model and the last data are not covered by pairs.
    """
    models, data = ([*axis][:-1] for axis in (MODELS, DATA))
    covered = pairwise(models, data, [*LAYOUTS])
    in_every_run = {parameters.values for parameters in covered if not parameters.marks} | MORE
    for case in itertools.product(MODELS, DATA, LAYOUTS):
        model, data, layout = case
        if model == "distilled" and "pp" in layout:
            continue  # A teacher excludes stages.
        if model == "sigmoid" and data == "stream" and "dp" in layout:
            continue  # It balances micro-batches, and data-parallel ranks form those of a stream from other rows.
        yield pytest.param(*case, marks=() if case in in_every_run else pytest.mark.slow)


@pytest.mark.parametrize(("model", "data", "layout"), list(cases()))
def test_every_layout_logs_what_one_process_logs(
    corpus: Path, in_one_process: Callable[[str, str], Curves], tmp_path: Path, model: str, data: str, layout: str
) -> None:
    ranks, flags = LAYOUTS[layout]
    found = run(tmp_path, command_line(corpus, MODELS[model], DATA[data], flags), ranks)
    assert_equal_curves(found, in_one_process(model, data))


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_launched_command_logs_the_same(
    corpus: Path, in_one_process: Callable[[str, str], Curves], tmp_path: Path, launcher: str
) -> None:
    ranks, flags = LAYOUTS["pp3"]
    argv = command_line(corpus, MODELS["sigmoid"], DATA["answers"], flags)
    argv += ["--tensorboard-dir", f"{tmp_path}/curves", "--save", f"{tmp_path}/save"]
    done = run_command([*launch(launcher, ranks), *argv], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    curves = curves_in(tmp_path / "curves")
    assert_equal_curves(curves, in_one_process("sigmoid", "answers"))
    assert "the pipeline idles 33% of a step with 4 accumulation steps" in done.stdout
    printed = dict(re.findall(r"iteration (\d+)/.* \| pipeline idle (\S+)% \|", done.stdout))
    idle = scalars_in(tmp_path / "curves")["speed/pipeline idle"]
    assert {int(step): float(share) / 100 for step, share in printed.items()} == pytest.approx(idle, abs=5e-4)
    # The first step has no step before it.
    assert [*idle] == [2] and 0 < idle[2] < 1
    for event in read_record(tmp_path / "save"):
        if event["event"] == "start":
            assert event["planned_pipeline_idle"] == pytest.approx(1 / 3)
        if event["event"] == "progress":
            logged = {name: values[event["iteration"]] for name, values in curves.items() if name in RECORDED}
            assert logged == pytest.approx({name: event[field] for name, field in RECORDED.items()}, rel=1e-7)
            assert event.get("pipeline_idle", 0.0) == pytest.approx(idle.get(event["iteration"], 0.0), rel=1e-6)
