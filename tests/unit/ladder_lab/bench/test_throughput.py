"""Training throughput: model sizes, utilisation, and the whole command at a small size."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from ladder_lab.bench.options import ThroughputOptions
from ladder_lab.bench.paired import PairedTimes
from ladder_lab.bench.sizes import SIZES
from ladder_lab.bench.throughput import PRODUCTS_AT_ONCE, _rows, _transformers_model, _ways
from megatron_ladder.blueprint.tensors import parameter_count

SMALL = replace(SIZES["small-train"], num_layers=1, hidden_size=64, ffn_hidden_size=96, vocab_size=128, head_dim=8)


def test_utilisation_and_ratios() -> None:
    """Products of 2 * 10^3 FLOPs in 1 s each make a rate of 2000 FLOP/s."""
    options = ThroughputOptions(batch=3, matrix=10)
    # 3 samples, forward and backward thrice the forward: projections, scores, MLP and head.
    flops = 3 * 3 * 2 * 16 * (64 * 8 * 32 + 2 * 16 * 64 + 3 * 64 * 96 + 64 * 128)
    seconds = {"ladder": flops / 1000, "transformers": flops / 500, "product": float(PRODUCTS_AT_ONCE)}
    times = PairedTimes({way: tuple(second * drift for drift in (1, 2, 1, 3)) for way, second in seconds.items()})
    peak = 989e12
    ladder, transformers = _rows(options, SMALL, 16, times, peak)
    assert ladder["mfu"] == pytest.approx(1000 / 1.5 / peak)
    assert ladder["utilisation"] == pytest.approx(0.5) and transformers["utilisation"] == pytest.approx(0.25)
    assert ladder["speed_over_transformers"] == pytest.approx(2.0) and transformers["speed_over_transformers"] == 1.0
    assert ladder["median_seconds"] == pytest.approx(1.5 * flops / 1000)
    assert ladder["tokens_per_second"] == pytest.approx(48 / (1.5 * flops / 1000))
    assert (ladder["spread"], ladder["verdict"]) == (pytest.approx(0.0), "sound")
    without = PairedTimes({way: times.seconds[way] for way in ("ladder", "product")})
    (alone,) = _rows(options, SMALL, 16, without, None)
    assert (
        alone["mfu"] is None and alone["speed_over_transformers"] is None and alone["utilisation"] == pytest.approx(0.5)
    )


def test_experts_are_not_compared_with_dense_layers() -> None:
    options = ThroughputOptions(wirings=("standard",), backend="none", matrix=8)
    experts = replace(SIZES["small-moe"], num_layers=1, moe_layers=(0,), hidden_size=64, vocab_size=128, head_dim=4)
    with ExitStack() as graphs:
        assert [*_ways(options, experts, 8, torch.device("cpu"), graphs)] == ["standard", "product"]


@pytest.mark.parametrize(
    ("size", "kind"), [("small-train", "LlamaForCausalLM"), ("small-hybrid", "Qwen3_5ForCausalLM")]
)
def test_models_are_compared_with_those_of_the_same_type(size: str, kind: str) -> None:
    shape = replace(SIZES[size], hidden_size=64, ffn_hidden_size=96, vocab_size=128)
    theirs = _transformers_model(shape, torch.bfloat16, torch.device("cpu"))
    assert type(theirs).__name__ == kind
    assert sum(weight.numel() for weight in theirs.parameters()) == parameter_count(shape).total
