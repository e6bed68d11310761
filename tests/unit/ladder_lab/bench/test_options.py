"""The benchmark's command line, and shapes by name and in numbers."""

import pytest

from ladder_lab.bench.options import parse_alpha, parse_benchmark
from ladder_lab.bench.sizes import SIZES, find_size
from megatron_ladder.blueprint.tensors import active_parameters, parameter_count
from tests.helpers.runs import errors_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500us", (5e-4, "s")), ("1c", (1.0, "c")), ("0.5a", (0.5, "a")), ("0", (0.0, "s")), ("2", None), ("-1ms", None)],
)
def test_interconnect_times(text: str, expected: tuple[float, str] | None) -> None:
    assert parse_alpha(text) == (None if expected is None else pytest.approx(expected))


def test_gpus_have_their_own_interconnect() -> None:
    _, own = parse_benchmark("decode --device cuda --tp 4 --tp-all-reduce symmetric --sizes llama-8b".split())
    assert (own.tp, own.alpha, own.sizes) == (4, ("own",), ("llama-8b",))


def test_one_gpu_has_an_emulated_interconnect() -> None:
    words = "decode --emulate --device cuda --tp 8 --alpha 0 nvlink 2c --comm-sms 1 16 --skew 0us 8us --sizes llama-8b"
    _, options = parse_benchmark(words.split())
    assert (options.alpha, options.comm_sms, options.cuda_graph) == (("0", "nvlink", "2c"), (1, 16), True)


def test_an_interconnect_of_tensor_or_of_expert_parallel_ranks() -> None:
    parsed = [parse_benchmark(one.split())[1] for one in ("train", "train --tp 4", "forward --ep 8 --emulate")]
    assert [(one.tensor_parallel, one.ranks) for one in parsed] == [(2, 2), (4, 4), (1, 8)]
    assert [one.sizes for one in parsed] == [("small-train",), ("small-train",), ("small-ep",)]


def test_only_gpus_have_graphs_by_default() -> None:
    words = ["train", "train --device cuda", "train --device cuda --no-cuda-graph"]
    assert [parse_benchmark(one.split())[1].cuda_graph for one in words] == [False, True, False]


def test_all_errors_are_reported_together() -> None:
    for words, starts in (
        ("decode --rounds 2 --comm-sms 0", ["--comm-sms 0: expected 1 to 32", "--rounds 2: expected 4 or more"]),
        (
            "train --sizes huge --tp 3 --alpha fast dgx-spark --cuda-graph --device cuda",
            ["--alpha requires --device cpu or --emulate", "--sizes huge", "--alpha fast", "--alpha dgx-spark"],
        ),
        ("decode --skew 3us", ["--skew requires --emulate"]),
        ("decode --comm-sms 4", ["--comm-sms requires --device cuda or --emulate"]),
        (
            "decode --emulate --tp 3",
            ["--tp 3 does not divide --sizes small: --num-attention-heads", "--tp 3 does not divide --sizes small"],
        ),
        ("train --ep 2 --tp 2", ["--tp 2 and --ep exclude each other"]),
        ("prefill --draft-tokens 2", ["--draft-tokens 2 requires decode"]),
        (
            "decode --ep 3 --device cuda --sizes small",
            [
                "--ep requires train or forward",
                "--ep requires --device cpu or --emulate",
                "--ep 3 does not divide the 0",
            ],
        ),
        (
            "train --ep 3 --sizes small-moe --wirings desync-2x",
            ["--ep 3 does not divide the 16", "--wirings desync-2x"],
        ),
        ("train --ep 8 --alpha dgx-spark", ["--alpha dgx-spark: known for 2 ranks, found 8: change --ep"]),
        ("train --clock processor --emulate", ["--clock processor and --emulate exclude each other"]),
        ("decode --device cuda --comm-sms 1 16", ["--comm-sms 1 16: several values require --emulate"]),
        (
            "train --emulate --tp-all-reduce symmetric --device cuda --alpha 1c",
            ["--emulate and --tp-all-reduce exclude each other"],
        ),
        (
            "decode --emulate --alpha 0 nvlink --skew 0 3us --rounds 7 --tokens 100 --sequence 5023 --tp 8",
            ["--tokens 100: a conversation has 8192 positions, enough for 99 in each timing"],
        ),
        ("train --emulate --skew 1c x", ["--skew 1c: expected a time such as 3us", "--skew x: expected a time"]),
        (
            "train --sizes huge --tp 3 --alpha fast dgx-spark",
            ["--sizes huge", "--alpha fast", "--alpha dgx-spark: known for 2 ranks, found 3: change --tp"],
        ),
    ):
        found = errors_of(parse_benchmark, words.split())
        assert [m.startswith(s) for m, s in zip(found, starts, strict=True)] == [True] * len(starts)


def test_a_shape_is_given_by_name_or_in_numbers() -> None:
    assert find_size("small-train") is SIZES["small-train"]
    assert find_size("70b") is SIZES["llama-70b"] and find_size("13b") is SIZES["llama-2-13b"]
    shape = find_size("2x24x40x6x3x100")
    assert (shape.num_layers, shape.head_dim, shape.vocab_size, shape.tie_embeddings) == (2, 4, 100, False)
    # A layer: q and o 24 x 24, k and v 24 x 12, three matrices 24 x 40, two norms; then embedding, head, last norm.
    layer = 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40 + 2 * 24
    assert parameter_count(shape).total == 2 * layer + 2 * 100 * 24 + 24


EXPERT_BIASES = 58 * 256
PREDICTING_LAYER = 635_311_424 + 2 * 154880 * 2048 + 2 * 2048**2 + 3 * 2048
"""A further layer with its own embedding and head, the projection of two streams, and three norms."""


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # The bytes of all tensors, of which the biases of experts are in fp32.
        ("instella-moe", (31_725_581_824 - 4 * 26 * 64) / 2 + 26 * 64, 2.8),
        ("deepseek-v2-lite", 15_706_484_224, 2.4),
        ("glm-4.7-flash", 31_221_488_576 - PREDICTING_LAYER, 3),
        ("deepseek-v3", 671_026_404_352 + EXPERT_BIASES, 37),
    ],
)
def test_models_with_latent_attention_have_the_published_parameters(name: str, total: float, active: float) -> None:
    """`total` is that of the published files. Published numbers of active parameters are rounded, and leave out the
    embedding, the head, both, or neither."""
    model = find_size(name)
    count = parameter_count(model)
    assert count.total == total
    most = active_parameters(model) / 1e9
    unit = 1 if active == int(active) else 0.1
    assert most - (count.embedding + count.lm_head) / 1e9 - unit / 2 < active < most + unit / 2
