"""From a schema of any draft to one that llguidance enforces completely.

llguidance reads JSON schemas by itself. What is rewritten here it would refuse, or read otherwise
than JSON Schema does: patterns, dates, names with escapes, references, numbers beyond doubles, and
keywords that others can say. What cannot be enforced is refused with the path of its keyword. With
``strict`` False a keyword that only narrows is left out, and listed.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.schema.ecma import parse
from rayfin.deployments.guidance.schema.keywords import (
    APPLICATORS,
    DATES,
    DESCRIPTIONS,
    ELSEWHERE,
    FORMATS,
    REFUSED,
    REFUSED_FORMATS,
    REFUSED_REFERENCES,
    STRUCTURE,
    is_number,
    short,
)
from rayfin.deployments.guidance.schema.lint import check_literal, too_complex
from rayfin.deployments.guidance.schema.one_of import Disjoint
from rayfin.deployments.guidance.schema.pattern_parts import texts_of, write
from rayfin.deployments.guidance.schema.references import Pointer, References

Schema = dict[str, Any] | bool

NOTHING: dict[str, Any] = {"enum": []}
ANY_NAME = {"patternProperties": {"": True}, "additionalProperties": False}
"""Of an object: names in one form. llguidance would let ``"\\u0061"`` through beside ``"a"``."""

MAX_DEPENDENT = 4  # names of dependentRequired; each doubles what llguidance compiles
MAX_TEXTS = 64  # of a pattern of names that is written as these names
MAX_BOUND = (
    999_999_999_999_999_872  # the largest double of 18 digits, which llguidance can count to
)
MAX_COUNT = 2**32 - 1  # of characters, elements, properties
MIN_BOUND = 1e-18  # of a number greater than 0
MAX_FACTOR = 100_000  # in units of its last digit: an automaton has a state for each remainder
MAX_TENS = 10**8  # of a factor that is one digit and zeros, whose remainders are few

_COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_ITEMS = ("prefixItems", "items", "additionalItems")
_OBJECT = ("properties", "patternProperties", "additionalProperties", "required")
_SILENT = STRUCTURE | DESCRIPTIONS
_LATE = REFUSED | {"patternProperties", "minProperties", "maxProperties"}
"""They change what other keywords of the same schema have made, or depend on them."""


class Rewriter:
    """Rewrites a document and its definitions.

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
        self._handlers: dict[str, Callable[[dict[str, Any], str, Any, Pointer], None]] = {
            "type": self._plain,
            "const": self._literal,
            "enum": self._literal,
            "pattern": self._pattern,
            "format": self._format,
            "multipleOf": self._factor,
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._schema,
            "required": self._plain,
            "$ref": self._reference,
            **dict.fromkeys(_COUNTS, self._count),
            **dict.fromkeys(_BOUNDS, self._bound),
            **dict.fromkeys(_ITEMS, self._items),
            **dict.fromkeys(("allOf", "anyOf", "oneOf"), self._schemas),
        }
        self._definitions: dict[str, Schema] = {}
        self._waiting: list[str] = []  # names of definitions
        self._one_ofs: list[tuple[dict[str, Any], str]] = []  # schemas with oneOf, and their paths
        self._open: list[dict[str, Any]] = []  # objects that take names that are not listed
        self._factors: list[tuple[dict[str, Any], str]] = []  # schemas with one, and its path
        self._joins = False  # several schemas hold one value
        self._has_patterns = False
        self.unenforced: list[str] = []  # paths of keywords

    @property
    def plain_names(self) -> bool:
        """Whether names of properties cannot be written in two ways, with escapes or without."""
        return not (self._open and self._has_patterns)

    def rewrite(self) -> dict[str, Any]:
        """Returns the schema with the definitions that it needs; ``unenforced`` is complete."""
        for target in dict.fromkeys(self._references.targets.values()):
            self._names[target] = f"d{len(self._names)}"
        targets = {name: target for target, name in self._names.items()}
        root = self._node(())
        while self._waiting:  # a definition that is not reached holds nothing
            name = self._waiting.pop()
            if name not in self._definitions:
                self._definitions[name] = self._object(targets[name])
        self._hold_factors()
        disjoint = Disjoint(self._definitions)
        for schema, path in self._one_ofs:
            options = schema.pop("oneOf")
            if not disjoint.all_of(options, schema):
                self._drop(path, "options that share values")
            if "anyOf" in schema:
                also(schema, {"anyOf": options})
            else:
                schema["anyOf"] = options
        if self.plain_names:
            for schema in self._open:
                kinds = {"type": schema["type"]} if "type" in schema else {}
                also(schema, {**kinds, **ANY_NAME})
        whole = root if isinstance(root, dict) else {} if root else NOTHING
        return {**whole, "$defs": self._definitions} if self._definitions else whole

    def _drop(self, path: str, what: str) -> None:
        """Leaves a keyword out that cannot be enforced, or refuses it."""
        if self._strict:
            raise unsupported(path, what)
        self.unenforced.append(path)

    def _node(self, at: Pointer) -> Schema:
        if at in self._names and not isinstance(self._references.value(at), bool):
            return {"$ref": self._named(at)}
        return self._object(at)

    def _named(self, at: Pointer) -> str:
        self._waiting.append(self._names[at])
        return f"#/$defs/{self._names[at]}"

    def _object(self, at: Pointer) -> Schema:
        schema = self._references.value(at)
        path = self._references.path(at)
        if isinstance(schema, bool):
            return schema
        node: dict[str, Any] = {}
        self._joins = self._joins or _joins(schema)
        for keyword in _in_order(schema):
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
        listed = node.keys() & {"properties", "patternProperties"}
        if self._closed and listed:
            node.setdefault("additionalProperties", False)
        named = listed or schema.keys() & {"dependentRequired", "dependencies"}
        if named and node.get("additionalProperties") is not False:
            self._open.append(node)
        return node

    # Keywords that stand alone.

    def _plain(self, node: dict[str, Any], path: str, value: Any, at: Pointer) -> None:
        node[str(at[-1])] = value

    def _literal(self, node: dict[str, Any], path: str, value: Any, at: Pointer) -> None:
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
            also(node, {keyword: value})
        else:
            node[keyword] = value

    def _pattern(self, node: dict[str, Any], path: str, value: str, at: Pointer) -> None:
        text = self._written(path, value)
        if text is not None:
            node["pattern"] = text

    def _format(self, node: dict[str, Any], path: str, value: str, at: Pointer) -> None:
        if value in FORMATS:
            node["format"] = value
        elif value in DATES and "pattern" in self._references.value(at[:-1]):
            also(node, {"pattern": _pattern_of_format(value)})
        elif value in DATES:
            node["pattern"] = _pattern_of_format(value)
        elif value in REFUSED_FORMATS:
            self._drop(path, f"the format {value}")
        else:
            self.unenforced.append(path)

    def _count(self, node: dict[str, Any], path: str, value: float, at: Pointer) -> None:
        count, keyword = int(value), str(at[-1])
        if count > MAX_COUNT:
            raise too_complex(f"{path} must be at most {MAX_COUNT}, got {count}.", path)
        if keyword.endswith("Properties"):
            self._count_properties(node, keyword, path, count)
        else:
            node[keyword] = count

    def _count_properties(self, node: dict[str, Any], keyword: str, path: str, count: int) -> None:
        """Keeps a bound that llguidance can count to: it does not count optional properties."""
        required = set(node.get("required", ()))
        listed = node.get("properties", {})
        optional = [n for n, s in listed.items() if s is not False and n not in required]
        closed = node.get("additionalProperties") is False and "patternProperties" not in node
        if keyword == "minProperties" and count <= len(required):
            return
        if closed and keyword == "maxProperties" and count >= len(optional) + len(required):
            return
        if optional and not (closed and count - len(required) == 1):
            self._drop(path, "a count of properties that may be absent")
        else:
            node[keyword] = count

    def _bound(self, node: dict[str, Any], path: str, value: Any, at: Pointer) -> None:
        """Draft 4's booleans become numbers; bounds that cannot be counted to are tightened."""
        keyword, schema = str(at[-1]), self._references.value(at[:-1])
        if isinstance(value, bool):
            plain = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if not value or plain not in schema:
                return
            value = schema[plain]
        is_least = keyword in ("minimum", "exclusiveMinimum")
        if not _is_exact(value):
            value = _inner(value, is_least)
        if keyword.startswith("exclusive") and _is_passed(value, is_least, schema.get("type")):
            keyword = keyword.replace("exclusiveM", "m")
            value += _step_from(value) if is_least else -_step_from(value)
        if abs(value) > MAX_BOUND:
            if (value > 0) == is_least:
                raise unsupported(path, f"a bound of more than {MAX_BOUND}")
            keyword = keyword.replace("exclusiveM", "m")
            value = -MAX_BOUND if is_least else MAX_BOUND
        tighter = max if is_least else min
        node[keyword] = tighter(value, node.get(keyword, value))

    def _factor(self, node: dict[str, Any], path: str, value: float, at: Pointer) -> None:
        if _is_countable(value):
            node["multipleOf"] = value
            self._factors.append((node, path))
        else:
            self._drop(path, "a factor of many digits")

    def _hold_factors(self) -> None:
        """Leaves factors out that may hold one number: llguidance multiplies them in 32 bits."""
        factors = {Fraction(str(node["multipleOf"])) for node, _ in self._factors}
        unit = math.lcm(*(factor.denominator for factor in factors))
        counts = [int(factor * unit) for factor in factors]
        common = math.lcm(*counts)
        if not self._joins or len(factors) < 2:
            return
        if common * max(counts) < 2**32 and _is_small(common):
            return
        for node, path in self._factors:
            self._drop(path, "factors whose common multiple is large")
            del node["multipleOf"]

    def _reference(self, node: dict[str, Any], path: str, value: str, at: Pointer) -> None:
        target = self._references.targets[at[:-1]]
        if self._references.value(target) is False or self._is_endless(target):
            also(node, NOTHING)
        elif self._references.value(target) is not True:
            node["$ref"] = self._named(target)

    def _is_endless(self, target: Pointer) -> bool:
        """Whether references lead from a schema back to it, so that no value can be valid."""
        seen = set[Pointer]()
        while target in self._references.targets:
            if target in seen:
                return True
            seen.add(target)
            target = self._references.targets[target]
        return False

    # Keywords that hold schemas.

    def _schema(self, node: dict[str, Any], path: str, value: Any, at: Pointer) -> None:
        node[str(at[-1])] = self._node(at)

    def _schemas(self, node: dict[str, Any], path: str, value: list[Any], at: Pointer) -> None:
        given = [self._node((*at, i)) for i in range(len(value))]
        node[str(at[-1])] = [*given, *node.get(str(at[-1]), [])]
        if at[-1] == "oneOf":
            self._one_ofs.append((node, path))

    def _properties(
        self, node: dict[str, Any], path: str, value: Mapping[str, Any], at: Pointer
    ) -> None:
        for name in value:
            check_literal(name, path)
        node["properties"] = {name: self._node((*at, name)) for name in value}

    def _pattern_properties(
        self, node: dict[str, Any], path: str, value: Mapping[str, Any], at: Pointer
    ) -> None:
        for pattern in value:
            inner = f"{path}.{short(pattern)}"
            if not self._hold_names(node, inner, pattern, self._node((*at, pattern))):
                node["additionalProperties"] = True

    def _hold_names(self, node: dict[str, Any], path: str, pattern: str, schema: Schema) -> bool:
        """Holds the names of a pattern to a schema; returns False if it is left out.

        A pattern of few texts is written as these: llguidance takes it for names beyond those that
        are listed, of which it would find none amid an answer.
        """
        text = self._written(path, pattern)
        if text is None:
            return False
        names = texts_of(parse(pattern, path), MAX_TEXTS)
        if names is None:
            self._has_patterns = True
            node.setdefault("patternProperties", {})[text] = schema
            return True
        properties = node.setdefault("properties", {})
        for name in names:
            given = properties.get(name, True)
            properties[name] = schema if given is True else {"allOf": [given, schema]}
        return True

    def _items(self, node: dict[str, Any], path: str, value: Any, at: Pointer) -> None:
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

    def _refused(
        self, node: dict[str, Any], keyword: str, schema: Mapping[str, Any], at: Pointer
    ) -> None:
        value = schema[keyword]
        path = f"{self._references.path(at)}.{keyword}"
        if keyword in ("then", "else") and "if" not in schema:
            return
        if keyword == "if" and "then" not in schema and "else" not in schema:
            return
        if keyword in ("minContains", "maxContains") and "contains" not in schema:
            return
        if keyword == "uniqueItems" and not value:
            return
        if keyword.startswith("unevaluated"):
            done = self._unevaluated(node, keyword, schema, at)
        elif keyword == "propertyNames":
            done = self._property_names(node, schema, at)
        elif keyword == "dependentRequired" or (
            keyword == "dependencies"
            and all(isinstance(names, list | tuple) for names in value.values())
        ):
            done = _dependent_required(node, value)
        else:
            done = False
        if not done:
            self._drop(path, f"'{keyword}'")

    def _unevaluated(
        self, node: dict[str, Any], keyword: str, schema: Mapping[str, Any], at: Pointer
    ) -> bool:
        if schema[keyword] is True:
            return True
        if keyword == "unevaluatedItems" or (APPLICATORS | ELSEWHERE) & schema.keys():
            return False
        if "additionalProperties" not in schema:
            node["additionalProperties"] = self._node((*at, keyword))
        return True

    def _property_names(self, node: dict[str, Any], schema: Mapping[str, Any], at: Pointer) -> bool:
        """A pattern or a list of names: an object of no others holds as well."""
        at = (*at, "propertyNames")
        if _is_reference(self._references.value(at)):
            at = self._references.targets[at]
        names = self._references.value(at)
        if isinstance(names, bool) or "patternProperties" in schema:
            return names is True
        given = names.keys() - _SILENT - {"type"}
        if names.get("type", "string") != "string" or given - {"pattern", "enum", "const"}:
            return False
        for keyword in given:
            held: dict[str, Any] = {"type": "object"} if schema.get("type") == "object" else {}
            value = names[keyword]
            if keyword != "pattern":
                listed = [value] if keyword == "const" else value
                held["properties"] = {name: True for name in listed if isinstance(name, str)}
            elif not self._hold_names(held, self._references.path((*at, keyword)), value, True):
                continue
            also(node, {**held, "additionalProperties": False})
        return True

    def _written(self, path: str, pattern: str) -> str | None:
        """A pattern for llguidance; None if it is left out."""
        try:
            return write(parse(pattern, path))
        except InvalidRequest as e:
            if e.code != "unsupported_schema" or self._strict:
                raise
            self.unenforced.append(path)
            return None


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, Mapping) and list(schema) == ["$ref"]


