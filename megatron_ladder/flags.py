"""Flags of command lines as fields of dataclasses, with their types, bounds and documentation.

A field `micro_batch_size: int = flag(1, minimum=1)` with a docstring below it becomes `--micro-batch-size N`. The
docstring is its help. The type determines how many values the flag takes and how they are read:

    int, float, str, Path      one value
    bool                       a switch: `--bf16`; a switch that is on by default becomes `--no-...`, whose help is
                               the docstring after "Do not". The opposite spelling restores the default, for a value
                               that comes from a file
    Literal["a", "b"]          one of the words; with "true" and "false" among them, the flag may stand alone or be
                               spelled `--no-...`, as a switch
    tuple[T, ...]              one or more values after one flag
    T | None                   as T; None if the flag is not given

Bounds of a value, and flags that it requires or excludes, are declared with `flag`. `command_line.py` reads the words.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from megatron_ladder.errors import Problem, expected_one_of
from megatron_ladder.errors import flag_name as flag_name
from megatron_ladder.files import OutputKind, output_problem

_IMPOSSIBLE = re.compile(r"[\0\ud800-\udc7f\udd00-\udfff]")
"""NUL, and surrogates except for those that stand for undecodable bytes of a command line."""


class Check(typing.NamedTuple):
    """A check of values that belong together; see `rule`."""

    find: Callable[..., Iterable[Problem]]
    """Yields the problems of values, which follow each other as the fields in `reads`."""
    reads: Sequence[str]


def flag(default: Any = dataclasses.MISSING, **declared: Any) -> Any:
    """Declare a dataclass field that is a flag, required without a default; `Flag` describes what can be declared."""
    for name in declared.keys() & {"choices", "requires", "excludes"}:
        declared[name] = (declared[name],) if isinstance(declared[name], str) else tuple(declared[name])
    return dataclasses.field(default=default, metadata=declared)


def keyword_name(flag: str) -> str:
    """Return `micro_batch_size` for `--micro-batch-size`."""
    return flag.removeprefix("--").replace("-", "_")


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
            choices = typing.get_args(scalar)
            scalar = str
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A field of a dataclass as a flag; `flag` can declare the fields that have a default here."""

    field_name: str
    value_type: ValueType
    docstring: str
    default: Any
    """`dataclasses.MISSING` if the flag is required."""
    aliases: tuple[str, ...] = ()
    """Further spellings, with leading dashes."""
    choices: tuple[str, ...] = ()
    """Accepted texts, if they are computed; a Literal type lists others."""
    minimum: float | None = None
    """Limit of a number, or of each number of a tuple, as the next three; the last two are exclusive."""
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    requires: tuple[str, ...] = ()
    """Fields without which this one has no effect. A field with a value (`"optimizer adam"`, or several joined by
    ` or `) must have that value; without one it must have any value but its default. `no_verify` is a switch that is
    on by default."""
    excludes: tuple[str, ...] = ()
    """Fields that contradict this one, in the same notation."""
    output: OutputKind | None = None
    """Kind of a path that the program writes; it is an error if that is impossible."""
    details: str = ""
    """Computed text that follows the docstring in the help."""
    repeats: bool = False
    """Whether a repetition of the flag adds values; otherwise it replaces them, which is reported."""
    on_resume: Literal["take", "keep", "report", "data", "ignore"] = "take"
    """What a resumed run does with the value of its checkpoint if the flag is not given. take: uses it; keep: likewise,
    and rejects another given value, because it changes the order of samples; report: likewise, and reports another
    value, because it changes what is learned; data: uses it if no other flag that names data is given; ignore: uses the
    default, because the value concerns one start."""

    @property
    def name(self) -> str:
        """The first spelling; a switch that is on by default is spelled as what turns it off."""
        return flag_name(f"no_{self.field_name}" if self.default is True else self.field_name)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return (self.name, *self.aliases)

    @property
    def documentation(self) -> str:
        """One line. The docstring of a switch that is on by default describes what its flag turns off."""
        text = " ".join(f"{self.docstring} {self.details}".split())
        return f"Do not {text[:1].lower()}{text[1:]}" if self.default is True else text

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

    def allows(self, number: float) -> bool:
        """Whether a number is within the limits."""
        low = (self.minimum is None or number >= self.minimum) and (self.above is None or number > self.above)
        return low and (self.maximum is None or number <= self.maximum) and (self.below is None or number < self.below)

    def problems(self, value: Any) -> Iterator[Problem]:
        """Yield one problem for each limit that excludes the value, or one of several values."""
        for item in value if isinstance(value, tuple) else (value,):
            fields = {keyword_name(self.name): item}
            if isinstance(item, int | float) and not self.allows(item):
                yield Problem(fields, "{}: expected {bounds}", bounds=self.bounds)
            if isinstance(item, str) and self.choices and item not in self.choices:
                yield Problem(fields, "{}: {expected}", expected=expected_one_of(item, self.choices))
            if self.output and isinstance(item, Path) and (problem := output_problem(item, self.output)):
                yield Problem(fields, "{}: cannot be written: {problem}", "give another path", problem=problem)

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

    @property
    def limits(self) -> str:
        """Describe the accepted values, and the flags that this one requires and excludes."""
        choices = "among " + ", ".join(self.choices) if self.choices else ""
        requires = "requires " + " and ".join(map(_as_flag, self.requires)) if self.requires else ""
        excludes = "not with " + " or ".join(map(_as_flag, self.excludes)) if self.excludes else ""
        return "; ".join(part for part in (choices, self.bounds, requires, excludes) if part)


