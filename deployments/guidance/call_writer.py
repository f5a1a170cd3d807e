"""Calls in the syntax of a row: its marks, names and arguments as rules."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rayfin.deployments.guidance.elements import Elements
from rayfin.deployments.guidance.lark import BLANK, LarkWriter, alternatives, escaped, literal
from rayfin.deployments.guidance.literals import Literals
from rayfin.deployments.guidance.schema_facts import (
    ROOT_KEYWORDS,
    Schema,
    keywords,
    resolved,
    says_types_only,
    types_of,
    within,
)
from rayfin.deployments.guidance.string_terms import string_terms
from rayfin.deployments.text.parsing.format import TYPE, ToolFormat

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_COLON = f'{BLANK} ":" {BLANK}'
_COMMA = f'{BLANK} "," {BLANK}'
_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_IDS = {"mistral": "/[A-Za-z0-9]{9}/"}
_ANY_ID = "/[A-Za-z0-9_-]{1,64}/"
_SPACE = r"[ \t\n]{0,8}"
_NEWLINES = '"\\n"?'


class Callee(NamedTuple):
    """A function, and the schema that its arguments are held to; None allows any object."""

    name: str
    schema: Mapping[str, Any] | None = None


Group = tuple[list[str], Mapping[str, Any] | None]
"""The names of functions whose arguments are held to the same."""


class CallWriter:
    """Writes the rules of calls in one row's syntax."""

    def __init__(self, lark: LarkWriter, row: ToolFormat) -> None:
        self._lark = lark
        self._row = row
        self._literals = Literals(lark, row.quote)
        self._elements = Elements(lark, row)

    def can_hold(self, callee: Callee) -> bool:
        """Whether the schema can be held to in this syntax."""
        if callee.schema is None or self._row.syntax in ("json", "channels"):
            return True
        return self._members(callee.schema) is not None

    def calls(self, callees: Sequence[Callee], *, several: bool) -> str:
        """Returns the expression of a section of one call, or more, with all marks."""
        opening, closing = map(self._lark.mark, self._row.section)
        return self._joined(opening, self.run(callees, several=several), closing)

    def run(self, callees: Sequence[Callee], *, several: bool) -> str:
        """Returns the expression of calls and what is between them."""
        row = self._row
        if row.layout == "list":
            item = self._lark.rule(self._bodies(callees))
            comma = f'"," {BLANK}' if row.syntax == "python" else _COMMA
            more = f"({comma} {item})*" if several else ""
            return f'{BLANK} "[" {BLANK} {item} {more} {BLANK} "]"'
        call = self._lark.rule(self.one(callees))
        if not several:
            return call
        if row.syntax == "python":
            return f'{BLANK} {call} ("\\n" {call})*'
        between = self._lark.mark(row.separator)
        return f"{call} ({self._joined(between, call)})*"

    def one(self, callees: Sequence[Callee]) -> str:
        """Returns the expression of one call with its own marks."""
        opening, closing = map(self._lark.mark, self._row.call)
        return self._joined(opening, f"({self._bodies(callees)})", closing)

    def behind(self, mark: str, callees: Sequence[Callee], *, several: bool) -> str:
        """Returns what follows ``mark``, a token within the mark that begins a section or call."""
        row = self._row
        if mark in row.section[0]:
            rest = self._lark.behind(mark, row.section[0])
            return self._joined(
                rest, self.run(callees, several=several), self._lark.mark(row.section[1])
            )
        if mark in row.call[0]:
            rest = self._lark.behind(mark, row.call[0])
            return self._joined(rest, f"({self._bodies(callees)})", self._lark.mark(row.call[1]))
        if mark in row.function[0]:
            rest = self._lark.behind(mark, row.function[0])
            return self._joined(rest, f"({self._bodies(callees, begun=True)})")
        closing = self._lark.mark(row.section[1] or row.call[1])
        if row.layout == "list":
            return self._joined(self.run(callees, several=several), closing)
        return self._joined(BLANK, f"({self._bodies(callees)})", closing)

    def bare(self, callees: Sequence[Callee], *, several: bool) -> tuple[str, str]:
        """Returns calls without a mark, and the pattern of what they begin with.

        They begin with one lexeme, so that a text beside them can be one that begins otherwise.
        """
        row, in_list = self._row, self._row.layout == "list"
        heads, calls = [], []
        for names, schema in self._groups(callees):
            named = f"({'|'.join(map(escaped, names))})"
            bracket = rf"\[{_SPACE}" if in_list else ""
            if row.syntax == "python":
                heads.append(rf"{_SPACE}{bracket}{named}{_SPACE}\(")
                rest = f'{self._inner(schema)} ")"'
            else:
                colon = f"{_SPACE}:{_SPACE}"
                extra = f'("type"{colon}"function"{_SPACE},{_SPACE})?'
                key = f'{extra}"{escaped(row.name_key)}"{colon}"{named}"'
                heads.append(rf"{_SPACE}{bracket}\{{{_SPACE}{key}")
                rest = self._behind_name(schema)
            calls.append(f"{self._lark.terminal(f'/{heads[-1]}/')} {rest}")
        first = f"({' | '.join(calls)})"
        more = self._more(callees) if several else ""
        return self._joined(first, more, f'{BLANK} "]"' if in_list else ""), "|".join(heads)

    def _more(self, callees: Sequence[Callee]) -> str:
        """Further calls without marks of their own."""
        comma = f'"," {BLANK}' if self._row.syntax == "python" else _COMMA
        between = comma if self._row.layout == "list" else self._lark.mark(self._row.separator)
        return f"({between} {self._lark.rule(self._bodies(callees))})*"

    @staticmethod
    def _groups(callees: Sequence[Callee]) -> "list[Group]":
        """All functions that take any arguments together, and each other alone."""
        loose = [callee.name for callee in callees if callee.schema is None]
        groups: list[Group] = [(loose, None)] if loose else []
        return groups + [
            ([callee.name], callee.schema) for callee in callees if callee.schema is not None
        ]

    def _bodies(self, callees: Sequence[Callee], *, begun: bool = False) -> str:
        """An alternative for each group; ``begun``: the mark before the name is written."""
        groups = self._groups(callees)
        return " | ".join(self._body(names, schema, begun) for names, schema in groups)

    def _body(self, names: Sequence[str], schema: Mapping[str, Any] | None, begun: bool) -> str:
        row = self._row
        if row.syntax in ("tagged", "elements"):
            return self._tagged(names, schema, begun)
        if row.syntax in ("braces", "python"):
            opening, closing = ("{", "}") if row.quote else ("(", ")")
            head = self._joined(self._lark.mark(row.function[0]), self._alternatives(names))
            return f"{head} {literal(opening)} {self._inner(schema)} {literal(closing)}"
        if row.layout == "named":
            arguments = self._lark.json(ANY_OBJECT if schema is None else schema)
            before, after = map(self._lark.mark, row.arguments)
            return self._joined(self._head(names), before, arguments, after)
        named = self._alternatives(f'"{name}"' for name in names)
        ids = f"({self._ids()} {_COMMA})?" if row.id_key else ""
        key = literal(literal(row.name_key))
        return f'"{{" {BLANK} {ids} {key} {_COLON} {named} {self._behind_name(schema)}'

    def _behind_name(self, schema: Mapping[str, Any] | None) -> str:
        """The rest of an object."""
        key = literal(literal(self._row.arguments_key))
        arguments = self._lark.json(ANY_OBJECT if schema is None else schema)
        ids = f"({_COMMA} {self._ids()})?" if self._row.id_key else ""
        return f'{_COMMA} {key} {_COLON} {arguments} {ids} {BLANK} "}}"'

    def _ids(self) -> str:
        """The member of an object that holds the call's id."""
        inner = _IDS.get(self._row.id_style, _ANY_ID)[1:-1]
        value = self._lark.terminal(f'/"{inner}"/')
        return f"{literal(literal(self._row.id_key))} {_COLON} {value}"

    def _head(self, names: Sequence[str]) -> str:
        """The name outside of JSON, with the marks around it."""
        row = self._row
        opening, closing = map(self._lark.mark, row.function)
        if row.id_style == "kimi":
            return self._joined(
                opening, '"functions."?', self._alternatives(names), "/:[0-9]{1,3}/", closing
            )
        return self._joined(opening, self._alternatives(names), self._id_behind(), closing)

    def _id_behind(self) -> str:
        """The id that may stand behind a name outside of JSON."""
        row = self._row
        number = "/[0-9]{1,3}/" if row.numbered else _IDS.get(row.id_style, _ANY_ID)
        return f"({self._lark.mark(row.id_mark)} {number})?" if row.id_mark else ""

    def _inner(self, schema: Mapping[str, Any] | None) -> str:
        """The arguments of ``N(k=v)`` or ``N{k:v}``."""
        if schema is not None:
            return self._literals.items(self._members(schema) or [])
        key, equals = self._lark.terminal(_KEY), ":" if self._row.quote else "="
        member = self._lark.rule(f"{key} {literal(equals)} {self._literals.any()}")
        return f'({member} ("," {BLANK} {member})*)?'

    def _tagged(self, names: Sequence[str], schema: Mapping[str, Any] | None, begun: bool) -> str:
        row = self._row
        opening, closing = map(self._lark.mark, row.function)
        opening = "" if begun else opening
        if schema is None and row.syntax == "elements":
            inner = f"{self._elements.any()}*"
        elif schema is None:
            key = self._lark.terminal(_KEY)
            inner = f"({self._joined(self._lark.mark(row.key[0]), key, self._loose_value())})*"
        else:
            members = self._members(schema) or []
            inner = " ".join(part if needed else f"({part})?" for part, needed in members)
        end = self._lark.mark(row.arguments[1])
        names_and_id = self._joined(self._alternatives(names), self._id_behind())
        return self._joined(opening, names_and_id, closing, inner, end)

    def _loose_value(self) -> str:
        row = self._row
        parts = [self._free_text(row.key[1] + row.value[0])]
        for kind, end in row.json_key_ends.items() if self._names_types else ():
            parts.append(self._json_value(end + row.value[0], {"type": kind}, {}))
        if row.json_key_end and not self._names_types:
            parts.append(self._json_value(row.json_key_end + row.value[0], True, {}))
        return f"({' | '.join(parts)})" if parts[1:] else parts[0]

    def _free_text(self, before: str) -> str:
        return self._joined(self._lark.mark(before.rstrip()), self._lark.until(self._row.value[1]))

    def _json_value(self, before: str, schema: Schema, root: Mapping[str, Any]) -> str:
        value = self._lark.json(within(schema, root))
        return self._joined(self._lark.mark(before), value, self._lark.mark(self._row.value[1]))

    def _members(self, schema: Mapping[str, Any]) -> list[tuple[str, bool]] | None:
        """The expression of each argument, and whether it is required; None if one has none."""
        plain = resolved(schema, schema)
        if not isinstance(plain, Mapping) or keywords(plain) - ROOT_KEYWORDS:
            return None
        needed, extra = set(plain.get("required", ())), plain.get("additionalProperties", True)
        properties = plain.get("properties", {})
        if needed - set(properties) or not (isinstance(extra, bool) or properties):
            return None
        members = []
        for key, part in properties.items():
            member = self._member(key, part, schema)
            if member is None:
                return None
            members.append((member, key in needed))
        return members

    def _member(self, key: str, schema: Schema, root: Mapping[str, Any]) -> str | None:
        row = self._row
        if row.syntax == "elements":
            return self._elements.element(key, schema, root)
        if row.syntax != "tagged":
            value = self._literals.value(schema, root)
            equals = ":" if row.quote else "="
            return None if value is None else f"{literal(key + equals)} {value}"
        before = row.key[0] + row.write_key(key)
        if self._names_types:
            return self._by_type(before, schema, root)
        text, json_end = row.key[1] + row.value[0], row.json_key_end + row.value[0]
        types = types_of(schema, root)
        if not types:
            return None
        if types == {"string"}:
            return self._string(before + text, schema, root)
        if "string" in types and says_types_only(schema, root):
            free = self._free_text(before + text)
            if not row.json_key_end:
                return free
            return f"({free} | {self._json_value(before + json_end, schema, root)})"
        end = json_end if row.json_key_end else text
        return self._json_value(before + end, schema, root)

    @property
    def _names_types(self) -> bool:
        """Whether a key's mark names the JSON type of its value."""
        return TYPE in self._row.json_key_end

    def _by_type(self, before: str, schema: Schema, root: Mapping[str, Any]) -> str | None:
        """A value behind the mark of its type: an alternative for each."""
        row, target = self._row, resolved(schema, root)
        if target is None:
            return None
        plain = target if isinstance(target, Mapping) else {}
        if keywords(plain) == {"anyOf"}:
            parts = [self._by_type(before, part, root) for part in plain["anyOf"]]
        else:
            types, parts = types_of(target, root), []
            if "string" in types:
                parts.append(self._string(before + row.key[1], {**plain, "type": "string"}, root))
            for kind, end in row.json_key_ends.items():
                integers = kind == "number" and "integer" in types and kind not in types
                if kind in types or integers:
                    typed = {**plain, "type": "integer" if integers else kind}
                    parts.append(self._json_value(before + end, typed, root))
        return alternatives(parts)

    def _string(self, before: str, schema: Schema, root: Mapping[str, Any]) -> str | None:
        target = resolved(schema, root)
        if not isinstance(target, Mapping) or {"anyOf", "allOf"} & set(target):
            return None
        terms = string_terms(target)
        if terms is None:
            return None
        if not terms:
            return self._free_text(before)
        opening = self._lark.mark(before, exact=True)
        core = self._row.value[1].rstrip()
        tail = _NEWLINES if core != self._row.value[1] else ""
        return self._joined(opening, self._lark.held(terms, core), tail)

    @staticmethod
    def _alternatives(names: Any) -> str:
        return "(" + " | ".join(literal(name) for name in names) + ")"

    @staticmethod
    def _joined(*parts: str) -> str:
        return " ".join(filter(None, parts))
