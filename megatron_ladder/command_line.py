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
from megatron_ladder.errors import ErrorCollector, Problem, UserError, Vocabulary, raise_user_errors
from megatron_ladder.flags import Flag, flag_name, keyword_name, limit_problems, section_flags

Config = TypeVar("Config")
_SAME = (
    ("--model", "--hf", "--load", "--save"),
    ("--data", "--data-path", "--input"),
    ("--tokenizer-model", "--vocab-file", "--merge-file"),
)
"""Flags of different programs for the same directories and files; a program that lacks one suggests another."""

_MOST_LISTED = 40
"""Keywords of a Python function that an error lists."""


@dataclass
class FlagWords:
    """The words of a command line, or of files, by flag, before they are converted to values."""

    words: dict[str, str | list[str] | None] = field(default_factory=dict)
    """By the name of the field; None is a value that is None."""
    problems: list[str | Problem] = field(default_factory=list)
    missing: list[str | Problem] = field(default_factory=list)
    """Problems of required flags that are not given."""
    warnings: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    """Names of the fields with a problem, whose values are unknown."""
    written: Vocabulary = field(default_factory=Vocabulary)
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
        for flag in section_flags(config_class):
            default = "required" if flag.is_required else ""
            if flag.shown_default:
                default = f"default: {flag.shown_default}"
            facts = "; ".join(part for part in (flag.limits, default) if part)
            text = (flag.documentation + (f" ({facts})" if facts else "")).replace("%", "%%")
            placeholder = flag.value_type.placeholder
            options: dict[str, Any] = {"action": "store_true"}
            if placeholder:
                nargs = "?" if flag.switches_to else None
                options = {"nargs": "+" if flag.value_type.many else nargs, "metavar": placeholder.strip("[]")}
            group.add_argument(*flag.spellings, help=text, **options)
    return parser


def parse_command_line(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    find_problems: Callable[[FlagWords], Iterable[str | Problem]] = lambda line: (),
) -> list[Any]:
    """Read `argv` into one instance of each dataclass, in order.

    Raise a UserError with one message per invalid word or value; `find_problems` checks what `flag` cannot declare.
    `--help` and `--version` end the program.
    """
    line = read_words(config_classes, argv, program, description)
    _print_warnings(line)
    line.problems += find_problems(line)
    return build_sections(config_classes, line)


def parse_config(
    config_class: type[Config],
    argv: Sequence[str],
    program: str,
    description: str | None,
    find_errors: Callable[[Config], Iterable[str | Problem]] = lambda config: (),
    read_other: ReadOther = lambda name, values, line: False,
) -> Config:
    """Read `argv` into one dataclass, as `parse_command_line`; `find_errors` checks what `flag` cannot declare.

    `description` is the docstring of the program, of which the help shows the first paragraph.
    """
    summary = " ".join((description or "").split("\n\n")[0].split())
    errors = ErrorCollector()
    line = read_words([config_class], argv, program, summary, read_other)
    _print_warnings(line)
    config: Config
    (config,) = build_sections([config_class], line, errors=errors)
    errors.add(*find_errors(config))
    with line.written.in_messages():
        errors.raise_if_any()
    return config


def _print_warnings(line: FlagWords) -> None:
    for warning in line.warnings:
        print(f"*** {warning} ***", file=sys.stderr)


def read_words(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    read_other: ReadOther = lambda name, values, line: False,
    are_keywords: bool = False,
) -> FlagWords:
    """Return the words of a command line by flag; `--help` and `--version` end the program.

    `are_keywords`: the words are `flag_words` of the Python function `program`, and errors name its keywords.
    """
    if {"-h", "--help", "--version"} & set(argv):
        _help_parser(config_classes, program, description).parse_args(["--version" if "--version" in argv else "-h"])
    flags = section_flags(*config_classes)
    known = {spelling: flag for flag in flags for spelling in flag.spellings}
    known |= {flag.opposite: flag for flag in flags if flag.switches_to is not None}
    line = FlagWords()
    groups = _groups(argv, line)
    problem = " is not a flag of this program"
    fix = "see --help"
    if are_keywords:
        problem = f" is not a keyword of {program}"
        fix = f"its keywords are {', '.join(flag.field_name for flag in flags)}"
        if len(flags) > _MOST_LISTED:
            fix = "`pretrain_ladder.py --help` lists the flags that are"
    for name, attached, following in groups:
        if name in known:
            _read_flag(known[name], name, attached, following, line)
        elif not read_other(name, attached or following, line):
            synonyms = [other for names in _SAME if name in names for other in names if other in known]
            near = synonyms[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            line.faulty |= {known[spelling].field_name for spelling in near}
            hint = f"did you mean {near[0]}?" if near else fix
            line.problems.append(Problem(name, f"{problem}: {hint}"))
    if are_keywords:
        spellings = {name: keyword_name(spelling) for name, spelling in line.written.spellings.items()}
        line.written = Vocabulary(str, spellings)
    return line


def _groups(argv: Sequence[str], line: FlagWords) -> list[tuple[str, list[str], list[str]]]:
    """Return each flag with the word after its equals sign, and the words up to the next flag."""
    groups: list[tuple[str, list[str], list[str]]] = []
    for word in argv:
        if _is_flag(word):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else [], []))
        elif groups:
            groups[-1][2].append(word)
        else:
            line.problems.append(f"{word}: expected a flag")
    return groups


