"""Values that are no JSON: Python's literals, and objects between braces with bare keys."""

from collections.abc import Mapping
from typing import Any

from rayfin.deployments.guidance.lark import BLANK, LarkWriter, alternatives, literal
from rayfin.deployments.guidance.schema_facts import (
    ALL_TYPES,
    Schema,
    keywords,
    resolved,
    type_of,
    within,
)
from rayfin.deployments.guidance.string_terms import string_terms
from rayfin.deployments.text.parsing.render import json_text, python_text

ORDER = ("string", "integer", "number", "boolean", "null", "array", "object")
_LIST = {"type", "items", "minItems", "maxItems"}
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_TEXT = {"type", "pattern", "minLength", "maxLength", "format"}
_NUMBER = {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class Literals:
    """Writes the rules of values.

    Args:
        quote: the mark around strings, which have no escapes; "" is Python.
    """

    def __init__(self, lark: LarkWriter, quote: str = "") -> None:
        self._lark = lark
        self._quote = quote
        self._any = ""

    def any(self) -> str:
        """Returns the rule of any value."""
        if not self._any:
            self._any = name = self._lark.reserve()
            items = f'{name} ("," {BLANK} {name})*'
            member = f'{self._key_rule()} ":" {BLANK} {name}'
            number = self._lark.json({"type": "number"})
            body = [self._free_string(), number, *self._words("boolean"), *self._words("null")]
            body += [f'"[" ({items})? "]"', f'"{{" ({member} ("," {BLANK} {member})*)? "}}"']
            self._lark.define(name, " | ".join(body))
        return self._any

    def value(self, schema: Schema, root: Mapping[str, Any]) -> str | None:
        """Returns the expression of a value, or None if the schema cannot be written so."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._reference(schema, root)
        if not isinstance(schema, Mapping):
            return self.any() if schema else None
        words = keywords(schema)
        if not words:
            return self.any()
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            named = schema.get("type", list(ALL_TYPES))
            allowed = {named} if isinstance(named, str) else set(named)
            allowed |= {"integer"} if "number" in allowed else set()
            texts = [self._constant(v) for v in values if type_of(v) in allowed]
            plain = [text for text in texts if text is not None]
            unknown = words - {"type", "const", "enum"} or len(plain) < len(texts) or not plain
            return None if unknown else f"({' | '.join(plain)})"
        if "anyOf" in schema:
            if words != {"anyOf"}:
                return None
            return alternatives([self.value(part, root) for part in schema["anyOf"]])
        named = schema.get("type")
        types = [named] if isinstance(named, str) else named or ORDER
        parts = [self._typed({**schema, "type": kind}, root) for kind in ORDER if kind in types]
        return alternatives(parts)

    def items(self, members: list[tuple[str, bool]]) -> str:
        """Returns the expression of members in order with commas; a False one may be left out."""
        comma = f'"," {BLANK}'
        first, further = "", ""  # with a member before, the further ones have a comma
        for member, is_required in reversed(members):
            behind = f"{comma} {member} {further}".strip()
            alone = f"{member} {further}".strip()
            if is_required:
                first, further = alone, behind
            else:
                first = f"({alone} | {first})" if first else f"({alone})?"
                further = f"({behind} | {further})" if further else f"({behind})?"
            first, further = self._named(first), self._named(further)
        return first

    def _named(self, body: str) -> str:
        """A rule for an expression that would else be written twice."""
        return self._lark.rule(body) if body else ""

    def _typed(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        kind, words = schema["type"], keywords(schema)
        if kind == "string":
            return self._string(schema) if words <= _TEXT else None
        if kind in ("integer", "number"):
            return self._lark.json(within(schema, root)) if words <= _NUMBER else None
        if kind in ("boolean", "null"):
            return f"({' | '.join(self._words(kind))})" if words <= {"type"} else None
        if kind == "array":
            return self._array(schema, root) if words <= _LIST else None
        return self._object(schema, root) if words <= _OBJECT else None

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        item = self.value(schema.get("items", True), root)
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if item is None or (high is not None and high < max(low, 1)):
            return '"[" "]"' if high == 0 and low == 0 else None
        item = self._named(item)
        more = f"{max(low - 1, 0)},{'' if high is None else int(high) - 1}"
        items = f'{item} ("," {BLANK} {item}){{{more}}}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        needed, extra = set(schema.get("required", ())), schema.get("additionalProperties", True)
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping) or needed - set(properties):
            return None
        if not properties and extra is not False:
            value = self.value(extra, root)
            member = f'{self._key_rule()} ":" {BLANK} {value}'
            return f'"{{" ({member} ("," {BLANK} {member})*)? "}}"' if value else None
        members = []
        for key, part in properties.items():
            value, name = self.value(part, root), self._key(key)
            if value is None or name is None:
                return None
            members.append((f'{name} ":" {BLANK} {value}', key in needed))
        return f'"{{" {self.items(members)} "}}"'

    def _reference(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        """A rule for a reference, so that schemas may hold themselves."""
        target = resolved(schema, root)
        if target is None:
            return None
        key = (id(self), id(root), schema["$ref"])
        return self._lark.reference(key, lambda: self.value(target, root))

    def _words(self, kind: str) -> list[str]:
        if self._quote:
            return ['"true"', '"false"'] if kind == "boolean" else ['"null"']
        return ['"True"', '"False"'] if kind == "boolean" else ['"None"']

    def _key(self, key: str) -> str | None:
        if not self._quote:
            return literal(python_text(key))
        return literal(key) if key and key == key.strip() and ":" not in key else None

    def _key_rule(self) -> str:
        if self._quote:
            return self._lark.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        return self._python_string({"type": "string"})

    def _constant(self, value: object) -> str | None:
        if not self._quote:
            return literal(python_text(value))
        if isinstance(value, str):
            return self._held([literal(value)]) if self._quote not in value else None
        return None if isinstance(value, list | dict) else literal(json_text(value))

    def _free_string(self) -> str:
        return self._string({"type": "string"}) or ""

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        if not self._quote:
            return self._python_string(schema)
        terms = string_terms(schema)
        if terms is None:
            return None
        if not terms:
            return f"{self._lark.mark(self._quote, exact=True)} {self._lark.until(self._quote)}"
        return self._held(terms)

    def _held(self, terms: list[str]) -> str:
        opening = self._lark.mark(self._quote, exact=True)
        return f"{opening} {self._lark.held(terms, self._quote)}"

    def _python_string(self, schema: Mapping[str, Any]) -> str:
        """JSON's strings are Python's."""
        return self._lark.json(schema, json_allow_general_unicode_escapes=False)
