"""The transcripts of a recording's clips as one text, in order, whichever clip is written first."""

import re
from collections.abc import Sequence

from rayfin.deployments.api.audio.transcript import HeardText

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
        return next((own.language for own in self._heard if own.language), None)

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
