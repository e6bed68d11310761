"""Predictions of a calibration, compared with values computed by hand."""

from dataclasses import replace

import pytest

from ladder_lab.bench.calibration import Calibration, SubBlockSeconds
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.cost.links import WireModel
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.wiring import SubBlockKind

ATTENTION, MLP = SubBlockKind.MIXER, SubBlockKind.MLP
SERIAL = WireModel()
SHAPE = find_size("4x64x64x2x2x256")
FORWARD = Calibration({ATTENTION: SubBlockSeconds(3.0), MLP: SubBlockSeconds(5.0)}, 33.0, SHAPE)
TRAINING = Calibration({ATTENTION: SubBlockSeconds(3.0, 6.0, 2.0), MLP: SubBlockSeconds(5.0, 10.0, 4.0)}, 97.0, SHAPE)
EXPERTS = replace(
    SHAPE, num_experts=4, moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=32, moe_layers=(0, 1, 2, 3)
)
SPLIT = Calibration(
    {
        ATTENTION: SubBlockSeconds(3.0, 6.0, 2.0),
        SubBlockKind.SHARED_EXPERT: SubBlockSeconds(1.0, 2.0, 1.0),
        SubBlockKind.ROUTED_EXPERTS: SubBlockSeconds(4.0, 8.0, 3.0),
    },
    96.0,
    NAMED_WIRINGS["farskip"].of(EXPERTS, 1),
)


@pytest.mark.parametrize(
    ("calibration", "wiring", "seconds"),
    [
        (FORWARD, "standard", 33 + 8 * 7),
        # A wire of 7 for each sub-block, begun after the first.
        (FORWARD, "ladder", 1 + 3 + 8 * 7),
        # Two layers that wait for each sum but the last, which the first late sub-block does not read.
        (FORWARD, "hybrid", 1 + (3 + 7 + 5 + 7) + (3 + 7 + 5) + 5 * 7),
        (FORWARD, "desync-2x", 33 + 4 * 7),
        (FORWARD, "desync-4x", 33 + 2 * 7),
        # Backward hides the duration of the weight's gradient from each reduce: 2 in attention, 4 in the MLP.
        (TRAINING, "standard", 97 + 8 * 7 + 4 * (5 + 3)),
        (TRAINING, "standard-blocking", 97 + 8 * 7 + 8 * 7),
        # One blocking reduce forward and one backward for each interval.
        (TRAINING, "desync-2x", 97 + 4 * 7 + 4 * 7),
    ],
)
def test_a_pass_over_a_slow_wire(calibration: Calibration, wiring: str, seconds: float) -> None:
    assert calibration.predict(VARIANTS[wiring], 7.0, SERIAL) == pytest.approx(seconds)


def test_farskip_joins_sums_and_readings() -> None:
    """A wire of 7 carries two sums a layer in each direction.

    Forward, the first of them begins after attention and shared expert, 4, and then waits in each layer for the shared
    expert, 1, which waits for the routed ones before it. Backward, the first begins when the input gradient of both
    experts is done, 8 + 1, and waits in each layer for as long as routed experts and this gradient take beyond
    attention's reduce, 2.
    """
    forward = replace(SPLIT, kinds={kind: SubBlockSeconds(one.forward) for kind, one in SPLIT.kinds.items()})
    assert replace(forward, pass_seconds=32.0).predict(VARIANTS["farskip"], 7.0, SERIAL) == 4 + 8 * 7 + 3 * 1
    assert SPLIT.predict(VARIANTS["farskip"], 7.0, SERIAL) == (4 + 8 * 7 + 3 * 1) + (9 + 8 * 7 + 3 * 2)
