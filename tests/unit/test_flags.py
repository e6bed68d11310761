"""Command lines built from dataclasses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_ladder.command_line import Settings, _help_parser, flag_words, parse_command_line
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag, section_flags
from tests.helpers.runs import errors_of


@dataclass(frozen=True)
class Example:
    """Example. More words."""

    lr: float = flag(above=0, maximum=10)
    """The rate, in 100% of cases."""
    steps: int = flag(3, aliases=("--iterations",))
    """Steps."""
    style: Literal["linear", "cosine"] | None = None
    """A style."""
    overlap: bool = True
    """Overlap sums. Without it, they are exposed."""
    bf16: bool = False
    """Half precision."""
    ids: tuple[int, ...] = flag((), minimum=-2)
    """Numbers."""
    texts: tuple[str, ...] = flag((), repeats=True)
    """Texts."""
    folder: Path | None = None
    """A folder."""
    fused: Literal["auto", "true", "false"] = "auto"
    """Fuse."""
    decay: float = flag(0.9, minimum=0, below=1)
    """A decay."""
    depth: int | None = flag(None, minimum=1, requires="style cosine")
    """A depth."""
    stream: bool = flag(False, excludes="bf16")
    """Stream."""


def parse(words: str) -> Example:
    (example,) = parse_command_line([Example], words.split(), "example.py", "An example.")
    assert isinstance(example, Example)
    return example


def test_values_are_converted_to_their_types() -> None:
    assert parse("--lr 1e-3") == Example(1e-3)
    words = "--lr=10 --iterations 7 --style cosine --no-overlap --bf16 --ids 1 -2 --folder a/b --decay 0 --depth 1"
    assert parse(words) == Example(10.0, 7, "cosine", False, True, (1, -2), folder=Path("a/b"), decay=0.0, depth=1)


@pytest.mark.parametrize(
    ("words", "values", "warning"),
    [
        ("--lr 1 --ids 1 2 --texts a --ids 3 --texts b", {"ids": (3,)}, "--ids is given twice: 3 replaces 1 2"),
        ("--lr 1 --lr 2", {"lr": 2.0}, "--lr is given twice: 2 replaces 1"),
        ("--lr 1 --bf16 --no-bf16", {"bf16": False}, "--no-bf16 is given twice: false replaces true"),
    ],
)
def test_a_repeated_flag_replaces_its_values_with_a_warning(
    capsys: pytest.CaptureFixture[str], words: str, values: dict[str, object], warning: str
) -> None:
    found = parse(words)
    assert capsys.readouterr().err == f"*** {warning} ***\n"
    assert vars(found).items() >= values.items()
    assert parse("--lr 1 --texts a b --texts c").texts == ("a", "b", "c")
    assert flag_words({"ids": (1, 2), "texts": ("--a", "b"), "one": ["x"]}) == [
        *("--ids", "1", "2"),
        *("--texts=--a", "--texts=b", "--one=x"),
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--lr x --lr 1", "--lr: 'x' is not a number, before 1 replaces it"),
        ("--lr 20 --lr 1", "--lr 20.0: expected above 0, at most 10"),
        ("--lr 1 --ids 1 -9 --ids 3", "--ids -9: expected -2 or more"),
    ],
)
def test_replaced_values_must_be_valid(words: str, error: str) -> None:
    assert errors_of(parse, words) == [error]


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        (
            "--lrr 3 --steps many --style round --ids 1 9223372036854775808",
            [
                "--lrr is not a flag of this program: did you mean --lr?",
                "--steps: 'many' is not a whole number",
                "--style: 'round' is not one of linear, cosine",
                "--ids: 9223372036854775808 is too large",
            ],
        ),
        ("--lr", ["--lr: expected a value"]),
        ("--lr 1 --folder= --ids", ["--folder: the path is empty", "--ids: expected a value"]),
        (
            "x --lr 1 2 --bf16=true",
            [
                "x: expected a flag",
                "2: expected a flag, after the value of --lr",
                "--bf16 takes no value, found true",
            ],
        ),
        ("--lr=nan", ["--lr: 'nan' is not finite"]),
        ("--lr=-inf", ["--lr: '-inf' is not finite"]),
        (
            "--lr 11 --decay 1 --ids 4 -3 --depth 3 --bf16 --stream",
            [
                "--lr 11.0: expected above 0, at most 10",
                "--ids -3: expected -2 or more",
                "--decay 1.0: expected 0 or more, below 1",
                "--depth 3 requires --style cosine",
                "--stream and --bf16 exclude each other: give one of them",
            ],
        ),
    ],
)
def test_all_errors_are_reported_together(words: str, errors: list[str]) -> None:
    assert errors_of(parse, words) == errors


def test_words_of_a_file_are_converted_too() -> None:
    words: Any = {
        "lr": "1e-4",
        "bf16": "true",
        "overlap": "false",
        "ids": ["1", "2"],
        "style": "cosine",
    }

    def build(words: Any) -> list[Example]:
        settings = Settings(section_flags(Example))
        for one in settings.flags:
            if one.field_name in words:
                settings.give(one, words[one.field_name], "")
        return settings.build([Example])

    assert build(words) == [Example(1e-4, 3, "cosine", False, True, (1, 2))]
    for name, word in {"bf16": "maybe", "overlap": "", "folder": "a\0b", "lr": "nan"}.items():
        with pytest.raises(UserError, match=f"^--{name}: "):
            build(words | {name: word})
    with pytest.raises(UserError, match=r"^--folder: '\\ud800' has a character that no path or text can have$"):
        build(words | {"folder": "\ud800"})


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", "auto"),
        ("--fused", "true"),
        ("--fused --bf16", "true"),
        ("--fused false", "false"),
        ("--no-fused", "false"),
        ("--no-fused --fused=auto", "auto"),
    ],
)
def test_a_switch_with_a_third_value(words: str, value: str) -> None:
    assert parse(f"--lr 1 {words}").fused == value
    assert "--fused [{auto,true,false}]" in " ".join(_help_parser([Example], "p", "").format_help().split())


def test_help_shows_docstrings() -> None:
    text = " ".join(_help_parser([Example], "example.py", "An example.").format_help().split())
    assert "--no-overlap Do not overlap sums. Without it, they are exposed." in text
    assert "Example. More words" in text
    assert "--lr X The rate, in 100% of cases. (above 0, at most 10; required)" in text
    assert "--steps N, --iterations N Steps. (default: 3)" in text
