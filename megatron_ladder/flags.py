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
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from megatron_ladder.errors import Problem
from megatron_ladder.files import OutputKind, output_problem

_IMPOSSIBLE = re.compile(r"[\0\ud800-\udc7f\udd00-\udfff]")
"""NUL, and surrogates except for those that stand for undecodable bytes of a command line."""
OnResume = Literal["take", "report", "data", "ignore"]


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
    repeats: bool = False,
    on_resume: OnResume = "take",
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
        repeats: a repetition of the flag adds values; otherwise it replaces them.
        on_resume: what a resumed run does with the value of its checkpoint if the flag is not given. take: uses it;
            report: likewise, and reports another given value, because it changes what is learned; data: uses it if no
            other flag that names data is given; ignore: uses the default, because the value concerns one start.
    """
    requires = (requires,) if isinstance(requires, str) else tuple(requires)
    excludes = (excludes,) if isinstance(excludes, str) else tuple(excludes)
    limits = _Limits(tuple(choices), minimum, maximum, above, below, requires, excludes, output)
    metadata = {"aliases": aliases, "limits": limits, "details": details, "repeats": repeats, "on_resume": on_resume}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`."""
    return "--" + field_name.replace("_", "-")


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
            if word not in ("true", "false"):
                raise ValueError(f"{word!r} is not true or false")
            return word == "true"
        if self.scalar is Path and not word:
            raise ValueError("the path is empty")
        if self.scalar not in (int, float):
            if _IMPOSSIBLE.search(word):
                raise ValueError(f"{word!r} has a character that no path or text can have")
            return self.scalar(word)
        try:
            # Python, like YAML 1.1, reads 1_0 as 10.
            number = self.scalar(word.replace("_", "?"))
        except ValueError:
            raise ValueError(f"{word!r} is not a {'whole ' if self.scalar is int else ''}number") from None
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{word!r} is not finite")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise ValueError(f"{word} is too large")
        return number

    @property
    def placeholder(self) -> str:
        """The value's placeholder in the help, in brackets if it is optional; empty for a switch."""
        if self.choices:
            words = "{" + ",".join(self.choices) + "}"
            return f"[{words}]" if "true" in self.choices else words
        return {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}[self.scalar]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a dataclass as a flag."""

    field_name: str
    spellings: tuple[str, ...]
    """The flag and its aliases."""
    value_type: ValueType
    documentation: str
    """One line."""
    default: Any
    """`dataclasses.MISSING` if the flag is required."""
    limits: _Limits
    repeats: bool
    """Whether a repetition of the flag adds values."""
    on_resume: OnResume

    @property
    def name(self) -> str:
        """The first spelling; a switch that is on by default is spelled as what turns it off."""
        return self.spellings[0]

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is dataclasses.MISSING

    @property
    def switches_to(self) -> str | None:
        """The value of the flag without a word after it, if it may stand alone."""
        if self.value_type.scalar is bool:
            return "false" if self.default is True else "true"
        return "true" if "true" in self.value_type.choices else None

    @property
    def opposite(self) -> str:
        """The spelling that restores the default of a switch."""
        return flag_name(self.field_name if self.default is True else f"no_{self.field_name}")

    @property
    def shown_default(self) -> str:
        """Empty for switches, required flags, and flags whose default the documentation describes."""
        if self.value_type.scalar is bool or self.default in (None, (), dataclasses.MISSING):
            return ""
        return " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


# Parsing sources dominates the time to read a command line, and studies read many command lines.
@functools.cache
def section_flags(config_class: type) -> tuple[Flag, ...]:
    """Return all flags of a dataclass, inherited ones last."""
    documented, hints = _field_docstrings(config_class), typing.get_type_hints(config_class)
    flags = []
    for field in sorted(dataclasses.fields(config_class), key=lambda f: f.name not in config_class.__annotations__):
        name = flag_name(f"no_{field.name}" if field.default is True else field.name)
        documentation = f"{documented.get(field.name, '')} {field.metadata.get('details', '')}"
        flags.append(
            Flag(
                field_name=field.name,
                spellings=(name, *field.metadata.get("aliases", ())),
                value_type=ValueType.of(hints[field.name]),
                documentation=" ".join(documentation.split()),
                default=field.default,
                limits=field.metadata.get("limits", _Limits()),
                repeats=field.metadata.get("repeats", False),
                on_resume=field.metadata.get("on_resume", "take"),
            )
        )
    return tuple(flags)


def value_errors(configs: Sequence[Any]) -> list[Problem]:
    """Check the sections of one command line against what their flags allow; return one line per error."""
    pairs = [(one, getattr(config, one.field_name)) for config in configs for one in section_flags(config.__class__)]
    return limit_problems([one for one, _ in pairs], {one.name: value for one, value in pairs})


def limit_problems(flags: Iterable[Flag], values: Mapping[str, Any], together: bool = True) -> list[Problem]:
    """Check the values of flags, by name, against their limits; flags without a value have an error already.

    `requires` and `excludes`, which are checked `together`, refer to any of these flags.
    """
    known = {one.name: one for one in flags}
    problems: list[Problem] = []

    def holds(condition: str, unknown: bool) -> bool:
        """Whether a flag has the value in `condition`, or, if that has none, any but its default."""
        name, _, wanted = condition.partition(" ")
        default = known[name].default
        if name not in values:
            return unknown
        return str(values[name]) == wanted if wanted else values[name] != default

    for name, value in values.items():
        limits, before = known[name].limits, len(problems)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int | float) and not limits.contain(one):
                problems.append(Problem(name, f" {one}: expected {limits.bounds}"))
            if isinstance(one, str) and limits.choices and one not in limits.choices:
                problems.append(Problem(name, f" {one}: expected one of {', '.join(limits.choices)}"))
            problem = output_problem(one, limits.output) if limits.output and isinstance(one, Path) else None
            if problem:
                problems.append(Problem(name, f" {one}: cannot be written: {problem}: give another path"))
        if not together or value in (known[name].default, "false") or len(problems) > before:
            continue
        shown = "" if isinstance(value, bool | tuple) else f" {value}"
        for other in limits.requires:
            if not holds(other, unknown=True):
                problems.append(Problem(name, f"{shown} requires {other}"))
        for other in limits.excludes:
            if holds(other, unknown=False):
                problems.append(Problem(name, f"{shown} and {other} exclude each other: give one of them"))
    return problems


def to_plain(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as JSON-compatible values: paths as text, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
