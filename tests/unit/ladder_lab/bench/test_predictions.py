"""Predictions of a calibration, compared with values computed by hand."""

import pytest

from ladder_lab.bench.calibration import Calibration
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.cost.links import WireModel

SERIAL = WireModel()
FORWARD = Calibration((3.0, 5.0), (0.0, 0.0), (0.0, 0.0), pass_seconds=33.0, layers=4)
TRAINING = Calibration((3.0, 5.0), (6.0, 10.0), (2.0, 4.0), pass_seconds=97.0, layers=4)


@pytest.mark.parametrize(
    ("wiring", "seconds"),
    [
        ("standard", 33 + 8 * 7),
        # A wire of 7 for each sub-block, begun after the first.
        ("ladder", 1 + 3 + 8 * 7),
        # Two layers that wait for each sum but the last, which the first late sub-block does not read.
        ("hybrid", 1 + (3 + 7 + 5 + 7) + (3 + 7 + 5) + 5 * 7),
        ("desync-2x", 33 + 4 * 7),
        ("desync-4x", 33 + 2 * 7),
    ],
)
def test_a_pass_over_a_slow_wire(wiring: str, seconds: float) -> None:
    assert FORWARD.predict(VARIANTS[wiring], 7.0, SERIAL) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("wiring", "exposed"),
    [
        # Backward hides the duration of the weight's gradient from each reduce: 2 in attention, 4 in the MLP.
        ("standard", 8 * 7 + 4 * (5 + 3)),
        ("standard-blocking", 8 * 7 + 8 * 7),
        # One blocking reduce forward and one backward for each interval.
        ("desync-2x", 4 * 7 + 4 * 7),
        ("desync-4x", 2 * 7 + 2 * 7),
    ],
)
def test_training_over_a_slow_wire(wiring: str, exposed: float) -> None:
    assert TRAINING.predict(VARIANTS[wiring], 7.0, SERIAL) == pytest.approx(97 + exposed)
