"""The transcript in an answer, apart from what a model writes before it and within it."""

from collections.abc import Sequence

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
            before, found, text = self._held.partition(self._mark)
            if not found and not last and len(self._held) <= MOST_HELD:
                return ""
            self._open = True
            if found:
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
