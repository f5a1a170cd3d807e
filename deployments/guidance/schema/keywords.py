"""The keywords of JSON Schema: what is enforced, refused, or a description; and their shapes."""

from collections.abc import Callable, Mapping
from typing import Any

from rayfin.deployments.guidance.schema.lint import invalid_schema

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
"""Of ``$schema``, without its scheme and its empty fragment. Others are read as the last one."""

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = (
    rf"(?:{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR})"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
DATES = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}
"""Formats as patterns: llguidance's have a 29th of February in each year, and leap seconds."""

FORMATS = frozenset("duration email hostname ipv4 ipv6 uuid uri".split())
REFUSED_FORMATS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer "
    "relative-json-pointer regex".split()
)
"""Of the standard. Names beyond these two are annotations."""

DESCRIPTIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment".split()
)
"""They describe a value, and never limit it."""

STRUCTURE = frozenset(
    "$schema $id id $anchor $defs definitions $vocabulary $dynamicAnchor $recursiveAnchor".split()
)
"""They name things, and hold nothing by themselves."""

REFUSED = frozenset(
    "not if then else contains minContains maxContains uniqueItems unevaluatedItems "
    "unevaluatedProperties dependentSchemas dependentRequired dependencies propertyNames".split()
)
"""They only narrow what is valid, so that ``strict: false`` can leave them out."""

REFUSED_REFERENCES = frozenset(("$dynamicRef", "$recursiveRef"))

APPLICATORS = frozenset("allOf anyOf oneOf $ref".split())
"""Those that hold the value itself to another schema, and are enforced."""

ELSEWHERE = frozenset(
    "not if then else dependentSchemas dependencies $dynamicRef $recursiveRef".split()
)
"""Those that hold the value itself to another schema, and are refused."""

SCHEMAS = frozenset(
    "items additionalItems additionalProperties propertyNames not if then else contains "
    "unevaluatedItems unevaluatedProperties".split()
)
SCHEMA_LISTS = frozenset("allOf anyOf oneOf prefixItems".split())
SCHEMA_MAPS = frozenset("properties patternProperties $defs definitions dependentSchemas".split())


def check_shape(keyword: str, value: Any, path: str) -> None:
    """Checks that a keyword's value has the form of its kind.

    Raises:
        InvalidRequest: ``invalid_schema`` with the path of the value.
    """
    check = _SHAPES.get(keyword)
    if check is not None:
        check(value, path)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """A whole number from 0 on; 1.0 is one."""
    return is_number(value) and value >= 0 and value == int(value)


def _wrong(path: str, expected: str, value: Any) -> Exception:
    got = "null" if value is None else type(value).__name__
    return invalid_schema(f"{path} must be {expected}, got {got}.", path)


def _schema(value: Any, path: str) -> None:
    if not isinstance(value, Mapping | bool):
        raise _wrong(path, "a schema (an object or a boolean)", value)


def _items(value: Any, path: str) -> None:
    if isinstance(value, list | tuple):
        _schemas(value, path)
    else:
        _schema(value, path)


def _schemas(value: Any, path: str) -> None:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list of schemas", value)
    for i, inner in enumerate(value):
        _schema(inner, f"{path}[{i}]")


def _some_schemas(value: Any, path: str) -> None:
    _schemas(value, path)
    if not value:
        raise invalid_schema(f"{path} must not be empty.", path)


def _schema_map(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object of schemas", value)
    for name, inner in value.items():
        _schema(inner, f"{path}.{short(name)}")


def _string(value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise _wrong(path, "a string", value)


def _strings(value: Any, path: str) -> None:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list of strings", value)
    for i, inner in enumerate(value):
        _string(inner, f"{path}[{i}]")


def _string_map(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object of lists of strings", value)
    for name, inner in value.items():
        _strings(inner, f"{path}.{short(name)}")


def _dependencies(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    for name, inner in value.items():
        check = _strings if isinstance(inner, list | tuple) else _schema
        check(inner, f"{path}.{short(name)}")


def _values(value: Any, path: str) -> None:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)


def _number(value: Any, path: str) -> None:
    if not is_number(value):
        raise _wrong(path, "a number", value)


def _bound(value: Any, path: str) -> None:
    if not is_number(value) and not isinstance(value, bool):
        raise _wrong(path, "a number", value)


def _factor(value: Any, path: str) -> None:
    _number(value, path)
    if value <= 0:
        raise invalid_schema(f"{path} must be greater than 0, got {value}.", path)


def _count(value: Any, path: str) -> None:
    if not is_number(value):
        raise _wrong(path, "a whole number", value)
    if not is_count(value):
        raise invalid_schema(f"{path} must be a whole number from 0 on, got {value}.", path)


def _flag(value: Any, path: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(path, "a boolean", value)


def _type(value: Any, path: str) -> None:
    names = value if isinstance(value, list | tuple) else [value]
    if not names:
        raise invalid_schema(f"{path} must not be empty.", path)
    for name in names:
        if name not in TYPES:
            raise invalid_schema(
                f"{path} must be one of {', '.join(TYPES)}, got {str(name)[:32]!r}.", path
            )


def short(name: str) -> str:
    """A key as a part of a path."""
    return name if len(name) <= 64 else name[:61] + "..."


_SHAPES: dict[str, Callable[[Any, str], None]] = {
    "type": _type,
    "enum": _values,
    "pattern": _string,
    "format": _string,
    "$ref": _string,
    "required": _strings,
    "items": _items,
    "prefixItems": _schemas,
    "allOf": _some_schemas,
    "anyOf": _some_schemas,
    "oneOf": _some_schemas,
    "multipleOf": _factor,
    "minimum": _number,
    "maximum": _number,
    "exclusiveMinimum": _bound,
    "exclusiveMaximum": _bound,
    "uniqueItems": _flag,
    "dependentRequired": _string_map,
    "dependencies": _dependencies,
    **dict.fromkeys(
        "minLength maxLength minItems maxItems minProperties maxProperties minContains "
        "maxContains".split(),
        _count,
    ),
    **dict.fromkeys(SCHEMAS - {"items"}, _schema),
    **dict.fromkeys(SCHEMA_MAPS, _schema_map),
}
