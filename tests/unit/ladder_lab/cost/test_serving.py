"""The serving model compared with arithmetic written out, and its fit with known parameters."""

import math
import random
from dataclasses import replace

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.serving import (
    PARAMETERS,
    Parameter,
    Setting,
    _all_reduce_seconds,
    _fit_parameters,
    predict,
)

VALUES = {parameter.name: parameter.value for parameter in PARAMETERS}
LLAMA = SIZES["llama-8b"]
MB = 2**20


def decode(tensor: int, batch: int, wiring: str, p2p: bool = True, **changed: float) -> float:
    return predict(Setting(LLAMA, p2p, tensor, batch, wiring), {**VALUES, **changed}).decode / 511


def test_a_token_without_reduces() -> None:
    weights = 2 * (2 * 4096 * 5120 + 3 * 4096 * 14336) / (0.93 * 3.35e12)
    cache = 0.83 * 2 * 2 * 1536 * 4096 / 3.35e12
    head = 2 * 4096 * 128256 / (0.93 * 3.35e12)
    expected = 32 * (weights + cache + 34e-6) + head + 115e-6
    assert decode(1, 1, "no-comm") == pytest.approx(expected)
    # Two ranks share the layers; the head is whole on both.
    halved = 32 * ((weights + cache) / 2 + 34e-6) + head + 115e-6
    assert decode(2, 1, "no-comm") == pytest.approx(halved)


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "p2p", "microseconds"),
    [
        (MB, 1, True, 0),
        (MB, 2, True, 4.1 + 2.12 * 2 + (14**2 + (MB / 250e3) ** 2) ** 0.5),
        (4 * MB, 8, True, 4.1 + 2.12 * 8 + (28**2 + (1.75 * 4 * MB / 450e3) ** 2) ** 0.5),
        (4 * MB, 2, False, 8 + (178**2 + (4 * MB / 15.5e3) ** 2) ** 0.5),
        (24 * 1024, 4, False, -4.1 + 6.05 * 4 + 1.16 * 3 * 2 + 1.5 * 24 * 1024 / 330e3),
        (MB, 16, True, 36.7 + (41.5**2 + (1.875 * MB / 310e3) ** 2) ** 0.5),
        (MB, 16, False, 2.25 * (36.7 + (41.5**2 + (1.875 * MB / 310e3) ** 2) ** 0.5)),
    ],
)
def test_reduces(num_bytes: int, ranks: int, p2p: bool, microseconds: float) -> None:
    assert _all_reduce_seconds(num_bytes, ranks, p2p, VALUES) == pytest.approx(1e-6 * microseconds)


def test_wirings_by_their_formulas() -> None:
    no_glue = {f"single_{wiring}": 0.0 for wiring in ("standard", "ladder", "parallel")}
    t = _all_reduce_seconds(2 * 4096, 8, False, VALUES)
    bound = decode(8, 1, "no-comm", False)
    assert (decode(8, 1, "standard", False, **no_glue) - bound) / 32 == pytest.approx(2 * t)
    assert (decode(8, 1, "parallel", False, **no_glue) - bound) / 32 == pytest.approx(t)
    # Neither sub-block is as long as a reduce here, so that ladder takes 2 t and what contention gives back.
    assert t > 40e-6
    share = 0.57 * 8192 / (8192 + 0.33 * MB)
    layer = (bound - 2 * 4096 * 128256 / (0.93 * 3.35e12) - 115e-6) / 32
    ladder = (decode(8, 1, "ladder", False, **no_glue) - bound) / 32
    assert ladder == pytest.approx(2 * t + share * layer - layer)
    attention = 2 * 2 * 4096 * 5120 / 8 / (0.93 * 3.35e12) + 0.83 * 4 * 1536 * 4096 / 8 / 3.35e12 + 0.62 * 34e-6
    late_attention = (decode(8, 1, "ladder-attention", False, **no_glue) - bound) / 32
    assert late_attention == pytest.approx(t + share * attention - attention + t)
    together = (decode(8, 1, "ladder-parallel", False, **no_glue) - bound) / 32
    assert together == pytest.approx(max(layer, t) + share * min(layer, t) - layer)


def test_prefill_of_one_rank() -> None:
    values = {**VALUES, "score_passes": 0.0, "stream_passes": 0.0}
    times = predict(Setting(LLAMA, True, 1, 2, "no-comm"), values)
    matrices = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    flops = 2 * 2048 * (32 * matrices + 4096 * 128256) + 32 * 4 * 2048 * 1536 * 4096
    assert times.prefill == pytest.approx(flops / (0.58 * 989e12) + 32 * 170e-6)
    assert times.tokens_per_second(2) == pytest.approx(2 * 512 / (times.prefill + times.decode))


def test_a_batch_grows_the_floor() -> None:
    one = replace(LLAMA, num_layers=1)
    values = {**VALUES, "cache_share": 0.0, "sample": 0.0}
    four, sixteen = (predict(Setting(one, True, 1, batch, "no-comm"), values).decode / 511 for batch in (4, 16))
    assert sixteen - four == pytest.approx(4e-6)


PRIORS = (
    Parameter("latency", 5.0, 1.0, "us"),
    Parameter("rate", 100.0, 1.0, "GB/s"),
    Parameter("shift", 0.0, 10.0, "us", positive=False),
    Parameter("unseen", 7.0, 0.5, "nothing depends on it"),
)


def curve(values, x: float) -> float:
    return values["latency"] * math.log1p(x) + 1000 * x / values["rate"] + values["shift"]


def test_a_fit_recovers_parameters_and_keeps_those_without_measurements() -> None:
    true = {"latency": 9.0, "rate": 40.0, "shift": -3.0}
    points = [(x, curve(true, x)) for x in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)]
    found = _fit_parameters(PRIORS, lambda values: [(curve(values, x) - y) / 0.01 for x, y in points])
    assert found == pytest.approx({**true, "unseen": 7.0}, rel=2e-3)


def test_an_outlier_moves_a_fit_little() -> None:
    dice = random.Random(0)
    only = (Parameter("level", 1.0, 1.0, "of all"),)
    points = [2.0 * math.exp(dice.gauss(0, 0.01)) for _ in range(9)] + [6.0]
    found = _fit_parameters(only, lambda values: [math.log(values["level"] / point) / 0.01 for point in points])
    assert found["level"] == pytest.approx(2.0, rel=0.01), "a mean of logarithms would be 2.23"


def test_the_prior_weighs_as_one_measurement() -> None:
    only = (Parameter("level", 1.0, 0.1, "of all", positive=False),)
    found = _fit_parameters(only, lambda values: [(values["level"] - 1.1) / 0.1])
    assert found["level"] == pytest.approx(1.05)
