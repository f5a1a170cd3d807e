"""Calls as Python writes them, and values that are no JSON: both become JSON as they arrive."""

import json
import math
import re
from typing import NamedTuple

from rayfin.deployments.text.parsing.events import EventWriter
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.json_text import MAX_DEPTH, check_json, escape
from rayfin.deployments.text.parsing.marks import JSON_UNSAFE, Feed, Markers, MarkSet, Steps

MAX_WORD = 512
"""Characters of a name, a key, or a value that is no string."""

_WORD_END = re.compile(r"[^\w.\-]")
_WORDS = {
    "True": "true", "False": "false", "None": "null",
    "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}


class Dialect(NamedTuple):
    """How values are written."""

    quotes: MarkSet  # around a string
    stops: MarkSet  # behind a value that is no string
    is_python: bool  # with escapes in strings and quotes around keys


def python_dialect(markers: Markers) -> Dialect:
    """Python's literals."""
    stops = markers.marks(*",)]}: \n\t\r(=[{'\"")
    return Dialect(markers.marks('"""', "'''", '"', "'"), stops, True)


def braces_dialect(markers: Markers, quote: str) -> Dialect:
    """Gemma's objects: bare keys, strings between marks, no escapes."""
    return Dialect(markers.marks(quote), markers.marks(",", "]", "}"), False)


class ValueReader:
    """Reads values of a dialect and emits them as JSON arguments."""

    def __init__(self, feed: Feed, writer: EventWriter, dialect: Dialect) -> None:
        self._feed = feed
        self._writer = writer
        self._dialect = dialect
        self._colon = feed.markers.marks(":")

    def read(self) -> Steps[bool]:
        """Reads one value; returns False where it breaks off."""
        stack: list[str] = []
        while True:
            char = yield from self._feed.skip()
            if char in _CLOSING and (char != "(" or self._dialect.is_python):
                if len(stack) >= MAX_DEPTH:
                    return False
                stack.append(self._feed.take(self._feed.pos + 1))
                self._writer.arguments("{" if char == "{" else "[")
                if (yield from self._feed.skip()) == _CLOSING[char]:
                    if not (yield from self._close(stack)):
                        return False
                elif char == "{" and not (yield from self.read_key()):
                    return False
                else:
                    continue
            elif not (yield from self._read_scalar()):
                return False
            elif not (yield from self._close(stack)):
                return False
            if not stack:
                return True
            if stack[-1] == "{" and not (yield from self.read_key()):
                return False

    def _close(self, stack: list[str]) -> Steps[bool]:
        """Reads what closes lists and objects, up to the comma of one that goes on."""
        feed = self._feed
        while stack:
            char = yield from feed.skip()
            comma = char == ","
            if comma:
                feed.take(feed.pos + 1)
                char = yield from feed.skip()
            if not char:
                return False
            if char != _CLOSING[stack[-1]]:
                self._writer.arguments(", " if comma else "")
                return comma
            feed.take(feed.pos + 1)
            self._writer.arguments("}" if stack.pop() == "{" else "]")
        return True

    def read_key(self) -> Steps[bool]:
        """Reads the key of a member and its colon."""
        feed = self._feed
        yield from feed.skip()
        quote = yield from feed.match(self._dialect.quotes)
        if quote:
            if not (yield from self._read_string(quote)):
                return False
        elif self._dialect.is_python:
            return False
        else:
            feed.record()
            key = yield from feed.until(self._colon, MAX_WORD)
            if key is None:
                return False
            feed.forget()
            self._writer.arguments(f'"{escape(feed.markers.decode(key).strip())}"')
        if (yield from feed.skip()) != ":":
            return False
        feed.take(feed.pos + 1)
        self._writer.arguments(": ")
        return True

    def _read_scalar(self) -> Steps[bool]:
        quote = yield from self._feed.match(self._dialect.quotes)
        if quote:
            return (yield from self._read_string(quote))
        feed = self._feed
        feed.record()
        text = yield from feed.until(self._dialect.stops, MAX_WORD)
        value = None if text is None else self._as_json(feed.markers.decode(text).strip())
        if value is None:
            return False
        feed.forget()
        self._writer.arguments(value)
        return True

    def _as_json(self, text: str) -> str | None:
        if text in _WORDS:
            return _WORDS[text]
        number = as_number(text)
        if number is not None or self._dialect.is_python:
            return number
        return f'"{escape(text)}"' if text else None

    def _read_string(self, quote: str) -> Steps[bool]:
        self._writer.arguments('"')
        if self._dialect.is_python:
            closed = yield from self._read_python_string(quote)
        else:
            closed = yield from self._read_raw_string()
        self._writer.arguments('"' if closed else "")
        return closed

    def _read_raw_string(self) -> Steps[bool]:
        feed, writer = self._feed, self._writer
        end = self._dialect.quotes
        direct = end.safe_text(JSON_UNSAFE).direct("arguments", writer.calls - 1)
        while True:
            match = end.find(feed.text, feed.pos, feed.ended)
            writer.arguments(escape(feed.markers.decode(feed.take(match.start))))
            if match.mark:
                feed.take(match.end)
                return True
            if feed.ended:
                return False
            if feed.pos == len(feed.text):
                feed.direct = direct
            yield

    def _read_python_string(self, quote: str) -> Steps[bool]:
        feed, writer = self._feed, self._writer
        stop = feed.markers.marks(quote, "\\")
        direct = stop.safe_text(JSON_UNSAFE).direct("arguments", writer.calls - 1)
        while True:
            match = stop.find(feed.text, feed.pos, feed.ended)
            writer.arguments(escape(feed.markers.decode(feed.take(match.start))))
            if match.mark == quote:
                feed.take(match.end)
                return True
            if match.mark:
                feed.record()
                feed.take(match.end)
                if not (yield from self._read_escape()):
                    return False
                feed.forget()
                continue
            if feed.ended:
                return False
            if feed.pos == len(feed.text):
                feed.direct = direct
            yield

    def _read_escape(self) -> Steps[bool]:
        """Emits the character of an escape, whose backslash was read."""
        feed = self._feed
        char = yield from feed.peek()
        if not char:
            return False
        if char not in _HEX:
            feed.take(feed.pos + 1)
            text = feed.markers.decode(char)
            self._writer.arguments(escape(_ESCAPES.get(char, "\\" + text)))
            return True
        length = 1 + _HEX[char]
        while len(feed.text) - feed.pos < length:
            if feed.ended:
                return False
            yield
        code = feed.text[feed.pos + 1 : feed.pos + length]
        number = int(code, 16) if re.fullmatch("[0-9a-fA-F]+", code) else -1
        if not 0 <= number <= 0x10FFFF:
            return False
        feed.take(feed.pos + length)
        # The halves of a pair of surrogates stay escapes, which a JSON reader joins.
        half = 0xD800 <= number <= 0xDFFF
        self._writer.arguments(f"\\u{number:04x}" if half else escape(chr(number)))
        return True


def as_number(text: str) -> str | None:
    """Returns a number of Python or JSON as JSON, or None if it is none."""
    if not text or text[0] not in "+-.0123456789":
        return None
    as_written = check_json(text)
    if as_written is not None:
        return as_written
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None


class PythonCalls:
    """Reads ``[N(k=v), N()]``, or such calls without brackets."""

    def __init__(self, feed: Feed, writer: EventWriter) -> None:
        self._feed = feed
        self._writer = writer
        self._values = ValueReader(feed, writer, python_dialect(feed.markers))

    def read(self, marked: bool) -> Steps[bool]:
        """Reads calls behind their mark, or bare ones; returns False where they break off."""
        feed = self._feed
        in_list = (yield from feed.skip()) == "["
        if in_list:
            feed.take(feed.pos + 1)
        elif not marked:
            return False
        while True:
            if not (yield from self._read_call()):
                return False
            char = yield from feed.skip()
            if char and char in (",]" if in_list else ",;"):
                feed.take(feed.pos + 1)
                if char == "]":
                    return True
            elif in_list:
                return False
            if not in_list and not ((yield from feed.skip()) + " ")[0].isidentifier():
                return True

    def _read_call(self) -> Steps[bool]:
        feed, writer = self._feed, self._writer
        name = writer.find((yield from self._read_word()))
        if name is None or (yield from feed.skip()) != "(":
            return False
        feed.take(feed.pos + 1)
        char = yield from feed.skip()
        first = True
        while char != ")":
            if not first:
                feed.record()
            key = yield from self._read_word()
            if not key or (yield from feed.skip()) != "=":
                return False
            feed.take(feed.pos + 1)
            feed.forget()
            if first:
                writer.begin(name)
            writer.arguments(("{" if first else ", ") + f'"{escape(key)}": ')
            first = False
            if not (yield from self._values.read()):
                return False
            char = yield from feed.skip()
            if char == ",":
                feed.take(feed.pos + 1)
                char = yield from feed.skip()
            elif char != ")":
                return False
        feed.take(feed.pos + 1)
        if first:
            writer.begin(name)
        writer.arguments("{}" if first else "}")
        writer.end()
        feed.record()
        return True

    def _read_word(self) -> Steps[str]:
        """Reads a name; returns "" if none is next."""
        feed = self._feed
        yield from feed.skip()
        parts: list[str] = []
        left = MAX_WORD
        while True:
            match = _WORD_END.search(feed.text, feed.pos)
            end = match.start() if match is not None else len(feed.text)
            parts.append(feed.take(min(end, feed.pos + left + 1)))
            left -= len(parts[-1])
            if match is not None and left >= 0:
                return "".join(parts)
            if left < 0 or feed.ended:
                return ""
            yield


class BracesCalls:
    """Reads ``call:N{k:v}``."""

    def __init__(self, feed: Feed, writer: EventWriter, row: ToolFormat) -> None:
        self._feed = feed
        self._writer = writer
        self._prefix = row.function[0].strip()
        self._name_end = feed.markers.marks("{", *row.begins, *row.ends)
        self._values = ValueReader(feed, writer, braces_dialect(feed.markers, row.quote))

    def read(self) -> Steps[bool]:
        """Reads one call behind its mark; returns False where it breaks off."""
        feed, writer = self._feed, self._writer
        header = yield from feed.until(self._name_end, MAX_WORD)
        if header is None or (yield from feed.peek()) != "{":
            return False
        name = writer.find(feed.markers.decode(header).strip().removeprefix(self._prefix).strip())
        if name is None:
            return False
        writer.begin(name)
        feed.forget()
        if not (yield from self._values.read()):
            return False
        writer.end()
        feed.record()
        return True
