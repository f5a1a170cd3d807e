"""An image, a clip of audio or embeddings as a part of a request, and what runners report."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rayfin.actors.messages import Int32Array
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


ROWS = "prompt_embeds"
"""The name of the one array behind ``EmbedsInput.rows``."""


@dataclass(slots=True, frozen=True)
class EmbedsInput(RequestPart):
    """Embeddings in a prompt: row i stands for the prompt's token ``start + i``.

    ``rows`` goes from the ingress to the runner unread: ``{ROWS: array}`` of [length, hidden], or
    a Ray reference to that. numpy has no bfloat16, so such rows are the bits, in uint16.
    """

    rows: Any
    length: int
    dtype: str  # "float32", "float16" or "bfloat16"
    start: int = 0

    by_reference = True

    @property
    def end(self) -> int:
        """Returns the position after its last row."""
        return self.start + self.length


@dataclass(slots=True, frozen=True, kw_only=True)
class EmbedsFacts(PartFacts):
    """A model whose prompts may hold embeddings."""

    of: ClassVar[type[RequestPart]] = EmbedsInput

    size: int  # numbers of each embedding


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Embeddings in place of N tokens of a prompt."""

    ids: Int32Array  # [N] of the tokens that they stand for, which depend on them alone
    sent: EmbedsInput

    def at(self, start: int) -> "PromptEmbeds":
        """Returns the same from this position of the prompt on."""
        return replace(self, sent=replace(self.sent, start=start))
