"""Parts of a conversation that are no text, while a chat template renders it.

Each such part is a marker in the text that the template gets, with a number drawn for this one
conversation, so that no text of a request can hold it. What the template has written is cut at the
markers before it is tokenized, so no token crosses from text into a part.
"""

import copy
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from rayfin.deployments.text.messages import is_part

if TYPE_CHECKING:  # it imports torch
    from transformers import PreTrainedTokenizerFast

SECRET_BYTES = 16
FIRST_PLACE = -1
"""The id of part 0 among the ids of a rendered conversation; part 1 is one below it, and so on."""


@dataclass(frozen=True, slots=True)
class MarkedPart:
    """A part that is no text, and its path in the messages."""

    part: Mapping[str, Any]
    path: str


class Marked:
    """A conversation in which markers stand for all parts of a kind.

    Args:
        messages: unchecked; they stay as they are.
        kind: the ``type`` of the parts.

    Attributes:
        messages: with a part of text in place of each part of the kind.
        parts: those parts, in their order.
    """

    def __init__(self, messages: Any, kind: str) -> None:
        self._secret = f"part{secrets.token_hex(SECRET_BYTES)}n"
        self._pattern = re.compile(f"{self._secret}([0-9]+)e")
        self._kind = kind
        self.parts: list[MarkedPart] = []
        self.messages = messages
        if isinstance(messages, list | tuple):
            self.messages = [
                self._message(message, f"messages[{i}]") for i, message in enumerate(messages)
            ]

    def cut(self, text: str) -> list[str]:
        """The text before part a, the number a, the text after it, and so on."""
        return self._pattern.split(text)

    def without(self, text: str) -> str:
        """The text without markers."""
        return self._pattern.sub("", text)

    def tokenizer(self, inner: "PreTrainedTokenizerFast") -> "PreTrainedTokenizerFast":
        """A view of a tokenizer whose chat templates give ids of parts for markers."""
        kind: Any = type(inner)
        view: Any = copy.copy(inner)
        view.__class__ = _cutting(kind)
        view.marked = self
        return cast("PreTrainedTokenizerFast", view)

    def _message(self, message: Any, path: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(self._is_part, content)):
            return message
        parts = [self._text(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        return {**message, "content": parts}

    def _text(self, part: Any, path: str) -> Any:
        if not self._is_part(part):
            return part
        self.parts.append(MarkedPart(part, path))
        return {"type": "text", "text": f"{self._secret}{len(self.parts) - 1}e"}

    def _is_part(self, part: Any) -> bool:
        return is_part(part, self._kind)


@cache
def _cutting(kind: Any) -> Any:
    """The class of a tokenizer that cuts texts at the markers of its ``marked``."""

    class Cutting(kind):  # type: ignore[misc]
        marked: Marked

        def __call__(self, text: str, **options: Any) -> Any:
            first, *rest = self.marked.cut(text)
            ids = self._ids(first, options) if first else []
            newline = self._ids("\n", options) if rest else []
            for number, piece in zip(rest[::2], rest[1::2], strict=True):
                ids.append(FIRST_PLACE - int(number))
                if piece:
                    ids += self._inside(piece, newline, options)
            return {"input_ids": ids}

        def _inside(self, piece: str, newline: list[int], options: Any) -> list[int]:
            """The ids of a text that is no beginning: sentencepiece puts no space before it."""
            ids = self._ids(f"\n{piece}", options)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
            return self._ids(piece, options)

        def _ids(self, piece: str, options: Any) -> list[int]:
            return list(super().__call__(piece, **options)["input_ids"])

    return Cutting
