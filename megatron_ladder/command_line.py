"""Reads command lines into dataclasses whose fields are flags (see `flags.py`).

All errors of a command line are collected and raised together as one UserError.
"""

import argparse
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from megatron_ladder import __version__
from megatron_ladder.errors import UserError, faulty_flags, names_any, raise_user_errors
from megatron_ladder.flags import ValueType, flag_name, section_flags, value_errors, with_valid_numbers

Config = TypeVar("Config")


class _CollectingParser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors, so that they can be reported with the others."""

    def error(self, message: str) -> NoReturn:
        raise UserError((message[:1].lower() + message[1:]).removeprefix("argument "))


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
            if not one.placeholder or one.placeholder.startswith("["):
                options |= {"const": "false" if one.turns_off else "true"}
                if one.placeholder:
                    options |= {"nargs": "?", "metavar": one.placeholder.strip("[]")}
                else:
                    options |= {"action": "store_const"}
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


def parse_command_line(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    found: list[str] | None = None,
    settings: Mapping[str, str | list[str] | None] = types.MappingProxyType({}),
    given: set[str] | None = None,
) -> list[Any]:
    """Read `argv` into one instance of each dataclass, in order.

    Args:
        found: list to which errors are appended instead of raising them, for a caller that checks more. A value that
            cannot be read, or a number that is not allowed, is then the default, or 1 if there is none. Flags with an
            error in this list are not also reported as missing.
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
    return [with_valid_numbers(config) for config in configs]


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as a command line; None leaves a flag out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(flag_name(name if value else f"no_{name}"))
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"{flag_name(name)}={one}" for one in values]
    return words


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

    Raise a UserError with one message per error of the command line.
    """
    errors: list[str] = []
    summary = " ".join((description or "").split("\n\n")[0].split())
    (config,) = parse_command_line([config_class], argv, program, summary, errors)
    errors += find_errors(config)
    _raise_or_append(errors, found)
    return config


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
