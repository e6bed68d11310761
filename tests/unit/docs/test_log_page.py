"""The page about the log line lists what a run prints, draws and records."""

import math
import re
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig
from megatron_ladder.config.sections import TrainingConfig
from megatron_ladder.engine.build import build_rank_model
from megatron_ladder.flags import flag_name
from megatron_ladder.model.stack import BODIES
from megatron_ladder.train.log import RunLog
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import Evaluation, StepResult
from tests.docs.pages import Row, code_spans, read_page, table
from tests.helpers.training import CPU, run_of

PAGE = "docs/log.md"
RECIPE = "--train-iters 100 --lr 1e-3 --micro-batch-size 1".split()
RECORDED = {"iteration", "steps", "seconds", "loss", "tokens_per_second"}
"""Fields of the record's event, apart from those of some runs."""
ALL_LOSSES = [
    word for one in fields(TrainingConfig) if one.name.endswith("_coeff") for word in (flag_name(one.name), "0.1")
]


def log_a_step(run: RunConfig, folder: Path, everything: bool) -> None:
    """Log the first step of a run, with everything that only some runs know."""
    mesh = ProcessMesh.single()
    distillation = mock.MagicMock() if everything else None
    model = build_rank_model(run, mesh, torch.device("meta"), distillation=distillation)
    result = StepResult(
        1.0,
        1e-3,
        2.0,
        dict.fromkeys(model.extra_losses, 0.5),
        torch.ones(len(run.model.moe_layers), run.model.num_experts, dtype=torch.float64),
        pipeline_idle=0.25 if everything else None,
    )
    with RunLog(Trainer(run, mesh, CPU, model, mock.Mock()), 1, RunRecord(folder)) as log:
        log._peak_flops = 1e15 if everything else None
        log.training(1, 2.0, result)


def printed_fields(line: str) -> list[str]:
    """Return the names of the fields of a log line, in which each is next to its value."""
    parts = [re.sub(r"(^| +)\d\S*", "", part).strip() for part in line.split(" | ")]
    return [re.sub("^[MGTP]FLOP", "FLOP", part) for part in parts]


def names(rows: list[Row], column: int) -> list[str]:
    return [span for row in rows for span in code_spans(row[column])]


@pytest.mark.parametrize("everything", [False, True])
def test_the_page_lists_every_field_and_curve_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], everything: bool
) -> None:
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --mtp-num-layers 1".split()
    curves = ["--tensorboard-dir", str(tmp_path)]
    run = run_of([*RECIPE, *curves, *(experts + ALL_LOSSES if everything else [])], 1)
    log_a_step(run, tmp_path, everything)
    rows = [row for row in table(PAGE, "## Fields") if everything or row[-1] in ("always", "")]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration ")]
    assert printed_fields(line) == names(rows, 0)
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert sorted(shown.Tags()["scalars"]) == sorted(names(rows, 1))
    (event,) = [event for event in read_record(tmp_path) if event["event"] == "progress"]
    some = {name.replace(" ", "_") for row in rows if row[-1] not in ("always", "") for name in code_spans(row[0])}
    assert event.keys() - {"time", "event"} == RECORDED | some
    assert {*code_spans(read_page(PAGE))} >= RECORDED


def test_the_page_lists_the_losses_of_all_bodies_and_explains_only_its_fields() -> None:
    listed = {*names(table(PAGE, "## Fields"), 0), *names(table(PAGE, "## Fields"), 1)}
    assert {name for body in BODIES.values() for name in body.loss_names} <= listed
    assert {*names(table(PAGE, "## When to worry"), 0)} <= listed


def test_the_page_lists_the_fields_of_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, mesh = run_of([*RECIPE, "--tensorboard-dir", str(tmp_path)], 1), ProcessMesh.single()
    mtp_losses = {"mtp loss": 3.0, "mtp confirmed": 0.5}
    with RunLog(Trainer(run, mesh, CPU, mock.Mock(), mock.Mock()), 1, RunRecord(tmp_path)) as log:
        log.validation(1, Evaluation(2.0, mtp_losses))
        log.validation(1, Evaluation(2.0, {}), "web")
    lines = capsys.readouterr().out.splitlines()
    spans = {*code_spans(read_page(PAGE))}
    assert {*printed_fields(lines[0])[1:]} == {"valid lm loss", "ppl", *mtp_losses} <= spans
    assert printed_fields(lines[1])[1] == "valid web lm loss" and "valid web lm loss" in spans
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert {"valid/lm loss", "valid/ppl", "valid/mtp loss", "valid/mtp confirmed"} == {*shown.Tags()["scalars"]} & spans
    recorded, of_web = (event for event in read_record(tmp_path) if event["event"] == "evaluation")
    assert recorded.keys() - of_web.keys() == {"mtp_loss", "mtp_confirmed"} and recorded["mtp_confirmed"] == 0.5


@pytest.mark.parametrize(("loss", "mtp_loss"), [(math.nan, 3.0), (2.0, math.nan), (2.0, 3.0)])
def test_an_evaluation_names_the_cause_of_a_mean_over_no_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float, mtp_loss: float
) -> None:
    run, mesh = run_of(RECIPE, 1), ProcessMesh.single()
    with RunLog(Trainer(run, mesh, CPU, mock.Mock(), mock.Mock()), 1, RunRecord(tmp_path)) as log:
        log.validation(1, Evaluation(loss, {"mtp loss": mtp_loss}))
    names_cause = "no token counts (raise --eval-iters), or a weight is not finite" in capsys.readouterr().out
    assert names_cause == (math.isnan(loss) or math.isnan(mtp_loss))
