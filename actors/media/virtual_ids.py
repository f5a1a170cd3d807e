"""Ids of the tokens of an image, or of embeddings, which depend on these alone.

Pages of the prefix cache are found by their tokens. An image's placeholders are alike in every
image, so each gets an id of its own: below VIRTUAL_TOKENS, from the image's digest and its place in
the image; rows of embeddings alike. Pages with equal tokens then hold equal images, and whatever
compares prompts (the prefix index, forks, the router, the quarantine) needs no further key.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from rayfin.actors.media.part import VIRTUAL_TOKENS, MediaInput
from rayfin.actors.messages import Int32Array

BITS = 30


def virtual_ids(digest: bytes, count: int) -> Int32Array:
    """The ids [count] of the tokens of the image with this ``digest``."""
    drawn = np.frombuffer(hashlib.shake_256(digest).digest(4 * count), "<u4")
    return (VIRTUAL_TOKENS - 1 - (drawn >> (32 - BITS)).astype(np.int64)).astype(np.int32)


def put_virtual_ids(
    prompt: Int32Array, images: Sequence[MediaInput], media_token_id: int
) -> Int32Array:
    """The prompt [P] in which the tokens of images have ids of their own."""
    whole = prompt.copy()
    for image in images:
        ids = whole[image.start : image.start + image.length]
        places = ids == media_token_id
        ids[places] = virtual_ids(image.digest, int(places.sum()))
    return whole


BLOCK = 16
SHORTEST = 8  # rows of the last block; fewer join the one before it


def row_ids(rows: np.ndarray, dtype: str) -> Int32Array:
    """Returns the ids [N] of the ``rows`` [N, hidden] of embeddings, which lie one after another.

    The ids of BLOCK rows are drawn from one digest of them all, so that to meet the ids of a page
    takes all bits of its ids at once, not those of one row after another. Prompts that begin with
    the same blocks share their pages.
    """
    starts = list(range(0, len(rows), BLOCK))
    if len(starts) > 1 and len(rows) - starts[-1] < SHORTEST:
        starts.pop()
    blocks = zip(starts, [*starts[1:], len(rows)], strict=True)
    ids = [virtual_ids(_digest(rows[start:end], dtype), end - start) for start, end in blocks]
    return np.concatenate(ids) if ids else np.zeros(0, np.int32)


def _digest(rows: np.ndarray, dtype: str) -> bytes:
    """SHA-256 of rows; no image has the same one."""
    name = f"prompt_embeds {dtype} {rows.shape}\0"
    return hashlib.sha256(name.encode() + rows.tobytes()).digest()
