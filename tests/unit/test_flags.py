"""A command line from dataclasses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.flags import build_parser, flag, parse_command_line, to_plain


@dataclass(frozen=True)
class Example:
    """Example. More words."""

    lr: float
    """The rate, in 100% of cases."""
    steps: int = flag(3, aliases=("--iterations",))
    """Steps."""
    style: Literal["linear", "cosine"] | None = None
    """A style."""
    overlap: bool = True
    """Turn overlap off."""
    bf16: bool = False
    """Half precision."""
    ids: tuple[int, ...] = ()
    """Numbers."""
    folder: Path | None = None
    """A folder."""


def parse(words: str, **kwargs: object) -> Example:
    (example,) = parse_command_line([Example], words.split(), "example.py", "An example.", **kwargs)  # type: ignore
    assert isinstance(example, Example)
    return example


def mistakes_of(words: str, **kwargs: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse(words, **kwargs)
    return list(caught.value.mistakes)


def test_values_take_their_types() -> None:
    assert parse("--lr 1e-3") == Example(1e-3)
    given = parse("--lr=2 --iterations 7 --style cosine --no-overlap --bf16 --ids 1 -2 --ids 3 --folder a/b")
    assert given == Example(2.0, 7, "cosine", False, True, (1, -2, 3), Path("a/b"))


def test_all_mistakes_come_together() -> None:
    found = mistakes_of(
        "--lrr 3 --steps many --style round --num-experts 8 --swiglu --normalization LayerNorm",
        refused={"--num-experts": "layers are dense"},
        accepted={"--swiglu": (), "--normalization": ("rmsnorm",)},
    )
    assert found == [
        "--num-experts is not supported: layers are dense",
        "--normalization LayerNorm: only rmsnorm is supported; leave the flag out",
        "--lrr is no flag of this program: did you mean --lr?",
        "--lr is required",
        "--steps: 'many' is not a whole number",
        "--style: 'round' is not one of linear, cosine",
    ]


@pytest.mark.parametrize("value", ["0", "0.0", "0."])
def test_accepted_numbers_may_be_spelled_in_any_way(value: str) -> None:
    assert parse(f"--lr 1 --attention-dropout {value}", accepted={"--attention-dropout": ("0",)}) == Example(1.0)


def test_a_flag_without_its_value_is_a_mistake() -> None:
    assert mistakes_of("--lr") == ["argument --lr: expected one argument"]
    assert mistakes_of("--lr 1 --swiglu yes", accepted={"--swiglu": ()}) == ["--swiglu takes no value, found yes"]


def test_a_caller_may_look_for_more_mistakes() -> None:
    found: list[str] = []
    assert parse("--steps many", found=found) == Example(1.0, 3)
    assert found == ["--lr is required", "--steps: 'many' is not a whole number"]


def test_help_is_the_docstrings() -> None:
    text = " ".join(build_parser([Example], "example.py", "An example.").format_help().split())
    assert "Example. More words" in text
    assert "--lr X The rate, in 100% of cases. (required)" in text
    assert "--steps N, --iterations N Steps. (default: 3)" in text
    assert "--no-overlap Turn overlap off." in text


def test_plain_values() -> None:
    plain = to_plain(Example(0.5, style="linear", ids=(4, 5), folder=Path("x")))
    assert plain["ids"] == [4, 5] and plain["folder"] == "x" and plain["style"] == "linear"


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_numbers_are_finite(word: str) -> None:
    assert mistakes_of(f"--lr={word}") == [f"--lr: '{word}' is not finite"]
