"""Whether a value matches a node, and whether two nodes share no value: as far as that is cheap."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from rayfin.deployments.guidance.patterns.overlap import Pattern
from rayfin.deployments.guidance.schema.nodes import (
    Node,
    Nothing,
    Schema,
    has_type,
    same_as,
    type_of,
    types_of,
)

MAX_STEPS = 20_000
MAX_NESTING = 24


class Values:
    """Answers about the nodes of one document.

    Args:
        definitions: by name.
        patterns: by their text for llguidance.
    """

    def __init__(self, definitions: Mapping[str, Schema], patterns: Mapping[str, Pattern]) -> None:
        self._definitions = definitions
        self._patterns = patterns
        self._steps = 0
        self._listed: dict[int, tuple[Node, frozenset[Any]]] = {}  # literals by their node's id

    def admits(self, schema: Schema, value: Any, depth: int = 0) -> bool | None:
        """Whether a value is valid; None if that is not known."""
        if isinstance(schema, Nothing):
            return False
        self._steps += 1
        if depth > MAX_NESTING or self._steps > MAX_STEPS:
            return None
        answers = [self._own(schema, value, depth)]
        if "$ref" in schema:
            answers.append(self.admits(self._definitions[schema["$ref"]], value, depth + 1))
        answers += [self.admits(one, value, depth + 1) for one in schema.get("allOf", ())]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                answers.append(_any([self.admits(o, value, depth + 1) for o in schema[keyword]]))
        return _all(answers)

    def disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Whether surely no value is valid for both."""
        self._steps += 1
        if isinstance(one, Nothing) or isinstance(other, Nothing):
            return True
        if depth > MAX_NESTING or self._steps > MAX_STEPS:
            return False
        ones, others = self._conjuncts(one), self._conjuncts(other)
        shared = _shared_types(ones) & _shared_types(others)
        return all(self._disjoint_of(kind, ones, others, depth) for kind in shared)

    def all_disjoint(self, options: Sequence[Schema], beside: Node) -> bool:
        """Whether surely no value is valid for two of several schemas.

        Args:
            beside: holds each of the values as well.
        """
        conjuncts = [[beside, *self._conjuncts(one)] for one in options if isinstance(one, Node)]
        if _distinct([_literals_of(nodes) for nodes in conjuncts]):
            return True
        if all(_shared_types(nodes) <= {"object"} for nodes in conjuncts):
            required = [
                {n for node in nodes for n in node.get("required", ())} for nodes in conjuncts
            ]
            for name in set.intersection(*required) if required else ():
                if _distinct([self._constants(nodes, name) for nodes in conjuncts]):
                    return True
        held = [Node("", {"allOf": [one, beside]}) for one in options]
        return all(
            self.disjoint(one, other) for i, one in enumerate(held) for other in options[i + 1 :]
        )

    def _constants(self, nodes: list[Node], name: str) -> list[Any] | None:
        """The values that a property of an object can have, or None."""
        for node in nodes:
            schema = node.get("properties", {}).get(name)
            if isinstance(schema, Node):
                found = _literals_of(self._conjuncts(schema))
                if found is not None:
                    return found
        return None

    def _disjoint_of(self, kind: str, ones: list[Node], others: list[Node], depth: int) -> bool:
        """Whether no value of one type is valid for all of both lists."""
        for one in ones:
            for other in others:
                if self._own_disjoint(kind, one, other, depth):
                    return True
        for nodes, against in ((ones, others), (others, ones)):
            rest = Node("", {"allOf": [*against], "type": [kind]})
            for node in nodes:
                for keyword in ("anyOf", "oneOf"):
                    options = node.get(keyword)
                    if options and all(self.disjoint(o, rest, depth + 1) for o in options):
                        return True
        return False

    def _conjuncts(self, node: Node) -> list[Node]:
        """The nodes that hold a value at once: a node, its references, its allOf."""
        found: list[Node] = []
        seen: set[str] = set()
        waiting: list[Schema] = [node]
        while waiting and len(found) < 100:
            one = waiting.pop()
            if isinstance(one, Nothing):
                return [Node("", {"type": []})]
            found.append(one)
            waiting += one.get("allOf", ())
            name = one.get("$ref")
            if name is not None and name not in seen:
                seen.add(name)
                waiting.append(self._definitions[name])
        return found

    def _own_disjoint(self, kind: str, one: Node, other: Node, depth: int) -> bool:
        for a, b in ((one, other), (other, one)):
            listed = literals(a)
            if listed is not None:
                given = [value for value in listed if has_type([kind], type_of(value))]
                if all(self.admits(b, value, depth + 1) is False for value in given):
                    return True
        if kind == "object":
            return self._objects_disjoint(one, other, depth)
        if kind == "string":
            return self._strings_disjoint(one, other)
        if kind == "array":
            return _apart(one, other, "minItems", "maxItems")
        return kind == "number" and _apart(one, other, "minimum", "maximum")

    def _objects_disjoint(self, one: Node, other: Node, depth: int) -> bool:
        names = dict.fromkeys([*one.get("required", ()), *other.get("required", ())])
        return any(
            self.disjoint(self.property(one, name), self.property(other, name), depth + 1)
            for name in names
        )

    def _strings_disjoint(self, one: Node, other: Node) -> bool:
        if _apart(one, other, "minLength", "maxLength"):
            return True
        if "pattern" in one and "pattern" in other:
            return not self._patterns[one["pattern"]].overlaps(self._patterns[other["pattern"]])
        return False

    def property(self, node: Node, name: str) -> Schema:
        """The schema of a property; of several patterns any one, since patterns do not overlap."""
        listed: Schema | None = node.get("properties", {}).get(name)
        if listed is not None:
            return listed
        for text, schema in node.get("patternProperties", {}).items():
            found = self._patterns[text].matches(name)
            if found is None:
                return Node("")
            if found:
                return schema  # type: ignore[no-any-return]
        others: Schema = node.get("additionalProperties", Node(""))
        return others

    def _own(self, node: Node, value: Any, depth: int) -> bool | None:
        """Whether the keywords of the node itself admit a value."""
        kind = type_of(value)
        if "type" in node and not has_type(node["type"], kind):
            return False
        if not self._is_listed(node, value):
            return False
        if kind in ("integer", "number"):
            return _admits_number(node, value)
        if kind == "string":
            return self._admits_string(node, value)
        if kind == "array":
            return self._admits_array(node, value, depth)
        if kind == "object":
            return self._admits_object(node, value, depth)
        return True

    def _is_listed(self, node: Node, value: Any) -> bool:
        """Whether a value is one of the node's literals, or the node has none."""
        listed = literals(node)
        if listed is None:
            return True
        if id(node) not in self._listed:  # with the node, so that its id stays its own
            self._listed[id(node)] = node, frozenset(map(same_as, listed))
        return same_as(value) in self._listed[id(node)][1]

    def _admits_string(self, node: Node, value: str) -> bool | None:
        if not node.get("minLength", 0) <= len(value) <= node.get("maxLength", len(value)):
            return False
        found = self._patterns[node["pattern"]].matches(value) if "pattern" in node else True
        return None if found and "format" in node else found

    def _admits_array(self, node: Node, value: Sequence[Any], depth: int) -> bool | None:
        if not node.get("minItems", 0) <= len(value) <= node.get("maxItems", len(value)):
            return False
        first = node.get("prefixItems", [])
        others = node.get("items", Node(""))
        schemas = [*first, *[others] * (len(value) - len(first))]
        return _all([self.admits(s, v, depth + 1) for s, v in zip(schemas, value, strict=False)])

    def _admits_object(self, node: Node, value: Mapping[str, Any], depth: int) -> bool | None:
        if not set(node.get("required", ())) <= value.keys():
            return False
        least, most = node.get("minProperties", 0), node.get("maxProperties", len(value))
        if not least <= len(value) <= most:
            return False
        both = node.get("patternProperties") and node.get("properties")
        answers = [self.admits(self.property(node, n), v, depth + 1) for n, v in value.items()]
        return _all([*answers, None if both else True])