def _read_flag(flag: Flag, name: str, attached: list[str], following: list[str], line: FlagWords) -> None:
    """Add the words of a flag, and a problem if there are too few or too many."""
    alone = {flag.opposite: "false" if flag.switches_to == "true" else "true"}.get(name)
    takes_word = bool(flag.value_type.placeholder) and alone is None
    if name in flag.spellings:
        line.written.spellings[keyword_name(flag.name)] = name
    if attached and not takes_word:
        line.problems.append(Problem(name, f" takes no value, found {attached[0]}"))
    value = following if flag.value_type.many else following[:1]
    if attached or not takes_word:
        value = []
    line.problems += [f"{word}: expected a flag, after the value of {name}" for word in following[len(value) :]]
    if attached and takes_word:
        value = attached
    switched = alone or flag.switches_to
    if flag.value_type.many and value:
        before = list(line.words.get(flag.field_name) or ())
        if flag.repeats:
            line.words[flag.field_name] = [*before, *value]
        else:
            _set_words(flag, name, value, line)
    elif value or switched is not None:
        _set_words(flag, name, value[0] if value else str(switched), line)
    else:
        line.problems.append(Problem(name, ": expected a value"))
        line.faulty.add(flag.field_name)


def _set_words(flag: Flag, name: str, words: str | list[str], line: FlagWords) -> None:
    """Set the words of a flag; report other words that they replace, which must be valid, too."""
    before = line.words.get(flag.field_name)
    line.words[flag.field_name] = words
    if before in (None, words):
        return
    replaced, shown = (" ".join([given] if isinstance(given, str) else given or ()) for given in (before, words))
    line.warnings.append(f"{name} is given twice: {shown} replaces {replaced}")
    try:
        value = flag.value_type.read(before or "")
    except ValueError as error:
        line.problems.append(Problem(name, f": {error}, before {shown} replaces it"))
    else:
        line.problems += limit_problems([flag], {flag.name: value}, together=False)


def build_sections(
    config_classes: Sequence[type],
    line: FlagWords,
    may_lack_values: bool = False,
    errors: ErrorCollector | None = None,
) -> list[Any]:
    """Return one instance of each dataclass; raise a UserError with all problems of words and values.

    With `may_lack_values`, a required flag without words is None, and flags are not compared with each other.

    If flags are missing and there is no other problem, `errors` receives that, so that the caller can add errors of
    combinations. A missing flag then has a value that makes no combination invalid.
    """
    missing = list(line.missing)
    problems: list[str | Problem] = []
    values: dict[str, Any] = {}
    flags = section_flags(*config_classes)
    for flag in flags:
        if flag.field_name in line.faulty:
            continue
        words = line.words.get(flag.field_name, flag.default)
        if flag.field_name in line.words and words is not None:
            try:
                values[flag.name] = flag.value_type.read(words)
            except ValueError as error:
                problems.append(Problem(flag_name(flag.field_name), f": {error}"))
        elif flag.is_required and not may_lack_values:
            missing.append(Problem(flag.name, " is required"))
        else:
            values[flag.name] = None if flag.is_required else words
    problems += limit_problems(flags, values, not may_lack_values)
    with line.written.in_messages():
        if line.problems or problems or errors is None:
            raise_user_errors([*line.problems, *missing, *problems])
    if errors is not None:
        errors.add(*missing)
    return [
        config_class(
            **{flag.field_name: values.get(flag.name, _stand_in(flag)) for flag in section_flags(config_class)}
        )
        for config_class in config_classes
    ]


def _stand_in(flag: Flag) -> Any:
    """Return a value for a flag that is missing: the largest number, an empty text, or an empty file."""
    scalar = flag.value_type.scalar
    stand_ins: dict[Any, Any] = {int: sys.maxsize, float: sys.maxsize, Path: os.devnull}
    value = scalar(stand_ins.get(scalar, ""))
    return (value,) if flag.value_type.many else value


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as a command line; None leaves a flag out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(flag_name(name if value else f"no_{name}"))
        elif value is not None:
            values = list(map(str, value if isinstance(value, list | tuple) else [value]))
            if len(values) < 2 or any(map(_is_flag, values)):
                words += [f"{flag_name(name)}={word}" for word in values]
            else:
                words += [flag_name(name), *values]
    return words


def _parser(**options: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(**options)
    text = f"megatron_ladder {__version__}"
    parser.add_argument("--version", action="version", version=text, help="show the version and exit")
    return parser


def take_subcommand(
    argv: Sequence[str], descriptions: Mapping[str, str], program: str, description: str
) -> tuple[str, list[str]]:
    """Return the subcommand that `argv` begins with, and the words after it.

    Instead of a subcommand, `--help` lists `descriptions`, a sentence for each subcommand, and ends the program.
    Raise a UserError if there is no subcommand.
    """
    first = argv[0] if argv else ""
    if first in descriptions:
        return first, list(argv[1:])
    if first in ("-h", "--help", "--version"):
        parser = _parser(prog=program, usage="%(prog)s SUBCOMMAND [flags]", description=description)
        listed = parser.add_subparsers(title="subcommands", description="Each has its --help.", metavar="SUBCOMMAND")
        for name, sentence in descriptions.items():
            listed.add_parser(name, help=sentence)
        parser.parse_args([first])
    near = difflib.get_close_matches(first, descriptions, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    unknown = f"{first}: " if first and not _is_flag(first) else ""
    raise UserError(f"{unknown}expected one of {', '.join(descriptions)} first{hint}")


def _is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag; negative numbers are not."""
    return word.startswith("--") and len(word) > 2 and not word[2].isdigit()
