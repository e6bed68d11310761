"""An evaluation of a checkpoint does not change the curves and the record of a run."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ladder.train import log, loop
from megatron_ladder.train.log import describe_start


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

    def trackers(run: object, iteration: int, hide_later: bool, *_: object) -> list[MagicMock]:
        opened.append((iteration, hide_later))
        return []

    trainer = MagicMock()
    trainer.mesh.world.rank = 0
    monkeypatch.setattr(log, "ModelFlops", MagicMock())
    monkeypatch.setattr(log, "open_trackers", trackers)
    monkeypatch.setattr(loop, "Evaluations", MagicMock())
    assert loop._evaluate_loaded(trainer, MagicMock(), 4) == "evaluated"
    with log.RunLog(trainer, 5, MagicMock()):
        pass
    assert opened == [(4, False), (4, True)]
