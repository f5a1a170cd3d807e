"""From pruned nodes to the schema text that llguidance reads.

``oneOf`` becomes ``anyOf`` where the options share no value. Objects that take other properties get
a pattern for them: llguidance would let ``"\\u0061"`` through as another name than ``"a"``.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rayfin.deployments.guidance.patterns.ecma import parse
from rayfin.deployments.guidance.patterns.overlap import Pattern
from rayfin.deployments.guidance.patterns.parts import starts_anywhere, write
from rayfin.deployments.guidance.schema.keywords import DATES
from rayfin.deployments.guidance.schema.lint import MAX_UNANCHORED, too_complex
from rayfin.deployments.guidance.schema.nodes import Node, Nothing, Schema, types_of
from rayfin.deployments.guidance.schema.prune import is_closed
from rayfin.deployments.guidance.schema.rewrite import schemas_in
from rayfin.deployments.guidance.schema.values import Values

MAX_STEPS = 20_000

_OBJECT = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
)
_ANY_NAME = {"patternProperties": {"": True}, "additionalProperties": False}
_ARRAY = ("prefixItems", "items", "minItems", "maxItems")


class Emitter:
    """Writes the nodes of one document.

    Args:
        definitions: pruned, by name.
        patterns: by their text for llguidance.
        drop: leaves a keyword out by its path, or raises InvalidRequest.
    """

    def __init__(
        self,
        definitions: Mapping[str, Schema],
        patterns: Mapping[str, Pattern],
        drop: Callable[[str, str], None],
    ) -> None:
        self._definitions = definitions
        self._patterns = patterns
        self._values = Values(definitions, patterns)
        self._drop = drop
        self._has_patterns = False
        self.plain_names = True  # names of properties cannot be written in two ways

    def emit(self, root: Node) -> dict[str, Any]:
        """Returns the schema, with the definitions that it needs."""
        needed = self._needed(root)
        nodes = [root, *needed.values()]
        self._has_patterns = any(_has_patterns(node) for node in nodes)
        self._check_patterns(nodes)
        written: dict[str, Any] = self._write(root)
        if needed:
            written["$defs"] = {name: self._write(node) for name, node in needed.items()}
        return written

    def _needed(self, root: Node) -> dict[str, Node]:
        needed: dict[str, Node] = {}
        waiting: list[Schema] = [root]
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, Nothing):
                continue
            waiting += schemas_in(schema)
            name = schema.get("$ref")
            if name is not None and name not in needed:
                node = self._definitions[name]
                assert isinstance(node, Node)
                needed[name] = node
                waiting.append(node)
        return needed

    def _write(self, schema: Schema) -> Any:
        if isinstance(schema, Nothing):
            return False
        node = Node(schema.path, schema)
        also: list[Any] = []
        if "object" in types_of(node):
            self._count_properties(node)
            also += self._close_names(node)
        if "oneOf" in node:
            options = {"anyOf": [self._write(one) for one in self._one_of(node)]}
            if "anyOf" in node:
                also.append(options)
            else:
                node = Node(node.path, {"anyOf" if k == "oneOf" else k: v for k, v in node.items()})
                node["anyOf"] = options["anyOf"]
                return self._write_keywords(node, also, written=("anyOf",))
        return self._write_keywords(node, also)

    def _write_keywords(
        self, node: Node, also: list[Any], written: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        text: dict[str, Any] = {}
        for keyword in _in_order(node):
            value = node[keyword]
            if keyword in ("properties", "patternProperties"):
                text[keyword] = {name: self._write(inner) for name, inner in value.items()}
            elif keyword in ("additionalProperties", "items"):
                text[keyword] = self._write(value)
            elif keyword in ("allOf", "anyOf", "prefixItems") and keyword not in written:
                text[keyword] = [self._write(inner) for inner in value]
            elif keyword == "$ref":
                text[keyword] = f"#/$defs/{value}"
            elif keyword == "type":
                text[keyword] = value[0] if len(value) == 1 else value
            elif keyword != "oneOf":
                text[keyword] = value
        if also:
            text["allOf"] = [*text.pop("allOf", ()), *also]
        return text

    def _one_of(self, node: Node) -> list[Schema]:
        options: list[Schema] = node["oneOf"]
        beside = Node(node.path, {k: v for k, v in node.items() if k not in ("anyOf", "oneOf")})
        if not self._values.all_disjoint(options, beside):
            self._drop(f"{node.path}.oneOf", "options that share values")
        return options

    def _close_names(self, node: Node) -> list[Any]:
        others = node.get("additionalProperties", Node(node.path))
        if isinstance(others, Nothing) or not (
            node.get("properties") or node.get("patternProperties")
        ):
            return []
        if self._has_patterns:  # llguidance has no pattern for all other names
            self.plain_names = False
            return []
        return [{"type": node["type"], **_ANY_NAME} if "type" in node else dict(_ANY_NAME)]

    def _count_properties(self, node: Node) -> None:
        """Makes the bounds such that llguidance can count: no optional property beside them."""
        properties: dict[str, Schema] = node.get("properties", {})
        required: list[str] = node.get("required", [])
        listed = [name for name, schema in properties.items() if isinstance(schema, Node)]
        optional = [name for name in listed if name not in required]
        closed = is_closed(node)
        if node.get("minProperties", 0) <= len(required):
            node.pop("minProperties", None)
        if "maxProperties" in node:
            if closed and node["maxProperties"] >= len(optional) + len(required):
                del node["maxProperties"]
            elif node["maxProperties"] == len(required):
                nothing = Nothing(f"{node.path}.maxProperties", "others are required")
                node["properties"] = {
                    name: self._values.property(node, name) if name in required else nothing
                    for name in dict.fromkeys([*properties, *required])
                }
                node.pop("patternProperties", None)
                node["additionalProperties"] = nothing
                del node["maxProperties"]
                optional = []
        if closed and node.get("minProperties") == len(optional) + len(required):
            node["required"] = [*listed, *(name for name in required if name not in listed)]
            del node["minProperties"]
            optional = []
        bounds = [k for k in ("minProperties", "maxProperties") if k in node]
        if not optional or not bounds:
            return
        least = node.get("minProperties", 0) - len(required)
        most = node.get("maxProperties", len(required) + 1) - len(required)
        if not closed or "patternProperties" in node or least > 1 or most != 1:
            for bound in bounds:
                self._drop(f"{node.path}.{bound}", "a count of properties that may be absent")
                del node[bound]

    def _check_patterns(self, nodes: list[Node]) -> None:
        """Patterns without ``^`` multiply where several of them hold one string."""
        open_patterns = {
            text for text, pattern in self._patterns.items() if starts_anywhere(pattern.part)
        }
        if len(open_patterns) > MAX_UNANCHORED:
            counts = _OpenPatterns(self._definitions, open_patterns)
            for node in nodes:
                if max(counts.of(node).values(), default=0) > MAX_UNANCHORED:
                    raise too_complex(
                        f"{node.path} holds a string to more than {MAX_UNANCHORED} patterns "
                        "without '^'.",
                        node.path,
                    )


DATE_PATTERNS = frozenset(write(parse(text, name)) for name, text in DATES.items())
"""They compile at once, as the schemas of which ``closes_names`` is true."""


def closes_names(schema: Any) -> bool:
    """Whether a schema only has names of properties written in one form."""
    return isinstance(schema, dict) and {**schema, "type": 0} == {**_ANY_NAME, "type": 0}


class _OpenPatterns:
    """Counts the patterns that hold one string, by the string's place in the value."""

    def __init__(self, definitions: Mapping[str, Schema], patterns: set[str]) -> None:
        self._definitions = definitions
        self._patterns = patterns
        self._steps = 0

    def of(self, schema: Schema, depth: int = 0) -> Counter[tuple[str, ...]]:
        counts: Counter[tuple[str, ...]] = Counter()
        if isinstance(schema, Nothing) or depth > 32:
            return counts
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise too_complex(f"{schema.path} combines too many patterns.", schema.path)
        if schema.get("pattern") in self._patterns:
            counts[()] += 1
        inside = [*schema.get("properties", {}).items()]
        inside += [("*", s) for s in schema.get("patternProperties", {}).values()]
        inside += [("*", schema[k]) for k in ("additionalProperties", "items") if k in schema]
        inside += [(str(i), s) for i, s in enumerate(schema.get("prefixItems", ()))]
        for name, inner in inside:
            if isinstance(inner, Node) and "$ref" not in inner:
                for place, count in self.of(inner, depth + 1).items():
                    counts[(name, *place)] = max(counts[(name, *place)], count)
        both = list(schema.get("allOf", ()))
        if "$ref" in schema:
            both.append(self._definitions[schema["$ref"]])
        for one in both:
            counts += self.of(one, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            most: Counter[tuple[str, ...]] = Counter()
            for one in schema.get(keyword, ()):
                most |= self.of(one, depth + 1)
            counts += most
        return counts


def _in_order(node: Node) -> list[str]:
    """The keywords in written order; those of objects and of arrays stand together.

    llguidance applies what stands between references and options at once.
    """
    order: dict[str, None] = {}
    for keyword in node:
        group = next((g for g in (_OBJECT, _ARRAY) if keyword in g), (keyword,))
        first = group[0]
        if keyword == first or first not in node:
            order.update(dict.fromkeys(k for k in group if k in node))
        elif keyword not in group:
            order[keyword] = None
    return list(order)


def _has_patterns(node: Node) -> bool:
    waiting: list[Schema] = [node]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, Node):
            if schema.get("patternProperties"):
                return True
            waiting += schemas_in(schema)
    return False
