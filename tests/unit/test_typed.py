"""Errors in JSON texts and in their values, in words that name keys and neither msgspec's types nor its paths."""

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from megatron_ladder.typed import read_json, typed
from tests.helpers.commands import REPOSITORY_ROOT


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a":', "is not JSON: it ends too early"),
        (b'{"a": 1}\n}', "is not JSON: line 2, column 2"),
        ('{"ä": x}'.encode(), "is not JSON: line 1, column 7"),
        (b'{"a": 1e400}', "has a number that no float64 can hold"),
        (b'{"a": NaN}', "is not JSON: line 1, column 7"),
        (b'"\xff"', "is not JSON: has bytes that are not UTF-8"),
        (b"[" * 100_000, "is not JSON that can be read: it is nested too deeply"),
        (b"", "is not JSON: it ends too early"),
    ],
)
def test_texts_that_are_not_json(content: bytes, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_json(content)
    assert str(raised.value) == words


class _Row(Struct, array_like=True):
    name: str
    size: Annotated[int, Meta(ge=1, lt=9)]


class _Section(Struct):
    kinds: list[Literal["full", "window"]]
    rows: tuple[_Row, ...] = ()
    scale: float | None = None
    sizes: dict[str, int] = {}
    more: "_Section | None" = None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "kinds: found nothing, expected a list, each item 'full' or 'window'"),
        ([], "found [], expected an object"),
        ({"kinds": ["full", "odd"]}, "kinds[1]: found 'odd', expected 'full' or 'window'"),
        ({"kinds": [], "scale": "1"}, "scale: found '1', expected a number or null"),
        ({"kinds": None}, "kinds: found null, expected a list, each item 'full' or 'window'"),
        ({"kinds": [], "rows": [["a", 1], ["b", 9]]}, "rows[1][1]: found 9, expected a whole number from 1 to 8"),
        ({"kinds": [], "rows": [["a"]]}, "rows[0]: found ['a'], expected a list of 2 values"),
        ({"kinds": [], "sizes": {"a": "b"}}, "sizes: found {'a': 'b'}, expected an object, each value a whole number"),
        ({"kinds": [], "more": {"kinds": [], "scale": True}}, "more.scale: found True, expected a number or null"),
        ({"kinds": [], "more": {}}, "more.kinds: found nothing, expected a list, each item 'full' or 'window'"),
        ({"kinds": [], "scale": ["x" * 300]}, "scale: found a list of 1 values, expected a number or null"),
    ],
)
def test_values_of_other_types(values: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        typed(values, _Section)
    assert str(raised.value) == words


def test_no_other_file_shows_errors_of_msgspec() -> None:
    """The words of msgspec reach a user through one file only."""
    caught = [
        path.name
        for folder in ("megatron_ladder", "tools")
        for path in (REPOSITORY_ROOT / folder).rglob("*.py")
        if any(f"msgspec.{name}" in path.read_text() for name in ("ValidationError", "DecodeError", "MsgspecError"))
    ]
    assert sorted(caught) == ["prompt_files.py", "typed.py"]
