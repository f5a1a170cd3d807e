"""The times of words: tokens with times, joined to words."""

from collections.abc import Sequence

from pydantic import BaseModel

from rayfin.deployments.api.audio.merge import UNSPACED
from rayfin.deployments.text.tokenizer import Tokenizer


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
    made: list[Word] = []
    start = 0  # of the characters that are not whole yet
    for place, token in enumerate(tokens):
        text = detokenizer.push([token])
        if not text:
            continue
        first, last = round(begin + times[start], 2), round(begin + times[place + 1], 2)
        start = place + 1
        alone = UNSPACED.match(text) and any(letter.isalnum() for letter in text)
        if not made or text[0].isspace() or alone:
            made.append(Word(word=text, start=first, end=last))
        else:
            made[-1].word, made[-1].end = made[-1].word + text, last
    return [own.model_copy(update={"word": own.word.strip()}) for own in made if own.word.strip()]
