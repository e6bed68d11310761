"""The benchmark's command line."""

import pytest

from megatron_ladder.bench.options import parse_alpha, parse_options
from megatron_ladder.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500us", (5e-4, "s")), ("2ms", (2e-3, "s")), ("0.5s", (0.5, "s")), ("1c", (1.0, "c")), ("0.5a", (0.5, "a")),
        ("0", (0.0, "s")), ("2", None), ("c", None), ("1x", None), ("-1ms", None),
    ],
)  # fmt: skip
def test_interconnect_times(text: str, expected: tuple[float, str] | None) -> None:
    assert parse_alpha(text) == (None if expected is None else pytest.approx(expected))


def test_defaults_fit_the_case() -> None:
    assert parse_options(["train"])[1].size == "small-train"
    case, options = parse_options("prefill --size small-llama --alpha 1c 2ms".split())
    assert (case, options.size, options.alpha) == ("prefill", "small-llama", ("1c", "2ms"))


def test_mistakes_come_together() -> None:
    with pytest.raises(UserError) as caught:
        parse_options("--size huge --tp 1 --rounds 2 --alpha fast".split())
    starts = ["what to time", "--size huge", "--tp 1", "--rounds 2", "--alpha fast"]
    assert [mistake.startswith(s) for mistake, s in zip(caught.value.mistakes, starts, strict=True)] == [True] * 5
