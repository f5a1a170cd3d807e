"""The grammar of a custom tool as one pattern of its text.

A call holds the text as its model writes texts: with JSON's escapes, or up to a mark. A pattern can
be held to there, rules cannot: llguidance cuts a text into lexemes before it knows what a backslash
begins. So rules are written into each other. One that repeats itself at its edge is a repetition,
any other is nested as often as there is room: what is sampled always follows the grammar.

Raises:
    InvalidRequest: ``invalid_schema``, ``unsupported_schema`` or ``schema_too_complex``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.schema.code_points import (
    ALL,
    LAST,
    complement,
    of_text,
    ranges_of,
)
from rayfin.deployments.guidance.schema.ecma import parse, too_complex, unsupported
from rayfin.deployments.guidance.schema.pattern_parts import (
    Chars,
    OneOf,
    Part,
    Repeat,
    Sequence,
    unrolled,
    write,
)

MAX_LENGTH = 16 * 1024  # characters of a grammar
MAX_BRACKETS = 64
MAX_NESTED = 4  # times that a rule is written into itself
MAX_SIZE = 8000  # characters of a pattern
MAX_PARTS = 20_000  # that are looked at to write one

_FRACTION = r"([0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"([0-9]+[eE][+-]?[0-9]+|{_FRACTION}([eE][+-]?[0-9]+)?)"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _FRACTION,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?({_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""Of ``%import common``."""

