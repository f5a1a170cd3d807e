"""How many images a step may begin: one beside streams, so that a token waits for one at most."""

from rayfin.actors.scheduler.state.request import Request

BESIDE_STREAMS = 1


class ImageBudget:
    """Cuts chunks of prompts before images that a later step is to begin.

    The runner encodes an image when a chunk first reaches into it. Whether it has the image's
    embeddings already is unknown here, so each image counts.
    """

    def __init__(self) -> None:
        self._left: int | None = None  # images that this step may still begin; None: any number

    def begin(self, decoding: int) -> None:
        """A step with so many ``decoding`` rows is decided."""
        self._left = BESIDE_STREAMS if decoding else None

    def allows(self, request: Request) -> bool:
        """Whether a request that waits may have its first chunk in this step."""
        return self._left != 0 or not request.source.images

    def cap(self, request: Request, computed: int, length: int) -> int:
        """The tokens of a chunk from position ``computed`` on, fewer than ``length`` if need be."""
        if self._left is None or not request.source.images:
            return length
        begun = self._begun(request, computed, length)
        return length if len(begun) <= self._left else begun[self._left] - computed

    def take(self, request: Request, computed: int, length: int) -> None:
        """Counts the images of a chunk that is in the step."""
        if self._left is not None and request.source.images:
            self._left -= len(self._begun(request, computed, length))

    @staticmethod
    def _begun(request: Request, computed: int, length: int) -> list[int]:
        """First positions of the images that begin in a chunk."""
        starts = (image.start for image in request.source.images)
        return [start for start in starts if computed <= start < computed + length]
