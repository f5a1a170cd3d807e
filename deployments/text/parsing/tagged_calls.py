"""Calls whose arguments stand between tags."""

import json
from collections.abc import Mapping
from typing import Any

from rayfin.deployments.text.parsing.events import EventWriter
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.json_text import check_json, escape
from rayfin.deployments.text.parsing.marks import JSON_UNSAFE, MAX_HELD, Feed, Markers, Steps
from rayfin.deployments.text.parsing.python_calls import ValueReader, python_dialect

MAX_NAME = 256
"""Characters of a parameter's name."""

AROUND_A_NAME = 16
"""Characters beside a function's name: ``functions.``, and blanks."""

ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_BY_FIRST = {
    '"': "string",
    "{": "object",
    "[": "array",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
_MAX_REFERENCES = 16


class TaggedCalls:
    """Reads calls of one tagged format, behind the mark that begins them."""

    def __init__(self, feed: Feed, writer: EventWriter, row: ToolFormat) -> None:
        self._feed = feed
        self._writer = writer
        self._row = row
        marks = feed.markers.marks
        stripped = [text.strip() for text in (*row.key, *row.value, *row.arguments)]
        self._key, key_end, value_open, self._close, _, body_end = stripped
        ends = [mark for mark in (body_end, *row.ends, *row.begins) if mark]
        name_end = row.function[1].strip()
        self._name_open = marks(row.function[0].strip())
        # A name that has no end is text, and another call may follow it.
        self._name_ends = marks(
            *([name_end, *row.begins] if name_end else ["\n", self._key, *ends])
        )
        self._longest_name = max(map(len, writer.functions), default=0) + AROUND_A_NAME
        self._next = marks(self._key, body_end)
        self._stop = marks(*ends)
        self._json_ends = {end.strip() for end in row.json_key_ends.values()}
        self._key_ends = marks(key_end, *sorted(self._json_ends))
        self._value_open = marks(value_open)
        self._value_end = marks(self._close)

    def read(self, mark: str) -> Steps[bool]:
        """Reads one call behind ``mark``; returns False where it breaks off."""
        feed, writer = self._feed, self._writer
        opening = self._row.function[0].strip()
        if mark != opening:
            yield from feed.skip()
            if opening and not (yield from feed.match(self._name_open)):
                return False
        yield from feed.skip()
        text = yield from feed.until(self._name_ends, self._longest_name)
        written = feed.markers.decode(text or "")
        if self._row.id_mark:
            written = written.partition(self._row.id_mark)[0]
        name = None if text is None else writer.find(written.strip())
        if name is None:
            return False
        if name_end := self._row.function[1].strip():
            if (yield from feed.sees(self._name_ends)) != name_end:
                return False
            yield from feed.match(self._name_ends)
        return (yield from self._read_parameters(name))

    def _read_parameters(self, name: str) -> Steps[bool]:
        feed, writer = self._feed, self._writer
        first = True
        while True:
            yield from feed.skip()
            mark = yield from feed.match(self._next)
            if not mark and not (yield from feed.sees(self._stop)):
                yield from feed.match(self._stop)  # one within which the answer is cut
                return False
            if mark != self._key:
                break
            if first:
                writer.begin(name)
                feed.forget()
            if not (yield from self._read_parameter(name, "{" if first else ", ")):
                return False
            first = False
            feed.record()
        if first:
            writer.begin(name)
        writer.arguments("{}" if first else "}")
        writer.end()
        feed.record()
        return True

    def _read_parameter(self, name: str, before: str) -> Steps[bool]:
        feed, writer, row = self._feed, self._writer, self._row
        feed.record()
        text = yield from feed.until(self._key_ends, MAX_NAME)
        if text is None:
            return False
        key = row.read_key(feed.markers.decode(text).strip())
        ending = yield from feed.match(self._key_ends)
        if row.value[0].strip():
            yield from feed.skip()
            if not (yield from feed.match(self._value_open)):
                return False
        feed.forget()
        writer.arguments(f'{before}"{escape(key)}": ')
        if row.edges[0] and (yield from feed.peek()) == "\n":
            feed.take(feed.pos + 1)
        types = types_of_parameter(writer.functions[name], key)
        is_text = types == {"string"}
        if row.json_key_end:
            is_text = ending not in self._json_ends
        return (yield from (self._read_text() if is_text else self._read_json(types)))

    def _read_text(self) -> Steps[bool]:
        """Emits a string as it comes, up to its closing tag."""
        feed, writer = self._feed, self._writer
        edge = self._row.edges[1]
        direct = self._value_end.safe_text(JSON_UNSAFE).direct("arguments", writer.calls - 1)
        writer.arguments('"')
        while True:
            match = self._value_end.find(feed.text, feed.pos, feed.ended)
            end = match.start
            if edge and feed.text.endswith(edge, feed.pos, end) and (match.mark or not feed.ended):
                end -= 1  # it goes if the tag follows
            writer.arguments(escape(feed.markers.decode(feed.take(end))))
            if match.mark:
                feed.take(match.end)
                writer.arguments('"')
                return True
            if feed.ended:
                return False
            if feed.pos == len(feed.text):
                feed.direct = direct
            yield

    def _read_json(self, types: frozenset[str]) -> Steps[bool]:
        """Holds a value to its closing tag, and emits it."""
        self._feed.record()
        text = yield from self._feed.until(self._value_end, MAX_HELD)
        if text is None:
            return False
        yield from self._feed.match(self._value_end)
        self._feed.forget()
        text = self._feed.markers.decode(text).removesuffix(self._row.edges[1])
        self._writer.arguments(to_json(text, types))
        return True


def to_json(text: str, types: frozenset[str]) -> str:
    """Returns a value that stood between tags as JSON, of one of these types where it can be."""
    as_written = check_json(text)
    if as_written is not None and _fits(as_written, types):
        return as_written
    if "string" not in types:
        literal = _read_literal(text)
        if literal is not None and _fits(literal, types):
            return literal
    return json.dumps(text, ensure_ascii=False)


def types_of_parameter(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Returns the JSON types that a function's parameter may have; all if the schema is silent."""
    target = resolve(schema, schema)
    properties = target.get("properties") if isinstance(target, Mapping) else None
    if isinstance(properties, Mapping) and key in properties:
        return types_of(properties[key], schema)
    if isinstance(target, Mapping) and isinstance(target.get("additionalProperties"), Mapping):
        return types_of(target["additionalProperties"], schema)
    return ALL_TYPES


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a schema within ``root`` allows; all where it is silent."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return ALL_TYPES
    types = ALL_TYPES
    named = schema.get("type")
    if isinstance(named, str | list):
        names = {named} if isinstance(named, str) else {x for x in named if isinstance(x, str)}
        types = frozenset(names & ALL_TYPES | ({"integer"} if "number" in names else set()))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        types &= frozenset().union(*map(_types_of_value, values))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            types &= frozenset().union(*(types_of(x, root, depth + 1) for x in schema[word]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= types_of(part, root, depth + 1)
    if schema.get("nullable") is True:
        types |= {"null"}
    return types or ALL_TYPES


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follows references within a schema."""
    for _ in range(_MAX_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str) or not path.startswith("#"):
            return schema
        schema = root
        for part in path[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return None


def _types_of_value(value: Any) -> frozenset[str]:
    if value is None or isinstance(value, bool):
        return frozenset(("null" if value is None else "boolean",))
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return frozenset(("number", "integer") if whole else ("number",))
    if isinstance(value, str):
        return frozenset(("string",))
    return frozenset(("array" if isinstance(value, list) else "object",))


def _fits(text: str, types: frozenset[str]) -> bool:
    kind = _BY_FIRST.get(text[0], "number")
    if kind != "number" or "number" in types:
        return kind in types
    return "integer" in types and float(text).is_integer()


def _read_literal(text: str) -> str | None:
    """Returns a Python value as JSON, or None if it is none."""
    feed, writer = Feed(Markers(())), EventWriter({})
    feed.put(text.strip() + " ")
    feed.ended = True
    reader = ValueReader(feed, writer, python_dialect(feed.markers)).read()
    try:
        next(reader)
    except StopIteration as stop:
        rest = feed.text[feed.pos :].strip()
        if stop.value and not rest:
            return "".join(event.text for event in writer.drain())
    return None
