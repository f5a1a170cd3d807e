"""Takes out of nodes what no value can match, so that no answer runs into an end without one.

A definition that needs itself has no finite value: it is nothing as well.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rayfin.deployments.guidance.patterns.overlap import Pattern
from rayfin.deployments.guidance.schema.nodes import Node, Nothing, Schema, types_of
from rayfin.deployments.guidance.schema.rewrite import refs
from rayfin.deployments.guidance.schema.values import Values, literals


class Pruner:
    """Prunes the nodes of one document.

    Args:
        definitions: by name.
        patterns: by their text for llguidance.
    """

    def __init__(self, definitions: Mapping[str, Schema], patterns: Mapping[str, Pattern]) -> None:
        self._all = definitions
        self._values = Values(definitions, patterns)
        self._causes: dict[str, Nothing] = {}
        self.definitions: dict[str, Schema] = {}  # pruned, those that have values
        self._find_alive()

    def prune(self, schema: Schema) -> Schema:
        """Returns the schema without what no value can match."""
        if isinstance(schema, Nothing):
            return schema
        node = Node(schema.path, schema)
        for keyword in ("properties", "patternProperties"):
            if keyword in node:
                node[keyword] = {name: self.prune(s) for name, s in node[keyword].items()}
        for keyword in ("additionalProperties", "items"):
            if keyword in node:
                node[keyword] = self.prune(node[keyword])
        if "prefixItems" in node:
            node["prefixItems"] = [self.prune(s) for s in node["prefixItems"]]
        nothing = self._prune_applicators(node) or self._prune_types(node)
        if nothing is None:
            nothing = self._prune_literals(node)
        return node if nothing is None else nothing

    def _find_alive(self) -> None:
        """A definition is alive if it has a value that needs only those known to be alive."""
        users: dict[str, set[str]] = defaultdict(set)
        for name, schema in self._all.items():
            for used in refs(schema):
                users[used].add(name)
        waiting: dict[str, None] = dict.fromkeys(reversed(list(self._all)))
        while waiting:
            name, _ = waiting.popitem()
            pruned = self.prune(self._all[name])
            if isinstance(pruned, Nothing):
                self._causes[name] = pruned
            elif name not in self.definitions:
                self.definitions[name] = pruned
                waiting.update(dict.fromkeys(users[name] - self.definitions.keys()))
        for name in self.definitions:  # again, now that all others are known
            self.definitions[name] = self.prune(self._all[name])

    def _prune_applicators(self, node: Node) -> Nothing | None:
        name = node.get("$ref")
        if name is not None and name not in self.definitions:
            path = f"{node.path}.$ref" if not node.path.endswith("$ref") else node.path
            return self._causes.get(name) or Nothing(path, "it needs itself without an end")
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                options = [self.prune(option) for option in node[keyword]]
                node[keyword] = [o for o in options if isinstance(o, Node)]
                if not node[keyword]:
                    first = options[0]
                    assert isinstance(first, Nothing)
                    return first
        if "allOf" in node:
            node["allOf"] = [self.prune(one) for one in node["allOf"]]
            return next((one for one in node["allOf"] if isinstance(one, Nothing)), None)
        return None

    def _prune_types(self, node: Node) -> Nothing | None:
        dead = {kind: _dead(kind, node, self._values) for kind in types_of(node)}
        alive = [kind for kind, cause in dead.items() if cause is None]
        if not alive:
            return next(cause for cause in dead.values() if cause is not None)
        if len(alive) < len(dead):
            node["type"] = alive
        return None

    def _prune_literals(self, node: Node) -> Nothing | None:
        values = literals(node)
        if values is None:
            return None
        keyword = "const" if "const" in node else "enum"
        rest = Node(node.path, {k: v for k, v in node.items() if k != keyword})
        valid = [v for v in values if self._values.admits(rest, v) is not False]
        if not valid:
            reason = "no value of it is valid here" if values else "it is empty"
            return Nothing(f"{node.path}.{keyword}", reason)
        if keyword == "enum":
            node["enum"] = valid
        return None


def _dead(kind: str, node: Node, values: Values) -> Nothing | None:
    """Why the keywords of the node itself leave no value of a type, or None."""
    if kind in ("integer", "number"):
        return _dead_number(node, kind == "integer")
    if kind == "string":
        return _crossed(node, "minLength", "maxLength")
    if kind == "array":
        return _dead_array(node)
    return _dead_object(node, values) if kind == "object" else None


def _crossed(node: Node, least: str, most: str) -> Nothing | None:
    if least in node and most in node and node[least] > node[most]:
        return Nothing(f"{node.path}.{least}", f"it is greater than {most}")
    return None


def _dead_number(node: Node, whole: bool) -> Nothing | None:
    lows = [k for k in ("minimum", "exclusiveMinimum") if k in node]
    highs = [k for k in ("maximum", "exclusiveMaximum") if k in node]
    if not lows or not highs:
        return None
    low, high = max(lows, key=node.__getitem__), min(highs, key=node.__getitem__)
    least, most = Fraction(str(node[low])), Fraction(str(node[high]))
    open_low = any(k == "exclusiveMinimum" and node[k] == node[low] for k in lows)
    open_high = any(k == "exclusiveMaximum" and node[k] == node[high] for k in highs)
    factor = Fraction(str(node["multipleOf"])) if "multipleOf" in node else None
    if whole:  # the whole numbers among the multiples of a fraction
        factor = Fraction(1 if factor is None else factor.numerator)
    if factor is None:
        empty = least > most or (least == most and (open_low or open_high))
    else:
        first = math.floor(least / factor) + 1 if open_low else math.ceil(least / factor)
        last = math.ceil(most / factor) - 1 if open_high else math.floor(most / factor)
        empty = first > last
    return Nothing(f"{node.path}.{low}", f"no number is between it and {high}") if empty else None


def _dead_array(node: Node) -> Nothing | None:
    crossed = _crossed(node, "minItems", "maxItems")
    if crossed is not None:
        return crossed
    least = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    for one in first[:least]:
        if isinstance(one, Nothing):
            return one
    others = node.get("items")
    return others if isinstance(others, Nothing) and least > len(first) else None


def _dead_object(node: Node, values: Values) -> Nothing | None:
    crossed = _crossed(node, "minProperties", "maxProperties")
    if crossed is not None:
        return crossed
    required = node.get("required", [])
    for name in required:
        schema = values.property(node, name)
        if isinstance(schema, Nothing):
            return schema
    if len(required) > node.get("maxProperties", len(required)):
        return Nothing(f"{node.path}.maxProperties", "more properties are required")
    if is_closed(node):
        names = [s for s in node.get("properties", {}).values() if isinstance(s, Node)]
        if len(names) < node.get("minProperties", 0):
            return Nothing(f"{node.path}.minProperties", "there are fewer properties")
    return None


def is_closed(node: Node) -> bool:
    """Whether an object has no properties but those that are listed."""
    patterns: Mapping[str, Any] = node.get("patternProperties", {})
    return isinstance(node.get("additionalProperties"), Nothing) and all(
        isinstance(schema, Nothing) for schema in patterns.values()
    )
