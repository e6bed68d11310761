"""Builds command lines from dataclasses, and checks the values that they receive.

A field `micro_batch_size: int = flag(1, minimum=1)` with a docstring below it becomes `--micro-batch-size N`. The
docstring is its help. The type determines how many values the flag takes and how they are read:

    int, float, str, Path      one value
    bool                       a switch: `--bf16`; a switch that is on by default becomes `--no-...`
    Literal["a", "b"]          one of the words
    tuple[T, ...]              one or more values after one flag
    T | None                   as T; None if the flag is not given

_Bounds of a value, and flags that it requires or excludes, are declared in `flag`. All errors of a command line are
collected and raised together as one UserError.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

from megatron_ladder.errors import UserError

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """The numbers that a flag accepts; None means without limit."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower limit."""
    below: float | None = None
    """Exclusive upper limit."""

    def contains(self, number: float) -> bool:
        """Return whether the number is within all limits."""
        low = (self.minimum is None or number >= self.minimum) and (self.above is None or number > self.above)
        return low and (self.maximum is None or number <= self.maximum) and (self.below is None or number < self.below)

    def __str__(self) -> str:
        """Describe the limits: `1 or more`, `0 to 1`, `above 0, at most 1`; empty without limits."""
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:.15g} to {self.maximum:.15g}"
        limits = {
            "above {:.15g}": self.above,
            "{:.15g} or more": self.minimum,
            "at most {:.15g}": self.maximum,
            "below {:.15g}": self.below,
        }
        return ", ".join(text.format(limit) for text, limit in limits.items() if limit is not None)


