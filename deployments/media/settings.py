"""How many images a request may have, how large they are, and from where they come."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from rayfin.actors.errors import InvalidConfig

IMAGES = 8
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Settings of an operator."""

    max_images: int = IMAGES  # of a prompt
    max_pixels: int = 33_000_000  # of an image
    max_bytes: int = 20 * MEBIBYTE  # of an image's file ...
    max_total_bytes: int = 64 * MEBIBYTE  # ... and of all in a request
    timeout: float = 5.0  # seconds of a fetch, redirects included
    urls: bool = True  # images may be fetched
    domains: tuple[str, ...] = ()  # the only ones; () is all
    folder: str | None = None  # of files that requests may name
    cache_bytes: int = 2**30  # of images that were processed last


def read_limits(written: Mapping[str, object] | str | None) -> int:
    """The number of images in ``--limit-mm-per-prompt``, an object such as {"image": 8}.

    Raises:
        InvalidConfig: not such an object.
    """
    name = "limit_mm_per_prompt"
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except ValueError:
            written = {"": 0}
    limits = {} if written is None else written
    if not isinstance(limits, Mapping) or not limits.keys() <= {"image", "video", "audio"}:
        raise InvalidConfig(f'{name} must be an object such as {{"image": 8}}', name)
    count = limits.get("image", IMAGES)
    count = count.get("count", IMAGES) if isinstance(count, Mapping) else count
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidConfig(f"{name}: image must be a number of images, got {count!r}", name)
    return count
