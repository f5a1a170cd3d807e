"""Schemas after rewriting: one dialect, each with its path."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SIX_TYPES = ("null", "boolean", "number", "string", "array", "object")


class Node(dict[str, Any]):
    """A schema of the dialect that is enforced; ``{}`` allows everything.

    Schemas within are nodes, or ``Nothing``. ``$ref`` is the name of a definition, and ``type`` a
    list.
    """

    __slots__ = ("path",)

    def __init__(self, path: str, keywords: Mapping[str, Any] | None = None) -> None:
        super().__init__(keywords or {})
        self.path = path


@dataclass(slots=True, frozen=True)
class Nothing:
    """A schema that no value can match, and why."""

    path: str
    reason: str


Schema = Node | Nothing


def types_of(node: Node) -> tuple[str, ...]:
    return tuple(node.get("type", SIX_TYPES))


def type_of(value: Any) -> str:
    """The type of a JSON value; whole numbers are integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def same_as(value: Any) -> Any:
    """A key that equal JSON values share: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((name, same_as(inner)) for name, inner in value.items()))
    if isinstance(value, list | tuple):
        return ("array", *map(same_as, value))
    return value


def has_type(types: Iterable[str], kind: str) -> bool:
    return kind in types or (kind == "integer" and "number" in types)
