"""A check of one JSON value that arrives in pieces.

The value is followed by states. A state knows the state behind each character that it expects, so
a character of an answer costs one look into a table. Brackets change the stack of what is open.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 256

_HALF = re.compile("[\ud800-\udfff]")
_RUN = re.compile('[^"\\\\\\x00-\\x1f\ud800-\udfff]+')
_BLANKS = " \t\r\n"
_DIGITS = "0123456789"
_PLAIN = [chr(code) for code in range(0x20, 0x7F) if chr(code) not in '"\\']
"""The ASCII characters that stand for themselves within a string."""
# Parts of a number: what may follow in each. Those in capitals are whole numbers.
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


class _State(dict[str, "_State"]):
    """Where a value is: the state behind each character but brackets, and what brackets may come.

    Args:
        opens: an object or a list may begin.
        closes: the bracket that may close what is open, or "".
        is_string: any other text may follow too.
    """

    __slots__ = ("closes", "is_string", "opens")

    def __init__(self, opens: bool = False, closes: str = "", is_string: bool = False) -> None:
        super().__init__()
        self.opens = opens
        self.closes = closes
        self.is_string = is_string


def escape(text: str) -> str:
    """Returns text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object that a model has written, or None if it is none.

    Halves of surrogate pairs, which no answer can hold, become U+FFFD.
    """
    try:
        value = json.loads(text)
        if _HALF.search(written := json.dumps(value, ensure_ascii=False)):
            value = json.loads(_HALF.sub("\ufffd", written))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _add_blanks(*states: _State) -> None:
    for state in states:
        state |= dict.fromkeys(_BLANKS, state)


def _add_string(before: _State, behind: _State) -> None:
    """Adds a string between two states."""
    string, escaped = _State(is_string=True), _State()
    string |= dict.fromkeys(_PLAIN, string) | {"\\": escaped, '"': behind}
    escaped |= dict.fromkeys('"\\/bfnrt', string)
    digits = string
    for _ in range(4):
        state = _State()
        state |= dict.fromkeys("0123456789abcdefABCDEF", digits)
        digits = state
    escaped["u"] = digits
    before['"'] = string


def _add_scalars(before: _State, behind: _State) -> dict[str, _State]:
    """Adds strings, literals and numbers between two states; returns the parts of numbers."""
    _add_string(before, behind)
    for word in ("true", "false", "null"):
        state = before
        for char in word[:-1]:
            state = state.setdefault(char, _State())
        state[word[-1]] = behind
    # What may stand behind a number ends it.
    parts = {name: _State(closes=behind.closes if name.isupper() else "") for name in _NUMBER}
    for name, following in _NUMBER.items():
        parts[name] |= {char: parts[part] for char, part in following.items()}
        if name.isupper():
            parts[name] |= behind
    before["-"] = parts["minus"]
    before |= parts["minus"]
    return parts


_DONE, _BROKEN = _State(), _State()
_TOP = _State(opens=True)
_KEY, _FIRST_KEY, _COLON = _State(), _State(closes="}"), _State()
_MEMBER, _BEHIND_MEMBER = _State(opens=True), _State(closes="}")
_ELEMENT, _BEHIND_ELEMENT = _State(opens=True), _State(closes="]")
_FIRST_ELEMENT = _State(opens=True, closes="]")
_add_blanks(_TOP, _KEY, _FIRST_KEY, _COLON, _MEMBER, _BEHIND_MEMBER)
_add_blanks(_ELEMENT, _BEHIND_ELEMENT, _FIRST_ELEMENT)
_add_string(_KEY, _COLON)
_add_string(_FIRST_KEY, _COLON)
_COLON[":"] = _MEMBER
_BEHIND_MEMBER[","] = _KEY
_BEHIND_ELEMENT[","] = _ELEMENT
_add_scalars(_MEMBER, _BEHIND_MEMBER)
_add_scalars(_ELEMENT, _BEHIND_ELEMENT)
_add_scalars(_FIRST_ELEMENT, _BEHIND_ELEMENT)
_top_numbers = _add_scalars(_TOP, _DONE)
_WHOLE = [_DONE, *(state for name, state in _top_numbers.items() if name.isupper())]
"""The states in which a value is whole if nothing follows."""


def _turn(state: _State, stack: str, char: str) -> tuple[_State, str] | None:
    """Returns state and stack behind a character that is not in the table, or None."""
    if state.opens and char in "{[":
        if len(stack) >= MAX_DEPTH:
            return None
        return _FIRST_KEY if char == "{" else _FIRST_ELEMENT, stack + char
    if char == state.closes:
        stack = stack[:-1]
        if not stack:
            return _DONE, stack
        return _BEHIND_MEMBER if stack[-1] == "{" else _BEHIND_ELEMENT, stack
    if state.is_string and _RUN.match(char):
        return state, stack
    return None


class JsonText:
    """Follows one JSON value by a stack; its text stays as written.

    Only raw control characters within strings, which models write and JSON forbids, are escaped.

    Args:
        marker_texts: characters that stand for marker tokens, and the texts of these. Within a
            string they are text.
    """

    def __init__(self, marker_texts: Mapping[str, str] | None = None) -> None:
        self._markers = marker_texts or {}
        self._stack = ""  # "{" or "[" of each open object and list
        self._state = _TOP

    @property
    def done(self) -> bool:
        """The value is whole, and what follows is no part of it."""
        return self._state is _DONE

    @property
    def broken(self) -> bool:
        """What follows cannot be part of a JSON value."""
        return self._state is _BROKEN

    @property
    def whole(self) -> bool:
        """The value is whole if nothing follows."""
        return any(self._state is state for state in _WHOLE)

    def read(self, text: str, pos: int, end: int, out: list[str]) -> int:
        """Reads up to the end of the value or of the text; returns where; appends what it reads."""
        start = pos
        state = self._state
        while pos < end and state is not _DONE and state is not _BROKEN:
            if state.is_string:
                match = _RUN.match(text, pos, end)
                if match is not None:
                    pos = match.end()
                    continue
            char = text[pos]
            following = state.get(char)
            if following is None:
                turn = _turn(state, self._stack, char)
                if turn is not None:
                    following, self._stack = turn
                elif state.is_string:
                    out += [text[start:pos], escape(self._markers.get(char, char))]
                    start = pos = pos + 1
                    continue
                else:  # the character is no part of the value
                    self._state = state
                    state = _DONE if self.whole else _BROKEN
                    break
            state = following
            pos += 1
        self._state = state
        out.append(text[start:pos])
        return pos

    def follow(self, text: str) -> bool:
        """Reads a text if all of it stays as written and the value goes on; else it reads nothing.

        The same as ``read`` for the many short texts of an answer, in a tenth of the time.
        """
        following = self._state.get(text)  # one character
        if following is not None and following is not _DONE:
            self._state = following
            return True
        state, stack = self._state, self._stack
        for char in text:
            following = state.get(char)
            if following is None:
                turn = _turn(state, stack, char)
                if turn is None:
                    return False
                following, stack = turn
            if following is _DONE:
                return False
            state = following
        self._state, self._stack = state, stack
        return bool(text)


def check_json(text: str) -> str | None:
    """Returns a text that is one JSON value without blanks around it, or None if it is none."""
    stripped = text.strip(" \t\r\n")
    reader, out = JsonText(), list[str]()
    end = reader.read(stripped, 0, len(stripped), out)
    return "".join(out) if reader.whole and end == len(stripped) else None