_TOKEN = re.compile(
    r"""(?:[ \t\r\f]|(?://|\#)[^\n]*)*
    ( \n(?:\s|(?://|\#)[^\n]*)*                                 # the end of a definition
    | "(?:\\.|[^"\\\n])*"i? | /(?!/)(?:\\.|[^/\\\n])+/[imslux]* # a text, a regular expression
    | %[a-z]+ | [!?]{0,2}[A-Za-z_]\w* | [0-9]+ | -> | \.\. | \S | $)""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b"}
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_TIMES = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(slots=True, frozen=True)
class Name:
    """A rule or a terminal within the part of another one."""

    text: str


@dataclass(slots=True, frozen=True)
class Lexeme:
    """A text or a regular expression: a part without names."""

    part: Part


def pattern_of_regex(text: str, path: str) -> str:
    """Returns a pattern that the whole text matches, in llguidance's dialect."""
    return f"^(?:{write(_of_regex(text, path), edges=False)})$"


def pattern_of_lark(text: str, path: str) -> str:
    """Returns the pattern of a grammar's texts, in llguidance's dialect."""
    if len(text) > MAX_LENGTH:
        raise too_complex(f"{path} is longer than {MAX_LENGTH} characters.", path)
    try:
        part = _Inliner(_Reader(text, path), path).part()
        return f"^(?:{write(part, edges=False)})$"
    except RecursionError:
        raise too_complex(f"{path} is nested too deep.", path) from None


def _of_regex(text: str, path: str, flags: str = "") -> Part:
    """Reads a regular expression, whose dot is all but a newline."""
    if inline := _FLAGS.match(text):
        text, flags = text[inline.end() :], flags + inline[1]
    if "x" in flags:
        raise unsupported("the flag x", path)
    dot = ALL if "s" in flags else complement(of_text("\n"))
    part = parse(text, path, max_length=MAX_LENGTH, dot=dot)
    return _mapped(part, _any_case) if "i" in flags else part


def _mapped(part: Part, change: Callable[[Chars], Chars]) -> Part:
    """Returns a part with its sets of characters changed."""
    match part:
        case Chars():
            return change(part)
        case Repeat(inner, least, largest):
            return Repeat(_mapped(inner, change), least, largest)
        case Sequence(parts) | OneOf(parts):
            return type(part)(tuple(_mapped(p, change) for p in parts))
        case _:
            return part


def _any_case(chars: Chars) -> Chars:
    """Adds the other case of letters: those of ASCII, and of each single one.

    To what is left out by a set that reaches to the last character: ``[^a]`` has neither case.
    """
    is_rest = not chars.properties and bool(chars.ranges) and chars.ranges[-1][1] == LAST
    ranges = complement(chars.ranges) if is_rest else chars.ranges
    more = []
    for low, high in ranges:
        for first, last, step in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
            if max(low, first) <= min(high, last):
                more.append((max(low, first) + step, min(high, last) + step))
        other = chr(low).swapcase()
        more += [(ord(other), ord(other))] if low == high and len(other) == 1 else []
    ranges = ranges_of([*ranges, *more])
    return Chars(complement(ranges) if is_rest else ranges, chars.properties, chars.negated)


def _of_text(token: str) -> Part:
    """Reads a text with its quotes and its flag, as a sequence."""

    def char(match: "re.Match[str]") -> str:
        code = match[1] or match[2]
        return chr(int(code, 16)) if code else _LETTERS.get(match[3], match[3])

    text = _ESCAPE.sub(char, token.removesuffix("i")[1:-1])
    part = Sequence(tuple(Chars(of_text(c)) for c in text))
    return _mapped(part, _any_case) if token.endswith("i") else part


class _Reader:
    """Reads the definitions of a grammar. Parts of its rules hold names."""

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._tokens = [match[1] for match in _TOKEN.finditer(text)]
        self._at = 0
        self._open = 0  # brackets: a line may end within them
        self.rules: dict[str, Any] = {}
        self.ignored: list[Any] = []
        while self._next:
            if self._next[0] == "\n":
                self._at += 1
            elif self._take("%ignore"):
                self.ignored.append(self._choice())
            elif self._take("%import"):
                self._import()
            else:
                self._define()

    @property
    def _next(self) -> str:
        """Returns the next token; "" at the end."""
        return self._tokens[self._at]

    def _take(self, *texts: str) -> str:
        token = self._next
        self._at += token in texts
        return token if token in texts else ""

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self.invalid(f"{text!r} is expected, not {self._next[:32]!r}")

    def _name(self) -> str:
        name = self._next.lstrip("!?")
        if not _NAME.fullmatch(name):
            raise self.invalid(f"a name is expected, not {self._next[:32]!r}")
        self._at += 1
        return name

    def _number(self) -> int:
        token = self._next
        if not token.isdigit() or len(token) > 4:
            raise self.invalid(f"a number up to 9999 is expected, not {token[:32]!r}")
        self._at += 1
        return int(token)

    def _define(self) -> None:
        name = self._name()
        if self._take("."):
            self._number()  # a priority
        self._expect(":")
        if name in self.rules:
            raise self.invalid(f"{name[:64]} is defined twice")
        self.rules[name] = self._choice()
        if self._next[:1] not in ("", "\n"):
            raise self.invalid(f"{self._next[:32]!r} is not understood")

    def _import(self) -> None:
        library = self._name()
        self._expect(".") if self._next == "." else None
        names = [self._name()] if not self._take("(") else self._names()
        alias = self._name() if self._take("->") else ""
        for name in names:
            if library != "common" or name not in COMMON:
                raise unsupported(f"an import of {library[:32]}.{name[:32]}", self._path)
            self.rules[alias or name] = Lexeme(_of_regex(COMMON[name], self._path))

    def _names(self) -> list[str]:
        names = [self._name()]
        while self._take(","):
            names.append(self._name())
        self._expect(")")
        return names

    def _choice(self) -> Any:
        parts = [self._sequence()]
        while self._goes_on():
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else OneOf(tuple(parts))

    def _goes_on(self) -> bool:
        """Reads the bar before a further alternative, which may stand on a line of its own."""
        ends = self._next[:1] == "\n"
        if self._tokens[self._at + ends : self._at + ends + 1] != ["|"]:
            return False
        self._at += ends + 1
        return True

    def _sequence(self) -> Any:
        parts: list[Any] = []
        while True:
            if self._open and self._next[:1] == "\n":
                self._at += 1
            if self._take("->"):
                self._name()
            if self._next[:1] in ("", "\n", "|", ")", "]"):
                return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
            part = self._atom()
            times = self._times()
            parts.append(part if times is None else Repeat(part, *times))

    def _times(self) -> tuple[int, int | None] | None:
        if mark := self._take("?", "*", "+"):
            return _TIMES[mark]
        if self._take("~"):
            least = self._number()
            largest: int | None = self._number() if self._take("..") else least
        elif self._take("{"):
            least = 0 if self._next == "," else self._number()
            largest = least
            if self._take(","):
                largest = None if self._next == "}" else self._number()
            self._expect("}")
        else:
            return None
        if largest is not None and largest < max(least, 1):
            raise self.invalid("a repetition has no times")
        return least, largest

    def _atom(self) -> Any:
        token = self._next
        if token[0] == '"' and len(token) > 1:
            self._at += 1
            text = _of_text(token)
            return Lexeme(self._range(text) if self._take("..") else text)
        if token[0] == "/" and len(token) > 2:
            self._at += 1
            body, _, flags = token[1:].rpartition("/")
            return Lexeme(_of_regex(body, self._path, flags))
        closing = {"(": ")", "[": "]"}.get(token)
        if closing is None:
            return Name(self._name())
        self._at += 1
        self._open += 1
        if self._open > MAX_BRACKETS:
            raise too_complex(f"{self._path} is nested too deep.", self._path)
        part = self._choice()
        self._expect(closing)
        self._open -= 1
        return part if closing == ")" else Repeat(part, 0, 1)

    def _range(self, first: Part) -> Part:
        token = self._next
        last = _of_text(token) if token[:1] == '"' else Sequence(())
        ends = [
            part.parts[0].ranges[0][0]
            for part in (first, last)
            if isinstance(part, Sequence) and len(part.parts) == 1
            if isinstance(part.parts[0], Chars) and part.parts[0].ranges
        ]
        if len(ends) != 2 or ends[1] < ends[0]:
            raise self.invalid("a range goes from one character to a later one")
        self._at += 1
        return Chars(ranges_of([(ends[0], ends[1])]))

    def invalid(self, message: str) -> InvalidRequest:
        line = 1 + sum(token.count("\n") for token in self._tokens[: self._at])
        said = f"{self._path} is no valid grammar: {message} (line {line})."
        return InvalidRequest(said, self._path, "invalid_schema")


class _Inliner:
    """Writes the rules of a grammar into each other."""

    def __init__(self, reader: _Reader, path: str) -> None:
        self._reader = reader
        self._path = path
        self._rules = {name: _repeated(Name(name), rule) for name, rule in reader.rules.items()}
        self._open: dict[str, int] = {}  # how often rules are being written
        self._nested = 0  # how often one may be
        self._size = 0  # of what is written
        self._parts = 0  # that were looked at
        self._is_cut = False  # one could be once more

    def part(self) -> Part:
        """Returns the part of ``start``."""
        best: Part | None = None
        for self._nested in range(1, MAX_NESTED + 2):
            self._is_cut, self._size, self._parts = False, 0, 0
            try:
                part = self._written(Name("start"), True)
            except InvalidRequest:
                if best is None:
                    raise
                break
            best = best if part is None else Sequence((part, *self._ignored()))
            if not self._is_cut:
                break
        if best is None:
            raise self._reader.invalid("no text follows it")
        return best

    def _written(self, part: Any, in_rule: bool) -> Part | None:
        """Returns a part without names; None if a rule in it may not be written once more."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise too_complex(f"{self._path} is too complex: its rules are too many.", self._path)
        match part:
            case Name(name):
                return self._named(name, in_rule)
            case Repeat(inner, least, largest):
                written = self._written(inner, in_rule)
                if written is None:
                    return Sequence(()) if least == 0 else None
                return Repeat(written, least, largest)
            case Sequence(parts) | OneOf(parts):
                members = [self._written(p, in_rule) for p in parts]
                kept = tuple(p for p in members if p is not None)
                whole = len(kept) == len(members) if isinstance(part, Sequence) else bool(kept)
                return type(part)(kept) if whole else None
        plain: Part = part.part
        self._size += unrolled(plain)
        if self._size > MAX_SIZE:
            raise too_complex(f"{self._path} is too complex: its rules are too long.", self._path)
        return self._lexeme(plain) if in_rule else plain

    def _named(self, name: str, in_rule: bool) -> Part | None:
        if name not in self._rules:
            raise self._reader.invalid(f"{name[:64]} is not defined")
        times = self._open.get(name, 0)
        if times == self._nested:
            self._is_cut = True
            return None
        self._open[name] = times + 1
        is_terminal = name.lstrip("_")[:1].isupper()
        part = self._written(self._rules[name], in_rule and not is_terminal)
        self._open[name] = times
        return self._lexeme(part) if part is not None and in_rule and is_terminal else part

    def _lexeme(self, part: Part) -> Part:
        before = self._ignored()
        return Sequence((*before, part)) if before else part

    def _ignored(self) -> list[Part]:
        """Returns what may stand before each lexeme, and at the end."""
        parts = [self._written(part, False) for part in self._reader.ignored]
        lexemes = tuple(part for part in parts if part is not None)
        return [Repeat(OneOf(lexemes), 0, None)] if lexemes else []


def _repeated(name: Name, rule: Any) -> Any:
    """Returns a rule that begins or ends with itself as a repetition: a: b | a c is b c*."""
    once: list[Any] = []
    behind: list[Any] = []
    before: list[Any] = []
    for part in rule.parts if isinstance(rule, OneOf) else (rule,):
        inner: tuple[Any, ...] = part.parts if isinstance(part, Sequence) else ()
        if len(inner) < 2 or inner.count(name) != 1 or name not in (inner[0], inner[-1]):
            once.append(part)
        else:
            rest = Sequence(tuple(p for p in inner if p != name))
            (behind if inner[0] == name else before).append(rest)
    if not once or bool(behind) == bool(before):
        return rule
    more = Repeat(OneOf(tuple(behind or before)), 0, None)
    core = OneOf(tuple(once))
    return Sequence((core, more) if behind else (more, core))
