"""Token ids to text, piece by piece."""

from collections.abc import Sequence

import tokenizers

from rayfin.actors.messages import Int32Array

HALF = "\ufffd"  # a decoder's replacement for bytes that are not, or not yet, a character
MOST_HALVES = 3  # an unfinished UTF-8 character has at most three bytes
LONG_WINDOW = 48  # tokens; the limit of a window whose bytes never become characters
SHORT_WINDOW = 12  # tokens; at least as many bytes, enough to find the character boundary again


class IncrementalDetokenizer:
    """The text of a growing list of tokens, each character emitted once and only when whole.

    The pieces join to ``decode(prompt + ids)`` without ``decode(prompt)``: a first word keeps the
    space that a sentencepiece decoder would strip from it at the start of a text. One exception: a
    byte-fallback decoder takes back a whole run of byte tokens when a later one is invalid;
    characters of that run that were emitted stay.

    Args:
        backend: the tokenizer; only ``decode`` and ``id_to_token`` are called.
        prompt: the ids before the first one pushed; only their tail is decoded.
        skip: ids that give no text.
        join_added: no space between neighbouring added tokens, where some decoders put one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt: Sequence[int] | Int32Array = (),
        *,
        skip: frozenset[int] = frozenset(),
        join_added: bool = False,
    ) -> None:
        self._backend = backend
        self._skip = skip
        self._added = backend.get_added_tokens_decoder() if join_added else {}
        self._after_added = False
        self._window: list[int] = self._tail(prompt)
        self._read = len(self._window)  # tokens of the window that were emitted whole
        self._shown = self._decode(self._window)  # text of the window that was emitted

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that ``ids`` complete."""
        if self._added:
            return "".join(self._push_joined(token) for token in ids)
        fresh = [token for token in ids if self._has_text(token)]
        return self._advance(fresh) if fresh else ""

    def finish(self) -> str:
        """Returns the rest: replacement characters of bytes that stayed incomplete."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._shown += rest
        return rest

    def split(self, token: int) -> str:
        """Passes over ``token``, whose text is not wanted; returns the text that it cuts off.

        The tokens after it are decoded as those that follow it.
        """
        held = self.finish()
        self._window, self._read = [token], 1
        self._shown, self._after_added = self._decode(self._window), True
        return held

    def whole(self, ids: Sequence[int]) -> str:
        """Returns all text of ``ids`` at once."""
        return self.push(ids) + self.finish()

    def _advance(self, fresh: Sequence[int]) -> str:
        self._window.extend(fresh)
        text = self._decode(self._window)
        if not text.startswith(self._shown):  # a byte run that became invalid: skip it
            del self._window[: self._read]
            self._read, self._shown = 0, ""
            text = self._decode(self._window)
        halves = _trailing_halves(text)
        piece = text[len(self._shown) : len(text) - halves]
        self._shown += piece
        if not halves:
            self._slide(self._read)
        elif len(self._window) > LONG_WINDOW:
            self._slide(len(self._window) - SHORT_WINDOW, halves)
        return piece

    def _slide(self, start: int, halves: int = 0) -> None:
        """Drops the tokens before ``start``; all but ``halves`` characters were emitted."""
        del self._window[:start]
        self._read = 0 if halves else len(self._window)
        text = self._decode(self._window)
        self._shown = text[: len(text) - halves]

    def _push_joined(self, token: int) -> str:
        added = self._added.get(token)
        after_added, self._after_added = self._after_added, added is not None
        if added is not None and after_added:
            return self.split(token) + str(added.content)
        return self._advance([token]) if self._has_text(token) else ""

    def _tail(self, prompt: Sequence[int] | Int32Array) -> list[int]:
        """Returns the shortest tail, by doubling, whose text starts at a whole character."""
        length = SHORT_WINDOW
        while True:
            tail = [token for token in map(int, prompt[-length:]) if self._has_text(token)]
            text = self._decode(tail)
            if length >= len(prompt) or (text and not text.startswith(HALF)):
                return tail
            length *= 2

    def _has_text(self, token: int) -> bool:
        if token < 0 or token in self._skip:  # tokens of images are negative
            return False
        return self._backend.id_to_token(token) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False) if ids else ""
        return text


def _trailing_halves(text: str) -> int:
    count = 0
    while count < MOST_HALVES and text.endswith(HALF, 0, len(text) - count):
        count += 1
    return count
