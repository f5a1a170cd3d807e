"""Lark as llguidance reads it: writes grammars, and rewrites the schemas in users' grammars."""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from rayfin.deployments.guidance.json_text import WHITESPACE, JsonStyle, json_rule
from rayfin.deployments.guidance.schema.lint import check_size, check_text, parse_json_prefix
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat
from rayfin.deployments.text.tokenizer import Tokenizer

BLANK = "WS?"
"""Where JSON allows blanks."""

SHORTEST_MARK = 3  # characters of a mark that may be a token
_ESCAPED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "/": "\\/"}
_PART = re.compile(
    r"""(?P<json>%(?:json|regex|llguidance)(?![a-z]))
    | (?:\#|//)[^\n]*
    | "(?:\\.|[^"\\\n])*"
    | /(?:\\.|[^/\\])+/
    | [^%\#/"]+
    | .""",
    re.VERBOSE | re.DOTALL,
)


def literal(text: str) -> str:
    """A text as a string of Lark, which has no control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A pattern of Rust's dialect, slashes escaped, as a terminal of Lark."""
    return f"/{pattern}/" if pattern else '""'


def special(token: int) -> str:
    return f"<[{token}]>"


def rewrite_schemas(
    text: str, path: str, style: JsonStyle, max_bytes: int
) -> tuple[str, tuple[str, ...]]:
    """Returns a grammar with its schemas (``%json``) rewritten, and what these do not enforce.

    The rest of the grammar is checked when it compiles.

    Raises:
        InvalidRequest: ``invalid_schema``, ``schema_too_complex``, or what the schemas raise.
    """
    check_size(text, path, max_bytes)
    check_text(text, path)
    kept: list[str] = []
    unenforced: tuple[str, ...] = ()
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        assert match is not None, "a part is any character"
        part, at = match[0], match.end()
        if match["json"]:
            value, at = parse_json_prefix(text, at, path)
            if part == "%json":
                part, paths = json_rule(value, path, style)
                unenforced += paths
            else:
                part = text[match.start() : at]
        kept.append(part)
    return "".join(kept), unenforced


def mark_ids(
    tokenizer: Tokenizer, formats: Iterable[ToolFormat | ReasoningFormat | None]
) -> dict[str, int]:
    """Returns the ids of the marks that are single tokens of this tokenizer."""
    marks = (mark for row in formats if row is not None for mark in row.marks)
    added = tokenizer.added_ids
    return {mark: added[mark] for mark in marks if len(mark) >= SHORTEST_MARK and mark in added}


def escaped(text: str) -> str:
    """Returns the regular expression of a text, for use between slashes."""
    return "".join(_ESCAPED.get(char) or re.escape(char) for char in text)


def embedded(text: str) -> str:
    """Returns a grammar's text as an expression within another grammar."""
    if not text.lstrip().startswith("{"):
        return f"%lark {{\n{text}\n}}"
    (grammar,) = json.loads(text)["grammars"]
    if grammar.get("json_schema") is not None:
        return f"%json {json.dumps(grammar['json_schema'])}"
    return f"%lark {{\n{grammar['lark_grammar']}\n}}"


def alternatives(parts: Sequence[str | None]) -> str | None:
    """Returns the expression of one of ``parts``; None if there is none, or one is not known."""
    known = [part for part in parts if part is not None]
    return f"({' | '.join(known)})" if known and len(known) == len(parts) else None


