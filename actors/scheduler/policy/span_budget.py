"""How many spans a step may begin, an image each or a clip of audio: one beside streams, so that a
token waits for one at most.

And where chunks may end: not inside a span whose tokens see each other both ways.
"""

from rayfin.actors.scheduler.request import Request
from rayfin.actors.settings.bidirectional import Bidirectional

BESIDE_STREAMS = 1


class SpanBudget:
    """Cuts chunks of prompts before spans that a later step is to begin.

    The runner computes the inputs of a span when a chunk first reaches into it. Whether it has them
    already is unknown here, so each span counts.
    """

    def __init__(self, max_batch_tokens: int, uncut: Bidirectional) -> None:
        self._max_tokens, self._uncut = max_batch_tokens, uncut
        self._room = max_batch_tokens  # tokens that the step may still have
        self._left: int | None = None  # spans that this step may still begin; None: any number

    def begin(self, decoding: int) -> None:
        """A step with so many ``decoding`` rows is decided."""
        self._left = BESIDE_STREAMS if decoding else None
        self._room = self._max_tokens - decoding

    def allows(self, request: Request) -> bool:
        """Whether a request that waits may have its first chunk in this step."""
        return self._left != 0 or not (request.source.parts and _spans(request))

    def cap(self, request: Request, computed: int, length: int) -> int:
        """The tokens of a chunk from position ``computed`` on: ``length`` if they may be."""
        if self._left is not None and request.source.parts:
            begun = self._begun(request, computed, length)
            if len(begun) > self._left:
                length = begun[self._left] - computed
        return self.whole(request, computed, length, self._room)

    def whole(self, request: Request, computed: int, length: int, room: int) -> int:
        """The tokens of a chunk that cuts nothing which has to be computed whole.

        It ends before such a part, or is longer than ``length``, up to ``room``, if it begins
        there; 0 if there is no room.
        """
        if self._uncut.ahead == "nothing":
            return length
        prompt_len, end = len(request.source.prompt), computed + length
        for first, last in self._uncut.spans(_spans(request), prompt_len):
            if first < end < last:
                if first > computed:
                    return first - computed
                return last - computed if last - computed <= room else 0
        return length

    def take(self, request: Request, computed: int, length: int) -> None:
        """Counts the spans of a chunk that is in the step."""
        self._room -= length
        if self._left is not None and request.source.parts:
            # More than are left may begin in a prompt that no step cuts.
            self._left = max(self._left - len(self._begun(request, computed, length)), 0)

    @staticmethod
    def _begun(request: Request, computed: int, length: int) -> list[int]:
        """First positions of the spans that begin in a chunk."""
        return [start for start, _ in _spans(request) if computed <= start < computed + length]


def _spans(request: Request) -> list[tuple[int, int]]:
    return [span for part in request.source.parts if (span := part.span) is not None]
