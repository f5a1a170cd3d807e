"""A folder of packed weights: a start maps them instead of reading and packing a checkpoint.

A file's name is a digest of all that its content follows from: the checkpoint's bytes, the
settings, the kernels and the code. So nothing is ever invalidated: what changes has another name.
Any number of processes may use a folder at once: files appear whole, and are never changed. A file
that is broken is removed and made again.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfin.actors.errors import BrokenFile
from rayfin.actors.runner.cpu.array_file import (
    PART_SUFFIX,
    Array,
    read_arrays,
    write_arrays,
)
from rayfin.actors.timing import FILE_SETTLED_SECONDS, UNFINISHED_FILE_SECONDS

logger = logging.getLogger(__name__)

SUFFIX, DIGEST_SUFFIX = ".weights", ".digest"
READ_BYTES = 8 << 20
FILE_MODE, FOLDER_MODE = 0o600, 0o700


class WeightsCache:
    """Files of arrays by key, ``max_bytes`` in all; those used longest ago leave first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def key(self, files: Iterable[Path], depends: Mapping[str, Any]) -> str:
        """The name of what follows from the content of ``files`` and from ``depends``, JSON.

        The content of a file is read once: as long as its size, times and place stay, its digest
        does.

        Raises:
            OSError: a file cannot be read.
        """
        contents = [[path.name, self._digest_of(path)] for path in sorted(files)]
        text = json.dumps([contents, depends], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def find(self, key: str) -> tuple[dict[str, Any], list[Array]] | None:
        """What ``keep`` was given for ``key``, or None; a broken file is removed, with a line."""
        path = self._path(key)
        try:
            entry = read_arrays(path)
            with suppress(OSError):  # of another user, or read-only
                os.utime(path)
            return entry
        except FileNotFoundError:
            return None
        except (BrokenFile, OSError, ValueError, KeyError, TypeError) as error:
            self.drop(key, str(error))
            return None

    def holds(self, key: str) -> bool:
        """Whether there is a file for ``key``; its content is not looked at."""
        return self._path(key).exists()

    def drop(self, key: str, why: str) -> None:
        """Removes a file that cannot be used."""
        logger.warning("%s is ignored: %s", self._path(key), why)
        with suppress(OSError):
            self._path(key).unlink()

    def keep(self, key: str, meta: dict[str, Any], arrays: Sequence[Array]) -> bool:
        """Writes a file, and removes others for its room. False, with a line, if it cannot."""
        size = sum(array.nbytes for array in arrays)
        if size > self._max_bytes:
            logger.warning(
                "the packed weights are not kept: they have %.1f GiB, and the cache %.1f",
                size / 2**30,
                self._max_bytes / 2**30,
            )
            return False
        try:
            self._folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            self._make_room(size)
            write_arrays(self._path(key), meta, arrays, mode=FILE_MODE)
        except OSError as error:
            logger.warning("the packed weights are not kept: %s", error)
            return False
        logger.info("packed weights are kept in %s, %.1f GiB", self._path(key), size / 2**30)
        return True

    def _path(self, key: str) -> Path:
        return self._folder / (key + SUFFIX)

    def _make_room(self, size: int) -> None:
        """Removes what was used longest ago until ``size`` more bytes fit, and what is abandoned.

        Processes that have mapped a file keep it.
        """
        files, now = [], time.time()
        for path in self._folder.iterdir():
            with suppress(OSError):
                status = path.stat()
                if path.name.endswith(SUFFIX):
                    files.append((status.st_mtime, status.st_size, path))
                elif path.name.endswith(PART_SUFFIX):
                    if now - status.st_mtime > UNFINISHED_FILE_SECONDS:
                        path.unlink()
        held = sum(file_size for _, file_size, _ in files)
        for _, file_size, path in sorted(files):
            if held + size <= self._max_bytes:
                return
            with suppress(OSError):
                path.unlink()
                held -= file_size

    def _digest_of(self, path: Path) -> str:
        """The SHA-256 of a file, from the note of an earlier start if it is still the same file."""
        status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        place = [str(path.resolve()), status.st_dev, status.st_ino, status.st_size, *times]
        name = hashlib.sha256(json.dumps(place).encode()).hexdigest()[:40]
        note = self._folder / (name + DIGEST_SUFFIX)
        with suppress(OSError, ValueError):
            if len(bytes.fromhex(known := note.read_text())) == hashlib.sha256().digest_size:
                return known
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
        if time.time() - max(times) / 1e9 > FILE_SETTLED_SECONDS:
            with suppress(OSError):
                self._folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
                part = note.with_suffix(f".{os.getpid()}{PART_SUFFIX}")
                part.write_text(digest.hexdigest())
                part.replace(note)
        return digest.hexdigest()
