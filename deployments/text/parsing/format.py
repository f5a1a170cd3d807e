"""What a row of the format tables says: how a model writes its calls and its thoughts.

A format knows no tokenizer: marks are texts, with the blanks that models write around them. A
parser compares them without these blanks. A pair of texts stands before and behind its part.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

Pair = tuple[str, str]
NOTHING: Pair = ("", "")
Syntax = Literal["json", "tagged", "elements", "braces", "python", "channels"]
Layout = Literal["object", "list", "named", "lines"]
IdStyle = Literal["openai", "mistral", "kimi"]
ToolGuidance = Literal["schema", "json", "off"]
ReasoningField = Literal["reasoning", "reasoning_content", "both"]
TYPE = "TYPE"
"""In ``json_key_end``: the JSON type of the value; integers are numbers."""
JSON_TYPES = ("number", "boolean", "null", "array", "object")
_TAG = re.compile(r"(?<=<)/?\w+(?=>)")
_ESCAPES = (("&", "&amp;"), ('"', "&quot;"))


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes calls: ``section[0]``, calls with a separator between, ``section[1]``.

    A call is ``call[0]``, a body, ``call[1]``. The body, by syntax and layout, with the name N, the
    arguments A, and a key k and a value v of them:

    * json, object: ``{"name": N, "arguments": A}``
    * json, list: the section holds one list of such objects; ``call`` is empty
    * json, named: ``name[0] N name[1] arguments[0] A arguments[1]``
    * tagged: ``name[0] N name[1]``, for each argument ``key[0] k key[1] value[0] v value[1]``, then
      ``arguments[1]``. A string is written as it is, other values as JSON
    * elements: ``key[0] k key[1] v value[1] k key[1]`` for each argument; v may be elements itself,
      those of a list are named item
    * braces: ``name[0] N {k:v,k:v}``: bare keys, strings between two ``quote``, no escapes
    * python, list: ``[N(k=v), N()]``; lines: a call on each line
    * channels: messages of OpenAI's harmony; a recipient makes one a call
    """

    name: str
    syntax: Syntax
    aliases: tuple[str, ...] = ()  # vLLM's and SGLang's names
    layout: Layout = "object"
    section: Pair = NOTHING
    call: Pair = NOTHING
    separator: str = ""  # between calls
    name_key: str = "name"  # of the object of a call
    arguments_key: str = "arguments"
    id_key: str = ""  # of the call's id in its object, where a model writes one
    function: Pair = NOTHING  # around a name that is outside of JSON
    id_mark: str = ""  # behind the name and before an id, where a model writes one
    numbered: bool = False  # that id is the number of the call, from 1
    arguments: Pair = NOTHING
    key: Pair = NOTHING
    value: Pair = NOTHING
    json_key_end: str = ""  # instead of key[1] where v is JSON; then key[1] says that v is a string
    escapes_keys: bool = False  # k is an attribute of XML
    quote: str = ""
    id_style: IdStyle = "openai"  # kimi: N is written as functions.N:i, which is the id
    frame: Pair = NOTHING  # around a text beside calls: read, never written
    suffixed: bool = False  # some models write <tag:suffix>, with one suffix in all tags
    bare: bool = False  # calls also begin an answer without any mark
    openings: tuple[str, ...] = ()  # other texts that begin calls: read, never written
    closings: tuple[str, ...] = ()  # other texts that end them
    tokens: tuple[str, ...] = ()  # special tokens that are parts of marks
    triggers: tuple[str, ...] = ()  # a call begins behind each; empty if calls have no mark

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin a section or a call in a text, without blanks.

        Models leave out the marks around a tag of a function, which is one then.
        """
        tag = self.function[0] if self.syntax in ("tagged", "elements") else ""
        return _distinct(self.section[0], self.call[0], tag, *self.openings)

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that end a call or a section, without blanks."""
        return _distinct(self.call[1], self.section[1], *self.closings)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks and their tokens, without blanks: what a parser is given as markers."""
        pairs = (self.function, self.arguments, self.key, self.value)
        inner = [text for pair in pairs for text in pair]
        other = (self.separator, *self.json_key_ends.values(), self.quote, self.id_mark)
        return _distinct(*self.begins, *self.ends, *inner, *other, *self.frame, *self.tokens)

    @property
    def json_key_ends(self) -> dict[str, str]:
        """The texts behind a key whose value is JSON, by the value's type."""
        end = self.json_key_end
        return {kind: end.replace(TYPE, kind) for kind in JSON_TYPES} if end else {}

    def write_key(self, key: str) -> str:
        """Returns the name of a parameter as it stands between ``key``."""
        for char, escape in _ESCAPES if self.escapes_keys else ():
            key = key.replace(char, escape)
        return key

    def read_key(self, text: str) -> str:
        """Returns the name of a parameter that is written so."""
        for char, escape in reversed(_ESCAPES) if self.escapes_keys else ():
            text = text.replace(escape, char)
        return text

    @property
    def edges(self) -> Pair:
        """The newline, or nothing, that goes from each edge of a tagged value."""
        before = (self.value[0] or self.key[1]).endswith("\n")
        return ("\n" if before else "", "\n" if self.value[1].startswith("\n") else "")


@dataclass(slots=True, frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model writes what it thinks before it answers."""

    name: str
    aliases: tuple[str, ...] = ()
    open: tuple[str, ...] = ()  # the first is what templates write
    close: tuple[str, ...] = ()
    ends_at_call: bool = False  # a call within a thought ends it, as models forget to close
    dropped: tuple[str, ...] = ()  # marks around the answer, which are no content
    channels: bool = False  # messages of OpenAI's harmony; the channel says what is thought
    tokens: tuple[str, ...] = ()  # special tokens that are parts of marks
    suffixed: bool = False  # some models write <tag:suffix>, with one suffix in all tags

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks and their tokens, without blanks."""
        return _distinct(*self.open, *self.close, *self.dropped, *self.tokens)


Row = TypeVar("Row", ToolFormat, ReasoningFormat)


def with_suffix(row: Row, suffix: str) -> Row:
    """Returns a row whose tags all end with ``suffix``, which begins with a colon; or the row."""
    if not (suffix and row.suffixed):
        return row
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    changed = {name: _suffixed(value, suffix) for name, value in values.items()}
    return replace(row, **changed)


def _suffixed(value: Any, suffix: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_suffixed(part, suffix) for part in value)
    return _TAG.sub(lambda tag: tag[0] + suffix, value) if isinstance(value, str) else value


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark for text in texts if (mark := text.strip())))


def thought_start(reasoning: ReasoningFormat | None, opening: str) -> bool:
    """Whether the prompt has opened a thought.

    Args:
        opening: what the template puts into the model's mouth, never the history before it.
    """
    return reasoning is not None and opened(reasoning, opening) and not closed(reasoning, opening)


def opened(reasoning: ReasoningFormat, opening: str) -> bool:
    """Whether a thought begins in ``opening``."""
    return any(mark in opening for mark in reasoning.open)


def closed(reasoning: ReasoningFormat, opening: str) -> bool:
    """Whether the last thought in ``opening`` has ended there."""
    begun = max((opening.rfind(mark) for mark in reasoning.open), default=-1)
    return any(opening.rfind(mark) > begun for mark in reasoning.close)
