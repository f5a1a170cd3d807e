"""Arguments that are elements named after them, whose values may be elements again."""

from collections.abc import Mapping
from typing import Any

from rayfin.deployments.guidance.lark import LarkWriter, alternatives, escaped, literal
from rayfin.deployments.guidance.schema_facts import (
    Schema,
    keywords,
    resolved,
    types_of,
    within,
)
from rayfin.deployments.guidance.string_terms import string_terms
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.render import ITEM

_LIST = {"type", "items", "minItems", "maxItems"}
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class Elements:
    """Writes the rules of elements in a row's syntax."""

    def __init__(self, lark: LarkWriter, row: ToolFormat) -> None:
        self._lark = lark
        self._row = row
        self._any = ""

    def any(self) -> str:
        """Returns the rule of an element of any name and value."""
        if not self._any:
            self._any = name = self._lark.reserve()
            row, tag = self._row, self._lark.terminal(_NAME)
            end = literal(row.key[1])
            text = self._text(row.value[1])
            children = f"{name}+ {self._lark.mark(row.value[1], exact=True)}"
            opening = self._lark.mark(row.key[0], exact=True)
            self._lark.define(name, f"{opening} {tag} {end} ({text} | {children}) {tag} {end}")
        return self._any

    def element(self, key: str, schema: Schema, root: Mapping[str, Any]) -> str | None:
        """Returns an element's expression, or None if the schema cannot be written so."""
        row = self._row
        close = f"{row.value[1]}{key}{row.key[1]}"
        value = self._value(schema, root, close)
        opening = self._lark.mark(f"{row.key[0]}{key}{row.key[1]}", exact=True)
        return None if value is None else f"{opening} {value}"

    def _value(self, schema: Schema, root: Mapping[str, Any], close: str) -> str | None:
        """A value and the tag behind it."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._reference(schema, root, close)
        members = schema if isinstance(schema, Mapping) else {}
        if schema is False:
            return None
        if not keywords(members):
            return f"({self._text(close)} | {self.any()}+ {self._lark.mark(close, exact=True)})"
        if keywords(members) == {"anyOf"}:
            return alternatives([self._value(part, root, close) for part in members["anyOf"]])
        kinds = types_of(members, root)
        parts = [
            self._typed({**members, "type": kind}, root, close)
            for kind in sorted(kinds)
            if kind != "integer" or "number" not in kinds
        ]
        return alternatives(parts)

    def _typed(self, schema: Mapping[str, Any], root: Mapping[str, Any], close: str) -> str | None:
        kind, words = schema["type"], keywords(schema)
        end = self._lark.mark(close, exact=True)
        if kind == "string":
            terms = string_terms(schema)
            if terms is None or {"anyOf", "allOf"} & words:
                return None
            return self._lark.held(terms, close) if terms else self._text(close)
        if kind in ("array", "object"):
            make = self._array if kind == "array" else self._object
            inner = make(schema, root) if words <= (_LIST if kind == "array" else _OBJECT) else None
            return None if inner is None else f"{inner} {end}"
        return f"{self._lark.json(within(schema, root))} {end}"

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        item = self.element(ITEM, schema.get("items", True), root)
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if item is None or (high is not None and high < low):
            return None
        return f"({self._lark.rule(item)}){{{low},{'' if high is None else int(high)}}}"

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        needed, extra = set(schema.get("required", ())), schema.get("additionalProperties", True)
        properties = schema.get("properties", {})
        if needed - set(properties) or not isinstance(extra, bool):
            return None
        if not properties:
            return f"{self.any()}*" if extra else ""
        elements = [(self.element(key, part, root), key) for key, part in properties.items()]
        if any(element is None for element, _ in elements):
            return None
        return " ".join(f"({part})" if key in needed else f"({part})?" for part, key in elements)

    def _reference(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], close: str
    ) -> str | None:
        """A rule for a reference, so that schemas may hold themselves."""
        target = resolved(schema, root)
        if target is None:
            return None
        key = (id(self), id(root), schema["$ref"], close)
        return self._lark.reference(key, lambda: self._value(target, root, close))

    def _text(self, close: str) -> str:
        """Any text but one with a tag, and the tag behind it."""
        first, *_ = self._lark.parts(close)
        if isinstance(first, int):
            return self._lark.until(close)
        tag = escaped(self._row.key[0].removesuffix("<"))
        return self._lark.held(["/(?s:.*)/", f"~/(?s:.*){tag}(?s:.*)/"], close)
