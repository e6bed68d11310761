"""Reads command lines into dataclasses whose fields are flags (see `flags.py`).

All invalid words and values of a command line are collected and raised together as one UserError.
"""

import argparse
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_ladder import __version__
from megatron_ladder.errors import Problem, UserError, Vocabulary, raise_user_errors
from megatron_ladder.flags import (
    Flag,
    ValueType,
    check_values,
    conflicts,
    find_problems,
    flag_name,
    keyword_name,
    section_checks,
    section_flags,
)

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
class Settings:
    """Values of flags by field, in layers: those of a command line over those of a checkpoint over defaults.

    A field whose value is missing or invalid has no value. `words` knows where each value comes from.
    """

    flags: tuple[Flag, ...]
    given: dict[str, Any] = field(default_factory=dict)
    """Values of the command line, and of files that it names."""
    stored: dict[str, Any] = field(default_factory=dict)
    """Values of a checkpoint."""
    faulty: set[str] = field(default_factory=set)
    """Fields whose given value is invalid."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the given words."""
    warnings: list[str] = field(default_factory=list)
    words: Vocabulary = field(default_factory=Vocabulary)
    texts: dict[str, str] = field(default_factory=dict)
    """The words of given values."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of all fields that have one; `given` lists those that the user gives."""
        values = {one.field_name: one.default for one in self.flags if not one.is_required}
        values |= self.stored | self.given
        return {name: value for name, value in values.items() if name not in self.faulty} | {"given": tuple(self.given)}

    def give(self, one: Flag, words: str | list[str], spelling: str) -> None:
        """Set the value of a flag to that of its words, or add a problem."""
        name = one.field_name
        text = " ".join([words] if isinstance(words, str) else words)
        if text != self.texts.get(name, text) and not one.repeats:
            self._replace(one, text, spelling)
        self.texts[name] = text
        if spelling in one.spellings:
            self.words.spellings[keyword_name(one.name)] = spelling
        try:
            value = one.value_type.read(words)
        except ValueError as error:
            self.reject(name, error)
        else:
            self.given[name] = self.given.get(name, ()) + value if one.repeats else value
            self.faulty.discard(name)

    def reject(self, name: str, error: ValueError) -> None:
        """Report that a given value is invalid."""
        self.problems.append(Problem({name: None}, "{}: {error}", error=error))
        self.faulty.add(name)

    def accept(self, name: str, requires: tuple[str, ...], excludes: tuple[str, ...]) -> None:
        """Accept a flag of another program, which requests what this one does anyway."""
        switch = Flag(
            field_name=name,
            value_type=ValueType.of(bool),
            docstring="",
            default=False,
            requires=requires,
            excludes=excludes,
        )
        self.flags += (switch,)
        self.given[name] = True

    def over(self, lower: "Settings") -> "Settings":
        """Return both settings as one, in which these values replace those of the lower ones, with their problems."""
        decided = {*self.given, *self.faulty}
        places = {name: place for name, place in lower.words.places.items() if name.removeprefix("no_") not in decided}
        spellings = {name: self.words.spell(keyword_name(word)) for name, word in lower.words.spellings.items()}
        return Settings(
            tuple(dict.fromkeys((*lower.flags, *self.flags))),
            lower.given | self.given,
            faulty=(lower.faulty - decided) | self.faulty,
            problems=[*(problem for problem in lower.problems if not decided & problem.fields.keys()), *self.problems],
            warnings=[*lower.warnings, *self.warnings],
            words=Vocabulary(self.words.spell, spellings | self.words.spellings, places | self.words.places),
        )

    def with_stored(self, values: Mapping[str, Any], optional: Mapping[str, Any]) -> "Settings":
        """Return these settings over values of a checkpoint; optional ones that contradict others are left out."""
        settings = replace(self, stored={**values, **optional})
        parties = [[name for name in names if name in optional] for _, names in conflicts(self.flags, settings.values)]
        excluded = {names[0] for names in parties if names}
        if not excluded:
            return settings
        # Others may require one that was left out.
        return self.with_stored(values, {name: value for name, value in optional.items() if name not in excluded})

    def _replace(self, one: Flag, text: str, spelling: str) -> None:
        """Report that other words replace those of a flag, which must be valid, too."""
        name = one.field_name
        self.warnings.append(f"{spelling} is given twice: {text} replaces {self.texts[name]}")
        for position, problem in enumerate(self.problems):
            if name in problem.fields:
                self.problems[position] = problem.noted(after=f", before {text} replaces it")
        self.problems += one.problems(self.given.pop(name, None))

    def examine(self) -> tuple[dict[str, Any], list[Problem]]:
        """Return the valid values, by field, and the problems: of words, missing values, limits, and contradictions."""
        values = self.values
        required = [one.field_name for one in self.flags if one.is_required]
        missing = [Problem({name: None}, "{} is required") for name in required if name not in {*values, *self.faulty}]
        valid, invalid = check_values(self.flags, values)
        return valid | {"given": values["given"]}, [*self.problems, *missing, *invalid]

    def build(self, config_classes: Sequence[type]) -> list[Any]:
        """Return one instance of each dataclass; raise a UserError with all problems, also of their checks."""
        values, problems = self.examine()
        with self.words.in_messages():
            raise_user_errors([*problems, *find_problems(section_checks(*config_classes), values)])
        return build_sections(config_classes, values)


