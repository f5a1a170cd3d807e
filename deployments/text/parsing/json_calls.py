"""Calls whose arguments are a JSON object: objects, lists of them, or a name and the object."""

import json
import re

from rayfin.deployments.text.parsing.events import EventWriter
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.json_text import JsonText, check_json
from rayfin.deployments.text.parsing.marks import Direct, Feed, Steps

MAX_HEADER = 512
"""Characters around and of a name."""

_KIMI_ID = re.compile(r":\d+$")
# Keys beside the name and the arguments that models write into a call.
_OTHER_KEYS = {"id", "type", "index", "call_id", "tool_call_id"}


def read_arguments(feed: Feed, writer: EventWriter, name: str) -> Steps[bool]:
    """Emits a call of ``name`` with the object that follows; returns False if it is not whole."""
    if (yield from feed.skip()) != "{":
        return False
    writer.begin(name)
    feed.forget()
    value = JsonText(feed.markers.texts)
    direct = Direct((), value.follow, "arguments", writer.calls - 1)
    while True:
        out: list[str] = []
        feed.take(value.read(feed.text, feed.pos, len(feed.text), out))
        writer.arguments("".join(out))
        if value.done:
            writer.end()
            feed.record()
            return True
        if value.broken:
            return False
        if feed.ended:
            return False
        feed.direct = direct
        yield


class JsonCalls:
    """Reads calls of one JSON format, behind the mark that begins them."""

    def __init__(self, feed: Feed, writer: EventWriter, row: ToolFormat) -> None:
        self._feed = feed
        self._writer = writer
        self._row = row
        self._name_keys = {row.name_key, "name"}
        self._arguments_keys = {row.arguments_key, "arguments", "parameters"}
        self._header_end = feed.markers.marks("{", *row.begins, *row.ends)

    def read(self) -> Steps[bool]:
        """Reads the calls up to their closing mark; returns False where they break off."""
        char = yield from self._feed.skip()
        if char == "[":
            return (yield from self._read_list())
        if char == "{":
            return (yield from self._read_object())
        if self._row.function == ("", "") or not char:
            return False
        return (yield from self._read_named())

    def _read_list(self) -> Steps[bool]:
        feed = self._feed
        feed.take(feed.pos + 1)
        while True:
            if (yield from feed.skip()) != "{":
                return False
            if not (yield from self._read_object()):
                return False
            char = yield from feed.skip()
            if char not in (",", "]"):
                return False
            feed.take(feed.pos + 1)
            if char == "]":
                return True

    def _read_object(self) -> Steps[bool]:
        feed = self._feed
        feed.take(feed.pos + 1)
        call = _Envelope()
        char = yield from feed.skip()
        while char == '"':
            key = yield from self._read_string()
            if key is None or (yield from feed.skip()) != ":":
                return False
            feed.take(feed.pos + 1)
            if not (yield from self._read_member(call, key)):
                return False
            char = yield from feed.skip()
            if char == ",":
                feed.take(feed.pos + 1)
                char = yield from feed.skip()
        if char != "}" or call.name is None:
            return False
        feed.take(feed.pos + 1)
        if not call.emitted:
            self._emit(call.name, "{}")
        return True

    def _read_member(self, call: "_Envelope", key: str) -> Steps[bool]:
        if key in self._name_keys and call.name is None:
            call.name = self._writer.find((yield from self._read_string()) or "")
            if call.name is not None and call.arguments is not None:
                self._emit(call.name, call.arguments)
                call.emitted = True
            return call.name is not None
        if key in self._arguments_keys and not call.emitted and call.arguments is None:
            if call.name is not None and (yield from self._feed.skip()) == "{":
                call.emitted = True
                return (yield from read_arguments(self._feed, self._writer, call.name))
            return (yield from self._hold_arguments(call))
        if self._row.bare and key not in _OTHER_KEYS:
            return False  # some other JSON
        return (yield from self._read_value(self._feed.room)) is not None

    def _hold_arguments(self, call: "_Envelope") -> Steps[bool]:
        """Holds arguments before their name, or within a string."""
        text = yield from self._read_value(self._feed.room)
        if text is not None and text.startswith('"'):
            text = check_json(json.loads(text) or "{}")
        text = "{}" if text in ("null", "[]") else text
        if text is None or not text.startswith("{"):
            return False
        call.arguments = text
        if call.name is not None:
            self._emit(call.name, text)
            call.emitted = True
        return True

    def _read_string(self) -> Steps[str | None]:
        """Reads a short JSON string; returns what it says, or None if it is none."""
        if (yield from self._feed.skip()) != '"':
            return None
        text = yield from self._read_value(MAX_HEADER)
        return None if text is None else str(json.loads(text))

    def _read_value(self, limit: int) -> Steps[str | None]:
        """Reads any JSON value; returns its text, or None if it breaks or is too long."""
        feed = self._feed
        yield from feed.skip()
        value = JsonText(feed.markers.texts)
        out: list[str] = []

        def reads(text: str) -> bool:
            nonlocal limit
            if len(text) >= limit or not value.follow(text):
                return False
            out.append(text)
            limit -= len(text)
            feed.note(text)
            return True

        while True:
            end = min(len(feed.text), feed.pos + limit)
            limit -= len(feed.take(value.read(feed.text, feed.pos, end, out)))
            if value.done:
                return "".join(out)
            if value.broken or limit <= 0 or feed.ended:
                return None
            feed.direct = Direct((), reads)
            yield

    def _read_named(self) -> Steps[bool]:
        feed = self._feed
        header = yield from feed.until(self._header_end, MAX_HEADER)
        if header is None:
            return False
        name = self._writer.find(self._name_of(feed.markers.decode(header)))
        if name is None:
            return False
        if (yield from feed.peek()) == "{":
            return (yield from read_arguments(feed, self._writer, name))
        self._emit(name, "{}")
        return True

    def _name_of(self, header: str) -> str:
        row = self._row
        name = header.strip().removeprefix(row.function[0].strip())
        for mark in (row.id_mark, row.function[1].strip(), row.arguments[0].strip()):
            if mark:
                name = name.partition(mark)[0]
        name = name.strip()
        return _KIMI_ID.sub("", name) if row.id_style == "kimi" else name

    def _emit(self, name: str, arguments: str) -> None:
        self._writer.begin(name)
        self._writer.arguments(arguments)
        self._writer.end()
        self._feed.record()


class _Envelope:
    """What is known of one call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None  # held until the name is known
        self.emitted = False
