"""Reads a pattern of ECMA-262, with its characters as in Unicode mode.

``\\d`` and ``\\w`` are ASCII, ``.`` is all but the four line ends. Lazy quantifiers are read as
greedy ones, since only what matches counts. What no automaton can do is refused: look-around,
back-references, word boundaries, and ``^`` or ``$`` where something lies beside them.

Raises:
    InvalidRequest: ``invalid_schema``, ``unsupported_schema`` or ``schema_too_complex``.
"""

import re

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.schema.code_points import (
    ALL,
    DIGIT,
    LINE_END,
    SPACE,
    WORD,
    Ranges,
    complement,
    of_text,
    ranges_of,
)
from rayfin.deployments.guidance.schema.pattern_parts import (
    Chars,
    Edge,
    OneOf,
    Part,
    Repeat,
    Sequence,
    unrolled,
)

MAX_LENGTH = 1024  # bytes of a pattern
MAX_UNROLLED = 20_000
MAX_NESTING = 64

_DOT = complement(LINE_END)
_BOUNDS = re.compile(r"\{(\d{1,9})(?:(,)(\d{1,9})?)?\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_NAME = re.compile(r"\?P?<[A-Za-z_$][\w$]*>")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_SETS: dict[str, Ranges] = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}
_REFUSED_GROUPS = {
    "?=": "look-ahead",
    "?!": "look-ahead",
    "?<=": "look-behind",
    "?<!": "look-behind",
}


def parse(
    pattern: str,
    path: str,
    *,
    max_length: int = MAX_LENGTH,
    dot: Ranges = _DOT,
) -> Part:
    """Returns the parts of a pattern.

    Args:
        path: of the pattern, for errors.
        max_length: bytes.
        dot: the characters that ``.`` is.
    """
    if len(pattern.encode("utf-8", "replace")) > max_length:
        raise too_complex(f"{path} is longer than {max_length} bytes.", path)
    if "\0" in pattern:
        raise invalid("it holds a NUL", path)
    part = _Reader(pattern, path, dot).read()
    _check_edges(part, path, True, True)
    if unrolled(part) > MAX_UNROLLED:
        raise too_complex(
            f"{path} has more than {MAX_UNROLLED} characters when its repetitions are written out.",
            path,
        )
    return part


def invalid(message: str, path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is no valid pattern: {message}.", path, "invalid_schema")


def too_complex(message: str, path: str) -> InvalidRequest:
    return InvalidRequest(message, path, "schema_too_complex")


def unsupported(what: str, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} has {what}, which cannot be enforced.", path, "unsupported_schema"
    )


class _Reader:
    """A position in a pattern, and the rules that move it."""

    def __init__(self, pattern: str, path: str, dot: Ranges) -> None:
        self._text = pattern
        self._path = path
        self._dot = dot
        self._at = 0
        self._depth = 0

    def read(self) -> Part:
        part = self._choice()
        if self._at < len(self._text):
            raise invalid("unmatched ')'", self._path)
        return part

    def _choice(self) -> Part:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else OneOf(tuple(parts))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _quantified(self) -> Part:
        part = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return part
        if isinstance(part, Edge):
            raise unsupported("a repeated '^' or '$'", self._path)
        self._skip("?")  # lazy
        if self._bounds() is not None:
            raise invalid("multiple repeat", self._path)
        least, largest = bounds
        if largest is not None and least > largest:
            raise invalid("min repeat greater than max repeat", self._path)
        return Repeat(part, least, largest)

    def _bounds(self) -> tuple[int, int | None] | None:
        c = self._peek()
        if c in ("*", "+", "?"):
            self._at += 1
            return (1 if c == "+" else 0), (1 if c == "?" else None)
        match = _BOUNDS.match(self._text, self._at) if c == "{" else None
        if match is None:
            return None
        self._at = match.end()
        least = int(match[1])
        if match[2] is None:
            return least, least
        return least, None if match[3] is None else int(match[3])

    def _atom(self) -> Part:
        c = self._next()
        if c == "(":
            return self._group()
        if c == "[":
            return self._set()
        if c == ".":
            return Chars(self._dot)
        if c in "^$":
            return Edge(at_end=c == "$")
        if c == "\\":
            return self._escape()
        if c in "*+?" or (c == "{" and _BOUNDS.match(self._text, self._at - 1)):
            raise invalid("nothing to repeat", self._path)
        if c == "{" and self._peek() == ",":
            raise invalid("'{,n}' is written '{0,n}'", self._path)
        return Chars(self._single(ord(c)))

    def _group(self) -> Part:
        if self._peek() == "?":
            for mark, what in _REFUSED_GROUPS.items():
                if self._text.startswith(mark, self._at):
                    raise unsupported(what, self._path)
            name = _NAME.match(self._text, self._at)
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif name is not None:
                self._at = name.end()
            elif self._text.startswith("?P=", self._at):
                raise unsupported("a back-reference", self._path)
            else:
                raise unsupported("inline flags", self._path)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise too_complex(f"{self._path} nests deeper than {MAX_NESTING} groups.", self._path)
        part = self._choice()
        self._depth -= 1
        if not self._skip(")"):
            raise invalid("missing ')'", self._path)
        return part

    def _escape(self) -> Part:
        c = self._peek()
        if c in ("b", "B"):
            raise unsupported(f"'\\{c}'", self._path)
        if c in tuple("123456789k"):
            raise unsupported("a back-reference", self._path)
        ranges, properties = self._escaped()
        return Chars(ranges, properties)

    def _escaped(self) -> tuple[Ranges, tuple[str, ...]]:
        """What stands after a backslash, in a set and outside of it."""
        match = _PROPERTY.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            return (), (f"\\{match[0]}",)
        c = self._next()
        if c in _SETS:
            return _SETS[c], ()
        if c in _CONTROLS:
            return self._single(_CONTROLS[c]), ()
        if c == "0" and not self._peek().isdigit():
            return self._single(0), ()
        if c == "c" and self._peek().isascii() and self._peek().isalpha():
            return self._single(ord(self._next()) % 32), ()
        if c in "xu":
            return self._single(self._hexadecimal(c)), ()
        if c.isalnum():
            raise invalid(f"unknown escape '\\{c}'", self._path)
        return self._single(ord(c)), ()

    def _hexadecimal(self, kind: str) -> int:
        match = re.compile(
            r"[0-9a-fA-F]{2}" if kind == "x" else r"[0-9a-fA-F]{4}|\{[0-9a-fA-F]{1,6}\}"
        ).match(self._text, self._at)
        if match is None:
            raise invalid(f"incomplete escape '\\{kind}'", self._path)
        self._at = match.end()
        point = int(match[0].strip("{}"), 16)
        if 0xD800 <= point < 0xDC00:  # the pair is one character
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._at)
            if low is not None:
                self._at = low.end()
                point = 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return point

    def _set(self) -> Part:
        negated = self._skip("^")
        pairs: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._skip("]"):
            ranges, named = self._set_member()
            properties += named
            low = ranges[0][0] if not named and _is_single(ranges) else None
            if low is None or self._peek() != "-" or self._peek(1) in ("]", ""):
                pairs += ranges
                continue
            self._at += 1
            ends, named = self._set_member()
            properties += named
            if named or not _is_single(ends):  # [a-\d]: the hyphen is one of the characters
                pairs += [*ranges, *ends, (0x2D, 0x2D)]
            elif ends[0][0] < low:
                raise invalid("a range in a set is out of order", self._path)
            else:
                pairs.append((low, ends[0][0]))
        ranges = ranges_of(pairs)
        if properties:
            return Chars(ranges, tuple(properties), negated)
        ranges = complement(ranges) if negated else ranges
        if not ranges:
            raise invalid("an empty set matches nothing", self._path)
        return Chars(ranges)

    def _set_member(self) -> tuple[Ranges, tuple[str, ...]]:
        if self._at >= len(self._text):
            raise invalid("unterminated set, ']' is missing", self._path)
        c = self._next()
        if c != "\\":
            return self._single(ord(c)), ()
        if self._skip("b"):
            return of_text("\b"), ()
        return self._escaped()

    def _single(self, point: int) -> Ranges:
        if 0xD800 <= point <= 0xDFFF or point > ALL[-1][1]:
            raise invalid("a surrogate is no character", self._path)
        return ((point, point),)

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._text[at] if at < len(self._text) else ""

    def _next(self) -> str:
        c = self._peek()
        if not c:
            raise invalid("it ends after a backslash", self._path)
        self._at += 1
        return c

    def _skip(self, c: str) -> bool:
        if self._peek() != c:
            return False
        self._at += 1
        return True


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _check_edges(part: Part, path: str, first: bool, last: bool) -> None:
    """An edge may stand only where the text itself begins or ends.

    Args:
        first: nothing can match before the part.
        last: nothing can match after it.
    """
    match part:
        case Edge(at_end):
            if not (last if at_end else first):
                raise unsupported("'^' or '$' in its middle", path)
        case Repeat(inner, _, _):
            _check_edges(inner, path, False, False)
        case OneOf(parts):
            for p in parts:
                _check_edges(p, path, first, last)
        case Sequence(parts):
            starts = [isinstance(p, Edge) and not p.at_end for p in parts]
            ends = [isinstance(p, Edge) and p.at_end for p in parts]
            for i, p in enumerate(parts):
                _check_edges(p, path, first and all(starts[:i]), last and all(ends[i + 1 :]))
        case Chars():
            pass
