"""Where a guided request stands, as a function of its tokens, and which token may come next.

    THINKING   between the marks of a thought: everything may, until its budget is spent; no end if
               a grammar is to come
    FREE       everything may, until a call has begun: a mark, and what names a function
    BOUND      what the grammar of the answer, or of a call, lets through
    DONE       it has ended; a step that is in flight by then may only sample the end

An answer that may open a thought for itself begins as OPENING: its first tokens are those of the
mark, or already the answer.
"""

import logging
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from rayfin.actors.errors import GrammarFailed, RequestFailed
from rayfin.actors.guidance import Guidance, Thinking
from rayfin.actors.runner.parts.grammars.book import (
    WORD,
    GrammarBook,
    Vocabulary,
    WordArray,
    brief,
)
from rayfin.actors.runner.parts.grammars.call_trial import CallTrial, TextMarks

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

BITS = [np.uint32(1 << place) for place in range(WORD)]


class Phase(Enum):
    OPENING = auto()
    THINKING = auto()
    FREE = auto()
    BOUND = auto()
    DONE = auto()


class OpenThought:
    """A thought that has not ended: looks for its close."""

    def __init__(self, thinking: Thinking, vocabulary: Vocabulary) -> None:
        self._thinking = thinking
        self._vocabulary = vocabulary
        self._length = 0  # tokens
        self._recent: list[int] = []  # the last of them, as many as the close has
        self._close = thinking.close.encode()
        self._tail = b""  # the end of its text, shorter than the close
        ids = thinking.close_ids
        self._by_id = len(ids) == 1 and ids[0] in vocabulary.special

    @property
    def spent(self) -> bool:
        """Whether its budget is."""
        budget = self._thinking.budget
        return budget is not None and self._length >= budget

    def forced(self) -> int:
        """The next token of the close, some of which may be there."""
        ids, recent = self._thinking.close_ids, self._recent
        count = min(len(ids) - 1, len(recent))
        while count and tuple(recent[-count:]) != ids[:count]:
            count -= 1
        return ids[count]

    def ends_with(self, token: int) -> bool:
        """Appends a token; whether the thought ends with it.

        A close that is one special token is known by its id, any other by its text: it may be
        written in several ways.
        """
        ids = self._thinking.close_ids
        self._length += 1
        self._recent = [*self._recent, token][-len(ids) :]
        if ids and tuple(self._recent) == ids:
            return True
        if self._by_id or not self._close:
            return False
        text = self._tail + self._vocabulary.bytes_of(token)
        self._tail = text[max(len(text) - len(self._close) + 1, 0) :]
        return self._close in text

    def ban_beyond(self, words: WordArray) -> None:
        """Bans tokens that would end the thought and begin the answer: no grammar sees them."""
        if self._by_id:
            return
        close = self._thinking.close
        for length in range(len(close)):
            if self._tail.endswith(close[:length].encode()):
                words &= ~self._vocabulary.beyond(close[length:])


class OpeningMark:
    """The mark that an answer may begin with, to open a thought."""

    def __init__(self, thinking: Thinking, vocabulary: Vocabulary) -> None:
        self._ids = thinking.open_ids
        self._vocabulary = vocabulary
        self._seen: list[int] = []
        self._text = b""
        self._mark = b"".join(map(vocabulary.bytes_of, self._ids))
        self._by_id = len(self._ids) == 1 and self._ids[0] in vocabulary.special

    @property
    def before(self) -> list[int]:
        """The tokens before the last one."""
        return self._seen[:-1]

    @property
    def next(self) -> int | None:
        """The token that goes on with the mark, or None if it is written in another way."""
        count = len(self._seen)
        return self._ids[count] if tuple(self._seen) == self._ids[:count] else None

    def begins_with(self, token: int) -> bool | None:
        """Appends a token: whether the mark is complete, or None if it is not the mark."""
        self._seen.append(token)
        if tuple(self._seen) == self._ids:
            return True
        if self._by_id:
            return None
        self._text += self._vocabulary.bytes_of(token)
        if self._text.startswith(self._mark):
            return True
        return False if self._mark.startswith(self._text) else None


