"""Lark as llguidance reads it: writing parts of it, and checking the grammars that users write.

Schemas within a grammar (``%json``) are compiled as all others are, and special tokens are written
by their ids.

Raises:
    InvalidRequest: ``invalid_schema``, ``schema_too_complex``, or what the schemas within raise.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.json_text import JsonStyle, json_rule
from rayfin.deployments.guidance.schema.lint import (
    MAX_RULES,
    check_chains,
    check_count,
    check_literal,
    check_size,
    check_text,
    invalid_schema,
    parse_json_prefix,
    too_complex,
)

MAX_NESTING = 25  # llguidance reads 30
MAX_UNROLLED = 20_000
MAX_CHAIN = 1000  # rules, each the first to name the next one

_SKIP = re.compile(r"(?:(?:#|//)[^\n]*|[ \t\r\n])*")
_TOKEN = re.compile(
    r"""(?P<json>%(?:json|regex|llguidance)(?![a-z]))
    | (?P<directive>%[a-z]+)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    | (?P<special><[^<>\s]+>)
    | (?P<other_grammar>@[\w-]+)
    | (?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    | (?P<bounds>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    | (?P<mark>->|::|\.\.|[-+]?\d[\w.]*|[+*?:|&~=,.()\[\]{}_])""",
    re.VERBOSE,
)
_BOUND = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_IMPORTED = re.compile(r"%import\s+[\w.]+(?:\s*->\s*(\w+))?(?:\s*\(([^)]*)\))?")
_ONE_TOKEN = re.compile(r"<\[\^?[\d,\s*-]+\]>")


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


@dataclass(slots=True)
class CheckedLark:
    """A grammar that may be compiled."""

    text: str
    unenforced: list[str] = field(default_factory=list)


def literal(text: str) -> str:
    """A text as a string of Lark, which has no control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A pattern of Rust's dialect, slashes escaped, as a terminal of Lark."""
    return f"/{pattern}/" if pattern else '""'


def special(token: int) -> str:
    return f"<[{token}]>"


def check_lark(
    text: str,
    path: str,
    *,
    special_tokens: Mapping[str, int],
    style: JsonStyle,
    max_bytes: int,
) -> CheckedLark:
    """Checks a grammar without compiling it; returns it with its schemas rewritten."""
    check_size(text, path, max_bytes)
    check_text(text, path)
    return _Checker(text, path, special_tokens, style).check()


class _Checker:
    """Reads a grammar's tokens once, and notes its rules."""

    def __init__(
        self, text: str, path: str, special_tokens: Mapping[str, int], style: JsonStyle
    ) -> None:
        self._text = text
        self._path = path
        self._special_tokens = special_tokens
        self._style = style
        self._uses: dict[str, list[str]] = {}  # of each rule, in written order
        self._known: set[str] = set()  # imported or declared
        self._sizes: list[int] = [1]  # of the open groups, bounds written out
        self._checked = CheckedLark("")

    def check(self) -> CheckedLark:
        tokens = list(self._tokens())
        rule = ""
        head = False  # between a rule's name and its colon: attributes and parameters
        condition = False  # of an option, to the end of its line
        for i, token in enumerate(tokens):
            following = tokens[i + 1] if i + 1 < len(tokens) else None
            before = tokens[i - 1].text if i else ""
            condition = token.text == "%if" or (condition and not self._new_line(tokens, i))
            if token.kind == "name" and self._defines(tokens, i):
                rule = token.text.lstrip("!?")
                check_count(len(self._uses) + 1, MAX_RULES, "rules", self._path)
                self._uses.setdefault(rule, [])
                self._sizes = [1]
                head = True
            elif head:
                head = token.text != ":"
            elif token.kind == "name" and rule and before not in ("->", "::") and not condition:
                self._uses[rule].append(token.text)
            else:
                self._measure(token, following)
        self._check_names()
        return self._checked

    def _new_line(self, tokens: list[_Token], i: int) -> bool:
        return "\n" in self._text[tokens[i - 1].end : tokens[i].start]

    def _measure(self, token: _Token, following: _Token | None) -> None:
        """Follows the groups, and what their repetitions come to."""
        if token.kind == "mark" and token.text in ("(", "["):
            self._sizes.append(1)
            if len(self._sizes) > MAX_NESTING:
                raise too_complex(
                    f"{self._path} nests deeper than {MAX_NESTING} groups.", self._path
                )
        elif token.kind == "mark" and token.text in (")", "]") and len(self._sizes) > 1:
            self._repeat(self._sizes.pop(), following)
        elif token.kind in ("string", "regex"):
            self._terminal(token, following)

    def _tokens(self) -> Iterator[_Token]:
        """The tokens; what is kept of them is written to the checked text."""
        kept: list[str] = []
        at = 0
        while True:
            start = at
            at = _SKIP.match(self._text, at).end()  # type: ignore[union-attr]
            kept.append(self._text[start:at])
            if at == len(self._text):
                break
            found = _TOKEN.match(self._text, at)
            if found is None:
                raise self._invalid("has an unknown character", at)
            token = _Token(found.lastgroup or "", found[0], at, found.end())
            at = token.end
            text = token.text
            if token.kind == "json":
                at, text = self._json(token)
            elif token.kind == "special":
                text = self._special(token)
            elif token.kind == "other_grammar":
                raise self._invalid("names another grammar, and there is none", token.start)
            elif token.text in ("%import", "%declare"):
                at = self._declare(token)
                text = self._text[token.start : at]
            kept.append(text)
            yield token
        self._checked.text = "".join(kept)

    def _defines(self, tokens: list[_Token], i: int) -> bool:
        """Whether a name is that of the rule or terminal that begins here."""
        line_start = self._text.rfind("\n", 0, tokens[i].start) + 1
        before = self._text[line_start : tokens[i].start].strip()
        if before not in ("", "%override"):
            return False
        depth = 0
        for token in tokens[i + 1 : i + 40]:
            if token.text in ("[", "{"):
                depth += 1
            elif token.text in ("]", "}"):
                depth -= 1
            elif depth == 0:
                if token.text in (":", "::"):
                    return True
                if token.text not in (".", "_") and not token.text.lstrip("-").isdigit():
                    return False
        return False

    def _terminal(self, token: _Token, following: _Token | None) -> None:
        if token.kind == "string":
            check_literal(token.text, self._path)
            self._repeat(1, following)
            return
        size = 1
        for found in _BOUND.finditer(token.text):
            size *= max(1, int(found[2] or found[1]))
            self._check_unrolled(size)
        self._repeat(size, following)

    def _repeat(self, size: int, following: _Token | None) -> None:
        """Adds what is repeated to the group around it."""
        if following is not None and following.kind == "bounds":
            numbers = [int(n) for n in re.findall(r"\d{1,9}", following.text)]
            size *= max([1, *numbers])
        self._check_unrolled(size)
        self._sizes[-1] = max(self._sizes[-1], size)

    def _check_unrolled(self, size: int) -> None:
        if size > MAX_UNROLLED:
            raise too_complex(
                f"{self._path} repeats more than {MAX_UNROLLED} times, "
                "its nested repetitions multiplied.",
                self._path,
            )

    def _check_names(self) -> None:
        known = self._uses.keys() | self._known
        for rule, used in self._uses.items():
            for name in used:
                if name.lstrip("!?") not in known:
                    raise invalid_schema(
                        f"{self._path} names {name[:64]!r} in {rule[:64]!r}, which is undefined.",
                        self._path,
                    )
        if "start" not in self._uses:
            raise invalid_schema(f"{self._path} has no rule 'start'.", self._path)
        check_chains(self._uses, ["start"], self._path, MAX_CHAIN)

    def _json(self, token: _Token) -> tuple[int, str]:
        """The JSON after ``%json`` and the like: where it ends, and what it becomes."""
        value, end = parse_json_prefix(self._text, token.end, self._path)
        if token.text != "%json":
            return end, self._text[token.start : end]
        rule, unenforced = json_rule(value, self._path, self._style)
        self._checked.unenforced += unenforced
        return end, rule

    def _special(self, token: _Token) -> str:
        if _ONE_TOKEN.fullmatch(token.text):
            return token.text
        number = self._special_tokens.get(token.text)
        if number is None:
            raise self._invalid(f"names {token.text[:64]}, which is no special token", token.start)
        return special(number)

    def _declare(self, token: _Token) -> int:
        """Notes the names of a directive; returns where it ends."""
        end = self._text.find("\n", token.start)
        end = len(self._text) if end < 0 else end
        line = self._text[token.start : end]
        if token.text == "%declare":
            self._known.update(line.split()[1:])
            return end
        found = _IMPORTED.match(line)
        if found is None:
            raise self._invalid("has an incomplete %import", token.start)
        if found[2] is not None:
            self._known.update(name.strip() for name in found[2].split(","))
        else:
            self._known.add(found[1] or line.split()[1].rpartition(".")[2])
        return token.start + found.end()

    def _invalid(self, what: str, at: int) -> InvalidRequest:
        line = self._text.count("\n", 0, at) + 1
        near = self._text[at : at + 20]
        return invalid_schema(f"{self._path} {what} in line {line}: {near!r}.", self._path)
