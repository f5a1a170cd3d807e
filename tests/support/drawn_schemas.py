"""Schemas as people send them, drawn by a seed, each with valid and invalid values.

They have the habits of those who write schemas: classes of Python with ``$defs`` and
``anyOf`` null, closed objects of TypeScript, configuration files with patterns of names, API
descriptions with formats and ranges. Whether a value is valid is jsonschema's to say; most of
``Drawn.values`` are meant to be, and the changed ones mostly are not.
"""

import copy
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

Draw = random.Random
Style = Literal["python", "typescript", "config", "api"]

THINGS = (
    "order invoice parcel booking recipe flight guest room ticket sensor device vehicle branch "
    "lesson student author chapter album track venue match player team budget claim permit survey"
).split()
FIELDS = (
    "title label note summary city country street owner sender receiver colour size weight height "
    "width price total tax discount rating priority stage status channel currency language region "
    "quantity stock count page limit offset floor seat gate code reference serial batch version "
    "source target unit notes tags steps lines parts items options active archived public verified"
).split()
WORDS = "amber birch cedar delta ember fjord grove harbour inlet juniper kelp larch meadow".split()
STATES = "draft open paid sent late done failed paused queued closed".split()
TITLES = ("Number of pages", "As it is on the label.", 'ISO code; e.g. "NO"', "Größe in cm")


class Node(NamedTuple):
    """A schema, and what draws a value that it is meant to take."""

    schema: dict[str, Any]
    sample: Callable[[Draw], Any]


@dataclass(frozen=True)
class Drawn:
    """A schema with values for it."""

    seed: int
    style: Style
    schema: dict[str, Any]
    values: list[Any]


def drawn(seed: int, values: int = 3, changed: int = 5) -> Drawn:
    """Draws a schema, values for it, and values of these with a change each."""
    draw = Draw(seed)
    writer = _Writer(draw)
    root = writer.root()
    samples = [root.sample(draw) for _ in range(values)]
    changes = [_changed(draw, copy.deepcopy(draw.choice(samples))) for _ in range(changed)]
    return Drawn(seed, writer.style, root.schema, samples + changes)