def literals(node: Node) -> list[Any] | None:
    """The only values that a node can have, or None."""
    if "const" in node:
        return [node["const"]]
    listed: list[Any] | None = node.get("enum")
    return listed


def _literals_of(nodes: list[Node]) -> list[Any] | None:
    return next((found for node in nodes if (found := literals(node)) is not None), None)


def _distinct(several: Sequence[Sequence[Any] | None]) -> bool:
    """Whether all are known, and no value is in two of them."""
    seen: set[Any] = set()
    for values in several:
        if values is None:
            return False
        own = {same_as(value) for value in values}
        if own & seen:
            return False
        seen |= own
    return True


def _shared_types(nodes: list[Node]) -> set[str]:
    """Of all types the six; an integer is a number."""
    shared = {"null", "boolean", "number", "string", "array", "object"}
    for node in nodes:
        shared &= {"number" if kind == "integer" else kind for kind in types_of(node)}
    return shared


def _apart(one: Node, other: Node, least: str, most: str) -> bool:
    for a, b in ((one, other), (other, one)):
        if least in a and most in b and a[least] > b[most]:
            return True
    return False


def _admits_number(node: Node, value: float) -> bool:
    if value < node.get("minimum", value) or value > node.get("maximum", value):
        return False
    if "exclusiveMinimum" in node and value <= node["exclusiveMinimum"]:
        return False
    if "exclusiveMaximum" in node and value >= node["exclusiveMaximum"]:
        return False
    factor = node.get("multipleOf")
    return factor is None or (Fraction(str(value)) / Fraction(str(factor))).denominator == 1


def _all(answers: list[bool | None]) -> bool | None:
    if False in answers:
        return False
    return None if None in answers else True


def _any(answers: list[bool | None]) -> bool | None:
    if True in answers:
        return True
    return None if None in answers else False
