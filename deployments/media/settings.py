"""How many images or clips a request may have, how large they are, and from where they come."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.processed import WORDS

MOST: dict[MediaKind, int] = {"image": 8, "audio": 8}
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Settings of an operator."""

    max_images: int = MOST["image"]  # of a prompt
    max_audios: int = MOST["audio"]  # the same, of clips of audio
    max_pixels: int = 33_000_000  # of an image
    max_seconds: float = 120.0  # of a clip
    chunk_seconds: float | None = None  # of a clip of a recording; None: the model's own window
    max_upload_seconds: float = 3600.0  # of a recording that is to be written down
    max_upload_bytes: int = 25 * MEBIBYTE  # the same, of its file
    max_held_bytes: int = 2**30  # of all recordings that are written down now
    max_bytes: int = 20 * MEBIBYTE  # of a file ...
    max_total_bytes: int = 64 * MEBIBYTE  # ... and of all in a request
    timeout: float = 5.0  # seconds of a fetch, redirects included
    urls: bool = True  # files may be fetched
    domains: tuple[str, ...] = ()  # the only ones; () is all
    folder: str | None = None  # of files that requests may name
    cache_bytes: int = 2**30  # of images and clips that were processed last

    def limit(self, kind: MediaKind) -> int:
        """Images or clips of a prompt, at most."""
        return self.max_images if kind == "image" else self.max_audios


def media_sources(
    folder: str | None, domains: Sequence[str] | None
) -> tuple[str | None, tuple[str, ...]]:
    """The folder and the hosts that requests may name; "" is no folder, as in vLLM.

    Raises:
        InvalidConfig: there is no such folder.
    """
    name = "allowed_local_media_path"
    if folder and not Path(folder).is_dir():
        raise InvalidConfig(f"{name}: there is no folder {folder}", name)
    return folder or None, tuple(host.lower().rstrip(".") for host in domains or ())


def read_limits(written: Mapping[str, object] | str | None, kind: MediaKind = "image") -> int:
    """The number of images or clips in ``--limit-mm-per-prompt``, an object such as {"image": 8}.

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
    count = limits.get(kind, MOST[kind])
    count = count.get("count", MOST[kind]) if isinstance(count, Mapping) else count
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidConfig(
            f"{name}: {kind} must be a number of {WORDS[kind][1]}, got {count!r}", name
        )
    return count
