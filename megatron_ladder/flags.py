"""Flags of command lines as fields of dataclasses, with their types, bounds and documentation.

A field `micro_batch_size: int = flag(1, minimum=1)` with a docstring below it becomes `--micro-batch-size N`. The
docstring is its help. The type determines how many values the flag takes and how they are read:

    int, float, str, Path      one value
    bool                       a switch: `--bf16`; a switch that is on by default becomes `--no-...`. The opposite
                               spelling restores the default, for a value that comes from a file
    Literal["a", "b"]          one of the words; with "true" and "false" among them, the flag may stand alone or be
                               spelled `--no-...`, as a switch
    tuple[T, ...]              one or more values after one flag
    T | None                   as T; None if the flag is not given

Bounds of a value, and flags that it requires or excludes, are declared in `flag`. `command_line.py` reads the words.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from megatron_ladder.files import OutputKind, output_problem


@dataclasses.dataclass(frozen=True)
class _Limits:
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    output: OutputKind | None = None

    def contain(self, number: float) -> bool:
        low = (self.minimum is None or number >= self.minimum) and (self.above is None or number > self.above)
        return low and (self.maximum is None or number <= self.maximum) and (self.below is None or number < self.below)

    @property
    def bounds(self) -> str:
        """Describe the accepted numbers: `1 or more`, `0 to 1`, `above 0, at most 1`; empty without limits."""
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:.15g} to {self.maximum:.15g}"
        limits = {
            "above {:.15g}": self.above,
            "{:.15g} or more": self.minimum,
            "at most {:.15g}": self.maximum,
            "below {:.15g}": self.below,
        }
        return ", ".join(text.format(limit) for text, limit in limits.items() if limit is not None)

    def __str__(self) -> str:
        choices = "among " + ", ".join(self.choices) if self.choices else ""
        requires = "requires " + " and ".join(self.requires) if self.requires else ""
        excludes = "not with " + " or ".join(self.excludes) if self.excludes else ""
        return "; ".join(part for part in (choices, self.bounds, requires, excludes) if part)


def flag(
    default: Any = dataclasses.MISSING,
    *,
    aliases: Sequence[str] = (),
    choices: Iterable[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    requires: str | Sequence[str] = (),
    excludes: str | Sequence[str] = (),
    output: OutputKind | None = None,
    details: str = "",
) -> Any:
    """Declare a dataclass field that is a flag.

    Args:
        default: value without the flag; the flag is required if there is none.
        aliases: further spellings, with leading dashes.
        choices: accepted texts, if they are computed; a Literal type lists others.
        minimum, maximum, above, below: limits of a number, or of each number of a tuple; the last two are
            exclusive.
        requires: flags without which this one has no effect. A flag with a value (`"--optimizer adam"`) must have
            that value; without one it must have any value but its default.
        excludes: flags that contradict this one, in the same notation.
        output: kind of a path that the program writes; it is an error if that is impossible.
        details: computed text that follows the docstring in the help.
    """
    requires = (requires,) if isinstance(requires, str) else tuple(requires)
    excludes = (excludes,) if isinstance(excludes, str) else tuple(excludes)
    limits = _Limits(tuple(choices), minimum, maximum, above, below, requires, excludes, output)
    return dataclasses.field(default=default, metadata={"aliases": aliases, "limits": limits, "details": details})


def flag_name(field_name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`."""
    return "--" + field_name.replace("_", "-")


def _spelling(field: "dataclasses.Field[Any]") -> str:
    return flag_name("no_" + field.name if field.default is True else field.name)


# Parsing sources dominates the time to read a command line, and studies read many command lines.
@functools.cache
def _field_docstrings(config_class: type) -> dict[str, str]:
    documented: dict[str, str] = {}
    for ancestor in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(ancestor))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statements in itertools.pairwise(body.body):
            match statements:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    documented[name] = inspect.cleandoc(text)
    return documented


