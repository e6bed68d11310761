"""The step's time by hand: no reduces, all exposed, a pipeline's triangle, data-parallel bytes."""

from dataclasses import replace

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.links import WireModel, backward_seconds, forward_seconds
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.memory import Layout, stage_parameters
from ladder_lab.cost.training import LayerTime, step_time
from megatron_ladder.blueprint.tensors import padded_vocab_size
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES

LLAMA = SIZES["llama-8b"]
H100 = Machine.usual("h100")
NO_CONTENTION = replace(H100, contention=0.0)


def times_of(
    wiring="standard", tensor: int = 8, machine: Machine = NO_CONTENTION, factor: float = 1.0, recompute: bool = False
) -> LayerTime:
    return LayerTime(LLAMA.in_wiring(wiring), machine, tensor, 4096, 1, recompute, False, factor)


def head_seconds(tensor: int) -> float:
    products = 6 * 4096 * 4096 * 128256 / (0.58 * 989e12 * tensor)
    return products + 24 * 4096 * padded_vocab_size(128256, tensor) / tensor / 3.35e12


def update_seconds(layout: Layout) -> float:
    return 28 * stage_parameters(LLAMA, layout, 0) / layout.data / 3.35e12


def test_one_gpu_is_products_and_memory() -> None:
    step = step_time(times_of(tensor=1), Layout(zero=0), 3)
    projections, scores, mlp = 2 * 4096 * (2 * 4096 + 2 * 1024), 4 * 4096 * 4096, 6 * 4096 * 14336
    useful = 3 * 32 * 4096 * (projections + scores / 2 + mlp)
    stream = 2 * 32 * 3 * 5.5 * 2 * 4096 * 4096 / 3.35e12
    pass_seconds = useful / (0.58 * 989e12) + stream + head_seconds(1)
    assert step.compute == pytest.approx(3 * pass_seconds + update_seconds(Layout()))
    assert (step.exposed_tensor, step.bubble, step.exposed_data) == pytest.approx((0, 0, 0))
    again = step_time(times_of(tensor=1, recompute=True), Layout(zero=0), 3)
    layers = 3 * pass_seconds - 3 * head_seconds(1)
    assert again.total - step.total == pytest.approx(layers / 3)


@pytest.mark.parametrize("wiring", SHARED_STREAM_MODES)
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_layers_are_the_schedule_of_the_benchmark(wiring, factor: float) -> None:
    times = times_of(wiring, factor=factor, machine=H100)
    steps = times.sub_blocks * 32
    wire = WireModel(contention=H100.contention_of(2 * 4096 * 4096))
    expected = forward_seconds(steps, wire) + backward_seconds(steps, wire, launch_before_wgrad=True)
    assert times.passes(32)[1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("wiring", "gain"), [("ladder", 1.25), ("parallel", 1.35), ("ladder-parallel", 1.50)])
def test_gains_of_training_with_bounded_collectives(wiring: str, gain: float) -> None:
    """Those of a step-time model that was fitted to runs on H100, for Megatron's overlap as the baseline."""
    bounded = replace(H100, contention=0.2)
    standard, other = (times_of(name, machine=bounded).passes(32)[1] for name in ("standard", wiring))
    assert standard / other == pytest.approx(gain, abs=0.02)


@pytest.mark.parametrize("interval", [2, 4])
def test_desync_exposes_one_reduce_per_interval_in_each_pass(interval: int) -> None:
    standard = times_of(factor=3.0)
    model = LLAMA.in_wiring("desync", desync_interval=interval, ranks=8)
    compute, total = replace(standard, model=model).passes(32)
    assert compute == pytest.approx(standard.passes(32)[0])
    assert total - compute == pytest.approx(2 * 64 / interval * standard.reduce_seconds)


def test_a_pipeline_waits_for_its_other_stages() -> None:
    times = times_of(tensor=1)
    one, four = step_time(times, Layout(), 8), step_time(times, Layout(pipeline=4), 8)
    layer = times.passes(1)[1]
    slowest = 8 * layer + head_seconds(1)
    update = update_seconds(Layout(pipeline=4))
    assert four.compute == pytest.approx(8 * slowest + update, rel=1e-6)
    sending = 2 * 11 * (4.1e-6 + 2 * 2.12e-6 + 2 * 4096 * 4096 / 282e9)
    assert four.bubble == pytest.approx(24 * layer + sending, rel=1e-6)
    assert one.bubble == 0.0
    # A late wiring hands on one more tensor.
    late = step_time(times_of("ladder", tensor=1), Layout(pipeline=4), 8)
    assert late.bubble - four.bubble == pytest.approx(2 * 11 * 2 * 4096 * 4096 / 282e9)
