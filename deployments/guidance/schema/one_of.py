"""Whether the options of ``oneOf`` share no value, so that it is ``anyOf``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayfin.deployments.guidance.schema.keywords import TYPES

MAX_STEPS = 20_000
MAX_NESTING = 24

Schema = Mapping[str, Any] | bool
Parts = Sequence[Mapping[str, Any]]
"""Schemas that hold a value at once."""


class Disjoint:
    """Compares schemas of one document, after rewriting.

    Args:
        definitions: by the names that ``#/$defs/`` refers to.
    """

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._steps = 0

    def all_of(self, options: Sequence[Schema], beside: Mapping[str, Any]) -> bool:
        """Whether surely no value is valid for two of several schemas.

        Args:
            beside: holds each of the values as well.
        """
        several = [self._parts(one, beside) for one in options]
        required = [{n for part in parts for n in part.get("required", ())} for parts in several]
        if all(_types(parts) == {"object"} for parts in several):
            for name in set.intersection(*required):  # the one that tells them apart
                if _differ([_constants(self._property(parts, name)) for parts in several]):
                    return True
        return all(
            self._apart(one, other) for i, one in enumerate(several) for other in several[i + 1 :]
        )

    def _parts(self, *schemas: Schema) -> Parts:
        """The schemas, their references and their allOf."""
        parts: list[Mapping[str, Any]] = []
        waiting, seen = list(schemas), set[str]()
        while waiting and len(parts) < 100:
            one = waiting.pop()
            if isinstance(one, bool):
                parts += [] if one else [{"enum": []}]
                continue
            parts.append(one)
            waiting += one.get("allOf", ())
            name = one.get("$ref")
            if name is not None and name not in seen:
                seen.add(name)
                waiting.append(self._definitions[name.removeprefix("#/$defs/")])
        return parts

    def _property(self, parts: Parts, name: str) -> Parts:
        """The schemas that hold a property."""
        held: list[Schema] = []
        for part in parts:
            if name in part.get("properties", ()):
                held.append(part["properties"][name])
            elif part.get("additionalProperties") is False and "patternProperties" not in part:
                held.append(False)
        return self._parts(*held)

    def _apart(self, ones: Parts, others: Parts, depth: int = 0) -> bool:
        """Whether surely no value is valid for all parts of both."""
        self._steps += 1
        if depth > MAX_NESTING or self._steps > MAX_STEPS:
            return False
        if _differ([_constants(ones), _constants(others)]):
            return True
        shared = _types(ones) & _types(others)
        return all(self._apart_in(kind, ones, others, depth) for kind in shared)

    def _apart_in(self, kind: str, ones: Parts, others: Parts, depth: int) -> bool:
        """Whether no value of one type is valid for both."""
        both = [*ones, *others]
        if kind == "number" and _crossed(both, "minimum", "maximum"):
            return True
        if kind == "object":
            for name in dict.fromkeys(n for part in both for n in part.get("required", ())):
                one, other = self._property(ones, name), self._property(others, name)
                if self._apart(one, other, depth + 1):
                    return True
        for parts, against in ((ones, others), (others, ones)):
            for part in parts:
                options = part.get("anyOf")
                if options and all(
                    self._apart(self._parts(one, {"type": kind}), against, depth + 1)
                    for one in options
                ):
                    return True
        return False


def _constants(parts: Parts) -> list[Any] | None:
    """The only values that a value can be, or None; containers are not compared."""
    for part in parts:
        listed = [part["const"]] if "const" in part else part.get("enum")
        if listed is not None and not any(isinstance(one, list | dict) for one in listed):
            return list(listed)
    return None


def _differ(several: Sequence[Sequence[Any] | None]) -> bool:
    """Whether all are known, and no value is in two of them."""
    seen: set[Any] = set()
    for values in several:
        if values is None:
            return False
        keys = {(isinstance(value, bool), value) for value in values}
        if keys & seen:
            return False
        seen |= keys
    return True


def _types(parts: Parts) -> set[str]:
    """The types that all parts allow; an integer is a number."""
    shared = set(TYPES) - {"integer"}
    for part in parts:
        named = part.get("type", TYPES)
        names = [named] if isinstance(named, str) else named
        shared &= {"number" if name == "integer" else name for name in names}
        constants = _constants([part])
        if constants is not None:
            shared &= set(map(_type_of, constants))
    return shared


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "number"


def _crossed(parts: Parts, minimum: str, maximum: str) -> bool:
    """Whether the bounds of several leave no number."""
    lows = list(_bounds(parts, minimum, "exclusiveMinimum"))
    highs = list(_bounds(parts, maximum, "exclusiveMaximum"))
    return bool(lows and highs) and (
        max(lows)[0] > min(highs)[0]
        or any(low == high and (is_open or too) for low, is_open in lows for high, too in highs)
    )


def _bounds(parts: Parts, plain: str, exclusive: str) -> Iterator[tuple[float, bool]]:
    for part in parts:
        for keyword in (plain, exclusive):
            if keyword in part:
                yield part[keyword], keyword == exclusive
