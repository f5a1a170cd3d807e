"""Embeddings that a prompt has in place of tokens, as messages carry them."""

from dataclasses import dataclass
from typing import Any

ROWS = "prompt_embeds"
"""The name of the one array behind ``EmbedsInput.rows``."""


@dataclass(slots=True, frozen=True)
class EmbedsInput:
    """Embeddings in a prompt: row i stands for the prompt's token ``start + i``.

    ``rows`` goes from the ingress to the runner unread: ``{ROWS: array}`` of [length, hidden], or
    a Ray reference to that. numpy has no bfloat16, so such rows are the bits, in uint16.
    """

    rows: Any
    length: int
    dtype: str  # "float32", "float16" or "bfloat16"
    start: int = 0

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.start + self.length
