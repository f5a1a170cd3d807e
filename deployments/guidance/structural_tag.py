"""Structural tags to Lark: text with parts of a given form, in vLLM's form or as a tree of formats.

Text of any kind goes on until the first place where what follows it begins, so llguidance reads
both as one lazy terminal. Tags whose text is a token of the model are written by its id.

Raises:
    InvalidRequest: ``param`` is the path of the part.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.gbnf import gbnf_to_lark
from rayfin.deployments.guidance.json_text import JsonStyle, json_rule
from rayfin.deployments.guidance.lark import LarkWriter, literal, regex, rewrite_schemas, special
from rayfin.deployments.guidance.schema.ecma import parse
from rayfin.deployments.guidance.schema.lint import (
    check_document,
    check_literal,
    check_text,
    parse_json,
)
from rayfin.deployments.guidance.schema.pattern_parts import write
from rayfin.deployments.text.checks import as_list, as_object, as_string, required, wrong_type

MAX_TAGS = 1000
ANY = r"/(?s:.*)/"


class _Written(NamedTuple):
    """A part of a rule."""

    text: str
    ended: bool = False  # it has taken the ends that it was given


class _Tag(NamedTuple):
    """A tag, and what writes its content, given the texts that may end it."""

    given: Mapping[str, Any]
    path: str
    content: Callable[[Sequence[str]], _Written]


def structural_tag_to_lark(
    tag: Any,
    path: str,
    *,
    special_tokens: Mapping[str, int],
    style: JsonStyle,
    max_bytes: int,
) -> tuple[str, tuple[str, ...]]:
    """Returns the tag as Lark, and the paths of what its schemas do not enforce.

    Args:
        tag: has ``structures`` and ``triggers``, or ``format``.
        special_tokens: ids by text.
    """
    given = as_object(tag, path)
    check_document(given, path, max_bytes)
    if not given:
        raise InvalidRequest(f"{path} must not be empty.", path)
    text = json.dumps(given, ensure_ascii=False, default=dict)
    named = {
        token: number
        for token, number in special_tokens.items()
        if token and json.dumps(token, ensure_ascii=False)[1:-1] in text
    }
    writer = _TagWriter(LarkWriter(named), special_tokens, style, max_bytes)
    if given.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequest(f"{path}.type must be 'structural_tag'.", f"{path}.type")
    if "structures" in given or "triggers" in given:
        written = writer.legacy(given, path)
    else:
        written = writer.format(required(given, "format", path), f"{path}.format", ()).text
    return writer.lark.text(written), tuple(writer.unenforced)


class _TagWriter:
    """Writes one tag. A part is given the texts that may end it: those of the tag around it."""

    def __init__(
        self, lark: LarkWriter, special_tokens: Mapping[str, int], style: JsonStyle, max_bytes: int
    ) -> None:
        self.lark = lark
        self._special_tokens = special_tokens
        self._style = style
        self._max_bytes = max_bytes
        self.unenforced: list[str] = []
        self._formats: dict[str, Callable[[Mapping[str, Any], str, Sequence[str]], _Written]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "token": self._token,
        }

    def legacy(self, given: Mapping[str, Any], path: str) -> str:
        """vLLM's form: the structures are tags, each with the schema of what is in it."""
        structures = as_list(required(given, "structures", path), f"{path}.structures", MAX_TAGS)
        tags: list[_Tag] = []
        for i, structure in enumerate(structures):
            inner = f"{path}.structures[{i}]"
            schema = required(as_object(structure, inner), "schema", inner)
            content = partial(self._schema, schema, f"{inner}.schema")
            tags.append(_Tag(structure, inner, content))
        return self._triggered(tags, given, path, ()).text

    def format(self, value: Any, path: str, ends: Sequence[str]) -> _Written:
        given = as_object(value, path)
        kind = as_string(required(given, "type", path), f"{path}.type")
        if kind not in self._formats:
            raise InvalidRequest(
                f"{path}.type must be one of {', '.join(self._formats)}, got {kind[:32]!r}.",
                f"{path}.type",
            )
        return self._formats[kind](given, path, ends)

    # Formats that hold no others.

    def _const_string(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        return _Written(self._mark(self._string(given, "value", path)))

    def _json_schema(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        if given.get("style", "json") != "json":
            raise InvalidRequest(f"{path}.style must be 'json'.", f"{path}.style")
        if "json_schema" not in given:
            required(given, "json_schema", path)
        return self._schema(given["json_schema"], f"{path}.json_schema")

    def _schema(self, schema: Any, path: str, ends: Sequence[str] = ()) -> _Written:
        if isinstance(schema, str):
            schema = parse_json(schema, path, self._max_bytes)
        elif not isinstance(schema, Mapping | bool):
            raise wrong_type("an object", schema, path)
        text, unenforced = json_rule(schema, path, self._style)
        self.unenforced += unenforced
        return _Written(self.lark.rule(text))

    def _regex(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        pattern = self._string(given, "pattern", path)
        part = parse(pattern, f"{path}.pattern")
        return self._until(regex(write(part, edges=False)), ends)

    def _grammar(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        text = self._string(given, "grammar", path)
        inner = f"{path}.grammar"
        if "::=" in text:
            lark = gbnf_to_lark(
                text, inner, special_tokens=self._special_tokens, max_bytes=self._max_bytes
            )
        else:
            lark, unenforced = rewrite_schemas(text, inner, self._style, self._max_bytes)
            self.unenforced += unenforced
        return _Written(self.lark.rule(f"%lark {{\n{lark}\n}}"))

    def _any_text(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        excluded = given.get("excludes") or []
        if not isinstance(excluded, list | tuple):
            raise wrong_type("a list of strings", excluded, f"{path}.excludes")
        text = ANY
        if excluded:
            options = " | ".join(
                literal(self._checked(word, f"{path}.excludes[{i}]"))
                for i, word in enumerate(excluded)
            )
            text = self.lark.terminal(f"{ANY} & ~({ANY} ({options}) {ANY})")
        return self._until(text, ends)

    def _token(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        token = required(given, "token", path)
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return _Written(special(token))
        number = self._special_tokens.get(as_string(token, f"{path}.token"))
        if number is None:
            raise InvalidRequest(
                f"{path}.token names {token[:64]!r}, which is no special token.", f"{path}.token"
            )
        return _Written(special(number))

    # Formats that hold others.

    def _sequence(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        elements = as_list(required(given, "elements", path), f"{path}.elements", MAX_TAGS)
        texts: list[str] = []
        ended = False
        for i, element in enumerate(elements):
            inner = f"{path}.elements[{i}]"
            if i + 1 == len(elements):
                last = (
                    self._without(element, inner, ends)
                    if ended
                    else self.format(element, inner, ends)
                )
                return _Written(" ".join([*texts, last.text]), last.ended)
            begin = self._begin(elements[i + 1])
            written = (
                self._without(element, inner, begin)
                if ended
                else self.format(element, inner, begin)
            )
            texts.append(written.text)
            ended = written.ended
        raise AssertionError("as_list is never empty")

    def _without(self, element: Any, path: str, ends: Sequence[str]) -> _Written:
        """A format whose first text has been taken as the end of the one before."""
        given = as_object(element, path)
        if given["type"] == "const_string":
            return _Written('""')
        return self._tag(given, path, ends, begun=True)

    def _begin(self, element: Any) -> Sequence[str]:
        """The text that a format begins with, if that is one."""
        if isinstance(element, Mapping):
            kind = element.get("type")
            name = {"const_string": "value", "tag": "begin"}.get(kind) if kind else None
            text = element.get(name) if name is not None else None
            if isinstance(text, str) and text:
                return (text,)
        return ()

    def _or(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        elements = as_list(required(given, "elements", path), f"{path}.elements", MAX_TAGS)
        options = [
            self.format(element, f"{path}.elements[{i}]", ends)
            for i, element in enumerate(elements)
        ]
        if not any(option.ended for option in options):
            return _Written(self.lark.rule(" | ".join(option.text for option in options)))
        end = self._marks(ends)
        texts = [o.text if o.ended else f"{o.text} {end}" for o in options]
        return _Written(self.lark.rule(" | ".join(texts)), True)

    def _repeated(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        operator = {"optional": "?", "star": "*", "plus": "+"}[given["type"]]
        content = self.format(required(given, "content", path), f"{path}.content", ())
        return _Written(f"{self.lark.rule(content.text)}{operator}")

    def _tag(
        self, given: Mapping[str, Any], path: str, ends: Sequence[str], begun: bool = False
    ) -> _Written:
        begin = "" if begun else self._edge(given, "begin", path)
        content = required(given, "content", path)
        inner = partial(self.format, content, f"{path}.content")
        return self._tag_rule(begin, _Tag(given, path, inner))

    def _tag_rule(self, begin: str, tag: _Tag) -> _Written:
        ends = self._ends(tag.given, tag.path)
        written = tag.content(ends)
        end = "" if written.ended or not ends else self._marks(ends)
        return _Written(self.lark.rule(f"{begin} {written.text} {end}".strip()))

    def _triggered_tags(self, given: Mapping[str, Any], path: str, ends: Sequence[str]) -> _Written:
        tags: list[_Tag] = []
        for i, tag in enumerate(as_list(required(given, "tags", path), f"{path}.tags", MAX_TAGS)):
            inner = f"{path}.tags[{i}]"
            content = required(as_object(tag, inner), "content", inner)
            tags.append(_Tag(tag, inner, partial(self.format, content, f"{inner}.content")))
        return self._triggered(tags, given, path, ends)

    def _triggered(
        self, tags: Sequence[_Tag], given: Mapping[str, Any], path: str, ends: Sequence[str]
    ) -> _Written:
        triggers = as_list(required(given, "triggers", path), f"{path}.triggers", MAX_TAGS)
        bodies: dict[str, list[str]] = {
            self._checked(trigger, f"{path}.triggers[{i}]"): []
            for i, trigger in enumerate(triggers)
        }
        if "" in bodies:
            raise InvalidRequest(f"{path}.triggers must not be empty strings.", f"{path}.triggers")
        for tag in tags:
            begin = self._string(tag.given, "begin", tag.path)
            matches = [trigger for trigger in bodies if begin.startswith(trigger)]
            if len(matches) != 1:
                how = "no trigger" if not matches else "several triggers"
                raise InvalidRequest(
                    f"{tag.path}.begin must begin with one of the triggers, and begins with {how}.",
                    f"{tag.path}.begin",
                )
            rest = self._mark(begin[len(matches[0]) :]) if begin != matches[0] else ""
            bodies[matches[0]].append(self._tag_rule(rest, tag).text)
        options = [
            f"{self._lazy(ANY, [trigger])} ({' | '.join(texts)})"
            for trigger, texts in bodies.items()
            if texts
        ]
        body = self.lark.rule(" | ".join(options))
        once = self._flag(given, "stop_after_first", path)
        some = self._flag(given, "at_least_one", path)
        tail = self._until(ANY, ends)
        if once:
            return _Written(body) if some else self._either(body, tail, ends)
        return _Written(f"{body}{'+' if some else '*'} {tail.text}", tail.ended)

    def _either(self, body: str, tail: _Written, ends: Sequence[str]) -> _Written:
        if not tail.ended:
            return _Written(self.lark.rule(f"{body} | {tail.text}"))
        return _Written(self.lark.rule(f"{body} {self._marks(ends)} | {tail.text}"), True)

    def _tags_with_separator(
        self, given: Mapping[str, Any], path: str, ends: Sequence[str]
    ) -> _Written:
        tags = as_list(required(given, "tags", path), f"{path}.tags", MAX_TAGS)
        separator = self._string(given, "separator", path)
        one = self.lark.rule(
            " | ".join(
                self._tag(as_object(tag, f"{path}.tags[{i}]"), f"{path}.tags[{i}]", ()).text
                for i, tag in enumerate(tags)
            )
        )
        several = one
        if not self._flag(given, "stop_after_first", path):
            between = f"{self._mark(separator)} " if separator else ""
            several = self.lark.rule(f"{one} ({between}{one})*")
        return _Written(several if self._flag(given, "at_least_one", path) else f"{several}?")

    # Texts.

    def _edge(self, given: Mapping[str, Any], name: str, path: str) -> str:
        """A text, or a format of type token."""
        value = given.get(name)
        if isinstance(value, Mapping):
            return self._token(value, f"{path}.{name}", ()).text
        text = self._string(given, name, path)
        return self._mark(text) if text else ""

    def _ends(self, given: Mapping[str, Any], path: str) -> Sequence[str]:
        value = given.get("end")
        if value is None:
            required(given, "end", path)
        if isinstance(value, Mapping):
            number = self._token(value, f"{path}.end", ()).text
            return (number,)
        several = value if isinstance(value, list | tuple) else [value]
        ends = [self._checked(text, f"{path}.end") for text in several]
        return [] if "" in ends else ends

    def _until(self, text: str, ends: Sequence[str]) -> _Written:
        """A terminal, and the first of the ends after it."""
        return _Written(self._lazy(text, ends), True) if ends else _Written(text)

    def _lazy(self, text: str, ends: Sequence[str]) -> str:
        """A terminal up to the first of several texts or tokens, which is taken with it."""
        options: list[str] = []
        for end in ends:
            first, *others = self._parts(end)
            if isinstance(first, int):
                options.append(f"{text} {special(first)}")
            else:
                options.append(self.lark.rule(f"{text} {literal(first)}", "lazy"))
            options[-1] += "".join(f" {self._part(part)}" for part in others)
        return options[0] if len(options) == 1 else self.lark.rule(" | ".join(options))

    def _marks(self, texts: Sequence[str]) -> str:
        options = [self._mark(text) for text in texts]
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _mark(self, text: str) -> str:
        return " ".join(map(self._part, self._parts(text)))

    def _part(self, part: str | int) -> str:
        return special(part) if isinstance(part, int) else literal(part)

    def _parts(self, text: str) -> list[str | int]:
        """A text as pieces of text and tokens."""
        if text.startswith("<[") and text.endswith("]>") and text[2:-2].isdecimal():
            return [int(text[2:-2])]
        return self.lark.parts(text)

    def _string(self, given: Mapping[str, Any], name: str, path: str) -> str:
        if name not in given:
            required(given, name, path)
        return self._checked(given[name], f"{path}.{name}")

    def _checked(self, value: Any, path: str) -> str:
        text = as_string(value, path)
        check_text(text, path)
        check_literal(text, path)
        return text

    def _flag(self, given: Mapping[str, Any], name: str, path: str) -> bool:
        value = given.get(name, False)
        if not isinstance(value, bool):
            raise wrong_type("a boolean", value, f"{path}.{name}")
        return value