def _as_flag(condition: str) -> str:
    """`optimizer adam` -> `--optimizer adam`."""
    name, space, value = condition.partition(" ")
    return flag_name(name) + space + value


# Parsing sources dominates the time to read a command line, and studies read many command lines.
@functools.cache
def section_flags(*config_classes: type) -> tuple[Flag, ...]:
    """Return all flags of dataclasses, inherited ones last."""
    if len(config_classes) != 1:
        return tuple(itertools.chain.from_iterable(map(section_flags, config_classes)))
    (config_class,) = config_classes
    documented = _field_docstrings(config_class)
    hints = typing.get_type_hints(config_class)
    return tuple(
        Flag(
            field_name=field.name,
            value_type=ValueType.of(hints[field.name]),
            docstring=documented.get(field.name, ""),
            default=field.default,
            **field.metadata,
        )
        for field in sorted(dataclasses.fields(config_class), key=lambda f: f.name not in config_class.__annotations__)
    )


def conflicts(flags: Iterable[Flag], values: Mapping[str, Any]) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Yield a problem for each value, by field, that lacks one that it requires, or has one that it excludes.

    With it come the fields of which one has no effect. A flag whose value is unknown agrees with all others.
    """
    known = {keyword_name(word): one for one in flags if one.field_name in values for word in one.spellings}
    for one in dict.fromkeys(known.values()):
        value = values[one.field_name]
        if value in (one.default, "false"):
            continue
        for condition in (*one.requires, *one.excludes):
            name, _, wanted = condition.partition(" ")
            if name not in known:
                continue
            other = known[name]
            found = values[other.field_name]
            holds = str(found) in wanted.split(" or ") if wanted else found != other.default
            fields = {keyword_name(one.name): None if isinstance(value, tuple) else value, name: wanted or None}
            if not holds and condition in one.requires:
                yield Problem(fields, f"{{}} requires {{{name}}}"), (one.field_name,)
            if holds and condition in one.excludes:
                problem = Problem(fields, f"{{}} and {{{name}}} exclude each other", "give one of them")
                yield problem, (one.field_name, other.field_name)


def section_checks(*config_classes: type) -> list[Check]:
    """Return all checks of dataclasses: the `rule`s in their attribute `checks`."""
    return [check for config_class in config_classes for check in getattr(config_class, "checks", ())]


def check_values(flags: Sequence[Flag], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values, by field, that are within the limits of their flags, and the problems.

    They are values outside of the limits, and then combinations of others that contradict what flags declare.
    """
    valid: dict[str, Any] = {}
    problems: list[Problem] = []
    for one in flags:
        if one.field_name in values:
            value = values[one.field_name]
            outside = [*one.problems(value)]
            problems += outside
            valid |= {} if outside else {one.field_name: value}
    return valid, problems + [problem for problem, _ in conflicts(flags, valid)]


def rule(is_broken: Callable[..., Any], reason: str, fix: str = "", reads: Sequence[str] = ()) -> Check:
    """Return a check that reports values for which a function is true; its parameters name the fields that it reads.

    `reads` names them instead. The templates are those of `Problem`; `{world_size!v}` is a value without its field, and
    `{profile!f}` a field without its value.
    """
    names = reads or tuple(inspect.signature(is_broken).parameters)
    values_alone = re.findall(r"{(\w+)!v}", reason + fix)
    template = reason.replace("!v}", "_value}").replace("!f}", "}")

    def check(*values: Any) -> Iterator[Problem]:
        if is_broken(*values):
            found = dict(zip(names, values, strict=True))
            subjects = {name: None if bare else found.get(name) for name, bare in re.findall(r"{(\w+)(!f)?}", reason)}
            texts = {f"{name}_value": found[name] for name in values_alone}
            yield Problem(subjects, template, fix.replace("!v}", "_value}"), **texts)

    return Check(check, names)


def derive(rules: Mapping[str, Callable[..., Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values, by field, completed by functions of the fields that their parameters name, in their order.

    A field is unknown if one of those is, or if its function returns None.
    """
    derived = dict(values)
    for name, function in rules.items():
        names = inspect.signature(function).parameters
        is_known = derived.keys() >= names.keys()
        value = function(*map(derived.get, names)) if is_known else None
        derived.pop(name, None)
        if value is not None:
            derived[name] = value
    return derived


def find_problems(checks: Iterable[Check], values: Mapping[str, Any]) -> list[Problem]:
    """Return the problems that checks find in values, by field.

    Where a field that a check reads is unknown, because it is missing or invalid itself, there is nothing to check.
    """
    known = (check for check in checks if values.keys() >= {*check.reads})
    return [problem for check in known for problem in check.find(*map(values.get, check.reads))]


def to_plain(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as JSON-compatible values: paths as text, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
