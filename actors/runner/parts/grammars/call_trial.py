"""What of a free text may be a call: behind its mark it is text until it names a function."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rayfin.actors.guidance import Guidance
from rayfin.actors.runner.parts.grammars.book import GrammarBook, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CallTrial:
    """What may be the beginning of a call; a quoted mark is text.

    It is a call once it names a function and goes on: until then no token is held to the grammar.

    Args:
        grammar: what ``matcher`` was made of.
        names: of the functions; with none a mark is a call.
        before: bytes that come first and are no name: those of the mark.
    """

    def __init__(
        self,
        grammar: str,
        matcher: "LLMatcher",
        names: Iterable[str],
        vocabulary: Vocabulary,
        before: int = 0,
    ) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self._names = [name.encode() for name in names]
        self._vocabulary = vocabulary
        self._before = before
        self._text = b""

    @property
    def is_call(self) -> bool:
        """Whether it is one for certain."""
        text, whole = self._text[self._before :], self.matcher.is_stopped()
        named = any(name in text and (whole or not text.endswith(name)) for name in self._names)
        return named or not self._names

    def goes_on(self, token: int) -> bool:
        """Appends a token; whether it may still become a call."""
        self._text += self._vocabulary.bytes_of(token)
        return self.matcher.try_consume_tokens([token]) == 1


class TextMarks:
    """Looks in a free text for the marks of calls that are no tokens.

    Args:
        at_start: the text begins an answer, or follows a call: one may come without a mark.
    """

    def __init__(self, guidance: Guidance, book: GrammarBook, at_start: bool) -> None:
        marks = guidance.calls.marks if guidance.calls is not None else ()
        self._marks = [(text.encode(), grammar) for text, grammar in marks if text or at_start]
        self._longest = max((len(text) for text, _ in self._marks), default=0)
        self._names = guidance.names
        self._book = book
        self._tokens: list[int] = []  # with which a mark may have begun
        self._text = b""  # theirs
        self._next = 0  # where in it a mark may begin

    def append(self, token: int) -> None:
        if self._marks:
            self._tokens.append(token)
            self._text += self._book.vocabulary.bytes_of(token)

    def find(self) -> CallTrial | None:
        """The first mark that may still become a call, or None; marks before it are text."""
        while self._marks:
            places = [(self._text.find(text, self._next), text, g) for text, g in self._marks]
            at, text, grammar = min(
                (place for place in places if place[0] >= 0), default=(-1, b"", "")
            )
            if at < 0:
                break
            if not text:  # it begins the text alone
                self._marks = [mark for mark in self._marks if mark[0]]
            else:
                self._next = at + 1
            if (trial := self._trial(grammar, at, len(text))) is not None:
                return trial
        self._forget()
        return None

    def _trial(self, grammar: str, at: int, length: int) -> CallTrial | None:
        """A call whose mark is at a place, with all tokens from its first one on."""
        book, first, end = self._book, 0, 0
        sizes = [len(book.vocabulary.bytes_of(token)) for token in self._tokens]
        while length and end + sizes[first] <= at:
            end += sizes[first]
            first += 1
        before = at + length - end
        trial = CallTrial(grammar, book.matcher(grammar), self._names, book.vocabulary, before)
        return trial if all(map(trial.goes_on, self._tokens[first:])) else None

    def _forget(self) -> None:
        """Drops the tokens that no mark can begin with any more."""
        keep = max(len(self._text) - self._longest + 1, self._next, 0)
        bytes_of = self._book.vocabulary.bytes_of
        while self._tokens and (size := len(bytes_of(self._tokens[0]))) <= keep:
            del self._tokens[0]
            self._text = self._text[size:]
            keep -= size
            self._next = max(self._next - size, 0)
