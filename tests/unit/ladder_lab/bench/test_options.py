"""The benchmark's command line."""

import pytest

from ladder_lab.bench.options import BenchmarkOptions, RequestsOptions, parse_alpha, parse_options
from megatron_ladder.errors import UserError


def options_of(words: str) -> BenchmarkOptions:
    parsed = parse_options(words.split())
    assert not isinstance(parsed, RequestsOptions)
    return parsed[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500us", (5e-4, "s")), ("1c", (1.0, "c")), ("0.5a", (0.5, "a")), ("0", (0.0, "s")), ("2", None), ("-1ms", None)],
)
def test_interconnect_times(text: str, expected: tuple[float, str] | None) -> None:
    assert parse_alpha(text) == (None if expected is None else pytest.approx(expected))


def test_one_gpu_emulates_a_group_and_several_form_one() -> None:
    emulated = options_of("decode --device cuda --emulated-tp 8 --sizes llama-8b --link-preset nvlink")
    assert (emulated.ranks, emulated.processes, emulated.own_interconnect) == (8, 1, False)
    own = options_of("decode --device cuda --tp 4 --tp-all-reduce symmetric --sizes llama-8b")
    assert (own.ranks, own.processes, own.own_interconnect, own.alpha) == (4, 4, True, ("own",))


def test_all_errors_are_reported_together() -> None:
    for words, starts in (
        ("decode --rounds 2 --comm-sms 0", ["--comm-sms 0: expected 1 to 32", "--rounds 2: expected 4 or more"]),
        (
            "--sizes huge --tp 3 --alpha fast --link-preset wire infiniband",
            [
                "expected one of decode, prefill, train, serve first",
                "--sizes huge",
                "--alpha fast",
                "--link-preset wire",
                "--link-preset infiniband",
            ],
        ),
    ):
        with pytest.raises(UserError) as caught:
            parse_options(words.split())
        assert [m.startswith(s) for m, s in zip(caught.value.messages, starts, strict=True)] == [True] * len(starts)
