"""The configuration file of a run: values of flags in YAML.

Values are read from the text of the file, like the words of a command line, so YAML's implicit types do not matter:
`1e-4` is a number where a flag takes one, and `16-31` or `no` is a text where a flag takes a text.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.command_line import Settings
from megatron_ladder.config.megatron_flags import read_megatron_flag
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.flags import ValueType, flag_name, keyword_name

CONFIG_NAME = "config.yaml"
"""Name of the file that a run writes next to its checkpoints."""
NOT_IN_FILES = ("config", "local_rank")
"""Fields that a file does not set."""
_SWITCH_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_EXPECTED = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
_TAG = "tag:yaml.org,2002:"


def read_config_file(path: Path, settings: Settings) -> None:
    """Give flags the values of a file, whose keys are flags; raise UserError if it cannot be read."""
    flags = {
        keyword_name(spelling): one
        for one in settings.flags
        if one.field_name not in NOT_IN_FILES
        for spelling in (flag_name(one.field_name), *one.aliases)
    }
    lines = dict[str, int]()
    for key_node, node in _parse(path):
        line = key_node.start_mark.line + 1
        location = f"{path}:{line}"
        key = str(key_node.value).replace("-", "_")
        one = flags.get(key)
        name = key if one is None else one.field_name
        if name in lines:
            reason = "{config} {location}: {key} is set twice, first in line {first}"
            problem = Problem({}, reason, "remove one of them", location=location, key=key, first=lines[name])
            settings.problems.append(problem)
            continue
        lines[name] = line
        settings.words.places |= dict.fromkeys((name, f"no_{name}"), location)
        try:
            if one is not None:
                words = _words(node, one.value_type)
                if words is None:
                    settings.given[name] = None
                else:
                    settings.give(one, words, flag_name(key))
            elif not read_megatron_flag(flag_name(key), _megatron_words(node), settings):
                near = difflib.get_close_matches(key, flags, n=1, cutoff=0.8)
                hint = f"did you mean {near[0]}?" if near else "keys are the flags of --help without dashes"
                reason = "{config} {location}: {key} is not a flag of this program: {hint}"
                settings.problems.append(Problem({}, reason, location=location, key=key, hint=hint))
                settings.faulty |= {flags[name].field_name for name in near}
        except ValueError as error:
            settings.reject(name, error)


def config_file_text(values: Mapping[str, Any], note: str) -> str:
    """Return a configuration file with these values, whose first line is a note."""
    import yaml

    return f"# {note}\n{yaml.safe_dump(dict(values), sort_keys=False)}"


def _parse(path: Path) -> list[tuple[Any, Any]]:
    """Return the keys and values of a file as nodes of YAML, which know their text and their line."""
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(Problem({}, f"{{config}} {{path}}: cannot be read: {error.strerror}", path=path)) from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else "it has bytes that are not UTF-8"
        raise UserError(Problem({}, f"{{config}} {{path}}: not YAML: {reason}", path=path)) from None
    except yaml.YAMLError as error:
        # What the scanner misses belongs to the line where its token begins, not to the line where it gives up.
        begins = isinstance(error, yaml.scanner.ScannerError) and error.context_mark
        mark = begins or getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", error)
        raise UserError(Problem({}, "{config} {where}: not YAML: {problem}", where=where, problem=problem)) from None
    if root is None:
        return []
    if root.id != "mapping":
        reason = "{config} {path}: expected a line `flag_name: value` for each flag, found {kind}"
        raise UserError(Problem({}, reason, path=path, kind=_kind(root)))
    return list(root.value)


def _kind(node: Any) -> str:
    if node.id != "scalar":
        return "a list" if node.id == "sequence" else "a section"
    return "no value" if node.tag == f"{_TAG}null" else repr(node.value)


def _megatron_words(node: Any) -> list[str]:
    """Return the words after a flag of Megatron: none for true, which stands for a switch."""
    items = node.value if node.id == "sequence" else [node]
    words = [item.value if item.id == "scalar" else _kind(item) for item in items]
    return [] if node.tag == f"{_TAG}bool" and words[0].lower() in ("true", "yes", "on") else words


def _words(node: Any, value_type: ValueType) -> str | list[str] | None:
    """Return the words of a value as on a command line, or None for null; raise ValueError if its kind is wrong."""
    is_null = node.tag == f"{_TAG}null"
    is_switch = value_type.scalar is bool
    if is_null and value_type.optional:
        return None
    if node.id == "sequence" and value_type.many:
        item_type = dataclasses.replace(value_type, many=False, optional=False)
        return [str(_words(item, item_type)) for item in node.value]
    if node.id != "scalar" or is_null or (is_switch and node.tag != f"{_TAG}bool"):
        expected = "a list" if value_type.many else _EXPECTED.get(value_type.scalar, "true or false")
        flat = ": keys are not nested" if node.id == "mapping" else ""
        raise ValueError(f"expected {expected}, found {_kind(node)}{flat}")
    text = str(node.value)
    if is_switch or "true" in value_type.choices:
        text = _SWITCH_WORDS.get(text.lower(), text)
    return [text] if value_type.many else text