class GuidedRow:
    """One request's state. An error stays: no token of it is sampled any more."""

    def __init__(self, guidance: Guidance, book: GrammarBook, output: Iterable[int] = ()) -> None:
        self.guidance = guidance
        self.error: RequestFailed | None = None
        self.overtime = 0.0  # seconds that its masks took beyond their limit
        self._book = book
        self._output = list(output)
        self._plain = not guidance.forbidden
        self._bound_by = ""  # the grammar of what follows; "": it has none
        self._made: LLMatcher | None = None
        self._foreign: list[int] | None = None  # marks of calls that may not be within a thought
        self._replay()

    @property
    def grammar(self) -> str:
        """The text that its next mask is made from, or ""."""
        return self._bound_by

    def accept(self, token: int) -> None:
        """Appends a token that was sampled."""
        self._output.append(token)
        self._take(token)

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` tokens."""
        if count:
            del self._output[-count:]
            self._replay()

    def is_active(self, position: int) -> bool:
        """Whether not all tokens may be sampled at ``position`` of the request."""
        guidance = self.guidance
        if self.error is not None or self.phase in (Phase.BOUND, Phase.DONE) or guidance.forbidden:
            return True
        if guidance.ends and position < guidance.ends_from:
            return True
        if self.phase is Phase.FREE:
            return self._no_more_calls
        if guidance.grammar:
            return True
        return self._thought is not None and self._thought.spent

    def fill(self, words: WordArray, position: int) -> None:
        """Sets the bits [W] of the tokens that may be sampled at ``position``.

        Raises:
            RequestFailed: that cannot be said, and why; then for ever.
        """
        try:
            if self.error is not None:
                raise self.error
            if self.phase is Phase.THINKING:
                self._fill_thinking(words, position)
            else:
                self._fill_answer(words, position)
            if self._book.vocabulary.trimmed:
                words &= self._book.vocabulary.all
        except Exception as error:
            words[:] = 0
            self.error = _failure(error)
            raise self.error from None

    def _fill_thinking(self, words: WordArray, position: int) -> None:
        assert self._thought is not None
        if self._thought.spent:
            words[:] = 0
            _allow(words, self._thought.forced())
            return
        guidance = self.guidance
        words[:] = self._book.vocabulary.all
        _ban(words, guidance.forbidden)
        _ban(words, self._foreign or ())
        if guidance.grammar:
            self._thought.ban_beyond(words)
        if guidance.grammar or position < guidance.ends_from:
            _ban(words, guidance.ends)

    def _fill_answer(self, words: WordArray, position: int) -> None:
        guidance = self.guidance
        ends: Iterable[int] = guidance.ends
        early = position < guidance.ends_from
        if self._matcher is not None:
            ends = self._fill_bound(words, self._matcher)
            if self._plain and not early and self.phase is Phase.BOUND:
                return  # nearly always: the mask is the grammar's
        elif self.phase is Phase.DONE:
            words[:] = 0
        elif guidance.grammar:  # the mark of a thought that is no beginning of an answer
            words[:] = 0
            ends = ()
        else:
            words[:] = self._book.vocabulary.all
        _ban(words, guidance.forbidden)
        _ban(words, guidance.ends)
        if self.phase is Phase.FREE and self._no_more_calls and guidance.calls is not None:
            _ban(words, guidance.calls.triggers)
        if self._opening is not None and (token := self._opening.next) is not None:
            _allow(words, token)
        if not early or not words.any():
            for token in ends:
                _allow(words, token)

    def _fill_bound(self, words: WordArray, matcher: "LLMatcher") -> list[int]:
        """The grammar's mask, and which ends it lets through."""
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise GrammarFailed(f"the grammar cannot go on: {brief(matcher.get_error())}")
        ends, known = self.guidance.ends, self._book.vocabulary.ends
        if ends != known:
            accepts = matcher.is_accepting()
            ends = tuple(token for token in ends if accepts or _is_allowed(words, token))
            _ban(words, known)
            for token in ends:
                _allow(words, token)
            return list(ends)
        return [token for token in ends if _is_allowed(words, token)]

    @property
    def _no_more_calls(self) -> bool:
        calls = self.guidance.calls
        return calls is not None and calls.max_calls is not None and self._calls >= calls.max_calls

    @property
    def _matcher(self) -> "LLMatcher | None":
        """After the tokens so far. The first look makes it: its grammar may compile till then."""
        if self._made is None and self._bound_by:
            self._made = self._book.matcher(self._bound_by)
        return self._made

    def _bind(self, grammar: str) -> None:
        """What follows has this grammar, from its start on; "": it has none."""
        self._bound_by, self._made = grammar, None

    def _replay(self) -> None:
        """Goes through all tokens from the start."""
        thinking = self.guidance.thinking
        self._bind("")
        self._thought: OpenThought | None = None
        self._calls = 0  # begun
        self._opening: OpeningMark | None = None
        self._trial: CallTrial | None = None  # of what may be a call
        self._marks = TextMarks(self.guidance, self._book, at_start=True)
        self.error = None
        try:
            if thinking is None or not (thinking.starts_inside or thinking.open_ids):
                self._begin_answer()
            elif thinking.starts_inside:
                self._begin_thought()
            else:
                self._begin_answer()
                self._opening = OpeningMark(thinking, self._book.vocabulary)
                self.phase = Phase.OPENING
        except Exception as error:
            self.error = _failure(error)
        for token in self._output:
            self._take(token)

    def _take(self, token: int) -> None:
        if self.error is not None:
            return
        try:
            self._advance(token)
        except Exception as error:  # the step goes on: its other rows have their tokens
            self.error = _failure(error)

    def _advance(self, token: int) -> None:
        if self.phase is Phase.OPENING and self._opens(token):
            return
        if self._thought is not None and self._thought.ends_with(token):
            self._begin_answer()
        elif token in self.guidance.ends:
            self.phase = Phase.DONE
        elif self.phase is Phase.BOUND:
            self._consume(token)
        elif self.phase is not Phase.DONE:
            self._try_call(token)

    def _try_call(self, token: int) -> None:
        """Goes on with what may be a call, or begins it; then the answer is held to its grammar."""
        trial = self._trial
        self._marks.append(token)
        if trial is None or not trial.goes_on(token):
            trial = self._trial = self._new_trial(token)
        if trial is None or not trial.is_call:
            return
        self._trial = self._thought = None
        self._calls += self.guidance.calls is not None
        self._bind(trial.grammar)
        self._made = trial.matcher
        self.phase = Phase.BOUND
        self._end_call()

    def _new_trial(self, token: int) -> CallTrial | None:
        """What may be a call from this token on or from an earlier one, or None."""
        guidance, calls = self.guidance, self.guidance.calls
        thinking = guidance.thinking
        thinks = self.phase is Phase.THINKING
        if calls is not None and not self._no_more_calls:
            if thinks and not (thinking is not None and thinking.ends_at_call):
                return None
            if token in calls.triggers:
                return self._trial_of(calls.grammar, self._book.matcher(calls.grammar))
            return self._marks.find()
        if thinks and thinking is not None and token in thinking.calls:
            trial = self._trial_of(guidance.grammar, self._book.matcher(guidance.grammar))
            return trial if trial.goes_on(token) else None
        return None

    def _trial_of(self, grammar: str, matcher: "LLMatcher") -> CallTrial:
        return CallTrial(grammar, matcher, self.guidance.names, self._book.vocabulary)

    def _opens(self, token: int) -> bool:
        """Whether the answer still begins as a thought does; else it is an answer from now on."""
        opening, matcher = self._opening, self._matcher
        assert opening is not None
        matched = opening.begins_with(token)
        if matched is None:
            self._opening = None
            self.phase = Phase.BOUND if self.guidance.grammar else Phase.FREE
            for earlier in opening.before if self.phase is Phase.FREE else ():
                self._try_call(earlier)
            return False
        if matched:
            self._begin_thought()
        elif matcher is not None and not matcher.try_consume_tokens([token]):
            self._bind("")
        return True

    def _consume(self, token: int) -> None:
        matcher = self._matcher
        if matcher is None or not matcher.consume_token(token):
            why = "" if matcher is None else f": {brief(matcher.get_error())}"
            raise GrammarFailed(f"token {token} is not of the request's grammar{why}")
        self._end_call()

    def _end_call(self) -> None:
        """What follows a complete call of a free answer is free again, and may go on with it."""
        guidance, grammar, matcher = self.guidance, self._bound_by, self._matcher
        if guidance.grammar or guidance.calls is None or matcher is None:
            return
        if grammar == guidance.calls.rest or not matcher.is_accepting():
            return
        if self._no_more_calls and guidance.calls.rest:
            self._bind(guidance.calls.rest)
        elif matcher.is_stopped() or guidance.names:
            self._bind("")
            self.phase = Phase.FREE
            self._marks = TextMarks(guidance, self._book, at_start=True)
            self._trial = None if matcher.is_stopped() else self._trial_of(grammar, matcher)

    def _begin_thought(self) -> None:
        thinking = self.guidance.thinking
        assert thinking is not None
        self._bind("")
        self._opening = None
        self._thought = OpenThought(thinking, self._book.vocabulary)
        self._marks = TextMarks(self.guidance, self._book, at_start=False)
        self.phase = Phase.THINKING
        if thinking.calls and self._foreign is None:
            whole = self.guidance.grammar
            self._foreign = [
                token
                for token in thinking.calls
                if not self._book.matcher(whole).try_consume_tokens([token])
            ]

    def _begin_answer(self) -> None:
        self._thought = self._trial = None
        self._marks = TextMarks(self.guidance, self._book, at_start=True)
        self.phase = Phase.FREE
        if self.guidance.grammar:
            self.phase = Phase.BOUND
            self._bind(self.guidance.grammar)


def _failure(error: Exception) -> RequestFailed:
    if isinstance(error, RequestFailed):
        return error
    logger.error("a guided row failed: %s", error, exc_info=error)
    return RequestFailed(f"{type(error).__name__}: {error}")


def _is_allowed(words: WordArray, token: int) -> bool:
    return token < len(words) * WORD and bool(int(words[token // WORD]) >> token % WORD & 1)


def _allow(words: WordArray, token: int) -> None:
    if token < len(words) * WORD:
        words[token // WORD] |= _bit(token)


def _ban(words: WordArray, tokens: Iterable[int]) -> None:
    for token in tokens:
        if token < len(words) * WORD:
            words[token // WORD] &= ~_bit(token)


def _bit(token: int) -> np.uint32:
    return BITS[token % WORD]