class _Writer:
    """Writes one schema, in one style."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.style: Style = draw.choice(("python", "typescript", "config", "api"))
        self._definitions: dict[str, Node] = {}
        self._open: list[str] = []  # definitions that are being written
        self._hard = draw.random() < 0.1  # one keyword that is hard to enforce
        self._place = "$defs" if self.style in ("python", "config") else "definitions"

    def root(self) -> Node:
        node = self._object(3)
        schema = dict(node.schema)
        if self.style == "typescript":
            schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
        elif self.style == "config" and self._draw.random() < 0.5:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        if self._definitions:
            schema[self._place] = {name: own.schema for name, own in self._definitions.items()}
        return Node(schema, node.sample)

    def _chance(self, share: float) -> bool:
        return self._draw.random() < share

    def _names(self, count: int) -> list[str]:
        names = self._draw.sample(FIELDS, count)
        if self.style in ("typescript", "api"):
            return [
                f"{a}{b.title()}" if i % 3 == 1 else a for i, (a, b) in enumerate(_pairs(names))
            ]
        if self.style == "config":
            return [f"{a}-{b}" if i % 3 == 1 else a for i, (a, b) in enumerate(_pairs(names))]
        return [f"{a}_{b}" if i % 3 == 1 else a for i, (a, b) in enumerate(_pairs(names))]

    # Values that hold others.

    def _any(self, depth: int) -> Node:
        kinds: list[tuple[float, Callable[[], Node]]] = [
            (6, self._leaf),
            (1.2, self._nullable),
        ]
        if depth > 0:
            kinds += [
                (2, lambda: self._list(depth - 1)),
                (1.5, lambda: self._object(depth - 1)),
                (1.2, lambda: self._reference(depth - 1)),
                (0.6, lambda: self._map(depth - 1)),
                (0.8, lambda: self._union(depth - 1)),
                (0.5, lambda: self._kinds(depth - 1)),
                (0.4, self._tuple),
                (0.4, lambda: self._all_of(depth - 1)),
                (0.3, self._named_by_pattern),
                (0.3, self._tree),
            ]
        weights, writers = zip(*kinds, strict=True)
        (write,) = self._draw.choices(writers, weights)
        return self._described(write())

    def _described(self, node: Node) -> Node:
        schema = dict(node.schema)
        if "$ref" in schema:
            return node
        if self.style == "python" and self._chance(0.7):
            schema["title"] = self._draw.choice(FIELDS).title()
        elif self._chance(0.3):
            schema["description"] = self._draw.choice(TITLES)
        return Node(schema, node.sample)

    def _object(self, depth: int) -> Node:
        names = self._names(self._draw.randint(1, 7 if depth else 4))
        members = {name: self._any(depth) for name in names}
        closed = self.style == "typescript" or self._chance(0.3)
        required = (
            names
            if closed and self._chance(0.5)
            else self._draw.sample(names, self._draw.randint(0, len(names)))
        )
        required = [name for name in names if name in required]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: member.schema for name, member in members.items()},
        }
        if required or self._chance(0.3):
            schema["required"] = required
        if closed:
            schema["additionalProperties"] = False
        elif self._chance(0.1):
            schema["additionalProperties"] = {"type": "string"}
        if self._hard:
            self._hard = False
            schema |= self._hard_keyword(names)

        def sample(draw: Draw) -> Any:
            return {
                name: member.sample(draw)
                for name, member in members.items()
                if name in required or draw.random() < 0.6
            }

        return Node(schema, sample)

    def _hard_keyword(self, names: Sequence[str]) -> dict[str, Any]:
        first, last = names[0], names[-1]
        hard: list[dict[str, Any]] = [
            {"dependentRequired": {first: [last]}},
            {"if": {"required": [first]}, "then": {"required": [last]}},
            {"not": {"required": [first, last]}},
            {"minProperties": 1},
            {"propertyNames": {"pattern": "^[a-zA-Z_-]+$"}},
            {"anyOf": [{"required": [first]}, {"required": [last]}]},
            {"unevaluatedProperties": False},
        ]
        return self._draw.choice(hard)

    def _list(self, depth: int) -> Node:
        inner = self._any(depth)
        least = self._draw.choice([0, 0, 0, 1, 2])
        most = least + self._draw.randint(1, 4)
        schema: dict[str, Any] = {"type": "array", "items": inner.schema}
        if least:
            schema["minItems"] = least
        if self._chance(0.4):
            schema["maxItems"] = most
        if self._chance(0.04):
            schema["uniqueItems"] = True
        return Node(schema, lambda d: [inner.sample(d) for _ in range(d.randint(least, most))])

    def _tuple(self) -> Node:
        parts = [self._leaf() for _ in range(self._draw.randint(2, 3))]
        schemas = [part.schema for part in parts]
        size = len(parts)
        schema: dict[str, Any]
        if self.style == "typescript":
            schema = {"items": schemas, "additionalItems": False}
        else:
            schema = {"prefixItems": schemas, "items": False}
        schema = {"type": "array", **schema, "minItems": size, "maxItems": size}
        return Node(schema, lambda d: [part.sample(d) for part in parts])

    def _map(self, depth: int) -> Node:
        inner = self._any(depth)
        schema: dict[str, Any] = {"type": "object", "additionalProperties": inner.schema}
        if self._chance(0.2):
            schema["maxProperties"] = 4
        if self._chance(0.2):
            schema["propertyNames"] = {"pattern": "^[a-z]+$"}
        return Node(
            schema,
            lambda d: {word: inner.sample(d) for word in d.sample(WORDS, d.randint(0, 3))},
        )

    def _named_by_pattern(self) -> Node:
        text, number = self._leaf(), self._leaf()
        schema = {
            "type": "object",
            "patternProperties": {"^x-": text.schema, "^[0-9]+$": number.schema},
            "additionalProperties": False,
        }

        def sample(draw: Draw) -> Any:
            named = {f"x-{word}": text.sample(draw) for word in draw.sample(WORDS, 2)}
            return named | {str(draw.randint(0, 99)): number.sample(draw)}

        return Node(schema, sample)

    def _nullable(self) -> Node:
        inner = self._leaf()
        null: dict[str, Any] = {"type": "null"}
        kind = inner.schema.get("type")
        if self.style == "python" or not isinstance(kind, str) or "enum" in inner.schema:
            schema: dict[str, Any] = {"anyOf": [inner.schema, null], "default": None}
        else:
            schema = {**inner.schema, "type": [kind, "null"]}
        return Node(schema, lambda d: None if d.random() < 0.3 else inner.sample(d))

    def _union(self, depth: int) -> Node:
        text = Node({"type": "string", "maxLength": 12}, lambda d: d.choice(WORDS))
        number = Node({"type": "integer"}, lambda d: d.randint(-9, 9999))
        parts = self._draw.sample([text, number, self._list(depth), self._object(depth)], 2)
        schema = {"anyOf": [part.schema for part in parts]}
        return Node(schema, lambda d: d.choice(parts).sample(d))

    def _kinds(self, depth: int) -> Node:
        """Objects that a field tells apart."""
        field = self._draw.choice(("kind", "type", "shape"))
        one_of = self._chance(0.6)
        parts = []
        for word in self._draw.sample(WORDS, self._draw.randint(2, 3)):
            inner = self._object(depth)
            says = {"const": word} if self._chance(0.6) else {"type": "string", "enum": [word]}
            properties = {field: says, **inner.schema["properties"]}
            required = [field, *inner.schema.get("required", [])]
            schema = {**inner.schema, "properties": properties, "required": required}
            parts.append(Node(schema, partial(_with, field, word, inner)))
        name = "oneOf" if one_of else "anyOf"
        return Node({name: [p.schema for p in parts]}, lambda d: d.choice(parts).sample(d))

    def _reference(self, depth: int) -> Node:
        name = self._draw.choice(THINGS).title()
        if name not in self._definitions and name not in self._open:
            self._open.append(name)
            self._definitions[name] = self._object(depth)
            self._open.remove(name)
        if name in self._open:
            return self._leaf()
        target = self._definitions[name]
        return Node({"$ref": f"#/{self._place}/{name}"}, target.sample)

    def _tree(self) -> Node:
        name = f"{self._draw.choice(THINGS).title()}Tree"
        field, leaf = self._draw.choice(("children", "replies", "parts")), self._leaf()
        reference = {"$ref": f"#/{self._place}/{name}"}
        schema = {
            "type": "object",
            "properties": {"value": leaf.schema, field: {"type": "array", "items": reference}},
            "required": ["value"],
            "additionalProperties": False,
        }

        def sample(draw: Draw, depth: int = 2) -> Any:
            value: dict[str, Any] = {"value": leaf.sample(draw)}
            if depth and draw.random() < 0.6:
                value[field] = [sample(draw, depth - 1) for _ in range(draw.randint(0, 2))]
            return value

        self._definitions[name] = Node(schema, sample)
        return Node(reference, sample)

    def _all_of(self, depth: int) -> Node:
        """A definition with further fields."""
        base = self._object(depth)
        if "additionalProperties" in base.schema:
            base = Node(
                {k: v for k, v in base.schema.items() if k != "additionalProperties"}, base[1]
            )
        name = f"Base{len(self._definitions)}"
        self._definitions[name] = base
        own = self._leaf()
        more = {"type": "object", "properties": {"extra": own.schema}, "required": ["extra"]}
        schema = {"allOf": [{"$ref": f"#/{self._place}/{name}"}, more]}

        def sample(draw: Draw) -> Any:
            return {**base.sample(draw), "extra": own.sample(draw)}

        return Node(schema, sample)

    # Values that hold none.

    def _leaf(self) -> Node:
        writers: list[tuple[float, Callable[[], Node]]] = [
            (4, self._text),
            (2.5, self._integer),
            (1.5, self._number),
            (1.5, self._boolean),
            (2, self._enum),
            (1, self._formatted),
            (1, self._patterned),
            (0.3, self._constant),
            (0.2, self._free),
        ]
        weights, kinds = zip(*writers, strict=True)
        (write,) = self._draw.choices(kinds, weights)
        made: Node = write()
        return made

    def _text(self) -> Node:
        schema: dict[str, Any] = {"type": "string"}
        least, most = 0, 40
        if self._chance(0.25):
            least = schema["minLength"] = 1
        if self._chance(0.25):
            most = schema["maxLength"] = self._draw.choice((5, 20, 80, 255))

        def sample(draw: Draw) -> Any:
            words = " ".join(draw.choices([*WORDS, "é", '"q"', "\\n\n", "日本"], k=4))
            return words[: draw.randint(least, most)]

        return Node(schema, sample)

    def _integer(self) -> Node:
        low, high = sorted(self._draw.choice((-100, 0, 1, 5, 10, 365, 9999, 65535)) for _ in "ab")
        schema: dict[str, Any] = {"type": "integer"}
        if self.style == "api" and self._chance(0.4):
            schema["format"] = "int32"
        step = 1
        if self._chance(0.5):
            schema["minimum"] = low
        if self._chance(0.4):
            schema["maximum"] = high
        if self._chance(0.08) and low <= 0 and high >= 10:
            step = schema["multipleOf"] = 5
        return Node(schema, lambda d: d.randint(-(-low // step), high // step) * step)

    def _number(self) -> Node:
        schema: dict[str, Any] = {"type": "number"}
        low, high = -50.0, 5000.0
        if self._chance(0.4):
            low = schema["minimum"] = self._draw.choice((0, 0.5, -12.25))
        elif self._chance(0.2):
            schema["exclusiveMinimum"] = 0
            low = 0.01
        if self._chance(0.3):
            high = schema["maximum"] = self._draw.choice((1, 99.5, 100))
        return Node(schema, lambda d: round(d.uniform(low + 0.01, high - 0.01), d.randint(1, 2)))

    def _boolean(self) -> Node:
        return Node({"type": "boolean"}, lambda d: d.random() < 0.5)

    def _enum(self) -> Node:
        values: list[Any] = self._draw.sample(STATES, self._draw.randint(2, 6))
        schema: dict[str, Any] = {"type": "string", "enum": values}
        if self._chance(0.15):
            values = self._draw.sample([1, 2, 3, 5, 8, 13], 3)
            schema = {"enum": values}
        return Node(schema, lambda d: d.choice(values))

    def _constant(self) -> Node:
        value = self._draw.choice([*WORDS, 1, 2.5, True, None])
        return Node({"const": value}, lambda d: value)

    def _free(self) -> Node:
        schema: dict[str, Any] = self._draw.choice([{}, {"type": "object"}, {"type": "array"}])
        empty: dict[str, Any] = {"object": {"a": [1, None]}, "array": [1, "b"]}
        return Node(schema, lambda d: empty.get(schema.get("type", ""), d.choice(WORDS)))

    def _formatted(self) -> Node:
        name = self._draw.choice(tuple(FORMATS))
        return Node({"type": "string", "format": name}, FORMATS[name])

    def _patterned(self) -> Node:
        pattern = self._draw.choice(tuple(PATTERNS))
        schema: dict[str, Any] = {"type": "string", "pattern": pattern}
        return Node(schema, PATTERNS[pattern])


def _with(field: str, word: str, inner: Node, draw: Draw) -> Any:
    return {field: word, **inner.sample(draw)}


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(names, [*names[1:], "id"], strict=True))


def _letters(draw: Draw, count: int, alphabet: str) -> str:
    return "".join(draw.choices(alphabet, k=count))


def _digits(draw: Draw, count: int) -> str:
    return _letters(draw, count, string.digits)


def _date(draw: Draw) -> str:
    return f"{draw.randint(1950, 2049)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"


FORMATS: dict[str, Callable[[Draw], str]] = {
    "date": _date,
    "date-time": lambda d: f"{_date(d)}T{d.randint(0, 23):02}:{d.randint(0, 59):02}:07Z",
    "email": lambda d: f"{d.choice(WORDS)}@{d.choice(WORDS)}.example",
    "uri": lambda d: f"https://{d.choice(WORDS)}.example/{d.choice(WORDS)}?n={d.randint(1, 9)}",
    "uuid": lambda d: "-".join(_letters(d, n, "0123456789abcdef") for n in (8, 4, 4, 4, 12)),
    "ipv4": lambda d: ".".join(str(d.randint(0, 255)) for _ in range(4)),
}
PATTERNS: dict[str, Callable[[Draw], str]] = {
    "^[A-Z]{2,3}$": lambda d: _letters(d, d.randint(2, 3), string.ascii_uppercase),
    r"^\d{5}(-\d{4})?$": lambda d: _digits(d, 5) + d.choice(["", f"-{_digits(d, 4)}"]),
    r"^v?\d+\.\d+\.\d+$": lambda d: f"{d.choice(['', 'v'])}{d.randint(0, 9)}.{d.randint(0, 30)}.0",
    "^[a-z][a-z0-9-]*$": lambda d: f"{d.choice(WORDS)}-{d.randint(1, 9)}",
    r"^\+?[0-9 ()-]{7,20}$": lambda d: f"+{_digits(d, 2)} ({_digits(d, 3)}) {_digits(d, 6)}",
    "^#[0-9a-fA-F]{6}$": lambda d: f"#{_letters(d, 6, '0123456789abcdefABCDEF')}",
    "^(low|medium|high)$": lambda d: d.choice(["low", "medium", "high"]),
    r"^\S+$": lambda d: d.choice(WORDS),
    r"^[A-Z0-9]{3}-\d{4}$": lambda d: f"{_letters(d, 3, 'ABC123')}-{_digits(d, 4)}",
    r"\.(png|jpe?g)$": lambda d: f"{d.choice(WORDS)}.{d.choice(['png', 'jpg', 'jpeg'])}",
    "^.{1,8}$": lambda d: _letters(d, d.randint(1, 8), "abé日 "),
}
OTHERS: list[Any] = [None, True, 0, -1, 10**6, 0.125, "", "x" * 300, "?", [], {}, ["a"], {"a": 1}]


def _changed(draw: Draw, value: Any) -> Any:
    """The value with a member more, less or other somewhere inside."""
    inside = [own for own in _containers(value) if own]
    place = draw.choice(inside or [value])
    change = draw.choice(("other", "other", "less", "more"))
    if isinstance(place, dict) and place:
        key = draw.choice(list(place))
        if change == "less":
            del place[key]
        elif change == "more":
            place["zzz"] = draw.choice(OTHERS)
        else:
            place[key] = _other(draw, place[key])
    elif isinstance(place, list) and place:
        at = draw.randrange(len(place))
        if change == "less":
            del place[at]
        elif change == "more":
            place.append(draw.choice([*OTHERS, place[at]]))
        else:
            place[at] = _other(draw, place[at])
    else:
        return draw.choice(OTHERS)
    return value


def _other(draw: Draw, value: Any) -> Any:
    """A value near this one, or any."""
    if draw.random() < 0.5:
        if isinstance(value, str) and value:
            at = draw.randrange(len(value))
            return value[:at] + draw.choice(["", "0", "Z", " ", "~", value]) + value[at + 1 :]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return draw.choice([-value, value + 0.5, value * 1000, -1, str(value)])
    return draw.choice(OTHERS)


def _containers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value, *(own for item in value.values() for own in _containers(item))]
    if isinstance(value, list):
        return [value, *(own for item in value for own in _containers(item))]
    return []
