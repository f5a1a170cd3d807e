"""From a schema of any draft to nodes of the one dialect that llguidance enforces completely.

What cannot be enforced is refused with the path of its keyword. With ``strict`` False a keyword
that only narrows is left out, and listed.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.patterns.ecma import parse
from rayfin.deployments.guidance.patterns.overlap import Fuel, Pattern
from rayfin.deployments.guidance.patterns.parts import Part, write
from rayfin.deployments.guidance.schema.keywords import (
    ANNOTATIONS,
    APPLICATORS,
    DATES,
    DESCRIPTIONS,
    ELSEWHERE,
    FORMATS,
    REFUSED,
    REFUSED_FORMATS,
    REFUSED_REFERENCES,
    STRUCTURE,
    TYPES,
    is_number,
    short,
)
from rayfin.deployments.guidance.schema.lint import check_literal, too_complex
from rayfin.deployments.guidance.schema.nodes import Node, Nothing, Schema
from rayfin.deployments.guidance.schema.references import Pointer, References

MAX_DEPENDENT = 4  # names of dependentRequired; each doubles what llguidance compiles
MAX_BOUND = (
    999_999_999_999_999_872  # the largest double of 18 digits, which llguidance can count to
)
MAX_COUNT = 2**32 - 1  # of characters, elements, properties

_COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_ITEMS = frozenset("items prefixItems additionalItems".split())
_SILENT = STRUCTURE | DESCRIPTIONS
_LATE = REFUSED | {"patternProperties"}
"""They change what other keywords of the same schema have made."""


class Rewriter:
    """Makes the nodes of a document and of its definitions.

    Args:
        strict: False leaves out what only narrows.
        closed: objects with ``properties`` and without ``additionalProperties`` take no others.
    """

    def __init__(
        self, references: References, *, strict: bool = True, closed: bool = False
    ) -> None:
        self._references = references
        self._strict = strict
        self._closed = closed
        self._names: dict[Pointer, str] = {}
        self._handlers: dict[str, Callable[[Node, str, Any, Pointer], None]] = {
            "type": self._type,
            "const": self._literal,
            "enum": self._literal,
            "pattern": self._pattern,
            "format": self._format,
            "multipleOf": self._factor,
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._schema,
            "required": self._required,
            "uniqueItems": self._unique,
            "$ref": self._reference,
            **dict.fromkeys(_COUNTS, self._count),
            **dict.fromkeys(_BOUNDS, self._bound),
            **dict.fromkeys(_ITEMS, self._items),
            **dict.fromkeys(("allOf", "anyOf", "oneOf"), self._schemas),
        }
        self.definitions: dict[str, Schema] = {}
        self._fuel = Fuel()
        self.patterns: dict[str, Pattern] = {}  # by their text for llguidance
        self.unenforced: list[str] = []  # paths of keywords

    def rewrite(self) -> Schema:
        """Returns the root; ``definitions`` and ``unenforced`` are complete then."""
        for target in dict.fromkeys(self._references.targets.values()):
            self._names[target] = f"d{len(self._names)}"
        targets = {name: target for target, name in self._names.items()}
        root = self._node(())
        waiting = sorted(refs(root))
        while waiting:  # a definition that is not reached holds nothing
            name = waiting.pop()
            if name not in self.definitions:
                self.definitions[name] = self._object(targets[name])
                waiting += sorted(refs(self.definitions[name]))
        return root

    def drop(self, path: str, what: str) -> None:
        """Leaves a keyword out that cannot be enforced, or refuses it."""
        if self._strict:
            raise unsupported(path, what)
        self.unenforced.append(path)

    def _node(self, at: Pointer) -> Schema:
        if at in self._names:
            return Node(self._references.path(at), {"$ref": self._names[at]})
        return self._object(at)

    def _object(self, at: Pointer) -> Schema:
        schema = self._references.value(at)
        path = self._references.path(at)
        if schema is False:
            return Nothing(path, "it is false")
        node = Node(path)
        if schema is True:
            return node
        for keyword in sorted(schema, key=_LATE.__contains__):
            inner = f"{path}.{short(keyword)}"
            handler = self._handlers.get(keyword)
            if handler is not None:
                handler(node, inner, schema[keyword], (*at, keyword))
            elif keyword in REFUSED_REFERENCES:
                raise unsupported(inner, "it is resolved while a value is read")
            elif keyword in REFUSED:
                self._refused(node, keyword, schema, at)
            elif keyword not in _SILENT:
                self.unenforced.append(inner)
        if self._closed and "additionalProperties" not in node:
            if "properties" in node or "patternProperties" in node:
                node["additionalProperties"] = Nothing(path, "other properties are disabled")
        return node

    # Keywords that stand alone.

    def _type(self, node: Node, path: str, value: Any, at: Pointer) -> None:
        names = [value] if isinstance(value, str) else value
        node["type"] = [
            name
            for name in TYPES
            if name in names and not (name == "integer" and "number" in names)
        ]

    def _literal(self, node: Node, path: str, value: Any, at: Pointer) -> None:
        values = value if at[-1] == "enum" else [value]
        waiting = list(values)
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                check_literal(one, path)
            elif isinstance(one, Mapping):
                waiting += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                waiting += one
            elif is_number(one) and not _is_exact(one):
                raise unsupported(path, "a number has more digits than a double")
        keyword = str(at[-1])
        if "enum" in node or "const" in node:
            _also(node, Node(path.rpartition(".")[0], {keyword: value}))
        else:
            node[keyword] = value

    def _pattern(self, node: Node, path: str, value: str, at: Pointer) -> None:
        text = self._written(path, value)
        if text is not None:
            node["pattern"] = text

    def _format(self, node: Node, path: str, value: str, at: Pointer) -> None:
        if value in FORMATS:
            node["format"] = value
        elif value in DATES:
            part, text = _parts_of_format(value)
            self.patterns.setdefault(text, Pattern(part, self._fuel))
            if "pattern" in self._references.value(at[:-1]):
                _also(node, Node(path, {"pattern": text}))
            else:
                node["pattern"] = text
        elif value in REFUSED_FORMATS:
            self.drop(path, f"the format {value}")
        else:
            self.unenforced.append(path)

    def _count(self, node: Node, path: str, value: float, at: Pointer) -> None:
        count = int(value)
        if count > MAX_COUNT:
            raise too_complex(f"{path} must be at most {MAX_COUNT}, got {count}.", path)
        node[str(at[-1])] = count

    def _bound(self, node: Node, path: str, value: Any, at: Pointer) -> None:
        """Draft 4's booleans become numbers; bounds that cannot be counted to are tightened."""
        keyword = str(at[-1])
        if isinstance(value, bool):
            schema = self._references.value(at[:-1])
            plain = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if not value or plain not in schema:
                return
            value = schema[plain]
        is_least = keyword in ("minimum", "exclusiveMinimum")
        if not _is_exact(value):
            value = _inner(value, is_least)
        if abs(value) > MAX_BOUND:
            if (value > 0) == is_least:
                raise unsupported(path, f"a bound of more than {MAX_BOUND}")
            keyword = keyword.replace("exclusiveM", "m")
            if keyword in node:
                return
            value = -MAX_BOUND if is_least else MAX_BOUND
        node[keyword] = value

    def _factor(self, node: Node, path: str, value: float, at: Pointer) -> None:
        if not _is_countable(value):
            self.drop(path, "a factor of many digits")
        else:
            node["multipleOf"] = value

    def _required(self, node: Node, path: str, value: list[str], at: Pointer) -> None:
        node["required"] = list(dict.fromkeys(value))

    def _unique(self, node: Node, path: str, value: bool, at: Pointer) -> None:
        if value:
            self.drop(path, "elements that differ")

    def _reference(self, node: Node, path: str, value: str, at: Pointer) -> None:
        node["$ref"] = self._names[self._references.targets[at[:-1]]]

    # Keywords that hold schemas.

    def _schema(self, node: Node, path: str, value: Any, at: Pointer) -> None:
        node[str(at[-1])] = self._node(at)

    def _schemas(self, node: Node, path: str, value: list[Any], at: Pointer) -> None:
        given = [self._node((*at, i)) for i in range(len(value))]
        node[str(at[-1])] = [*given, *node.get(str(at[-1]), [])]

    def _properties(self, node: Node, path: str, value: Mapping[str, Any], at: Pointer) -> None:
        for name in value:
            check_literal(name, path)
        node["properties"] = {name: self._node((*at, name)) for name in value}

    def _pattern_properties(
        self, node: Node, path: str, value: Mapping[str, Any], at: Pointer
    ) -> None:
        written = {name: self._written(f"{path}.{short(name)}", name) for name in value}
        texts = {text: name for name, text in written.items() if text is not None}
        parts = [self.patterns[text] for text in texts]
        apart = not any(
            one.overlaps(other) for i, one in enumerate(parts) for other in parts[i + 1 :]
        )
        if not apart or len(texts) < len(written):
            if not apart:
                self.drop(path, "patterns that share a name")
            node["additionalProperties"] = Node(path)
            return
        self._hold_names(node, {text: self._node((*at, name)) for text, name in texts.items()})

    def _hold_names(self, node: Node, schemas: Mapping[str, Schema]) -> None:
        """Holds names to the schemas of their patterns.

        A pattern of listed names alone is written as these: llguidance takes it for further names,
        of which it would find none amid an answer.
        """
        properties: dict[str, Schema] = dict(node.get("properties", {}))
        names = dict.fromkeys([*properties, *node.get("required", ())])
        kept: dict[str, Schema] = {}
        for text, schema in schemas.items():
            pattern = self.patterns[text]
            found = {name: pattern.matches(name) for name in names}
            if None in found.values() or not pattern.matches_only(names):
                kept[text] = schema
                continue
            for name in names:
                if found[name]:
                    properties[name] = _both(properties.get(name), schema)
        if properties or len(kept) < len(schemas):
            node["properties"] = properties
        if kept:
            node["patternProperties"] = kept

    def _items(self, node: Node, path: str, value: Any, at: Pointer) -> None:
        """Tuples of the old drafts become prefixItems and items."""
        schema = self._references.value(at[:-1])
        items = schema.get("items")
        old = isinstance(items, list | tuple)
        keyword = at[-1]
        if old and keyword == "items":
            node["prefixItems"] = [self._node((*at, i)) for i in range(len(items))]
        elif old and keyword == "additionalItems":
            node["items"] = self._node(at)
        elif keyword == "items":
            node["items"] = self._node(at)
        elif keyword == "prefixItems" and not old:
            if self._references.draft < 2020 and "items" in schema:
                self.unenforced.append(path)  # unknown to that draft, whose items holds all
            else:
                node["prefixItems"] = [self._node((*at, i)) for i in range(len(value))]
        elif keyword == "prefixItems":
            self.unenforced.append(path)

    # Keywords that are refused, but for forms that others can say.

    def _refused(self, node: Node, keyword: str, schema: Mapping[str, Any], at: Pointer) -> None:
        value = schema[keyword]
        path = f"{self._references.path(at)}.{keyword}"
        if keyword in ("then", "else") and "if" not in schema:
            return
        if keyword == "if" and "then" not in schema and "else" not in schema:
            return
        if keyword in ("minContains", "maxContains") and "contains" not in schema:
            return
        if keyword.startswith("unevaluated"):
            done = self._unevaluated(node, keyword, schema, at)
        elif keyword == "propertyNames":
            done = self._property_names(node, schema, at)
        elif keyword == "dependentRequired" or (
            keyword == "dependencies"
            and all(isinstance(names, list | tuple) for names in value.values())
        ):
            done = self._dependent_required(node, value, path)
        else:
            done = False
        if not done:
            self.drop(path, f"'{keyword}'")

    def _unevaluated(
        self, node: Node, keyword: str, schema: Mapping[str, Any], at: Pointer
    ) -> bool:
        if schema[keyword] is True:
            return True
        if keyword == "unevaluatedItems" or (APPLICATORS | ELSEWHERE) & schema.keys():
            return False
        if "additionalProperties" not in schema:
            node["additionalProperties"] = self._node((*at, keyword))
        return True

    def _property_names(self, node: Node, schema: Mapping[str, Any], at: Pointer) -> bool:
        """A pattern alone: names that match it have the schema of additionalProperties."""
        names = schema["propertyNames"]
        if names is True or names == {}:
            return True
        others = schema.get("additionalProperties", True)
        if not isinstance(names, Mapping) or "patternProperties" in schema:
            return False
        given = [name for name in names if name not in ANNOTATIONS | STRUCTURE]
        if given != ["pattern"] or (schema.get("properties") and not isinstance(others, bool)):
            return False
        here = (*at, "propertyNames", "pattern")
        path = self._references.path(here)
        text = self._written(path, names["pattern"])
        if text is None:
            return True
        pattern = self.patterns[text]
        found = {name: pattern.matches(name) for name in schema.get("properties", {})}
        if None in found.values():
            return False
        lost = {name: Nothing(path, "its name does not match") for name in found if not found[name]}
        if lost:
            _also(node, Node(path, {"properties": lost}))
        if others is not False:
            self._hold_names(node, {text: node.get("additionalProperties", Node(path))})
            node["additionalProperties"] = Nothing(path, "other names do not match")
        return True

    def _dependent_required(
        self, node: Node, dependent: Mapping[str, list[str]], path: str
    ) -> bool:
        """Each name is absent, or those that depend on it are there."""
        if len(dependent) > MAX_DEPENDENT:
            return False
        for name, needed in dependent.items():
            if needed:
                inner = f"{path}.{short(name)}"
                absent = {"properties": {name: Nothing(inner, "another option has it")}}
                present = {"required": list(dict.fromkeys([name, *needed]))}
                _also(node, Node(inner, {"anyOf": [Node(inner, absent), Node(inner, present)]}))
        return True

    def _written(self, path: str, pattern: str) -> str | None:
        """A pattern for llguidance; None if it is left out."""
        try:
            part = parse(pattern, path)
        except InvalidRequest as e:
            if e.code != "unsupported_schema" or self._strict:
                raise
            self.unenforced.append(path)
            return None
        text = write(part)
        self.patterns.setdefault(text, Pattern(part, self._fuel))
        return text


