"""A check of one JSON value that arrives in pieces."""

import json
import re
from collections.abc import Mapping
from typing import Literal

MAX_DEPTH = 256

_Mode = Literal[
    "value", "first value", "first key", "key", "colon", "next", "string", "escape", "hex",
    "number", "literal", "done", "broken",
]  # fmt: skip
_RUN = re.compile('[^"\\\\\\x00-\\x1f\ud800-\udfff]+')
_BLANKS = re.compile(r"[ \t\r\n]+")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_DIGITS = "0123456789"
# States of a number: what may follow in each. Those in capitals are whole numbers.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "ZERO"} | dict.fromkeys("123456789", "INT"),
    "ZERO": {".": "point", "e": "e", "E": "e"},
    "INT": dict.fromkeys(_DIGITS, "INT") | {".": "point", "e": "e", "E": "e"},
    "point": dict.fromkeys(_DIGITS, "FRACTION"),
    "FRACTION": dict.fromkeys(_DIGITS, "FRACTION") | {"e": "e", "E": "e"},
    "e": dict.fromkeys(_DIGITS, "EXPONENT") | {"+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "EXPONENT"),
    "EXPONENT": dict.fromkeys(_DIGITS, "EXPONENT"),
}


def escape(text: str) -> str:
    """Returns text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonText:
    """Follows one JSON value by a stack; its text stays as written.

    Only raw control characters within strings, which models write and JSON forbids, are escaped.

    Args:
        marker_texts: characters that stand for marker tokens, and the texts of these. Within a
            string they are text.
    """

    def __init__(self, marker_texts: Mapping[str, str] | None = None) -> None:
        self._markers = marker_texts or {}
        self._stack: list[str] = []  # "{" or "[" of each open object and list
        self._mode: _Mode = "value"
        self._in_key = False  # of the string
        self._left = 0  # hex digits of an escape
        self._word = ""  # the rest of a literal
        self._number = ""  # the state of a number

    @property
    def done(self) -> bool:
        """The value is whole, and what follows is no part of it."""
        return self._mode == "done"

    @property
    def broken(self) -> bool:
        """What follows cannot be part of a JSON value."""
        return self._mode == "broken"

    @property
    def in_string(self) -> bool:
        """Any text without quotes, backslashes and control characters may follow."""
        return self._mode == "string"

    @property
    def whole(self) -> bool:
        """The value is whole if nothing follows."""
        return self.done or (self._mode == "number" and not self._stack and self._number.isupper())

    def read(self, text: str, pos: int, end: int, out: list[str]) -> int:
        """Reads up to the end of the value or of the text; returns where; appends what it reads."""
        start = pos
        while pos < end and self._mode not in ("done", "broken"):
            char = text[pos]
            if self._mode == "string":
                match = _RUN.match(text, pos, end)
                if match is not None:
                    pos = match.end()
                    continue
                if char not in '"\\':
                    out += [text[start:pos], escape(self._markers.get(char, char))]
                    start = pos = pos + 1
                    continue
                self._end_run(char)
                pos += 1
            elif char in " \t\r\n" and self._mode not in ("escape", "hex", "number", "literal"):
                match = _BLANKS.match(text, pos, end)
                pos = match.end() if match is not None else pos + 1
            else:
                pos += self._step(char)
        out.append(text[start:pos])
        return pos

    def _end_run(self, char: str) -> None:
        if char == "\\":
            self._mode = "escape"
        elif self._in_key:
            self._mode = "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._mode = "next" if self._stack else "done"

    def _step(self, char: str) -> int:
        """Goes on by a character outside of a run of text; returns 0 if it is no part of it."""
        mode = self._mode
        if mode in ("value", "first value"):
            return self._begin_value(char, closes=mode == "first value")
        if mode in ("first key", "key"):
            return self._begin_key(char, closes=mode == "first key")
        if mode == "colon":
            return self._go("value") if char == ":" else self._fail()
        if mode == "next":
            if char == ",":
                return self._go("key" if self._stack[-1] == "{" else "value")
            return self._close(char)
        if mode == "escape":
            if char == "u":
                self._left = 4
                return self._go("hex")
            return self._go("string") if char in '"\\/bfnrt' else self._fail()
        if mode == "hex":
            self._left -= 1
            if char not in "0123456789abcdefABCDEF":
                return self._fail()
            return self._go("hex" if self._left else "string")
        if mode == "literal":
            return self._continue_literal(char)
        return self._continue_number(char)

    def _go(self, mode: _Mode) -> int:
        self._mode = mode
        return 1

    def _fail(self) -> int:
        self._mode = "broken"
        return 0

    def _begin_value(self, char: str, closes: bool) -> int:
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return self._fail()
            self._stack.append(char)
            return self._go("first key" if char == "{" else "first value")
        if char == '"':
            self._in_key = False
            return self._go("string")
        if char in _LITERALS:
            self._word = _LITERALS[char][1:]
            return self._go("literal")
        if char == "-" or char in _DIGITS:
            self._number = "minus" if char == "-" else _NUMBER["minus"][char]
            return self._go("number")
        return self._close(char) if closes else self._fail()

    def _begin_key(self, char: str, closes: bool) -> int:
        if char == '"':
            self._in_key = True
            return self._go("string")
        return self._close(char) if closes else self._fail()

    def _close(self, char: str) -> int:
        if not self._stack or char != ("}" if self._stack[-1] == "{" else "]"):
            return self._fail()
        self._stack.pop()
        self._end_value()
        return 1

    def _continue_literal(self, char: str) -> int:
        if char != self._word[0]:
            return self._fail()
        self._word = self._word[1:]
        if not self._word:
            self._end_value()
        return 1

    def _continue_number(self, char: str) -> int:
        following = _NUMBER[self._number].get(char)
        if following is not None:
            self._number = following
            return 1
        if not self._number.isupper():
            return self._fail()
        self._end_value()  # the character is read again, as what follows the number
        return 0


def check_json(text: str) -> str | None:
    """Returns a text that is one JSON value without blanks around it, or None if it is none."""
    stripped = text.strip(" \t\r\n")
    reader, out = JsonText(), list[str]()
    end = reader.read(stripped, 0, len(stripped), out)
    return "".join(out) if reader.whole and end == len(stripped) else None