class LarkWriter:
    """Collects the rules of one grammar. Equal rules are written once.

    Args:
        tokens: ids of marks that are single tokens.
        ends: ids that end an answer: a mark ends before one, as the runner samples it.
    """

    def __init__(self, tokens: Mapping[str, int], ends: Iterable[int] = ()) -> None:
        self._tokens = dict(tokens)
        self._ends = frozenset(ends)
        longest = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) if longest else "(?!)")
        self._names: dict[tuple[str, str], str] = {}
        self._references: dict[Hashable, str] = {}
        self._count = 0

    def rule(self, body: str, options: str = "") -> str:
        """Returns the name of a rule."""
        return self._name("r", body, options)

    def terminal(self, body: str) -> str:
        """Returns the name of a terminal: one lexeme."""
        return self._name("T", body, "")

    def reserve(self) -> str:
        """Returns the name of a rule whose body is set later, by ``define``."""
        self._count += 1
        return f"r{self._count}"

    def define(self, name: str, body: str) -> None:
        """Sets the body of a reserved rule."""
        self._names["", f"{name}: {body}"] = name

    def reference(self, key: Hashable, write: Callable[[], str | None]) -> str | None:
        """Returns the name of the rule of ``key``, whose body ``write`` makes; it may hold itself.

        None if there is no body.
        """
        if key not in self._references:
            self._references[key] = self.reserve()
            body = write()
            if body is None:
                del self._references[key]
                return None
            self.define(self._references[key], body)
        return self._references[key]

    def json(self, schema: Mapping[str, Any] | bool, **options: Any) -> str:
        """Returns the name of a rule of JSON that follows ``schema``."""
        body = {} if schema is True else dict(schema or {"not": {}})
        held = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
        body["x-guidance"] = {**held, **body.get("x-guidance", {}), **options}
        return self.rule(f"%json {json.dumps(body)}")

    def parts(self, text: str) -> list[str | int]:
        """Returns a mark as its texts and tokens; it ends before a token that ends the answer."""
        parts: list[str | int] = []
        start = 0
        for match in self._pattern.finditer(text):
            token = self._tokens[match[0]]
            parts += [text[start : match.start()]] * (match.start() > start)
            if token in self._ends:
                return parts
            parts.append(token)
            start = match.end()
        return parts + [text[start:]] * (start < len(text))

    def mark(self, text: str, *, exact: bool = False) -> str:
        """Returns the expression of a mark; blanks at its edges are free if not exact.

        Of no text it is "".
        """
        return self._joined(self.parts(text), exact)

    def behind(self, part: str, text: str) -> str:
        """Returns the expression of a mark behind a part of it; blanks at its end are free."""
        return self._joined(self.parts(text.partition(part)[2]), False, inside=True)

    def _joined(self, parts: Sequence[str | int], exact: bool, *, inside: bool = False) -> str:
        """The parts of a mark; ``inside``: they stand behind another one."""
        last = len(parts) - 1
        return " ".join(
            special(part)
            if isinstance(part, int)
            else self._text(part, exact, before=not (inside or at), after=at == last)
            for at, part in enumerate(parts)
        )

    def _text(self, text: str, exact: bool, *, before: bool, after: bool) -> str:
        """A text of a mark; ``before``, ``after``: it is at this edge of the mark."""
        if exact or not text.strip():
            return (literal(text) if exact else BLANK) if text else ""
        blank = text[0].isspace() and before, text[-1].isspace() and after
        core = text.lstrip() if blank[0] else text
        core = core.rstrip() if blank[1] else core
        return " ".join(filter(None, (BLANK * blank[0], literal(core), BLANK * blank[1])))

    def until(self, close: str) -> str:
        """Returns the expression of any text up to and with a mark, which is not in the text."""
        first, *rest = self.parts(close) or [""]
        tail = self._joined(rest, False, inside=True)
        if isinstance(first, int):
            return f"{self.terminal('/(?s:.+)/')}? <[{first}]> {tail}".rstrip()
        if rest:
            return f"{self.terminal(f'/(?s:.*){escaped(first)}/')} {tail}"
        return self.rule(f"/(?s:.*){escaped(first)}/", "lazy") if first else self.free()

    def held(self, terms: Iterable[str], close: str) -> str:
        """Returns the expression of a text that matches all terms, then exactly a mark."""
        body = " & ".join([*terms, f"~/(?s:.*){escaped(close.strip())}(?s:.*)/"])
        first, *rest = self.parts(close)
        if isinstance(first, str):  # one lexeme, as a text does not know where it ends
            body, first = f"({body}) {literal(first)}", ""
        tail = [
            special(part) if isinstance(part, int) else literal(part) for part in (first, *rest)
        ]
        return " ".join([self.terminal(body), *(part for part in tail if part != literal(""))])

    def free(self, *without: str) -> str:
        """Returns the expression of a text, which may be empty and holds none of these texts."""
        if not without:
            return f"{self.terminal('/(?s:.+)/')}?"
        marks = "|".join(map(escaped, without))
        return f"{self.terminal(f'/(?s:.+)/ & ~/(?s:.*({marks}).*)/')}?"

    def text(self, start: str) -> str:
        """Returns the grammar of an answer that is the expression ``start``."""
        lines = [f"start: {start}"]
        for (options, body), name in self._names.items():
            head = f"{name}[{options}]" if options else name
            lines.append(body if body.startswith(f"{name}: ") else f"{head}: {body}")
        if any(re.search(r"\bWS\b", line) for line in lines):
            lines.append(f"WS: /{WHITESPACE}/")
        return "\n".join(lines) + "\n"

    def _name(self, kind: str, body: str, options: str) -> str:
        key = (options, body)
        if key not in self._names:
            self._count += 1
            self._names[key] = f"{kind}{self._count}"
        return self._names[key]
