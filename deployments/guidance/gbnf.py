"""GBNF, the grammars of llama.cpp, to Lark.

A line break is a blank: a rule goes on until the next ``name ::=``, comments and lines that begin
with ``|`` included. A grammar without recursion becomes one terminal. In others a repeated set of
characters becomes a terminal only where what follows cannot begin with one of them, because
llguidance's terminals take as much as they can.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.lark import literal, regex, special
from rayfin.deployments.guidance.schema.code_points import (
    ALL,
    Ranges,
    complement,
    intersects,
    ranges_of,
)
from rayfin.deployments.guidance.schema.lint import (
    MAX_DEPTH,
    MAX_RULES,
    check_count,
    check_literal,
    check_size,
    check_text,
    invalid_schema,
    too_complex,
)
from rayfin.deployments.guidance.schema.pattern_parts import (
    Chars,
    OneOf,
    Part,
    Repeat,
    Sequence,
    unrolled,
    write,
)

MAX_UNROLLED = 20_000
MAX_REPEATS = 4  # of the same element
MAX_ROUNDS = 30  # until what may follow each rule is known
MAX_INLINED = 150  # groups and rules within each other
MAX_GROUPS = 12  # within each other, in Lark; deeper ones become rules

_SKIP = re.compile(r"(?:\#[^\n]*|\s)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)(?:\#[^\n]*|\s)*::=")
_BOUNDS = re.compile(r"\{\s*(\d{0,9})\s*(,)?\s*(\d{0,9})\s*\}")
_TOKEN = re.compile(r"<\[\d+\]>|<[^<>\s]+>")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(slots=True, frozen=True)
class Reference:
    """Another rule."""

    name: str


@dataclass(slots=True, frozen=True)
class SpecialToken:
    """One token of the model."""

    number: int


@dataclass(slots=True, frozen=True)
class Text:
    """Characters that stand together; there may be none."""

    value: str


@dataclass(slots=True, frozen=True)
class Several:
    """Parts one after the other, or one of them, or one of them again and again."""

    parts: tuple["Element", ...]
    kind: str  # "all", "one", "repeat"
    least: int = 1
    largest: int | None = 1


Element = Chars | Text | Reference | SpecialToken | Several


def gbnf_to_lark(text: str, path: str, *, special_tokens: Mapping[str, int], max_bytes: int) -> str:
    """Returns the grammar as Lark.

    Raises:
        InvalidRequest: ``invalid_schema`` or ``schema_too_complex``.
    """
    check_size(text, path, max_bytes)
    check_text(text, path)
    rules = _Reader(text, path, special_tokens).read()
    return _Writer(rules, path).write()


class _Reader:
    """A position in a grammar, and the rules that move it."""

    def __init__(self, text: str, path: str, special_tokens: Mapping[str, int]) -> None:
        self._text = text
        self._path = path
        self._special_tokens = special_tokens
        self._at = 0
        self._depth = 0

    def read(self) -> dict[str, Element]:
        rules: dict[str, Element] = {}
        self._skip()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                raise self._invalid("expects 'name ::='")
            check_count(len(rules) + 1, MAX_RULES, "rules", self._path)
            if head[1] in rules:
                raise self._invalid(f"defines {head[1][:64]!r} twice")
            self._at = head.end()
            rules[head[1]] = self._options()
            if self._at < len(self._text) and _HEAD.match(self._text, self._at) is None:
                raise self._invalid(f"has an unexpected {self._text[self._at]!r}")
        for name, body in rules.items():
            missing = [one for one in _references(body) if one not in rules]
            if missing:
                raise invalid_schema(
                    f"{self._path} names {missing[0][:64]!r} in {name[:64]!r}, which is undefined.",
                    self._path,
                )
        if "root" not in rules:
            raise invalid_schema(f"{self._path} has no rule 'root'.", self._path)
        return rules

    def _options(self) -> Element:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Several(tuple(options), "one")

    def _sequence(self) -> Element:
        parts: list[Element] = []
        self._skip()
        while self._at < len(self._text) and self._peek() not in "|)":
            if _HEAD.match(self._text, self._at):
                break
            parts.append(self._repeated(self._element()))
            self._skip()
        return parts[0] if len(parts) == 1 else Several(tuple(parts), "all")

    def _repeated(self, element: Element) -> Element:
        for _ in range(MAX_REPEATS):
            self._skip()
            c = self._peek()
            if c and c in "*+?":
                self._at += 1
                least, largest = (1 if c == "+" else 0), (1 if c == "?" else None)
            elif c == "{":
                least, largest = self._bounds()
            else:
                return element
            element = Several((element,), "repeat", least, largest)
            if _nested_bounds(element) > MAX_UNROLLED:
                raise too_complex(
                    f"{self._path} repeats more than {MAX_UNROLLED} times, "
                    "its nested repetitions multiplied.",
                    self._path,
                )
        raise self._invalid("repeats a repetition again and again")

    def _bounds(self) -> tuple[int, int | None]:
        match = _BOUNDS.match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            raise self._invalid("has incomplete bounds")
        least = int(match[1] or 0)
        largest = (int(match[3]) if match[3] else None) if match[2] else least
        if largest is not None and largest < least:
            raise self._invalid("has bounds out of order")
        if max(least, largest or 0) > MAX_UNROLLED:
            raise too_complex(f"{self._path} repeats more than {MAX_UNROLLED} times.", self._path)
        self._at = match.end()
        return least, largest

    def _element(self) -> Element:
        c = self._peek()
        if c == '"':
            return self._string()
        if c == "[":
            return self._set()
        if c == "(":
            return self._group()
        if c == ".":
            self._at += 1
            return Chars(ALL)
        token = _TOKEN.match(self._text, self._at)
        if token is not None:
            return self._special(token)
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._invalid(f"has an unexpected {c!r}")
        self._at = name.end()
        return Reference(name[0])

    def _group(self) -> Element:
        self._at += 1
        if self._text.startswith(("=", "!"), self._at):
            raise InvalidRequest(
                f"{self._path} has look-ahead, which cannot be enforced.",
                self._path,
                "unsupported_schema",
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_complex(f"{self._path} nests deeper than {MAX_DEPTH} groups.", self._path)
        inner = self._options()
        self._depth -= 1
        if self._peek() != ")":
            raise self._invalid("misses a ')'")
        self._at += 1
        return inner

    def _special(self, match: re.Match[str]) -> Element:
        text = match[0]
        if text.startswith("<[") and text[2:-2].isdecimal():
            number: int | None = int(text[2:-2])
        else:
            number = self._special_tokens.get(text)
        if number is None:
            raise self._invalid(f"names {text[:64]}, which is no special token")
        self._at = match.end()
        return SpecialToken(number)

    def _string(self) -> Element:
        start = self._at
        self._at += 1
        text: list[str] = []
        while self._peek() != '"':
            if not self._peek() or self._peek() == "\n":
                self._at = start
                raise self._invalid("has a string without an end")
            text.append(chr(self._character()))
        self._at += 1
        value = "".join(text)
        check_literal(value, self._path)
        return Text(value)

    def _set(self) -> Element:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        pairs: list[tuple[int, int]] = []
        while self._peek() != "]":
            if not self._peek():
                self._at = start
                raise self._invalid("has a set without an end")
            low = high = self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._character()
            if high < low:
                raise self._invalid("has a range out of order")
            pairs.append((low, high))
        self._at += 1
        ranges = complement(ranges_of(pairs)) if negated else ranges_of(pairs)
        if not ranges:
            self._at = start
            raise self._invalid("has an empty set, which matches nothing,")
        return Chars(ranges)

    def _character(self) -> int:
        c = self._text[self._at]
        self._at += 1
        if c != "\\":
            return ord(c)
        kind = self._peek()
        self._at += 1
        if kind in _DIGITS:
            digits = self._text[self._at : self._at + _DIGITS[kind]]
            self._at += len(digits)
            try:
                point = int(digits, 16) if len(digits) == _DIGITS[kind] else -1
            except ValueError:
                point = -1
            if not 0 <= point <= ALL[-1][1] or 0xD800 <= point <= 0xDFFF:
                raise self._invalid("has an invalid escape before this place")
            return point
        if not kind or (kind.isalnum() and kind not in _ESCAPES):
            raise self._invalid("has an unknown escape before this place")
        return ord(_ESCAPES.get(kind, kind))

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _skip(self) -> None:
        match = _SKIP.match(self._text, self._at)
        self._at = match.end() if match is not None else self._at

    def _invalid(self, what: str) -> InvalidRequest:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[self._at : self._at + 20]
        return invalid_schema(f"{self._path} {what} in line {line}: {near!r}.", self._path)


class _Writer:
    """Writes rules as Lark."""

    def __init__(self, rules: dict[str, Element], path: str) -> None:
        self._rules = rules
        self._path = path
        self._names = {name: f"r{i}" for i, name in enumerate(rules)}
        self._lines: list[str] = []
        self._firsts: dict[str, tuple[Ranges, bool]] = {}  # of each rule; whether it may be empty
        self._follows: dict[str, Ranges] = {}  # what may come after each rule
        self._parts: dict[str, Part | None] = {}
        self._groups = 0

    def write(self) -> str:
        whole = self._as_part(Reference("root"), 0)
        if whole is not None and unrolled(whole) <= MAX_UNROLLED:
            return f"start: {regex(write(whole))}"
        self._find_firsts()
        self._find_follows()
        self._lines.append(f"start: {self._names['root']}")
        for name, element in self._rules.items():
            text = self._element(element, self._follows[name], 0)
            self._lines.append(f"{self._names[name]}: {text}")
        return "\n".join(self._lines)

    def _as_part(self, element: Element, depth: int) -> Part | None:
        """A grammar without recursion as a pattern; None for others, and for tokens."""
        if depth > MAX_INLINED:
            return None
        match element:
            case Chars():
                return element
            case Text(value):
                return Sequence(tuple(Chars(((ord(c), ord(c)),)) for c in value))
            case Reference(name):
                if name not in self._parts:
                    self._parts[name] = None  # while it is made: recursion
                    self._parts[name] = self._as_part(self._rules[name], depth + 1)
                return self._parts[name]
            case SpecialToken():
                return None
            case Several(elements, kind, least, largest):
                parts: list[Part] = []
                size = 0
                for one in elements:
                    part = self._as_part(one, depth + 1)
                    size += MAX_UNROLLED + 1 if part is None else unrolled(part)
                    if part is None or size > MAX_UNROLLED:
                        return None
                    parts.append(part)
                if kind == "repeat":
                    return Repeat(parts[0], least, largest)
                return OneOf(tuple(parts)) if kind == "one" else Sequence(tuple(parts))

    def _element(self, element: Element, follow: Ranges, depth: int) -> str:
        """Lark for an element; ``follow`` is what may come after it."""
        match element:
            case Chars():
                return regex(write(element))
            case Text(value):
                return literal(value)
            case Reference(name):
                return self._names[name]
            case SpecialToken(number):
                return special(number)
            case Several(elements, "one"):
                options = [self._element(one, follow, depth + 1) for one in elements]
                return self._group(" | ".join(options), depth)
            case Several(elements, "repeat"):
                return self._repeat(element, follow, depth)
            case Several(elements):
                return self._sequence(elements, follow, depth)

    def _sequence(self, elements: tuple[Element, ...], follow: Ranges, depth: int) -> str:
        texts: list[str] = []
        for element, after in reversed(self._with_follows(elements, follow)):
            texts.append(self._element(element, after, depth + 1))
        return " ".join(texts[::-1]) if texts else '""'

    def _repeat(self, element: Several, follow: Ranges, depth: int) -> str:
        inner, least, largest = element.parts[0], element.least, element.largest
        if largest == 0:
            return '""'
        if isinstance(inner, Chars):
            if largest == 1 or not intersects(inner.ranges, follow):
                terminal = regex(write(Repeat(inner, max(1, least), largest)))
                return self._group(terminal, depth, least == 0)
        first, _ = self._first(inner)
        after = follow if largest == 1 else _join(follow, first)
        text = self._element(inner, after, depth + 1)
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, largest))
        if bounds is None:
            bounds = f"{{{least},{'' if largest is None else largest}}}"
        return f"({text}){bounds}" if depth < MAX_GROUPS else f"{self._rule(text)}{bounds}"

    def _group(self, text: str, depth: int, empty: bool = False) -> str:
        if empty:  # a terminal that may be empty: the rule may be
            return f'({text} | "")' if depth < MAX_GROUPS else self._rule(f'{text} | ""')
        if " | " not in text:
            return text
        return f"({text})" if depth < MAX_GROUPS else self._rule(text)

    def _rule(self, text: str) -> str:
        self._groups += 1
        name = f"g{self._groups}"
        self._lines.append(f"{name}: {text}")
        return name

    def _find_firsts(self) -> None:
        self._firsts = dict.fromkeys(self._rules, ((), False))
        for _ in range(MAX_ROUNDS):
            before = dict(self._firsts)
            for name in reversed(self._rules):
                self._firsts[name] = self._first(self._rules[name])
            if before == self._firsts:
                return
        self._firsts = dict.fromkeys(self._rules, (ALL, True))

    def _first(self, element: Element) -> tuple[Ranges, bool]:
        """The characters that an element may begin with, and whether it may be empty."""
        match element:
            case Chars(ranges):
                return ranges, False
            case Text(value):
                return ((((ord(value[0]),) * 2),) if value else ()), not value
            case Reference(name):
                return self._firsts[name]
            case SpecialToken():
                return (), False
            case Several(elements, "one"):
                firsts = [self._first(one) for one in elements]
                return _join(*(r for r, _ in firsts)), any(empty for _, empty in firsts)
            case Several(elements, "repeat", least):
                first, empty = self._first(elements[0])
                return first, empty or least == 0
            case Several(elements):
                joined: Ranges = ()
                for one in elements:
                    first, empty = self._first(one)
                    joined = _join(joined, first)
                    if not empty:
                        return joined, False
                return joined, True

    def _find_follows(self) -> None:
        self._follows = dict.fromkeys(self._rules, ())
        for _ in range(MAX_ROUNDS):
            before = dict(self._follows)
            for name, element in self._rules.items():
                self._note_follows(element, self._follows[name])
            if before == self._follows:
                return
        self._follows = dict.fromkeys(self._rules, ALL)

    def _note_follows(self, element: Element, follow: Ranges) -> None:
        match element:
            case Reference(name):
                self._follows[name] = _join(self._follows[name], follow)
            case Several(elements, "one"):
                for one in elements:
                    self._note_follows(one, follow)
            case Several(elements, "repeat", _, largest):
                first, _ = self._first(elements[0])
                self._note_follows(elements[0], follow if largest == 1 else _join(follow, first))
            case Several(elements):
                for one, after in self._with_follows(elements, follow):
                    self._note_follows(one, after)
            case _:
                pass

    def _with_follows(
        self, elements: tuple[Element, ...], follow: Ranges
    ) -> list[tuple[Element, Ranges]]:
        """The elements of a sequence, each with what may come after it."""
        pairs: list[tuple[Element, Ranges]] = []
        for element in reversed(elements):
            pairs.append((element, follow))
            first, empty = self._first(element)
            follow = _join(first, follow) if empty else first
        return pairs[::-1]


def _join(*several: Ranges) -> Ranges:
    return ranges_of(pair for ranges in several for pair in ranges)


def _references(element: Element) -> Iterable[str]:
    waiting = [element]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Reference):
            yield one.name
        elif isinstance(one, Several):
            waiting += reversed(one.parts)


def _nested_bounds(element: Element) -> int:
    """The largest product of bounds within each other."""
    if not isinstance(element, Several):
        return 1
    inner = max(map(_nested_bounds, element.parts), default=1)
    return inner * (max(1, element.least, element.largest or 0) if element.kind == "repeat" else 1)