@cache
def _parts_of_format(name: str) -> tuple[Part, str]:
    """The parts of a format that is a pattern for llguidance, and its text."""
    part = parse(DATES[name], f"format {name}")
    return part, write(part)


def unsupported(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be enforced: {what}.", path, "unsupported_schema")


def schemas_in(node: Node) -> list[Schema]:
    """The schemas that are directly within one."""
    found: list[Schema] = []
    for keyword in ("additionalProperties", "items"):
        if keyword in node:
            found.append(node[keyword])
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        found += node.get(keyword, ())
    for keyword in ("properties", "patternProperties"):
        found += node.get(keyword, {}).values()
    return found


def refs(schema: Schema) -> set[str]:
    """The names of all definitions that a schema refers to."""
    names: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Node):
            if "$ref" in one:
                names.add(one["$ref"])
            waiting += schemas_in(one)
    return names


def _also(node: Node, other: Node) -> None:
    """Holds a schema to another one as well."""
    node["allOf"] = [*node.get("allOf", ()), other]


def _both(one: Schema | None, other: Schema) -> Schema:
    """A schema of the values that both allow."""
    if not one or isinstance(other, Nothing):  # an empty one allows every value
        return other
    if isinstance(one, Nothing) or not other:
        return one
    return Node(one.path, {"allOf": [one, other]})


def _is_exact(value: float) -> bool:
    """Whether a double is exactly this number."""
    return isinstance(value, float) or _as_double(value) == value


def _as_double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _inner(value: int, is_least: bool) -> float:
    """The double closest to a bound that is within it."""
    near = _as_double(value)
    if is_least and near < value:
        return math.nextafter(near, math.inf)
    if not is_least and near > value:
        return math.nextafter(near, -math.inf)
    return near


def _is_countable(factor: float) -> bool:
    """Whether llguidance reads a factor as this decimal, with at most 32 bits of digits."""
    scaled, digits = float(factor), 0
    while scaled != int(scaled):
        scaled *= 10.0
        digits += 1
        if digits > 20:
            return False
    return scaled < 2**32 and Fraction(str(factor)) == Fraction(int(scaled), 10**digits)
