"""Embeddings that a prompt has in place of tokens, as a part of a request."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rayfin.actors.parts import PartFacts, RequestPart

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
        """The position after its last row."""
        return self.start + self.length


@dataclass(slots=True, frozen=True, kw_only=True)
class EmbedsFacts(PartFacts):
    """A model whose prompts may hold embeddings."""

    of: ClassVar[type[RequestPart]] = EmbedsInput

    size: int  # numbers of each embedding
