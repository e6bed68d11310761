"""An evaluation of a checkpoint does not change the curves and the record of a run."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ladder.train import log, loop


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
