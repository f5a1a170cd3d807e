"""Images and clips of audio as their encoder reads them, and the tokens that stand for them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.part import MediaInput

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
"""What an encoder reads, by the names that its model gives it."""

WORDS: dict[MediaKind, tuple[str, str]] = {
    "image": ("image", "images"),
    "audio": ("clip of audio", "clips of audio"),
}
"""What one is called, and several are."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """What a prompt and an encoder need of an image or a clip."""

    digest: bytes
    arrays: Any  # Arrays, or a Ray reference to them
    ids: list[int]  # tokens in place of the one that a template has for it
    grid: tuple[int, ...] = ()
    num_bytes: int = 0  # of the arrays
    seconds: float = 0.0  # of a clip


class MediaProcessor(Protocol):
    """The side of a model's processor that makes ``ProcessedMedia``; threads may share it."""

    kind: MediaKind
    token: str  # what a template writes for an image or clip ...
    place_id: int  # ... and its id
    media_token_id: int  # of the token that stands for each of its embeddings: mostly the same
    types_of_images: bool  # it marks tokens of images for a model that reads them both ways

    @property
    def chat_template(self) -> str | None:
        """The template of older folders, which is in a file of the processor's."""

    def process(self, given: Any) -> ProcessedMedia:
        """Makes what the encoder reads of a decoded image or clip; takes a core.

        Raises:
            InvalidRequest: the model's processor refuses it.
        """


class ReplacingText:
    """Token ids of the texts in place of images or clips, each tokenized once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        ids = self._ids.get(text)
        if ids is None:
            # Not verbose: a clip may have more tokens than the tokenizer takes to be the model's.
            ids = list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
            if len(self._ids) >= 256:
                self._ids.clear()
            self._ids[text] = ids
        return ids


def processed(arrays: Arrays, ids: list[int], grid: tuple[int, ...] = ()) -> ProcessedMedia:
    """These arrays and tokens, with their identity."""
    num_bytes = sum(array.nbytes for array in arrays.values())
    return ProcessedMedia(digest(arrays), arrays, ids, grid, num_bytes)


def digest(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """SHA-256 of what an encoder reads: names, types, shapes and bytes."""
    whole = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        whole.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        whole.update(array.data if array.nbytes else b"")
    return whole.digest()


def as_arrays(features: Mapping[str, Any], but: set[str]) -> Arrays:
    """Returns a processor's ``features`` without the names in ``but``; tensors become arrays."""
    return {
        name: np.ascontiguousarray(np.asarray(value))
        for name, value in features.items()
        if name not in but
    }


def put_media(
    ids: Sequence[int],
    media: Sequence[ProcessedMedia],
    media_token_id: int,
    param: str,
    place_id: int | None = None,
    kind: MediaKind = "image",
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """Replaces the n-th place of an image or clip in a prompt by the tokens of the n-th one.

    ``place_id`` is the token of a place, unless that is ``media_token_id`` too.

    The ids are those that users see: ``put_virtual_ids`` makes those that engines get.

    Raises:
        InvalidRequest: the prompt has another number of places.
    """
    place = media_token_id if place_id is None else place_id
    count = sum(token == place for token in ids)
    if count != len(media):
        raise InvalidRequest(
            f"The prompt has places for {count} {WORDS[kind][1]}, and {len(media)} are given.",
            param,
            f"invalid_{kind}_count",
        )
    whole: list[int] = []
    inputs: list[MediaInput] = []
    rest = iter(media)
    for token in ids:
        if token != place:
            whole.append(token)
            continue
        one = next(rest)
        first = one.ids.index(media_token_id)
        length = len(one.ids) - one.ids[::-1].index(media_token_id) - first
        inputs.append(MediaInput(one.digest, len(whole) + first, length, one.arrays, one.grid))
        whole += one.ids
    return whole, tuple(inputs)
