"""Ids of an image's tokens, which depend on the image alone.

Pages of the prefix cache are found by their tokens. An image's placeholders are alike in every
image, so each gets an id of its own: below VIRTUAL_TOKENS, from the image's digest and its place in
the image. Pages with equal tokens then hold equal images, and whatever compares prompts (the prefix
index, forks, the router, the quarantine) needs no further key.
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
        own = whole[image.start : image.start + image.length]
        places = own == media_token_id
        own[places] = virtual_ids(image.digest, int(places.sum()))
    return whole
