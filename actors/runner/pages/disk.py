"""Pages as files: one for each page and rank, removed when the folder is full."""

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rayfin.actors.messages import Int32Array, PageTransfer
from rayfin.actors.runner.pages.records import Bytes, head_bytes, head_of, state_name, why_wrong
from rayfin.actors.timing import PAGE_WARNING_SECONDS
from rayfin.cache.page_files import PART_SUFFIX, PageFolder

logger = logging.getLogger(__name__)

FILE_MODE, FOLDER_MODE = 0o600, 0o700
FILLED, CLEANED = 0.95, 0.85  # of the folder's limit: from when files leave, and until when
STEP_NANOSECONDS = 1_000_000  # a page's file is so much older than the one of the page before it


class DiskPages:
    """One rank's share of the pages in ``folder``. A ``PageSource``."""

    def __init__(self, folder: PageFolder, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._room = 0  # bytes that the folder had left when it was last looked at ...
        self._since_look = 0  # ... and those written since
        self._warned = -math.inf  # when the last line about the disk was logged

    def records(self, what: PageTransfer, into: Bytes) -> Iterator[None]:
        for page_hash, tokens in zip(what.hashes, what.tokens, strict=True):
            path = self._folder.file(page_hash, self._rank)
            why = _read_page(path, tokens, into)
            if why is not None:
                logger.log(
                    logging.DEBUG if why == "" else logging.WARNING,
                    *("%s is computed again: %s", path, why or "there is no file"),
                )
                return
            yield

    def state(self, what: PageTransfer, into: Bytes) -> int:
        for count in range(len(what.hashes), 0, -1):
            path = self._folder.file(state_name(what.hashes[count - 1]), self._rank)
            if path.exists() and _read_page(path, what.tokens[count - 1], into) is None:
                return count
        return 0

    def holds(self, page_hash: bytes) -> bool:
        """Whether there is a file."""
        return self._folder.file(page_hash, self._rank).exists()

    def write(self, page_hash: bytes, tokens: Int32Array, content: Bytes) -> None:
        """Writes a file, which appears whole.

        Raises:
            OSError: it cannot be written.
        """
        self._make_room()
        _write_page(self._folder.file(page_hash, self._rank), tokens, content)
        self._since_look += len(content)

    def touch(self, transfer: PageTransfer, count: int) -> None:
        """Notes that the pages were used, ends of prompts earlier than their beginnings."""
        now, names = time.time_ns(), [*transfer.before, *transfer.hashes[:count]]
        if transfer.snapshot is not None and count:
            names.insert(0, state_name(names[-1]))  # without it the pages are of no use
        for number, page_hash in enumerate(names):
            used = now - number * STEP_NANOSECONDS
            with suppress(OSError):
                os.utime(self._folder.file(page_hash, self._rank), ns=(used, used))

    def _make_room(self) -> None:
        """Removes the files used longest ago where the folder is full.

        Others write there too: it is looked at again when half of what was left is written.
        """
        if self._since_look < self._room / 2:
            return
        limit = self._folder.max_bytes
        files = sorted(self._folder.files())
        held = sum(size for _, size, _ in files)
        if held > limit * FILLED:
            for _, size, path in files:
                if held <= limit * CLEANED:
                    break
                with suppress(OSError):
                    os.unlink(path)
                    held -= size
        self._room, self._since_look = limit - held, 0

    def remove_all(self) -> None:
        """Removes the files of this model with these settings."""
        home = self._folder.home(self._rank)
        for _, _, path in list(self._folder.files()):
            if path.is_relative_to(home):
                with suppress(OSError):
                    os.unlink(path)

    def warn(self, error: OSError) -> None:
        """A line, and no more for a while: a full disk stays full."""
        if time.monotonic() - self._warned > PAGE_WARNING_SECONDS:
            self._warned = time.monotonic()
            logger.warning("pages are not kept in %s: %s", self._folder.path, error)


def _read_page(path: Path, tokens: Int32Array, into: Bytes) -> str | None:
    """Reads a file ``into`` a buffer; returns why it cannot be used, "" if there is none.

    A broken file is removed.
    """
    head = bytearray(head_bytes(tokens))
    try:
        with open(path, "rb", buffering=0) as file:
            whole = _all(os.readv, file.fileno(), [memoryview(head), into.data])
            more = file.read(1)
    except FileNotFoundError:
        return ""
    why = "it is not whole" if not whole or more else why_wrong(head, into, tokens)
    if why is not None:
        with suppress(OSError):
            path.unlink()
    return why


def _write_page(path: Path, tokens: Int32Array, content: Bytes) -> None:
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    head = head_of(tokens, content)
    try:
        file = _create(part)
        try:
            if not _all(os.writev, file, [memoryview(head), content.data]):
                raise OSError(f"{part} is not written whole")
        finally:
            os.close(file)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _create(path: Path) -> int:
    """Opens a new file for writing, and makes its folders if they are missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileNotFoundError:
        for folder in (path.parent.parent.parent, path.parent.parent, path.parent):
            folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        return os.open(path, flags, FILE_MODE)


def _all(
    move: Callable[[int, Sequence[memoryview]], int], file: int, buffers: Sequence[memoryview]
) -> bool:
    """Reads or writes all of ``buffers``; False if the file or the disk ends before."""
    part = list(buffers)
    while part:
        moved = move(file, part)
        if moved <= 0:
            return False
        while part and moved >= part[0].nbytes:
            moved -= part.pop(0).nbytes
        if part:
            part[0] = part[0][moved:]
    return True