def _dependent_required(node: dict[str, Any], dependent: Mapping[str, list[str]]) -> bool:
    """Each name is absent, or those that depend on it are there."""
    if len(dependent) > MAX_DEPENDENT:
        return False
    for name, needed in dependent.items():
        if needed:
            present = {"required": list(dict.fromkeys([name, *needed]))}
            also(node, {"anyOf": [{"properties": {name: False}}, present]})
    return True


@cache
def _pattern_of_format(name: str) -> str:
    return write(parse(DATES[name], f"format {name}"))


DATE_PATTERNS = frozenset(map(_pattern_of_format, DATES))
"""They compile at once, as the schemas of which ``closes_names`` is true."""


def closes_names(schema: Any) -> bool:
    """Whether a schema only has names of properties written in one form."""
    return isinstance(schema, dict) and {**schema, "type": 0} == {**ANY_NAME, "type": 0}


def unsupported(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be enforced: {what}.", path, "unsupported_schema")


def also(node: dict[str, Any], other: dict[str, Any]) -> None:
    """Holds a schema to another one as well."""
    node["allOf"] = [*node.get("allOf", ()), other]


def _in_order(schema: Mapping[str, Any]) -> list[str]:
    """The keywords in written order; those of objects and of arrays stand together.

    llguidance applies what stands between references and options at once.
    """
    place = {keyword: i for i, keyword in enumerate(schema)}
    for group in (_OBJECT, _ITEMS):
        first = min((place[k] for k in group if k in place), default=0)
        place.update({k: first for k in group if k in place})
    return sorted(schema, key=lambda keyword: (keyword in _LATE, place[keyword]))


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


def _joins(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema holds a value to several schemas, which llguidance makes one of."""
    if len(schema.get("allOf", ())) > 1 or schema.keys() >= {"properties", "patternProperties"}:
        return True
    return bool(schema.keys() & APPLICATORS) and len(schema.keys() - _SILENT) > 1


def _is_passed(bound: float, is_least: bool, kind: Any) -> bool:
    """Returns whether llguidance may let a bound itself through that is exclusive.

    It does so with whole ones that are nearer to 0 than another bound less than 1 away.
    """
    is_whole = abs(bound) < 10**14 and bound == int(bound)
    return kind != "integer" and is_whole and (bound >= 0 if is_least else bound <= 0)


def _step_from(bound: float) -> float:
    """To the next number of 15 digits, which llguidance reads exactly."""
    return float(10.0 ** (len(str(abs(int(bound)))) - 15)) if bound else MIN_BOUND


def _is_small(count: int) -> bool:
    """Returns whether an automaton can hold a number to multiples of a whole one."""
    return count <= MAX_FACTOR or (count <= MAX_TENS and len(str(count).rstrip("0")) == 1)


def _is_countable(factor: float) -> bool:
    """Whether llguidance reads a factor as this decimal, and holds numbers to it in time."""
    scaled, digits = float(factor), 0
    while scaled != int(scaled):
        scaled *= 10.0
        digits += 1
        if digits > 20:
            return False
    return _is_small(int(scaled)) and Fraction(str(factor)) == Fraction(int(scaled), 10**digits)
