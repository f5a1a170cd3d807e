"""Tool calls as a model of a format writes them: what a parser must read back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rayfin.deployments.text.parsing.format import ToolFormat

ITEM = "item"
"""The name of the elements of a list."""

_PYTHON_WORDS = {True: "True", False: "False", None: "None"}


class WrittenCall(NamedTuple):
    """A call that is to be written."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""  # in the formats whose calls hold one


def render_calls(row: ToolFormat, calls: Sequence[WrittenCall]) -> str:
    """Returns the text of one or more calls, with all marks.

    A tagged string, or one in braces, is written as it is: it must not hold its closing mark.
    """
    if row.layout == "list" and row.syntax == "json":
        body = json_text([_object(row, call) for call in calls])
    elif row.syntax == "python":
        body = row.separator.join(_python_call(call) for call in calls)
        body = f"[{body}]" if row.layout == "list" else body
    else:
        body = row.separator.join(
            f"{row.call[0]}{_body(row, call, i)}{row.call[1]}" for i, call in enumerate(calls)
        )
    return f"{row.section[0]}{body}{row.section[1]}"


def json_text(value: object) -> str:
    """Returns JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _object(row: ToolFormat, call: WrittenCall) -> dict[str, Any]:
    body = {row.name_key: call.name, row.arguments_key: dict(call.arguments)}
    return body | {row.id_key: call.id} if row.id_key and call.id else body


def _body(row: ToolFormat, call: WrittenCall, index: int) -> str:
    if row.syntax in ("tagged", "elements"):
        write = _tagged if row.syntax == "tagged" else _element
        written = "".join(write(row, key, value) for key, value in call.arguments.items())
        name = f"{call.name}{row.id_mark}{index + 1}" if row.numbered else call.name
        return f"{row.function[0]}{name}{row.function[1]}{written}{row.arguments[1]}"
    if row.syntax == "braces":
        return f"{row.function[0]}{call.name}{row.function[1]}{_braced(row, call.arguments)}"
    if row.layout == "object":
        return json_text(_object(row, call))
    name = f"functions.{call.name}:{index}" if row.id_style == "kimi" else call.name
    if row.id_mark and call.id:
        name += row.id_mark + call.id
    before, after = row.arguments
    body = f"{before}{json_text(dict(call.arguments))}{after}"
    return f"{row.function[0]}{name}{row.function[1]}{body}"


def _tagged(row: ToolFormat, key: str, value: object) -> str:
    is_text = isinstance(value, str)
    end = row.key[1] if is_text else row.json_key_ends.get(_json_type(value), row.key[1])
    text = value if is_text else json_text(value)
    return f"{row.key[0]}{row.write_key(key)}{end}{row.value[0]}{text}{row.value[1]}"


def _element(row: ToolFormat, key: str, value: object) -> str:
    if isinstance(value, Mapping):
        text = "".join(_element(row, name, item) for name, item in value.items())
    elif isinstance(value, list):
        text = "".join(_element(row, ITEM, item) for item in value)
    else:
        text = value if isinstance(value, str) else json_text(value)
    return f"{row.key[0]}{key}{row.key[1]}{text}{row.value[1]}{key}{row.key[1]}"


def _json_type(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array"


def _braced(row: ToolFormat, value: object) -> str:
    if isinstance(value, str):
        return f"{row.quote}{value}{row.quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_braced(row, item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_braced(row, item) for item in value) + "]"
    return json_text(value)


def _python_call(call: WrittenCall) -> str:
    arguments = ", ".join(f"{key}={python_text(value)}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def python_text(value: object) -> str:
    """Returns a JSON value as a Python literal."""
    if isinstance(value, bool) or value is None:
        return _PYTHON_WORDS[value]
    if isinstance(value, Mapping):
        items = (f"{json_text(key)}: {python_text(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(python_text(item) for item in value) + "]"
    return json_text(value)
