"""Predictions of a calibration, compared with values computed by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ladder_lab.bench.calibration import (
    Calibration,
    Computation,
    DeviceClock,
    SubBlockSeconds,
    _computations,
    time_backward,
    time_forward,
)
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.bench.workloads import build_models
from ladder_lab.cost.links import WireModel
from ladder_lab.link.link import NoCommGroup
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.wiring import SubBlockKind
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel

ATTENTION, MLP = Computation(SubBlockKind.MIXER), Computation(SubBlockKind.MLP)
DELTA_OF_HYBRID = Computation(SubBlockKind.MIXER, "gated DeltaNet")
ATTENTION_OF_HYBRID = Computation(SubBlockKind.MIXER, "attention")
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
        Computation(SubBlockKind.SHARED_EXPERT): SubBlockSeconds(1.0, 2.0, 1.0),
        Computation(SubBlockKind.ROUTED_EXPERTS): SubBlockSeconds(4.0, 8.0, 3.0),
    },
    96.0,
    NAMED_WIRINGS["farskip"].of(EXPERTS, 1),
)
SECONDS_OF_HYBRID = {DELTA_OF_HYBRID: 9.0, ATTENTION_OF_HYBRID: 3.0, MLP: 5.0}
HYBRID = Calibration(
    {computation: SubBlockSeconds(seconds) for computation, seconds in SECONDS_OF_HYBRID.items()},
    54.0,
    find_size("small-hybrid"),
)
"""Three layers with gated DeltaNet and one with attention."""


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
        # A second and third gated DeltaNet wait for the sum of the one before. From the third on, the wire is busy.
        (HYBRID, "ladder", 4 + (9 + 7 + 9 + 7 + 9) + 4 * 7),
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
    forward = replace(
        SPLIT, by_computation={key: SubBlockSeconds(one.forward) for key, one in SPLIT.by_computation.items()}
    )
    assert replace(forward, pass_seconds=32.0).predict(VARIANTS["farskip"], 7.0, SERIAL) == 4 + 8 * 7 + 3 * 1
    assert SPLIT.predict(VARIANTS["farskip"], 7.0, SERIAL) == (4 + 8 * 7 + 3 * 1) + (9 + 8 * 7 + 3 * 2)


DIVIDED = Calibration(
    {
        ATTENTION: SubBlockSeconds(3.0, 6.0, 2.0, 1.0),
        Computation(SubBlockKind.SHARED_EXPERT): SubBlockSeconds(2.0, 4.0, 1.0, 0.5),
        Computation(SubBlockKind.ROUTED_EXPERTS): SubBlockSeconds(4.0, 8.0, 3.0, 1.5),
    },
    1 + 4 * 27.0,
    EXPERTS,
    divides_experts=True,
)


def test_divided_experts_on_a_slow_wire() -> None:
    """All-to-alls take 7. In a layer of standard, the first half of the shared expert hides 1.5 of the dispatch, and
    the second half 0.5 of the combine. In one of farskip, a combine, a dispatch and the experts follow each other.

    In backward, the shared expert and the gradients of the weights of both experts take 7.5 and hide the gradient of a
    dispatch. Computed at once, those of the experts' second product delay its launch.
    """
    only_forward = replace(
        DIVIDED,
        by_computation={
            key: one._replace(backward=0.0, weight_gradient=0.0) for key, one in DIVIDED.by_computation.items()
        },
        pass_seconds=1 + 4 * 9.0,
    )
    standard = 4 * (3 + 7 + 4 + 7)
    assert only_forward.predict(VARIANTS["standard"], 7.0, SERIAL) == 1 + standard
    assert only_forward.predict(VARIANTS["farskip"], 7.0, SERIAL) == 1 + (7 + 4) + 3 * (7 + 7 + 4) + 7
    late = 4 * (7 + 3.5 + 7.5 + 3) + 3
    assert DIVIDED.predict(VARIANTS["standard"], 7.0, SERIAL) == 1 + standard + late
    at_once = replace(VARIANTS["standard"], late_weight_gradients=False)
    assert DIVIDED.predict(at_once, 7.0, SERIAL) == 1 + standard + 4 * (7 + (8 - 3) + 7 + 6)


def test_units_of_wires_in_hybrids() -> None:
    assert (HYBRID.sub_block, HYBRID.attention) == ((3 * 9 + 3 + 4 * 5) / 8, 3.0)
    only_delta = replace(HYBRID.shape, linear_attention_layers=(0, 1, 2, 3))
    assert replace(FORWARD, shape=only_delta).attention == 3.0


def test_windows_make_different_computations() -> None:
    names = [computation.name for computation in _computations(find_size("gpt-oss-20b"))]
    assert names == ["attention to 128 positions with sinks", "experts", "attention with sinks", "experts"] * 12
    assert [computation.name for computation in _computations(SHAPE)] == ["attention", "mlp"] * 4


@pytest.fixture(scope="module")
def hybrid() -> LanguageModel:
    alone = CommGroup.alone()
    cpu = torch.device("cpu")
    standard = [VARIANTS["standard"]]
    return build_models(standard, HYBRID.shape, ProcessMesh.single(), alone, alone, torch.float32, cpu)["standard"]


def test_every_mixer_gets_its_forward_time(hybrid: LanguageModel) -> None:
    mixers = [9.0, 9.0, 9.0, 3.0]
    expected = [seconds for mixer in mixers for seconds in (mixer, 5.0)]
    assert timed_forward(hybrid, expected) == HYBRID.by_computation


def timed_forward(model: LanguageModel, expected: list[float]) -> dict[Computation, SubBlockSeconds]:
    """Return what `time_forward` finds when the bodies take these times, at their ends."""

    class Clock(DeviceClock):
        now = 0.0

        def mark(self) -> float:
            return self.now

    clock = Clock(torch.device("cpu"))

    def taking(seconds: float) -> Callable[..., None]:
        def advance(*_: object) -> None:
            clock.now += seconds

        return advance

    steps = model.stack.sub_blocks()
    handles = [step.body.register_forward_hook(taking(seconds)) for step, seconds in zip(steps, expected, strict=True)]
    finish = time_forward(model, clock)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model.hidden_states(tokens, model.training_context(tokens))
    for handle in handles:
        handle.remove()
    return finish()


@pytest.mark.parametrize("wiring", ["standard", "farskip"])
def test_experts_that_run_inside_of_another_body_are_not_part_of_its_time(wiring: str) -> None:
    alone, cpu = CommGroup.alone(), torch.device("cpu")
    two = NoCommGroup(CommGroup(range(2), 0, None))
    mesh = replace(ProcessMesh.single(), experts=two)
    model = build_models([VARIANTS[wiring]], EXPERTS, mesh, two, alone, torch.float32, cpu)[wiring]
    kinds = [step.wired.kind for step in model.stack.sub_blocks()]
    seconds = {SubBlockKind.MIXER: 3.0, SubBlockKind.SHARED_EXPERT: 1.0, SubBlockKind.ROUTED_EXPERTS: 4.0}
    found = timed_forward(model, [seconds[kind] for kind in kinds])
    assert {computation.kind: each.forward for computation, each in found.items()} == seconds


def test_every_mixer_gets_its_backward_time(hybrid: LanguageModel) -> None:
    """Floating-point operations stand for seconds. `[q, k, v, gate, a, b]`, `[q, k, v, gate]`, `[gate, up]`."""

    class Clock(DeviceClock):
        def time(self, run: Callable[[], object]) -> float:
            with FlopCounterMode(display=False) as counter:
                run()
            return counter.get_total_flops()

    tokens, width = 4, HYBRID.shape.hidden_size
    found = time_backward(hybrid, torch.ones(tokens, 1, width), 1, Clock(torch.device("cpu")))
    columns = {
        DELTA_OF_HYBRID: sum([4 * 128, 4 * 128, 8 * 128, 8 * 128, 8, 8]),
        MLP: 2 * 1408,
        ATTENTION_OF_HYBRID: sum([4 * 256, 2 * 256, 2 * 256, 4 * 256]),
    }
    gradients = {computation: 2 * tokens * width * count for computation, count in columns.items()}
    assert {computation: seconds.weight_gradient for computation, seconds in found.items()} == gradients
    # Two products for each of the forward ones, of inputs and output.
    assert found[MLP].backward == 2 * 2 * tokens * width * 3 * 1408
