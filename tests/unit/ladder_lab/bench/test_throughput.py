"""Training throughput: model sizes, utilisation, and the whole command at a small size."""

from dataclasses import replace

import pytest
import torch

from ladder_lab.bench.paired import PairedTimes
from ladder_lab.bench.sizes import SIZES
from ladder_lab.bench.throughput import PRODUCTS_AT_ONCE, ThroughputWorkload, _rows
from megatron_ladder.errors import UserError
from tools.throughput import parse_options

CPU = torch.device("cpu")
SMALL = replace(SIZES["small-train"], num_layers=1, hidden_size=64, ffn_hidden_size=96, vocab_size=128, head_dim=8)


def test_utilisation_and_ratios() -> None:
    """Products of 2 * 10^3 FLOPs in 1 s each make a rate of 2000 FLOP/s."""
    workload = ThroughputWorkload(SMALL, 16, 3, torch.float32, CPU, None, matrix=10)
    # 3 samples, forward and backward thrice the forward: projections, scores, MLP and head.
    flops = 3 * 3 * 2 * 16 * (64 * 8 * 32 + 2 * 16 * 64 + 3 * 64 * 96 + 64 * 128)
    seconds = {"ladder": flops / 1000, "transformers": flops / 500, "product": float(PRODUCTS_AT_ONCE)}
    times = PairedTimes({way: tuple(second * drift for drift in (1, 2, 1, 3)) for way, second in seconds.items()})
    ladder, transformers = _rows(workload, times)
    assert ladder["utilisation"] == pytest.approx(0.5) and transformers["utilisation"] == pytest.approx(0.25)
    assert ladder["speed_over_transformers"] == pytest.approx(2.0) and transformers["speed_over_transformers"] == 1.0
    assert ladder["median_seconds"] == pytest.approx(1.5 * flops / 1000)
    assert ladder["tokens_per_second"] == pytest.approx(48 / (1.5 * flops / 1000))
    assert (ladder["spread"], ladder["verdict"]) == (pytest.approx(0.0), "sound")
    (alone,) = _rows(workload, PairedTimes({way: times.seconds[way] for way in ("ladder", "product")}))
    assert alone["speed_over_transformers"] is None and alone["utilisation"] == pytest.approx(0.5)


def test_experts_are_not_compared_with_dense_layers() -> None:
    argv = ["--size", "small-moe"]
    assert parse_options([*argv, "--no-transformers"]).size == "small-moe"
    with pytest.raises(UserError, match="--size small-moe: the Llama of transformers has no experts; add --no-tr"):
        parse_options(argv)
