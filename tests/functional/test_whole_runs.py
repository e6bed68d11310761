"""Every scalar that whole runs log, in each layout, compared with one process, whose scalars equal a plain model's."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ladder_lab.dry_run.program import dry_run
from megatron_ladder.api import TextGenerator, export_model
from megatron_ladder.config.run import parse_run
from megatron_ladder.train.record import read_record
from tests.chaos.ranks import Job
from tests.helpers.commands import launch, run_command
from tests.helpers.pairwise import pairwise, usual_share
from tests.helpers.plain_runs import expected_curves
from tests.helpers.whole_runs import (
    CORNER_LAYOUTS,
    CORNERS,
    DATA,
    EXPERT_LAYOUTS,
    EXPERT_MODELS,
    HYBRIDS,
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
from tests.unit.generate.tiny_model import greedy_by_transformers

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
    ("biased", "texts", "tp2-pp3"),
    ("biased", "answers", "tp2-dp2"),
    ("distilled", "answers", "tp2"),
    ("distilled", "documents", "dp2"),
    ("distilled", "conversations", "tp2-dp2"),
}
"""Models, data and layouts of every test run in addition to a pairwise cover."""
QUICK_CORNERS = {
    ("experts in no layer", "texts", "pp3"),
    ("values wider than keys", "texts", "tp2"),
    ("one head and one expert", "texts", "pp2x3"),
}
"""Likewise, of models of `CORNERS`."""
SECONDS = 60
"""Time limit of a run, also on a busy machine."""
ALL = MODELS | CORNERS
OF_HYBRIDS = {f"hybrid, {wiring}": flags for wiring, flags in HYBRIDS.items()}


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
        return run(tmp_path_factory.mktemp("one"), command_line(corpus, (ALL | OF_HYBRIDS)[model], DATA[data]), 1)

    return find


def cases_in_one_process() -> Iterator[Any]:
    """Yield models and data, of which odd corners learn from texts, and only under `--slow` from other data."""
    for model, data in itertools.product(ALL, DATA):
        if data != "stream":
            slow = model in CORNERS and data != "texts"
            yield pytest.param(model, data, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("model", "data"), [*cases_in_one_process()])
def test_one_process_logs_what_a_plain_model_computes(
    corpus: Path, in_one_process: Callable[[str, str], Curves], model: str, data: str
) -> None:
    expected = expected_curves(command_line(corpus, ALL[model], DATA[data]))
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
    for case in itertools.product(CORNERS, DATA, CORNER_LAYOUTS):
        model, data, layout = case
        has_one = model == "one head and one expert"
        if (has_one and ("tp" in layout or layout == "pp3x2")) or (layout == "pp2x3" and not has_one):
            continue  # One head is not divisible, nor are six and seven layers among other chunks.
        yield pytest.param(*case, marks=() if case in QUICK_CORNERS else pytest.mark.slow)


@pytest.mark.parametrize(("model", "data", "layout"), list(cases()))
def test_every_layout_logs_what_one_process_logs(
    corpus: Path, in_one_process: Callable[[str, str], Curves], tmp_path: Path, model: str, data: str, layout: str
) -> None:
    ranks, flags = CORNER_LAYOUTS[layout]
    found = run(tmp_path, command_line(corpus, ALL[model], DATA[data], flags), ranks)
    assert_equal_curves(found, in_one_process(model, data))


@pytest.mark.parametrize("model", usual_share(OF_HYBRIDS, 4))
def test_hybrids_of_every_wiring_log_what_a_plain_model_computes(
    corpus: Path, in_one_process: Callable[[str, str], Curves], model: str
) -> None:
    expected = expected_curves(command_line(corpus, OF_HYBRIDS[model], DATA["conversations"]))
    assert_equal_curves(in_one_process(model, "conversations"), expected)


@pytest.mark.parametrize(("model", "layout"), usual_share(itertools.product(OF_HYBRIDS, LAYOUTS), 21))
def test_hybrids_of_every_wiring_log_in_every_layout_what_one_process_logs(
    corpus: Path, in_one_process: Callable[[str, str], Curves], tmp_path: Path, model: str, layout: str
) -> None:
    ranks, flags = LAYOUTS[layout]
    found = run(tmp_path, command_line(corpus, OF_HYBRIDS[model], DATA["conversations"], flags), ranks)
    assert_equal_curves(found, in_one_process(model, "conversations"))


def cases_of_experts() -> Iterator[Any]:
    """Yield models, data and layouts, of which all but a pairwise cover are slow."""
    for parameters in pairwise(EXPERT_MODELS, [*DATA], [*EXPERT_LAYOUTS]):
        model, data, layout = parameters.values
        if data == "stream" and (model == "sigmoid" or layout in ("ep2-dp4", "ep4")):
            continue  # See `cases`; two streams are not divisible over four ranks.
        yield parameters


@pytest.mark.parametrize(("model", "data", "layout"), list(cases_of_experts()))
def test_experts_over_data_parallel_ranks_log_the_same(
    corpus: Path, in_one_process: Callable[[str, str], Curves], tmp_path: Path, model: str, data: str, layout: str
) -> None:
    ranks, flags = EXPERT_LAYOUTS[layout]
    argv = command_line(corpus, MODELS[model], DATA[data], "--expert-sharding width", flags)
    assert_equal_curves(run(tmp_path, argv, ranks), in_one_process(model, data))


def slow_except(*quick: str) -> list[Any]:
    """Return the names of all models, of which all but these are slow."""
    return [pytest.param(model, marks=() if model in quick else pytest.mark.slow) for model in ALL]


@pytest.mark.parametrize("model", slow_except("biased", *CORNERS))
def test_a_trained_model_is_exported_and_generates_what_transformers_does(
    corpus: Path, tmp_path: Path, model: str
) -> None:
    run(tmp_path, command_line(corpus, ALL[model], DATA["texts"], f"--save {tmp_path}/save"), 1)
    export_model(tmp_path / "save", tmp_path / "hf")
    # transformers takes the first letter, whose id is 0, for padding.
    prompts = ["bcd", "zy", "q" * 9]
    options = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    continued = [TextGenerator(tmp_path / name).generate(prompts, **options) for name in ("save", "hf")]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    encoded = [tuple(AutoTokenizer.from_pretrained(tmp_path / "hf")(prompt).input_ids) for prompt in prompts]
    for generations in continued:
        assert [generation.ids for generation in generations] == greedy_by_transformers(exported, encoded, 6)


@pytest.mark.parametrize("model", slow_except("experts in no layer"))
def test_a_dry_run_of_every_model_matches(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    layout = "pp2x2" if "one head" in model else "tp2"
    ranks, flags = LAYOUTS[layout]
    without_teacher = ALL[model].partition(" --distill-from")[0]
    dry_run(parse_run(command_line(corpus, without_teacher, DATA["texts"], flags)), ranks)
    assert f"launches of {ranks} ranks" in capsys.readouterr().out


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