def build_sections(config_classes: Iterable[type], values: Mapping[str, Any]) -> list[Any]:
    """Return one instance of each dataclass, with the values of its fields."""
    return [cls(**{one.field_name: values[one.field_name] for one in section_flags(cls)}) for cls in config_classes]


ReadOther = Callable[[str, Sequence[str], Settings], bool]
"""Reads a flag of another program with its values; returns whether it is known there."""


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
    description: str | None,
    read_other: ReadOther = lambda name, values, settings: False,
) -> list[Any]:
    """Read `argv` into one instance of each dataclass, in order.

    Raise a UserError with one message per invalid word or value. `--help` and `--version` end the program. The help
    shows the first paragraph of the description.
    """
    summary = " ".join((description or "").split("\n\n")[0].split())
    settings = read_command_line(config_classes, argv, program, summary, read_other)
    for warning in settings.warnings:
        print(f"*** {warning} ***", file=sys.stderr)
    return settings.build(config_classes)


def parse_config(config_class: type[Config], *args: Any, **options: Any) -> Config:
    """Read a command line into one dataclass, as `parse_command_line`."""
    config: Config
    (config,) = parse_command_line([config_class], *args, **options)
    return config


def read_command_line(
    config_classes: Sequence[type],
    argv: Sequence[str],
    program: str,
    description: str,
    read_other: ReadOther = lambda name, values, settings: False,
    are_keywords: bool = False,
) -> Settings:
    """Return the values of a command line, with problems; `--help` and `--version` end the program.

    `are_keywords`: the words are `flag_words` of the Python function `program`, and errors name its keywords.
    """
    if {"-h", "--help", "--version"} & set(argv):
        _help_parser(config_classes, program, description).parse_args(["--version" if "--version" in argv else "-h"])
    flags = section_flags(*config_classes)
    known = {spelling: one for one in flags for spelling in one.spellings}
    known |= {one.opposite: one for one in flags if one.switches_to is not None}
    settings = Settings(flags)
    reason = "{} is not a flag of this program"
    fix = "see --help"
    if are_keywords:
        reason = f"{{}} is not a keyword of {program}"
        fix = f"its keywords are {', '.join(one.field_name for one in flags)}"
        if len(flags) > _MOST_LISTED:
            fix = "`pretrain_ladder.py --help` lists the flags that are"
    for name, attached, following in _groups(argv, settings):
        settings.words.spellings.setdefault(keyword_name(name), name)
        if name in known:
            _read_flag(known[name], name, attached, following, settings)
        elif not read_other(name, attached or following, settings):
            synonyms = [other for names in _SAME if name in names for other in names if other in known]
            near = synonyms[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            settings.faulty |= {known[spelling].field_name for spelling in near}
            hint = f"did you mean {{{keyword_name(near[0])}}}?" if near else fix
            settings.problems.append(Problem({keyword_name(name): None}, f"{reason}: {hint}"))
    if are_keywords:
        spellings = {name: keyword_name(spelling) for name, spelling in settings.words.spellings.items()}
        settings.words = Vocabulary(str, spellings)
    return settings


def _groups(argv: Sequence[str], settings: Settings) -> list[tuple[str, list[str], list[str]]]:
    """Return each flag with the word after its equals sign, and the words up to the next flag."""
    groups: list[tuple[str, list[str], list[str]]] = []
    for word in argv:
        if _is_flag(word):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else [], []))
        elif groups:
            groups[-1][2].append(word)
        else:
            settings.problems.append(Problem({}, "{word}: expected a flag", word=word))
    return groups


def _read_flag(one: Flag, name: str, attached: list[str], following: list[str], settings: Settings) -> None:
    """Give a flag its value, and add a problem if there are too few or too many words."""
    alone = {one.opposite: "false" if one.switches_to == "true" else "true"}.get(name)
    takes_word = bool(one.value_type.placeholder) and alone is None
    subject = {keyword_name(name): None}
    if attached and not takes_word:
        settings.problems.append(Problem(subject, "{} takes no value, found {word}", word=attached[0]))
    value = following if one.value_type.many else following[:1]
    if attached or not takes_word:
        value = []
    for word in following[len(value) :]:
        reason = "{word}: expected a flag, after the value of {flag}"
        settings.problems.append(Problem({}, reason, word=word, flag=name))
    if attached and takes_word:
        value = attached
    switched = alone or one.switches_to
    if value and one.value_type.many:
        settings.give(one, value, name)
    elif value or switched is not None:
        settings.give(one, value[0] if value else str(switched), name)
    else:
        settings.problems.append(Problem(subject, "{}: expected a value"))
        settings.faulty.add(one.field_name)


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