@dataclasses.dataclass(frozen=True)
class ValueType:
    """Converts the words after a flag to a value."""

    scalar: type
    choices: tuple[str, ...]
    many: bool
    optional: bool

    @staticmethod
    def of(annotation: Any) -> "ValueType":
        """Read the annotation of a field; raise TypeError if it is not in the table of the module docstring."""
        is_union = typing.get_origin(annotation) in (Union, types.UnionType)
        members = typing.get_args(annotation) if is_union else (annotation,)
        scalar, *others = [member for member in members if member is not type(None)]
        many = typing.get_origin(scalar) is tuple
        if many:
            scalar = typing.get_args(scalar)[0]
        choices: tuple[str, ...] = ()
        if typing.get_origin(scalar) is Literal:
            scalar, choices = str, typing.get_args(scalar)
        if others or scalar not in (int, float, str, bool, Path):
            raise TypeError(f"a field cannot be {annotation} on a command line")
        return ValueType(scalar, choices, many, optional=len(members) > 1)

    def read(self, words: str | Sequence[str]) -> Any:
        """Convert one word, or several if the flag takes them; raise ValueError if one is not valid."""
        return tuple(map(self._read_word, words)) if self.many else self._read_word(str(words))

    def _read_word(self, word: str) -> Any:
        if self.choices and word not in self.choices:
            raise ValueError(f"{word!r} is not one of {', '.join(self.choices)}")
        if self.scalar is bool:
            return word == "true"
        if self.scalar not in (int, float):
            return self.scalar(word)
        try:
            number = int(word.replace("_", "")) if self.scalar is int else float(word)
        except ValueError:
            raise ValueError(f"{word!r} is not a {'whole ' if self.scalar is int else ''}number") from None
        if not math.isfinite(number):
            raise ValueError(f"{word!r} is not finite")
        return number

    @property
    def stand_in(self) -> Any:
        """A harmless replacement for a value that cannot be read."""
        value = self.choices[0] if self.choices else self.scalar("1")
        return (value,) if self.many else value

    @property
    def placeholder(self) -> str:
        """The value's placeholder in the help, in brackets if it is optional; empty for a switch."""
        if self.choices:
            words = "{" + ",".join(self.choices) + "}"
            return f"[{words}]" if "true" in self.choices else words
        return {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}[self.scalar]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag as shown in `--help` and in the reference pages, all texts on one line.

    `spellings` are the flag and its aliases. A switch has no placeholder; if it is on by default, it `turns_off`. There
    is no `default` to show for switches, required flags, and flags whose default the documentation describes.
    """

    field_name: str
    spellings: tuple[str, ...]
    placeholder: str
    many: bool
    documentation: str
    default: str | None
    required: bool
    turns_off: bool
    limits: str


def section_flags(config_class: type) -> list[Flag]:
    """Return all flags of a dataclass, inherited ones last."""
    documented = _field_docstrings(config_class)
    hints = typing.get_type_hints(config_class)
    flags = []
    for field in sorted(dataclasses.fields(config_class), key=lambda f: f.name not in config_class.__annotations__):
        value_type = ValueType.of(hints[field.name])
        default = None
        if value_type.scalar is not bool and field.default not in (None, (), dataclasses.MISSING):
            default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        flags.append(
            Flag(
                field_name=field.name,
                spellings=(_spelling(field), *field.metadata.get("aliases", ())),
                placeholder=value_type.placeholder,
                many=value_type.many,
                documentation=" ".join(f"{documented[field.name]} {field.metadata.get('details', '')}".split()),
                default=default,
                required=field.default is dataclasses.MISSING,
                turns_off=field.default is True,
                limits=str(field.metadata.get("limits", "")),
            )
        )
    return flags


def value_errors(configs: Sequence[Any], skipped: Collection[str] = ()) -> list[str]:
    """Check the sections of one command line, except `skipped` fields, against what their flags allow.

    Return one line per error. `requires` and `excludes` refer to flags of any section.
    """
    errors: list[str] = []
    for config in configs:
        for field in dataclasses.fields(config):
            limits: _Limits | None = field.metadata.get("limits")
            if limits is None or field.name in skipped:
                continue
            value, name = getattr(config, field.name), _spelling(field)
            before = len(errors)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, int | float) and not limits.contain(one):
                    errors.append(f"{name} {one}: expected {limits.bounds}")
                if isinstance(one, str) and limits.choices and one not in limits.choices:
                    errors.append(f"{name} {one}: expected one of {', '.join(limits.choices)}")
                problem = output_problem(one, limits.output) if limits.output and isinstance(one, Path) else None
                errors += [f"{name} {one}: cannot be written: {problem}: give another path"] if problem else []
            if value == field.default or len(errors) > before:
                continue
            shown = name if isinstance(value, bool | tuple) else f"{name} {value}"
            errors += [f"{shown} requires {other}" for other in limits.requires if not _has(configs, other)]
            contradicted = [other for other in limits.excludes if _has(configs, other)]
            errors += [f"{shown} and {other} exclude each other: give one of them" for other in contradicted]
    return errors


def with_valid_numbers(config: Any) -> Any:
    """Return a section with the default, or 1 if there is none, instead of each number that its flag does not allow."""
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        limits: _Limits | None = field.metadata.get("limits")
        value = getattr(config, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if limits is not None and not all(limits.contain(one) for one in values if isinstance(one, int | float)):
            is_required = field.default is dataclasses.MISSING
            changes[field.name] = ValueType.of(hints[field.name]).stand_in if is_required else field.default
    return dataclasses.replace(config, **changes)


def _has(configs: Sequence[Any], condition: str) -> bool:
    """Whether a flag was given with the value in `condition`, or, if that has none, with a value of any kind."""
    name, _, wanted = condition.partition(" ")
    for config in configs:
        for field in dataclasses.fields(config):
            if _spelling(field) == name:
                value = getattr(config, field.name)
                return str(value) == wanted if wanted else value != field.default
    raise ValueError(f"no flag {name} in {', '.join(type(config).__name__ for config in configs)}")


def to_plain(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as JSON-compatible values: paths as text, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
