"""An image or a clip of audio in a prompt, as messages carry it."""

from dataclasses import dataclass
from typing import Any

VIRTUAL_TOKENS = -1
"""Ids below this are tokens of media: which ones they are depends on the image or clip alone."""


@dataclass(slots=True, frozen=True)
class MediaInput:
    """An image or clip of a prompt: which tokens are its own, and what its encoder reads.

    ``arrays`` go from the ingress to the runner unread: the arrays themselves, by the names that
    the model gives them, or a Ray reference to them.
    """

    digest: bytes  # of what the encoder reads; the same image has the same one
    start: int  # position of its first token in the prompt ...
    length: int  # ... and the tokens up to its last one, ordinary ones between them included
    arrays: Any
    grid: tuple[int, ...] = ()  # patches in time, height and width, where positions depend on them
