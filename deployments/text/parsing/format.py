"""What a row of the format tables says: how a model writes its calls and its thoughts.

A format knows no tokenizer: marks are texts, with the blanks that models write around them. A
parser compares them without these blanks. A pair of texts stands before and behind its part.
"""

from dataclasses import dataclass
from typing import Literal

Pair = tuple[str, str]
NOTHING: Pair = ("", "")
Syntax = Literal["json", "tagged", "braces", "python", "channels"]
Layout = Literal["object", "list", "named", "lines"]
IdStyle = Literal["openai", "mistral", "kimi"]
ToolGuidance = Literal["schema", "json", "off"]
ReasoningField = Literal["reasoning", "reasoning_content", "both"]


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
    arguments: Pair = NOTHING
    key: Pair = NOTHING
    value: Pair = NOTHING
    json_key_end: str = ""  # instead of key[1] where v is JSON; then key[1] says that v is a string
    quote: str = ""
    id_style: IdStyle = "openai"  # kimi: N is written as functions.N:i, which is the id
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
        tag = self.function[0] if self.syntax == "tagged" else ""
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
        other = (self.separator, self.json_key_end, self.quote, self.id_mark)
        return _distinct(*self.begins, *self.ends, *inner, *other, *self.tokens)

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

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks and their tokens, without blanks."""
        return _distinct(*self.open, *self.close, *self.dropped, *self.tokens)


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark for text in texts if (mark := text.strip())))
