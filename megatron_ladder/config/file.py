"""The configuration file of a run: values of flags in YAML or TOML.

Values are read from the text of the file, like the words of a command line, so YAML's implicit types do not matter:
`1e-4` is a number where a flag takes one, and `16-31` or `no` is a text where a flag takes a text.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.command_line import is_flag
from megatron_ladder.config.megatron_flags import ACCEPTED, REFUSED
from megatron_ladder.errors import UserError
from megatron_ladder.flags import ValueType, flag_name

CONFIG_NAME = "config.yaml"
"""Name of the file that a run writes next to its checkpoints."""
NOT_IN_FILES = ("config", "local_rank")
"""Fields that a file does not set."""
_SWITCH_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_EXPECTED = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


class FileFlags(NamedTuple):
    """The flags that a file sets."""

    settings: dict[str, str | list[str] | None]
    """Words by the name of the field."""
    words: list[str]
    """Megatron's other flags, as on a command line."""
    places: dict[str, str]
    """File and line of each flag."""


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line, each with the first word after it or after its equals sign."""
    found = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if is_flag(word):
            name, equals, value = word.partition("=")
            found[name] = value if equals else following
    return found


def read_config_file(path: Path, sections: Sequence[type], errors: list[str]) -> FileFlags:
    """Read a file whose keys are the flags of these dataclasses; `errors` receives one line per invalid key or value.

    Raises UserError if the file cannot be read.
    """
    fields = _fields_by_key(sections)
    read, lines = FileFlags({}, [], {}), dict[str, int]()
    for key_node, node in _parse(path):
        line = key_node.start_mark.line + 1
        # The lines of TOML are unknown.
        place = str(path) if path.suffix == ".toml" else f"{path}:{line}"
        if not isinstance(key_node.value, str):
            errors.append(f"--config {place}: expected a flag as key, found {_kind(key_node)}")
            continue
        key = key_node.value.replace("-", "_")
        name = fields[key].name if key in fields else key
        if name in lines:
            errors.append(f"--config {place}: {key} is set twice, first in line {lines[name]}: remove one of them")
            continue
        lines[name], flag = line, flag_name(name)
        read.places[flag] = read.places[flag_name(f"no_{name}")] = place
        try:
            if key in fields:
                read.settings[name] = _words(node, ValueType.of(fields[key].type))
            elif flag in REFUSED or flag in ACCEPTED:
                read.words.extend(_megatron_words(flag, node))
            else:
                near = difflib.get_close_matches(key, fields, n=1, cutoff=0.8)
                hint = f"did you mean {near[0]}?" if near else "keys are the flags of --help without dashes"
                errors.append(f"--config {place}: {key} is not a flag of this program: {hint}")
        except ValueError as error:
            errors.append(f"{flag}: {error}")
    return read


def config_file_text(values: Mapping[str, Any], note: str) -> str:
    """Return a configuration file with these values, whose first line is a note."""
    import yaml

    return f"# {note}\n{yaml.safe_dump(dict(values), sort_keys=False)}"


def _fields_by_key(sections: Sequence[type]) -> dict[str, "dataclasses.Field[Any]"]:
    fields = dict[str, "dataclasses.Field[Any]"]()
    for field in (field for section in sections for field in dataclasses.fields(section)):
        if field.name not in NOT_IN_FILES:
            names = (field.name, *field.metadata.get("aliases", ()))
            fields |= {name.removeprefix("--").replace("-", "_"): field for name in names}
    return fields


def _parse(path: Path) -> list[tuple[Any, Any]]:
    """Return the keys and values of a file as nodes of YAML, which know their text and their line."""
    import yaml

    kind = "TOML" if path.suffix == ".toml" else "YAML"

    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            # Every JSON text is YAML, except for escaped pairs of surrogates.
            text = json.dumps(tomllib.loads(text), default=str, ensure_ascii=False)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise UserError(f"--config {path}{line}: not YAML: {error.problem}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--config {path}: not {kind}: {error}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"--config {path}: expected a line `flag_name: value` for each flag, found {_kind(root)}")
    return list(root.value)


def _kind(node: Any) -> str:
    kind = node.tag.rpartition(":")[2]
    names = {"seq": "a list", "map": "a section", "null": "no value"}
    return names[kind] if kind in names else repr(node.value)


def _words(node: Any, value_type: ValueType) -> str | list[str] | None:
    """Return the words of a value as on a command line, or None for null; raise ValueError if its kind is wrong."""
    kind = node.tag.rpartition(":")[2]
    expected = _EXPECTED.get(value_type.scalar, "true or false")
    if kind == "null" and value_type.optional:
        return None
    if kind == "seq" and value_type.many:
        if wrong := [item for item in node.value if _kind(item) in ("a list", "a section", "no value")]:
            raise ValueError(f"expected {expected} in the list, found {_kind(wrong[0])}")
        return [str(item.value) for item in node.value]
    if kind in ("seq", "map", "null") or (value_type.scalar is bool and kind != "bool"):
        expected = "a list" if value_type.many else expected
        flat = ": keys are not nested" if kind == "map" else ""
        raise ValueError(f"expected {expected}, found {_kind(node)}{flat}")
    text = str(node.value)
    if value_type.scalar is bool:
        return _SWITCH_WORDS[text.lower()]
    if "true" in value_type.choices:
        return _SWITCH_WORDS.get(text.lower(), text)
    return [text] if value_type.many else text


def _megatron_words(flag: str, node: Any) -> list[str]:
    if not isinstance(node.value, str):
        raise ValueError(f"expected one value, found {_kind(node)}")
    if flag in ACCEPTED and ACCEPTED[flag]:
        return [flag, node.value]
    switch = _SWITCH_WORDS.get(node.value.lower(), node.value)
    return {"true": [flag], "false": []}.get(switch, [flag, node.value])
