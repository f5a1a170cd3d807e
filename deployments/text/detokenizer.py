"""Token ids to text, piece by piece."""

from collections.abc import Mapping, Sequence

import tokenizers

from rayfin.actors.messages import Int32Array

HALF = "\ufffd"  # a decoder's replacement for bytes that are not, or not yet, a character
MOST_HALVES = 3  # an unfinished UTF-8 character has at most three bytes
LONG_WINDOW = 48  # tokens; the limit of a window whose bytes never become characters
SHORT_WINDOW = 12  # tokens; at least as many bytes, enough to find the character boundary again


def byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Returns the byte of each token that stands for one (``<0x0A>``); {} if none does.

    Such a decoder (``ByteFallback``) gives a replacement character for each byte of an unfinished
    character, and for all bytes beside it.
    """
    named = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    tokens = {token: byte for token, byte in named if token is not None}
    whole = len(tokens) == 256 and backend.decode([*tokens][-1:], skip_special_tokens=False)
    return tokens if whole == HALF else {}


class IncrementalDetokenizer:
    """The text of a growing list of tokens, each character emitted once and only when whole.

    The pieces join to ``decode(prompt + ids)`` without ``decode(prompt)``: a first word keeps the
    space that a sentencepiece decoder would strip from it at the start of a text. They do so
    however the ids are cut into pushes. One exception: a byte-fallback decoder replaces a whole run
    of byte tokens by U+FFFD when one of them is invalid. Here the characters of that run stay, as
    in vLLM: a stream has sent them. Each other byte is one U+FFFD.

    Args:
        backend: the tokenizer.
        prompt: the ids before the first one pushed; only their tail is decoded.
        skip: ids that give no text.
        join_added: no space between neighbouring added tokens, where some decoders put one.
        byte_of: ``byte_tokens`` of the tokenizer; None: they are looked up.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt: Sequence[int] | Int32Array = (),
        *,
        skip: frozenset[int] = frozenset(),
        join_added: bool = False,
        byte_of: Mapping[int, int] | None = None,
    ) -> None:
        self._backend = backend
        self._skip = skip
        self._byte_of = byte_tokens(backend) if byte_of is None else byte_of
        self._added = backend.get_added_tokens_decoder() if join_added else {}
        self._after_added = False
        self._half: list[int] = []  # byte tokens of a character that is not whole yet
        self._window: list[int] = []  # tokens with whole characters of bytes only
        self._read, self._shown = 0, ""
        tail = self._tail(prompt)
        if self._byte_of:
            self._push(tail)
            self.finish()
        else:
            self._window = tail
            self._read = len(tail)  # tokens of the window that were emitted whole
            self._shown = self._decode(tail)  # text of the window that was emitted

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that ``ids`` complete."""
        if self._added:
            return "".join(self._push_joined(token) for token in ids)
        return self._push([token for token in ids if self._has_text(token)])

    def finish(self) -> str:
        """Returns the rest: replacement characters of bytes that stayed incomplete."""
        text = self._advance(self._replaced())
        rest = self._decode(self._window)[len(self._shown) :]
        self._shown += rest
        return text + rest

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

    def _push(self, fresh: Sequence[int]) -> str:
        """Passes on whole characters of byte tokens only; a byte that is of none is replaced."""
        if not self._half and self._byte_of.keys().isdisjoint(fresh):
            return self._advance(fresh)
        ready: list[int] = []
        for token in fresh:
            is_byte = token in self._byte_of
            if self._half and not (is_byte and self._is_whole([*self._half, token]) is not None):
                ready += self._replaced()
            if not is_byte:
                ready.append(token)
                continue
            self._half.append(token)
            is_whole = self._is_whole(self._half)
            if is_whole:
                ready += self._half
                self._half = []
            elif is_whole is None:
                ready += self._replaced()
        return self._advance(ready)

    def _is_whole(self, tokens: Sequence[int]) -> bool | None:
        """Returns whether bytes are a character; None if no further byte makes them one."""
        try:
            bytes(self._byte_of[token] for token in tokens).decode()
        except UnicodeDecodeError as error:
            return False if error.reason == "unexpected end of data" else None
        return True

    def _replaced(self) -> list[int]:
        """Returns the tokens of a replacement character for each byte held, which are dropped."""
        count, self._half = len(self._half), []
        if not count:
            return []
        numbers = {byte: token for token, byte in self._byte_of.items()}
        return [numbers[byte] for byte in HALF.encode()] * count

    def _advance(self, fresh: Sequence[int]) -> str:
        if not fresh:
            return ""
        self._window.extend(fresh)
        text = self._decode(self._window)
        if not text.startswith(self._shown):  # the prompt ends within a character
            del self._window[: self._read]
            self._read, self._shown = 0, ""
            text = self._decode(self._window)
        halves = 0 if self._byte_of else _trailing_halves(text)
        piece = text[len(self._shown) : len(text) - halves]
        self._shown += piece
        if piece and not halves:
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
        return self._push([token]) if self._has_text(token) else ""

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
