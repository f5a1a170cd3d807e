"""What a rewritten schema says of a value, as far as it decides how the value is written."""

import json
from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
MAX_DEPTH = 16

ROOT_KEYWORDS = frozenset(("type", "properties", "required", "additionalProperties"))
"""Of arguments that are written one by one: with these only they can be held to their schema."""

NO_KEYWORDS = ("$defs", "x-guidance")
"""Of a schema's root: what holds nothing by itself."""

Schema = Mapping[str, Any] | bool


def keywords(schema: Mapping[str, Any]) -> set[str]:
    """Returns the keywords of a schema that hold something."""
    return schema.keys() - set(NO_KEYWORDS)


def resolved(schema: Schema, root: Mapping[str, Any]) -> Schema | None:
    """Follows references to definitions of ``root``; None if one has keywords beside it."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        if keywords(schema) != {"$ref"}:
            return None
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return None


def types_of(schema: Schema, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a value may have; all where that is not plain."""
    target = resolved(schema, root)
    if not isinstance(target, Mapping) or depth > MAX_DEPTH:
        return ALL_TYPES
    types = ALL_TYPES
    named = target.get("type")
    if isinstance(named, str | list):
        names = {named} if isinstance(named, str) else {str(name) for name in named}
        types = frozenset(names | ({"integer"} if "number" in names else set())) & ALL_TYPES
    values = [target["const"]] if "const" in target else target.get("enum")
    if isinstance(values, list):
        types &= {type_of(value) for value in values}
    if "anyOf" in target:
        types &= frozenset().union(*(types_of(part, root, depth + 1) for part in target["anyOf"]))
    for part in target.get("allOf") or ():
        types &= types_of(part, root, depth + 1)
    return types


def type_of(value: object) -> str:
    """Returns the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def says_types_only(schema: Schema, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether each value of the schema's types is valid."""
    target = resolved(schema, root)
    if not isinstance(target, Mapping) or depth > MAX_DEPTH:
        return target is True
    parts = target.get("anyOf", ())
    if keywords(target) - {"type"} not in ({"anyOf"}, frozenset()):
        return False
    if parts and "type" in target:
        return False
    return all(says_types_only(part, root, depth + 1) for part in parts)


def within(schema: Schema, root: Mapping[str, Any]) -> Schema:
    """Returns a part of ``root`` as a schema of its own, with its options and definitions."""
    if not isinstance(schema, Mapping):
        return schema
    words = NO_KEYWORDS if '"$ref"' in json.dumps(schema) else ("x-guidance",)
    return {**schema, **{word: root[word] for word in words if word in root}}
