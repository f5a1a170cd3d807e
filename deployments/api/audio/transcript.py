"""The transcript in an answer, apart from what a model writes before it and within it.

Those of a recording's clips become one text, in order, whichever clip is written first.
"""

import re
from collections.abc import Sequence

from pydantic import BaseModel

from rayfin.deployments.text.tokenizer import Tokenizer

NO_LANGUAGE = "None"  # what a model writes that hears no speech
MOST_HELD = 64  # characters of a language and its mark


class HeardText:
    """The text of an answer behind the mark that a model may write before it.

    Args:
        mark: "" if it writes none.
    """

    def __init__(self, mark: str) -> None:
        self._mark, self._held, self._open = mark, "", not mark
        self.text = ""  # so far
        self.language: str | None = None  # that the model has heard

    def push(self, text: str, *, last: bool = False) -> str:
        """What ``text`` adds; a start that may yet turn out to be the language is held back."""
        if not self._open:
            self._held += text
            before, mark, text = self._held.partition(self._mark)
            if not mark and not last and len(self._held) <= MOST_HELD:
                return ""
            self._open = True
            if mark:
                language = before.strip().removeprefix("language ").strip()
                self.language = None if language == NO_LANGUAGE else language or None
            else:
                text = self._held
        self.text += text
        return text


class SpokenText:
    """The text of an answer's tokens without those for times, which are no special tokens.

    Args:
        first_time: tokens from this id on are times.
    """

    def __init__(self, tokenizer: Tokenizer, first_time: int) -> None:
        self._detokenizer, self._first_time = tokenizer.detokenizer(), first_time

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """What the next tokens of the answer add."""
        spoken = [token for token in token_ids if token < self._first_time]
        text = self._detokenizer.push(spoken)
        return text + self._detokenizer.finish() if last else text


UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u303f\u3040-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)
"""Characters of scripts that put no space between words: Thai, Lao, Tibetan, Burmese, Khmer, Han,
kana, and their marks."""


class JoinedText:
    """The text of all clips; what a later clip says waits for those before it.

    Args:
        strip: the whole begins with no space, though the model writes one.
    """

    def __init__(self, heard: Sequence[HeardText], *, strip: bool = False) -> None:
        self._heard, self._strip = heard, strip
        self._waiting = ["" for _ in heard]
        self._ended = [False for _ in heard]
        self._place = 0  # of the clip whose text goes out
        self._begun = False  # it has gone out in part
        self.text = ""  # so far

    @property
    def language(self) -> str | None:
        """The first language that the model has heard."""
        return next((heard.language for heard in self._heard if heard.language), None)

    def push(self, clip: int, text: str, *, last: bool = False) -> str:
        """What ``text``, the next one of that clip, adds to the whole."""
        self._waiting[clip] += self._heard[clip].push(text, last=last)
        self._ended[clip] |= last
        before = len(self.text)
        while self._place < len(self._heard):
            self._send(self._place)
            if not self._ended[self._place]:
                break
            self._place, self._begun = self._place + 1, False
        return self.text[before:]

    def _send(self, clip: int) -> None:
        waiting, self._waiting[clip] = self._waiting[clip], ""
        if (clip > 0 or self._strip) and not self._begun:
            waiting = waiting.lstrip()
            if waiting and _spaced(self.text, waiting):
                self.text += " "
        self._begun |= bool(waiting)
        self.text += waiting


def _spaced(before: str, behind: str) -> bool:
    """Whether a space belongs between two texts."""
    if not before or before[-1].isspace():
        return False
    return not (UNSPACED.match(before[-1]) or UNSPACED.match(behind[0]))


class Word(BaseModel):
    """A word of a recording."""

    word: str
    start: float  # seconds in the recording
    end: float


def words_of(
    tokens: Sequence[int], times: Sequence[float], begin: float, tokenizer: Tokenizer
) -> list[Word]:
    """Returns the words of a window's text.

    A word ends before a space; in scripts that have none between words, before each token with a
    letter.

    Args:
        tokens: N of text.
        times: N + 1, of begins and of the last end, seconds in the window.
        begin: of the window in the recording, seconds.
    """
    detokenizer = tokenizer.detokenizer()
    words: list[Word] = []
    start = 0  # of the characters that are not whole yet
    for place, token in enumerate(tokens):
        text = detokenizer.push([token])
        if not text:
            continue
        first, last = round(begin + times[start], 2), round(begin + times[place + 1], 2)
        start = place + 1
        alone = UNSPACED.match(text) and any(letter.isalnum() for letter in text)
        if not words or text[0].isspace() or alone:
            words.append(Word(word=text, start=first, end=last))
        else:
            words[-1].word, words[-1].end = words[-1].word + text, last
    return [
        word.model_copy(update={"word": word.word.strip()}) for word in words if word.word.strip()
    ]
