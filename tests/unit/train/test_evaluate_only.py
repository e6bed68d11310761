"""An evaluation of a checkpoint does not change the curves and the record of a run."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ladder.train import log, loop
from megatron_ladder.train.log import describe_start
from megatron_ladder.train.record import RunRecord, read_record


@pytest.mark.parametrize(("loss", "perplexity"), [(2.0, math.exp(2.0)), (800.0, "inf"), (math.nan, "nan")])
def test_the_perplexity_of_any_loss_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, perplexity: float | str
) -> None:
    monkeypatch.setattr(log, "ModelFlops", MagicMock())
    with log.RunLog(MagicMock(), 1, RunRecord(tmp_path)) as run_log:
        run_log.validation(1, loss)
    (event,) = read_record(tmp_path)
    assert event["ppl"] == perplexity


@pytest.mark.parametrize(
    ("skips", "iteration", "reason"), [(True, 4, "evaluates"), (False, 4, "goes on"), (False, 0, "begins")]
)
def test_the_start_event_has_its_reason(skips: bool, iteration: int, reason: str) -> None:
    trainer = MagicMock()
    trainer.run.to_dict.return_value = {}
    trainer.run.logging.skip_train = skips
    assert describe_start(trainer, iteration)["reason"] == reason


def test_an_evaluation_hides_no_points(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def curves(run: object, iteration: int, hide_later: bool, *_: object) -> MagicMock:
        opened.append((iteration, hide_later))
        return MagicMock()

    trainer = MagicMock()
    trainer.mesh.world.rank = 0
    monkeypatch.setattr(log, "ModelFlops", MagicMock())
    monkeypatch.setattr(log, "Curves", curves)
    monkeypatch.setattr(loop, "_agreed_stop_reason", lambda *_: None)
    assert loop._evaluate_loaded(MagicMock(trainer=trainer, iteration=4), MagicMock(), MagicMock()) == "evaluated"
    with log.RunLog(trainer, 5, MagicMock()):
        pass
    assert opened == [(4, False), (4, True)]
