"""An image or a clip of audio as a part of a request, and what runners report of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rayfin.actors.parts import PartFacts, PartUsage, RequestPart

VIRTUAL_TOKENS = -1
"""Ids below this are tokens of media: which ones they are depends on the image or clip alone."""


@dataclass(slots=True, frozen=True)
class MediaInput(RequestPart):
    """An image or clip of a prompt: which tokens are its own, and what its encoder reads.

    ``arrays`` go from the ingress to the runner unread: the arrays themselves, by the names that
    the model gives them, or a Ray reference to them.
    """

    digest: bytes  # of what the encoder reads; the same image has the same one
    start: int  # position of its first token in the prompt ...
    length: int  # ... and the tokens up to its last one, ordinary ones between them included
    arrays: Any
    grid: tuple[int, ...] = ()  # patches in time, height and width, where positions depend on them

    needs_history = by_reference = True

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + self.length


@dataclass(slots=True, frozen=True)
class Alignment(RequestPart):
    """A request for no tokens, but for where in its clip each token of its prompt is heard.

    The prompt has a transcript behind the clip, from ``start`` on. Its vector [N + 1] has seconds:
    the begin of each of the N tokens behind the one at ``start``, then the end of the last one.
    """

    start: int  # position of the token in front of the text
    states: int  # of the encoder that the clip fills; the others are padding

    samples = False
    needs_history = computes_all = True


@dataclass(slots=True, frozen=True, kw_only=True)
class MediaFacts(PartFacts):
    """A model that reads images, or hears.

    One that writes down speech has a clip of ``front_tokens`` in front of each prompt.
    """

    of: ClassVar[type[RequestPart]] = MediaInput

    token_id: int  # of the tokens of media


@dataclass(slots=True, frozen=True)
class MediaUsage(PartUsage):
    """What a runner did with images and clips of audio since its last result."""

    num_bytes: int = 0  # of the embeddings that it keeps now
    hits: int = 0  # of those that began with embeddings that it had
    evictions: int = 0  # embeddings that made room for others
    seconds: tuple[float, ...] = ()  # of each one that its tower computed

    @property
    def seconds_apart(self) -> float:
        return sum(self.seconds)
