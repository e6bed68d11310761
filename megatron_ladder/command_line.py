"""Reads command lines into dataclasses whose fields are flags (see `flags.py`).

All invalid words and values of a command line are collected and raised together as one UserError.
"""

import argparse
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_ladder import __version__
from megatron_ladder.errors import ErrorCollector, Problem, UserError, Written, raise_user_errors
from megatron_ladder.flags import Flag, flag_name, keyword_name, limit_problems, section_flags

Config = TypeVar("Config")
_SAME = (
    ("--model", "--hf", "--load", "--save"),
    ("--data", "--data-path", "--input"),
    ("--tokenizer-model", "--vocab-file", "--merge-file"),
)
"""Flags of different programs for the same directories and files; a program that lacks one suggests another."""


@dataclass
class FlagWords:
    """The words of a command line, or of files, by flag, before they are converted to values."""

    words: dict[str, str | list[str] | None] = field(default_factory=dict)
    """By the name of the field; None is a value that is None."""
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Problems of required flags that are not given."""
    warnings: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    """Names of the fields with a problem, whose values are unknown."""
    written: Written = field(default_factory=Written)
    accepted: set[str] = field(default_factory=set)
    """Flags of another program that request what this one does anyway."""


ReadOther = Callable[[str, Sequence[str], FlagWords], bool]
"""Reads a flag of another program with its values into words; returns whether it is known there."""


def _help_parser(config_classes: Sequence[type], program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser that prints the help, with one argument group per dataclass."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = _parser(prog=program, usage="%(prog)s [flags]", description=description, formatter_class=layout)
    for config_class in config_classes:
        title = inspect.cleandoc(config_class.__doc__ or config_class.__name__).split("\n")[0]
        group = parser.add_argument_group(title.rstrip("."))
        for one in section_flags(config_class):
            default = f"default: {one.shown_default}" if one.shown_default else "required" * one.is_required
            facts = "; ".join(part for part in (one.limits, default) if part)
            text = (one.documentation + (f" ({facts})" if facts else "")).replace("%", "%%")
            placeholder = one.value_type.placeholder
            options: dict[str, Any] = {"action": "store_true"}
            if placeholder:
                nargs = "+" if one.value_type.many else "?" if one.switches_to else None
                options = {"nargs": nargs, "metavar": placeholder.strip("[]")}
            group.add_argument(*one.spellings, help=text, **options)
    return parser


def parse_command_line(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    find_problems: Callable[[FlagWords], Iterable[str]] = lambda found: (),
) -> list[Any]:
    """Read `argv` into one instance of each dataclass, in order.

    Raise a UserError with one message per invalid word or value; `find_problems` checks what `flag` cannot declare.
    `--help` and `--version` end the program.
    """
    found = _read_words_and_warn(config_classes, argv, program, description)
    found.problems += find_problems(found)
    return build_sections(config_classes, found)


def parse_config(
    config_class: type[Config],
    argv: Sequence[str],
    program: str,
    description: str | None,
    find_errors: Callable[[Config], Iterable[str]] = lambda config: (),
    read_other: ReadOther = lambda name, values, found: False,
) -> Config:
    """Read `argv` into one dataclass, as `parse_command_line`; `find_errors` checks what `flag` cannot declare.

    `description` is the docstring of the program, of which the help shows the first paragraph.
    """
    summary = " ".join((description or "").split("\n\n")[0].split())
    errors = ErrorCollector()
    found = _read_words_and_warn([config_class], argv, program, summary, read_other)
    config: Config
    (config,) = build_sections([config_class], found, errors=errors)
    errors.add(*find_errors(config))
    with found.written.in_messages():
        errors.raise_if_any()
    return config


def _read_words_and_warn(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    read_other: ReadOther = lambda name, values, found: False,
) -> FlagWords:
    found = read_words(config_classes, argv, program, description, read_other)
    for warning in found.warnings:
        print(f"*** {warning} ***", file=sys.stderr)
    return found


def read_words(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    read_other: ReadOther = lambda name, values, found: False,
    are_keywords: bool = False,
) -> FlagWords:
    """Return the words of a command line by flag; `--help` and `--version` end the program.

    `are_keywords`: the words are `flag_words` of the Python function `program`, and errors name its keywords.
    """
    if {"-h", "--help", "--version"} & set(argv):
        _help_parser(config_classes, program, description).parse_args(["--version" if "--version" in argv else "-h"])
    flags = section_flags(*config_classes)
    known = {spelling: one for one in flags for spelling in one.spellings}
    known |= {one.opposite: one for one in flags if one.switches_to is not None}
    found = FlagWords()
    groups = _groups(argv, found)
    kind, otherwise = "a flag of this program", "see --help"
    if are_keywords:
        kind, otherwise = f"a keyword of {program}", "docs/api.md names the flags that are"
    for name, attached, following in groups:
        if name in known:
            _read_flag(known[name], name, attached, following, found)
        elif not read_other(name, attached or following, found):
            others = [one for names in _SAME if name in names for one in names if one in known]
            near = others[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            found.faulty |= {known[one].field_name for one in near}
            hint = f"did you mean {near[0]}?" if near else otherwise
            found.problems.append(Problem(name, f" is not {kind}: {hint}"))
    if are_keywords:
        spellings = {one: one for one in (*known, *(name for name, _, _ in groups))} | found.written.spellings
        found.written.spellings = {one: keyword_name(spelling) for one, spelling in spellings.items()}
    return found


def _groups(argv: Sequence[str], found: FlagWords) -> list[tuple[str, list[str], list[str]]]:
    """Return each flag with the word after its equals sign, and the words up to the next flag."""
    groups: list[tuple[str, list[str], list[str]]] = []
    for word in argv:
        if _is_flag(word):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else [], []))
        elif groups:
            groups[-1][2].append(word)
        else:
            found.problems.append(f"{word}: expected a flag")
    return groups


def _read_flag(one: Flag, name: str, attached: list[str], following: list[str], found: FlagWords) -> None:
    """Add the words of a flag, and a problem if there are too few or too many."""
    alone = {one.opposite: "false" if one.switches_to == "true" else "true"}.get(name)
    takes_word = bool(one.value_type.placeholder) and alone is None
    if name in one.spellings:
        found.written.spellings[one.name] = name
    if attached and not takes_word:
        found.problems.append(Problem(name, f" takes no value, found {attached[0]}"))
    own = (attached or (following if one.value_type.many else following[:1])) if takes_word else []
    rest = following if attached or not takes_word else following[len(own) :]
    found.problems += [f"{word}: expected a flag, after the value of {name}" for word in rest]
    if one.value_type.many and own:
        before = list(found.words.get(one.field_name) or ())
        if before and not one.repeats:
            found.warnings.append(f"{name} is given twice: {' '.join(own)} replaces {' '.join(before)}")
        found.words[one.field_name] = [*before, *own] if one.repeats else own
    elif own or (alone or one.switches_to) is not None:
        found.words[one.field_name] = own[0] if own else alone or one.switches_to
    else:
        found.problems.append(Problem(name, ": expected a value"))
        found.faulty.add(one.field_name)


def build_sections(
    config_classes: Sequence[type],
    found: FlagWords,
    may_lack_values: bool = False,
    errors: ErrorCollector | None = None,
) -> list[Any]:
    """Return one instance of each dataclass; raise a UserError with all problems of words and values.

    With `may_lack_values`, a required flag without words is None, and flags are not compared with each other.

    If flags are missing and there is no other problem, `errors` receives that, so that the caller can add errors of
    combinations. A missing flag then has a value that makes no combination invalid.
    """
    missing = list(found.missing)
    problems: list[str] = []
    values: dict[str, Any] = {}
    flags = section_flags(*config_classes)
    for one in (one for one in flags if one.field_name not in found.faulty):
        words = found.words.get(one.field_name, one.default)
        if one.field_name in found.words and words is not None:
            try:
                values[one.name] = one.value_type.read(words)
            except ValueError as error:
                problems.append(Problem(flag_name(one.field_name), f": {error}"))
        elif one.is_required and not may_lack_values:
            missing.append(Problem(one.name, " is required"))
        else:
            values[one.name] = None if one.is_required else words
    problems += limit_problems(flags, values, not may_lack_values)
    with found.written.in_messages():
        if found.problems or problems or errors is None:
            raise_user_errors([*found.problems, *missing, *problems])
    if errors is not None:
        errors.add(*missing)
    return [
        config_class(**{one.field_name: values.get(one.name, _stand_in(one)) for one in section_flags(config_class)})
        for config_class in config_classes
    ]


def _stand_in(one: Flag) -> Any:
    """Return a value for a flag that is missing: the largest number, an empty text, or an empty file."""
    scalar = one.value_type.scalar
    stand_ins: dict[Any, Any] = {int: sys.maxsize, float: sys.maxsize, Path: os.devnull}
    value = scalar(stand_ins.get(scalar, ""))
    return (value,) if one.value_type.many else value


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as a command line; None leaves a flag out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(flag_name(name if value else f"no_{name}"))
        elif value is not None:
            values = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
            if len(values) < 2 or any(map(_is_flag, values)):
                words += [f"{flag_name(name)}={one}" for one in values]
            else:
                words += [flag_name(name), *values]
    return words


def _parser(**options: Any) -> argparse.ArgumentParser:
    parser, version = argparse.ArgumentParser(**options), f"megatron_ladder {__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    return parser


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
        parser = _parser(prog=program, usage="%(prog)s SUBCOMMAND [flags]", description=description)
        listed = parser.add_subparsers(title="subcommands", description="Each has its --help.", metavar="SUBCOMMAND")
        for name, sentence in descriptions.items():
            listed.add_parser(name, help=sentence)
        parser.parse_args([first])
    near = difflib.get_close_matches(first, descriptions, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    found = f"{first}: " if first and not _is_flag(first) else ""
    raise UserError(f"{found}expected one of {', '.join(descriptions)} first{hint}")


def _is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag; negative numbers are not."""
    return word.startswith("--") and len(word) > 2 and not word[2].isdigit()
