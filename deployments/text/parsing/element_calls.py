"""Calls whose arguments are elements named after them, which may nest: MiniMax M3's."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rayfin.deployments.text.parsing.events import EventWriter
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.json_text import MAX_DEPTH, escape
from rayfin.deployments.text.parsing.marks import Feed, Steps
from rayfin.deployments.text.parsing.tagged_calls import (
    ALL_TYPES,
    MAX_NAME,
    TaggedCalls,
    resolve,
    to_json,
    types_of,
)

BESIDE = "$text"
"""The member for text beside the children of an element."""


class _Open(NamedTuple):
    """An element whose end is still to come."""

    name: str
    texts: list[str]
    children: list[tuple[str, Any]]

    @property
    def value(self) -> Any:
        text = "".join(self.texts)
        beside = [(BESIDE, text)] if text.strip() else []
        return [*self.children, *beside] if self.children else text


class ElementCalls(TaggedCalls):
    """Reads calls of a format of elements, behind the mark that begins them.

    An element ends at the next closing tag, whatever its name is, so that all arguments can be
    read. What a schema says to be a string streams; other values are held to their end.
    """

    def __init__(self, feed: Feed, writer: EventWriter, row: ToolFormat) -> None:
        super().__init__(feed, writer, row)
        self._tags = feed.markers.marks(row.key[0], row.value[1])
        self._tag_end = feed.markers.marks(row.key[1])
        # Of a call that lacks its end.
        self._no_keys = ("/", row.function[0].removeprefix(row.key[0]))
        self._seen: set[str] = set()  # keys of the call

    def read(self, mark: str) -> Steps[bool]:
        """Reads one call behind ``mark``; returns False where it breaks off."""
        self._seen.clear()
        return (yield from super().read(mark))

    def _read_parameter(self, name: str, before: str) -> Steps[bool]:
        feed, writer = self._feed, self._writer
        feed.record()
        key = yield from self._read_tag()
        if not key or key in self._seen or key.startswith(self._no_keys):
            return False
        self._seen.add(key)
        feed.forget()
        writer.arguments(f'{before}"{escape(key)}": ')
        root = writer.functions[name]
        schema = _property(root, key, root)
        if types_of(schema, root) == {"string"}:
            return (yield from self._read_text()) and bool((yield from self._read_tag()))
        feed.record()
        value = yield from self._read_element(key)
        if value is None:
            return False
        feed.forget()
        writer.arguments(as_json(value, schema, root))
        return True

    def _read_tag(self) -> Steps[str]:
        """Reads the rest of a tag; returns its name, or "" if it has none."""
        text = yield from self._feed.until(self._tag_end, MAX_NAME)
        if text is None:
            return ""
        yield from self._feed.match(self._tag_end)
        return self._feed.markers.decode(text).strip()

    def _read_element(self, name: str) -> Steps[Any]:
        """Reads an element behind its opening tag; returns its value, or None if it has no end."""
        feed = self._feed
        stack = [_Open(name, [], [])]
        while True:
            text = yield from feed.until(self._tags, feed.room)
            if text is None:
                return None
            stack[-1].texts.append(feed.markers.decode(text))
            mark = yield from feed.match(self._tags)
            tag = yield from self._read_tag()
            if not tag or len(stack) > MAX_DEPTH:
                return None
            if mark != self._close:
                stack.append(_Open(tag, [], []))
                continue
            element = stack.pop()
            if not stack:
                return element.value
            stack[-1].children.append((element.name, element.value))


def as_json(value: Any, schema: Any, root: Mapping[str, Any]) -> str:
    """Returns an element's value as JSON, of a type of its schema where it can be."""
    types = types_of(schema, root)
    if isinstance(value, str):
        if not value.strip() and "string" not in types and {"array", "object"} & types:
            return "[]" if "array" in types else "{}"
        return to_json(value, types)
    if "array" in types and types != ALL_TYPES:
        items = _branch(schema, root, "array").get("items")
        return f"[{', '.join(as_json(child, items, root) for _, child in value)}]"
    target = _branch(schema, root, "object")
    members: dict[str, list[str]] = {}
    for name, child in value:
        text = as_json(child, _property(target, name, root), root)
        members.setdefault(name, []).append(text)
    written = (
        f"{json.dumps(name, ensure_ascii=False)}: {_one_or_list(texts)}"
        for name, texts in members.items()
    )
    return f"{{{', '.join(written)}}}"


def _one_or_list(texts: list[str]) -> str:
    """The values of a name that may be repeated."""
    return f"[{', '.join(texts)}]" if texts[1:] else texts[0]


def _property(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    target = resolve(schema, root)
    target = target if isinstance(target, Mapping) else {}
    properties = target.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return target.get("additionalProperties")


def _branch(schema: Any, root: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """What a schema says of values of this type: itself, or one of its alternatives."""
    branch = resolve(schema, root)
    branch = branch if isinstance(branch, Mapping) else {}
    for word in ("anyOf", "oneOf"):
        for part in branch.get(word) or ():
            if kind in types_of(part, root):
                return _branch(part, root, kind)
    return branch
