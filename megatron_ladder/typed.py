"""Values of JSON files with types; errors name the key, what was found and what was expected.

`read_json` parses a text, and `typed` converts plain values to a class. Both raise ValueError with messages such as

    is not JSON: line 3, column 8
    layer_types[2]: found 'sliding_attention', expected 'full_attention'
    model.num_layers: found nothing, expected a whole number of at least 1

which follow the name of a file. msgspec, which converts the values, names types of its own and paths of its own.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as kinds

from megatron_ladder.errors import UserError

_T = TypeVar("_T")
_LONGEST = 200
"""Characters of a value in a message."""


def read_json(content: bytes) -> Any:
    """Return the value that a JSON text describes; raise ValueError for other content."""
    try:
        return msgspec.json.decode(content)
    except UnicodeDecodeError:
        raise ValueError("is not JSON: has bytes that are not UTF-8") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read: it is nested too deeply") from None
    except msgspec.ValidationError:
        raise ValueError("has a number that no float64 can hold") from None
    except msgspec.DecodeError as error:
        byte = re.search(r"\(byte (\d+)\)", str(error))
        if byte is None:
            raise ValueError("is not JSON: it ends too early") from None
        *lines, last = content[: int(byte[1])].decode(errors="replace").split("\n")
        raise ValueError(f"is not JSON: line {len(lines) + 1}, column {len(last) + 1}") from None


def typed(value: Any, kind: type[_T], dec_hook: Callable[[type, Any], Any] | None = None) -> _T:
    """Convert a plain value, such as one of `read_json`, to a type of msgspec; raise ValueError if it does not fit."""
    try:
        return msgspec.convert(value, kind, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise ValueError(_description(str(error), value, kinds.type_info(kind))) from None


def json_object(path: Path, content: bytes) -> dict[str, Any]:
    """Return the object in the content of a file; raise UserError for other content."""
    try:
        return typed(read_json(content), dict[str, Any])
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _description(message: str, value: Any, kind: kinds.Type) -> str:
    """Describe the value that an error of msgspec is about; its message ends with a path such as `$.layers[2].name`."""
    path = ""
    steps = re.search(r" - at `\$(.*)`$", message)
    # After an object with any keys, whose values have the path [...], there are no further steps.
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", steps[1].partition("[...]")[0] if steps else ""):
        path += f".{name}" if name else f"[{index}]"
        kind = _inside(kind, name or int(index))
        value = value[name] if name else value[int(index)]
    found = _shortened(value)
    if lacking := re.search(r"missing required field `(\w+)`", message):
        path += f".{lacking[1]}"
        kind = _inside(kind, lacking[1])
        found = "nothing"
    path = path.removeprefix(".")
    return f"{path + ': ' if path else ''}found {found}, expected {_expected(kind)}"


def _shortened(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    if len(text) > _LONGEST and isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)} values"
    return f"{text:.{_LONGEST}}"


def _inside(kind: kinds.Type, step: str | int) -> kinds.Type:
    """Return the type of a key or of an item."""
    match kind:
        case kinds.UnionType(types=types):
            return next(inside for member in types if not isinstance(inside := _inside(member, step), kinds.AnyType))
        case kinds.StructType(fields=fields) | kinds.DataclassType(fields=fields):
            known = {field.encode_name: field.type for field in fields}
            return known[step] if isinstance(step, str) else [*known.values()][step]
        case kinds.ListType(item_type=item) | kinds.VarTupleType(item_type=item):
            return item
        case kinds.TupleType(item_types=items) if isinstance(step, int):
            return items[step]
    return kinds.AnyType()


def _expected(kind: kinds.Type) -> str:
    """Describe a type as an object with an article."""
    match kind:
        case kinds.UnionType(types=types):
            described = _alternatives(map(_expected, types))
        case kinds.LiteralType(values=values):
            described = _alternatives(map(repr, values))
        case kinds.IntType(ge=low, lt=high):
            described = "a whole number" + _bounds(low, high)
        case kinds.FloatType():
            described = "a number"
        case kinds.StrType():
            described = "a text"
        case kinds.BoolType():
            described = "true or false"
        case kinds.NoneType():
            described = "null"
        case kinds.ListType(item_type=item) | kinds.VarTupleType(item_type=item):
            described = "a list" + _each("item", item)
        case kinds.TupleType(item_types=items):
            described = f"a list of {len(items)} values"
        case kinds.StructType(array_like=True, fields=fields):
            described = f"a list of {len(fields)} values"
        case kinds.DictType(value_type=item):
            described = "an object" + _each("value", item)
        case kinds.StructType() | kinds.DataclassType():
            described = "an object"
        case _:
            described = "another value"
    return described


def _each(name: str, kind: kinds.Type) -> str:
    return "" if isinstance(kind, kinds.AnyType) else f", each {name} {_expected(kind)}"


def _bounds(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return "" if low is None else f" of at least {low}"
    return f" from {low} to {high - 1}"


def _alternatives(texts: Iterable[str]) -> str:
    """Join texts by `or`, null last."""
    return " or ".join(sorted(dict.fromkeys(texts), key=lambda text: text == "null"))