def flag(
    default: Any = dataclasses.MISSING,
    *,
    aliases: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    requires: str | Sequence[str] = (),
    excludes: str | Sequence[str] = (),
    details: str = "",
) -> Any:
    """Declare a dataclass field that is a flag.

    Args:
        default: value without the flag; the flag is required if there is none.
        aliases: further spellings, with leading dashes.
        minimum, maximum, above, below: limits of a number, or of each number of a tuple; see `_Bounds`.
        requires: flags without which this one has no effect. A flag with a value (`"--optimizer adam"`) must have
            that value; without one it must have any value but its default.
        excludes: flags that contradict this one, in the same notation.
        details: computed text that follows the docstring in the help.
    """
    metadata = {
        "aliases": tuple(aliases),
        "bounds": _Bounds(minimum, maximum, above, below),
        "requires": (requires,) if isinstance(requires, str) else tuple(requires),
        "excludes": (excludes,) if isinstance(excludes, str) else tuple(excludes),
        "details": details,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`."""
    return "--" + field_name.replace("_", "-")


# Parsing sources dominates the time to read a command line, and studies read many command lines.
@functools.cache
def _field_docstrings(config_class: type) -> dict[str, str]:
    """Return the string literal below each field of a dataclass, by field name."""
    documented: dict[str, str] = {}
    for ancestor in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(ancestor))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                documented[statement.target.id] = inspect.cleandoc(following.value.value)
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
        optional = False
        if typing.get_origin(annotation) in (Union, types.UnionType):
            members = [member for member in typing.get_args(annotation) if member is not type(None)]
            optional = len(members) < len(typing.get_args(annotation))
            if len(members) != 1:
                raise TypeError(f"a field cannot be {annotation}: only X and X | None are read from a command line")
            annotation = members[0]
        many = typing.get_origin(annotation) is tuple
        if many:
            annotation = typing.get_args(annotation)[0]
        if typing.get_origin(annotation) is Literal:
            return ValueType(str, tuple(typing.get_args(annotation)), many, optional)
        if annotation not in (int, float, str, bool, Path):
            raise TypeError(f"a field cannot be {annotation} on a command line")
        return ValueType(annotation, (), many, optional)

    def read(self, word: str) -> Any:
        """Convert one word; raise ValueError, with the expectation, if it is not valid."""
        if self.choices:
            if word not in self.choices:
                raise ValueError(f"{word!r} is not one of {', '.join(self.choices)}")
            return word
        if self.scalar is int:
            try:
                return int(word.replace("_", ""))
            except ValueError:
                raise ValueError(f"{word!r} is not a whole number") from None
        if self.scalar is float:
            try:
                number = float(word)
            except ValueError:
                raise ValueError(f"{word!r} is not a number") from None
            if not math.isfinite(number):
                raise ValueError(f"{word!r} is not finite")
            return number
        return self.scalar(word)

    @property
    def stand_in(self) -> Any:
        """A harmless replacement for a value that cannot be read."""
        value = self.choices[0] if self.choices else self.scalar("1")
        return (value,) if self.many else value

    @property
    def placeholder(self) -> str:
        """The value's placeholder in the help."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "N", float: "X", str: "TEXT", Path: "PATH"}[self.scalar]


class _CollectingParser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors, so that they can be reported with the others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message[:1].lower() + message[1:])


def _build_parser(config_classes: Sequence[type], program: str, description: str) -> argparse.ArgumentParser:
    """Build a parser with one argument group per dataclass. It leaves values as text for `parse_command_line`."""
    parser = _CollectingParser(
        prog=program,
        usage="%(prog)s [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for config_class in config_classes:
        group = parser.add_argument_group(_section_title(config_class))
        for one in section_flags(config_class):
            _add_flag(group, one)
    return parser


def _section_title(config_class: type) -> str:
    """Return the heading of a dataclass's flags: the first line of its docstring."""
    return inspect.cleandoc(config_class.__doc__ or config_class.__name__).split("\n")[0].rstrip(".")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag as shown in `--help` and in the reference pages."""

    field_name: str
    spellings: tuple[str, ...]
    """The flag, followed by its aliases."""
    placeholder: str
    """Placeholder of a value; empty for a switch."""
    many: bool
    """Whether several values may follow."""
    documentation: str
    """One line of text."""
    default: str | None
    """As written on a command line; None for switches, required flags, and flags whose default is described."""
    required: bool
    turns_off: bool
    """Whether this is a switch that turns off a default."""
    limits: str
    """Bounds, required and excluded flags, in words; may be empty."""


def section_flags(config_class: type) -> list[Flag]:
    """Return all flags of a dataclass, inherited ones last."""
    documented = _field_docstrings(config_class)
    hints = typing.get_type_hints(config_class)
    own_first = sorted(dataclasses.fields(config_class), key=lambda f: f.name not in config_class.__annotations__)
    flags = []
    for field in own_first:
        value_type = ValueType.of(hints[field.name])
        is_switch, turns_off = value_type.scalar is bool, field.default is True
        default = None
        if not is_switch and field.default not in (None, (), dataclasses.MISSING):
            default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        first = flag_name("no_" + field.name if turns_off else field.name)
        flags.append(
            Flag(
                field_name=field.name,
                spellings=(first, *field.metadata.get("aliases", ())),
                placeholder="" if is_switch else value_type.placeholder,
                many=value_type.many,
                documentation=" ".join([*documented[field.name].split(), *field.metadata.get("details", "").split()]),
                default=default,
                required=field.default is dataclasses.MISSING,
                turns_off=turns_off,
                limits=_limits(field),
            )
        )
    return flags


def _limits(field: "dataclasses.Field[Any]") -> str:
    metadata = field.metadata
    parts = [str(metadata["bounds"])] if str(metadata.get("bounds", "")) else []
    if metadata.get("requires"):
        parts.append("requires " + " and ".join(metadata["requires"]))
    if metadata.get("excludes"):
        parts.append("not with " + " or ".join(metadata["excludes"]))
    return "; ".join(parts)


def _add_flag(group: Any, one: Flag) -> None:
    default = "required" if one.required else f"default: {one.default}" if one.default is not None else ""
    facts = "; ".join(part for part in (one.limits, default) if part)
    text = (one.documentation + (f" ({facts})" if facts else "")).replace("%", "%%")
    if not one.placeholder:
        value = "false" if one.turns_off else "true"
        group.add_argument(*one.spellings, dest=one.field_name, action="store_const", const=value, help=text)
        return
    group.add_argument(
        *one.spellings,
        dest=one.field_name,
        nargs="+" if one.many else None,
        action="extend" if one.many else "store",
        metavar=one.placeholder,
        help=text,
    )


def parse_command_line(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    found: list[str] | None = None,
) -> list[Any]:
    """Read `argv` into one instance of each dataclass, in order.

    Args:
        found: list to which errors are appended instead of raising them, for a caller that checks more. A value that
            cannot be read is then the default, or 1 if there is none.

    Raises:
        UserError: with one message per error of the command line.
    """
    errors: list[str] = []
    parser = _build_parser(config_classes, program, description)
    known = [option for action in parser._actions for option in action.option_strings]
    words = _take_unknown_flags(list(argv), known, errors)
    try:
        namespace = parser.parse_args(words)
    except UserError as error:
        raise UserError(*errors, *error.messages) from None
    given = vars(namespace)
    unread: set[str] = set()
    read = [_read_values(config_class, given, errors, unread) for config_class in config_classes]
    configs = [config_class(**values) for config_class, values in zip(config_classes, read, strict=True)]
    errors += value_errors(configs, unread)
    if found is not None:
        found.extend(errors)
    elif errors:
        raise UserError(*errors)
    return configs


def parse_config(
    config_class: type[Config],
    argv: Sequence[str],
    program: str,
    description: str | None,
    find_errors: Callable[[Config], Iterable[str]] = lambda config: (),
    found: list[str] | None = None,
) -> Config:
    """Read `argv` into one dataclass.

    Args:
        description: docstring of the program; the help shows its first paragraph.
        find_errors: checks that `flag` cannot declare.
        found: as in `parse_command_line`.

    Raises:
        UserError: with one message per error of the command line.
    """
    errors: list[str] = []
    summary = " ".join((description or "").split("\n\n")[0].split())
    (config,) = parse_command_line([config_class], argv, program, summary, errors)
    errors += find_errors(config)
    if found is not None:
        found += errors
    elif errors:
        raise UserError(*errors)
    return config


def value_errors(configs: Sequence[Any], skipped: Collection[str] = ()) -> list[str]:
    """Check all values of dataclass instances against what their `flag` declarations allow.

    Args:
        configs: the sections of one command line; `requires` and `excludes` refer to flags of any of them.
        skipped: names of fields that are not checked.

    Returns:
        One line per error.
    """
    errors: list[str] = []
    for config in configs:
        for field in dataclasses.fields(config):
            if field.name in skipped or "bounds" not in field.metadata:
                continue
            value, name = getattr(config, field.name), _spelling(field)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, int | float) and not field.metadata["bounds"].contains(one):
                    errors.append(f"{name} {one}: expected {field.metadata['bounds']}")
            if value != field.default:
                shown = name if isinstance(value, bool | tuple) else f"{name} {value}"
                errors += [
                    f"{shown} requires {other}" for other in field.metadata["requires"] if not _has(configs, other)
                ]
                errors += [
                    f"{shown} and {other} exclude each other: give one of them"
                    for other in field.metadata["excludes"]
                    if _has(configs, other)
                ]
    return errors


def _spelling(field: "dataclasses.Field[Any]") -> str:
    return flag_name("no_" + field.name if field.default is True else field.name)


def _has(configs: Sequence[Any], condition: str) -> bool:
    """Whether a flag was given with the value in `condition`, or, if that has none, with a value of any kind."""
    name, _, wanted = condition.partition(" ")
    for config in configs:
        for field in dataclasses.fields(config):
            if _spelling(field) == name:
                value = getattr(config, field.name)
                return str(value) == wanted if wanted else value != field.default
    raise ValueError(f"no flag {name} in {', '.join(type(config).__name__ for config in configs)}")


def is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag; negative numbers are not."""
    return word.startswith("--") and len(word) > 2 and not word[2].isdigit()


def _take_unknown_flags(words: list[str], known: Sequence[str], errors: list[str]) -> list[str]:
    """Remove unknown flags with their values, and suggest the most similar known flag."""
    kept: list[str] = []
    skipping = False
    for word in words:
        name = word.partition("=")[0]
        if is_flag(word):
            skipping = name not in known
            if skipping:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
                hint = f"did you mean {near[0]}?" if near else "see --help"
                errors.append(f"{name} is not a flag of this program: {hint}")
        if not skipping:
            kept.append(word)
    return kept


def _read_values(
    config_class: type, given: Mapping[str, Any], errors: list[str], unread: set[str]
) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name, value_type = field.name, ValueType.of(hints[field.name])
        if name not in given:
            if field.default is dataclasses.MISSING:
                errors.append(f"{flag_name(name)} is required")
                unread.add(name)
                values[name] = value_type.stand_in
            continue
        if value_type.scalar is bool:
            values[name] = given[name] == "true"
            continue
        try:
            if value_type.many:
                values[name] = tuple(value_type.read(word) for word in given[name])
            else:
                values[name] = value_type.read(given[name])
        except ValueError as error:
            errors.append(f"{flag_name(name)}: {error}")
            unread.add(name)
            if field.default is dataclasses.MISSING:
                values[name] = value_type.stand_in
    return values


def to_plain(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as JSON-compatible values: paths as text, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
