"""Where full pages lie on a disk: one file a page, named by the hash of all tokens up to its end.

    DIR/<namespace>/<first two digits>/<hash>.page

The namespace stands for all else that decides the bits of a page: the model's content, the settings
that decide tokens, the layout of a page, the version of the code. So a file never becomes wrong,
and engines, restarts and machines may share a folder.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

SUFFIX, PART_SUFFIX = ".page", ".part"
OWN = re.compile(r"[0-9a-f]{24}(-\d+)?/[0-9a-f]{2}/[0-9a-f]{64}\.page(\.[0-9a-f]+\.part)?")
"""Files that were made here; the folder may have others."""


@dataclass(frozen=True, slots=True)
class PageFolder:
    """The page files of one model with its settings.

    The scheduler asks which pages are there; the runners read and write them. Nothing is kept in
    memory: what another process stores is found at once.
    """

    path: str  # DIR
    namespace: str
    max_bytes: int  # of all files of DIR

    def of(self, digest: str) -> "PageFolder":
        """The folder of pages that other weights have made, of this digest; empty: its own."""
        if not digest:
            return self
        name = hashlib.sha256(f"{self.namespace} {digest}".encode()).hexdigest()
        return replace(self, namespace=name[: len(self.namespace)])

    def file(self, page_hash: bytes, rank: int = 0) -> Path:
        """The file of a page, or of a rank's share of it."""
        name = page_hash.hex()
        return self.home(rank) / name[:2] / (name + SUFFIX)

    def home(self, rank: int = 0) -> Path:
        """The folder of all pages, or of a rank's shares of them."""
        return Path(self.path, f"{self.namespace}-{rank}" if rank else self.namespace)

    def files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of use, bytes, path) of each file that was made here, of all models."""
        for root, _, names in os.walk(self.path):
            for name in names:
                path = Path(root, name)
                if OWN.fullmatch(path.relative_to(self.path).as_posix()):
                    with suppress(OSError):
                        status = path.stat()
                        yield status.st_mtime, status.st_size, path

    def holds(self, page_hash: bytes) -> bool:
        """Whether the page has a file, which may prove broken when it is read."""
        return os.path.exists(self.file(page_hash))

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first pages have files.

        Pages are stored in order and the ends of prompts are removed first, so a page's file says
        that those before it are there: a search by halves asks for few of them. A reader finds out
        where that is not so.
        """
        if not hashes or not self.holds(hashes[0]):
            return 0
        present, missing = 1, len(hashes) + 1
        while missing - present > 1:
            middle = (present + missing) // 2
            if self.holds(hashes[middle - 1]):
                present = middle
            else:
                missing = middle
        return present
