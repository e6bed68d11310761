"""Builds command lines from dataclasses, and checks the values that they receive.

A field `micro_batch_size: int = flag(1, minimum=1)` with a docstring below it becomes `--micro-batch-size N`. The
docstring is its help. The type determines how many values the flag takes and how they are read:

    int, float, str, Path      one value
    bool                       a switch: `--bf16`; a switch that is on by default becomes `--no-...`. The opposite
                               spelling restores the default, for a value that comes from a file
    Literal["a", "b"]          one of the words
    tuple[T, ...]              one or more values after one flag
    T | None                   as T; None if the flag is not given

Bounds of a value, and flags that it requires or excludes, are declared in `flag`. All errors of a command line are
collected and raised together as one UserError.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

from megatron_ladder import __version__
from megatron_ladder.errors import UserError, faulty_flags, names_any, raise_user_errors
from megatron_ladder.files import OutputKind, output_problem

Config = TypeVar("Config")


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
        """The value's placeholder in the help; empty for a switch."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}[self.scalar]


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
    _add_version(parser)
    for config_class in config_classes:
        title = inspect.cleandoc(config_class.__doc__ or config_class.__name__).split("\n")[0]
        group = parser.add_argument_group(title.rstrip("."))
        for one in section_flags(config_class):
            default = "required" if one.required else f"default: {one.default}" if one.default is not None else ""
            facts = "; ".join(part for part in (one.limits, default) if part)
            text = (one.documentation + (f" ({facts})" if facts else "")).replace("%", "%%")
            options: dict[str, Any] = {"dest": one.field_name, "help": text}
            if not one.placeholder:
                options |= {"action": "store_const", "const": "false" if one.turns_off else "true"}
                opposite = flag_name(one.field_name if one.turns_off else f"no_{one.field_name}")
                const = "true" if one.turns_off else "false"
                group.add_argument(
                    opposite, dest=one.field_name, action="store_const", const=const, help=argparse.SUPPRESS
                )
            elif one.many:
                options |= {"action": "extend", "nargs": "+", "metavar": one.placeholder}
            else:
                options |= {"metavar": one.placeholder}
            group.add_argument(*one.spellings, **options)
    return parser


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


def parse_command_line(
    config_classes: Sequence[type], argv: Sequence[str], program: str, description: str,
    found: list[str] | None = None, settings: Mapping[str, str | list[str] | None] = types.MappingProxyType({}),
    given: set[str] | None = None,
) -> list[Any]:  # fmt: skip
    """Read `argv` into one instance of each dataclass, in order.

    Args:
        found: list to which errors are appended instead of raising them, for a caller that checks more. A value that
            cannot be read is then the default, or 1 if there is none. Flags with an error in this list are not also
            reported as missing.
        settings: the words of flags that are not in `argv`, by the name of the field; None is a value that is None.
        given: receives the names of the fields whose values are in `argv` or `settings` and could be read.

    Raise a UserError with one message per error of the command line.
    """
    errors: list[str] = []
    parser = _build_parser(config_classes, program, description)
    known = [option for action in parser._actions for option in action.option_strings]
    words = _take_unknown_flags(list(argv), known, errors)
    try:
        namespace = parser.parse_args(words)
    except UserError as error:
        raise UserError(*(found or ()), *errors, *error.messages) from None
    unread: set[str] = set()
    words_of = {**settings, **vars(namespace)}
    faulty = faulty_flags([*errors, *(found or ())])
    configs = [cls(**_read_values(cls, words_of, faulty, errors, unread)) for cls in config_classes]
    faulty = faulty_flags([*errors, *(found or ())])
    errors += [error for error in value_errors(configs, unread) if not names_any(error, faulty)]
    if given is not None:
        given |= {name for name, words in words_of.items() if words is not None} - unread
    _raise_or_append(errors, found)
    return configs


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version", action="version", version=f"megatron_ladder {__version__}", help="show the version and exit"
    )


def take_subcommand(
    argv: Sequence[str], descriptions: Mapping[str, str], program: str, description: str
) -> tuple[str, list[str]]:
    """Return the subcommand that `argv` begins with, and the words after it.

    Instead of a subcommand, `--help` lists `descriptions`, a sentence for each subcommand, and ends the program.
    Raise a UserError if there is no subcommand.
    """
    first, words = argv[0] if argv else "", list(argv[1:])
    if first in descriptions:
        return first, words
    if first in ("-h", "--help", "--version"):
        parser = argparse.ArgumentParser(prog=program, usage="%(prog)s SUBCOMMAND [flags]", description=description)
        _add_version(parser)
        listed = parser.add_subparsers(title="subcommands", description="Each has its --help.", metavar="SUBCOMMAND")
        for name, sentence in descriptions.items():
            listed.add_parser(name, help=sentence)
        parser.parse_args([first])
    near = difflib.get_close_matches(first, descriptions, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    found = f"{first}: " if first and not is_flag(first) else ""
    raise UserError(f"{found}expected one of {', '.join(descriptions)} first{hint}")


def _raise_or_append(errors: Sequence[str], found: list[str] | None) -> None:
    if found is None:
        raise_user_errors(errors)
    else:
        found += errors


def parse_config(
    config_class: type[Config], argv: Sequence[str], program: str, description: str | None,
    find_errors: Callable[[Config], Iterable[str]] = lambda config: (), found: list[str] | None = None,
) -> Config:  # fmt: skip
    """Read `argv` into one dataclass.

    Args:
        description: docstring of the program; the help shows its first paragraph.
        find_errors: checks that `flag` cannot declare.
        found: as in `parse_command_line`.

    Raise a UserError with one message per error of the command line.
    """
    errors: list[str] = []
    summary = " ".join((description or "").split("\n\n")[0].split())
    (config,) = parse_command_line([config_class], argv, program, summary, errors)
    errors += find_errors(config)
    _raise_or_append(errors, found)
    return config


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
    config_class: type, given: Mapping[str, Any], faulty: Collection[str], errors: list[str], unread: set[str]
) -> dict[str, Any]:
    """Return the values of the given fields. Flags that are already `faulty` are not reported as missing."""
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name, value_type = field.name, ValueType.of(hints[field.name])
        if name in given:
            try:
                values[name] = None if given[name] is None else value_type.read(given[name])
                continue
            except ValueError as error:
                errors.append(f"{flag_name(name)}: {error}")
        elif field.default is dataclasses.MISSING:
            if flag_name(name) not in faulty:
                errors.append(f"{flag_name(name)} is required")
        else:
            continue
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
