"""Reads and writes pages of the cache as files, on a thread beside the steps.

A file has a header with the page's tokens and a CRC-32, then the page's bytes of each tensor: keys
of all layers, then values. On a CPU the system reads them straight into the page.
"""

import logging
import math
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayfin.actors.messages import Int32Array, PageTransfer
from rayfin.actors.timing import PAGE_READ_SECONDS, PAGE_TURN_SECONDS, PAGE_WARNING_SECONDS
from rayfin.cache.kv_tensors import KVTensors
from rayfin.cache.page_files import PART_SUFFIX, PageFolder

logger = logging.getLogger(__name__)

MAGIC = b"rfpage1\0"
HEADER = Struct("<8sII")  # magic, CRC-32 of tokens and bytes, number of tokens
FILE_MODE, FOLDER_MODE = 0o600, 0o700
MOST_BUFFERS = 1000  # of one call of readv or writev; Linux takes 1024
FILLED, CLEANED = 0.95, 0.85  # of the folder's limit: from when files leave, and until when
STEP_NANOSECONDS = 1_000_000  # a page's file is so much older than the one of the page before it

Bytes = npt.NDArray[np.uint8]


class DiskPages:
    """One rank's share of the pages in ``folder``.

    Args:
        next_step: epoch and number of the step that the runner takes next.
        overwritten: called with pages that are about to have new content.
    """

    def __init__(
        self,
        folder: PageFolder,
        rank: int,
        next_step: Callable[[], tuple[int, int]],
        overwritten: Callable[[Int32Array], None],
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._next_step = next_step
        self._overwritten = overwritten
        self._using = threading.Lock()  # held while a page is read or written
        self._tensors: _PageBytes | None = None
        self._epoch = -1
        self._room = 0  # bytes that the folder had left when it was last looked at ...
        self._since_look = 0  # ... and those written since
        self._warned = -math.inf  # when the last line about the disk was logged

    def use(self, cache: KVTensors | None, epoch: int) -> None:
        """Pages of ``cache`` are meant from now on, by transfers of ``epoch``; None: of nothing.

        Returns when no transfer touches the pages of before.
        """
        with self._using:
            self._tensors = None if cache is None else _PageBytes(cache)
            self._epoch = epoch

    def run(self, transfer: PageTransfer) -> int:
        """Carries out a transfer; returns how many of its first pages are where they belong."""
        if transfer.forget:
            self._remove_all()
            return 0
        # Pages to write are full, and their steps have run: their request has had a token behind
        # them. Pages to read into may be those of a request that has ended, and a step in flight
        # still writes there.
        if not transfer.write and not self._wait_for(transfer.after):
            return 0
        count = 0
        try:
            count = self._write(transfer) if transfer.write else self._read(transfer)
        except OSError as error:
            self._warn(error)
        self._touch(transfer, count)
        return count

    def _wait_for(self, step: tuple[int, int]) -> bool:
        """Waits until the step has run; False if it does not in time, or never will."""
        until = time.monotonic() + PAGE_READ_SECONDS
        while self._next_step() <= step:
            if time.monotonic() > until:
                return False
            time.sleep(PAGE_TURN_SECONDS)
        return True

    def _read(self, transfer: PageTransfer) -> int:
        for number, (page, page_hash) in enumerate(
            zip(transfer.pages, transfer.hashes, strict=True)
        ):
            path = self._folder.file(page_hash, self._rank)
            with self._using:
                if self._tensors is None or transfer.after[0] != self._epoch:
                    return 0
                self._overwritten(np.array([page], np.int32))
                buffers = self._tensors.buffers(page)
                why = _read_page(path, transfer.tokens[number], buffers)
                if why is None:
                    self._tensors.filled(page, buffers)
            if why is not None:
                logger.log(
                    logging.DEBUG if why == "" else logging.WARNING,
                    *("%s is computed again: %s", path, why or "there is no file"),
                )
                return number
        return len(transfer.pages)

    def _write(self, transfer: PageTransfer) -> int:
        for number, (page, page_hash) in enumerate(
            zip(transfer.pages, transfer.hashes, strict=True)
        ):
            path = self._folder.file(page_hash, self._rank)
            if path.exists():
                continue
            self._make_room()
            with self._using:
                if self._tensors is None or transfer.after[0] != self._epoch:
                    return number
                _write_page(path, transfer.tokens[number], self._tensors.read(page))
                self._since_look += self._tensors.page_bytes
        return len(transfer.pages)

    def _touch(self, transfer: PageTransfer, count: int) -> None:
        """Notes that the pages were used, ends of prompts earlier than their beginnings."""
        now = time.time_ns()
        for number, page_hash in enumerate([*transfer.before, *transfer.hashes[:count]]):
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

    def _remove_all(self) -> None:
        """Removes the files of this model with these settings."""
        own = self._folder.home(self._rank)
        for _, _, path in list(self._folder.files()):
            if path.is_relative_to(own):
                with suppress(OSError):
                    os.unlink(path)

    def _warn(self, error: OSError) -> None:
        """A line, and no more for a while: a full disk stays full."""
        if time.monotonic() - self._warned > PAGE_WARNING_SECONDS:
            self._warned = time.monotonic()
            logger.warning("pages are not kept in %s: %s", self._folder.path, error)


class _PageBytes:
    """The bytes of each page, in the order of a file."""

    def __init__(self, cache: KVTensors) -> None:
        tensors = [own for own in (*cache.keys, *cache.values) if own.numel()]
        self._bytes = [own.view(torch.uint8).view(cache.num_pages, -1) for own in tensors]
        self.page_bytes = sum(own.shape[1] for own in self._bytes)
        self._on_host = cache.device.type == "cpu"
        self._arrays: list[Bytes] = [own.numpy() for own in self._bytes] if self._on_host else []
        make: Any = torch.cuda.Stream  # which torch leaves without types
        self._stream: torch.cuda.Stream | None = None if self._on_host else make(cache.device)

    def buffers(self, page: int) -> list[Bytes]:
        """Where to read a page to."""
        if self._on_host:
            return [array[page] for array in self._arrays]
        return [np.empty(own.shape[1], np.uint8) for own in self._bytes]

    def filled(self, page: int, buffers: Sequence[Bytes]) -> None:
        """``buffers`` have what the page shall hold."""
        if self._stream is not None:
            # A step that has sampled nothing may have returned while the device computes.
            self._stream.wait_stream(torch.cuda.default_stream(self._bytes[0].device))
            with torch.cuda.stream(self._stream):
                for own, buffer in zip(self._bytes, buffers, strict=True):
                    own[page].copy_(torch.from_numpy(buffer))
            self._stream.synchronize()

    def read(self, page: int) -> list[Bytes]:
        """What a page holds."""
        if self._on_host:
            return self.buffers(page)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.default_stream(self._bytes[0].device))
        with torch.cuda.stream(self._stream):
            return [own[page].cpu().numpy() for own in self._bytes]


def _read_page(path: Path, tokens: Int32Array, buffers: Sequence[Bytes]) -> str | None:
    """Reads a file into ``buffers``; returns why it cannot be used, "" if there is none.

    A broken file is removed.
    """
    head = bytearray(HEADER.size + tokens.nbytes)
    try:
        with open(path, "rb", buffering=0) as file:
            whole = _all(
                os.readv, file.fileno(), [memoryview(head), *(own.data for own in buffers)]
            )
            more = file.read(1)
    except FileNotFoundError:
        return ""
    magic, crc, length = HEADER.unpack_from(head)
    held = np.frombuffer(head, np.int32, offset=HEADER.size)
    if not whole or more or magic != MAGIC or length != len(tokens):
        why = "it is not whole"
    elif crc != _crc(held, buffers):
        why = "its checksum is wrong"
    elif not np.array_equal(held, tokens):
        why = "it holds other tokens"
    else:
        return None
    with suppress(OSError):
        path.unlink()
    return why


def _write_page(path: Path, tokens: Int32Array, buffers: Sequence[Bytes]) -> None:
    """Writes a file, which appears whole.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    # One piece is summed and written several times as fast as those of all layers.
    content = np.concatenate([own.view(np.uint8).reshape(-1) for own in buffers])
    head = HEADER.pack(MAGIC, _crc(tokens, [content]), len(tokens)) + tokens.tobytes()
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
    for start in range(0, len(buffers), MOST_BUFFERS):
        part = list(buffers[start : start + MOST_BUFFERS])
        while part:
            moved = move(file, part)
            if moved <= 0:
                return False
            while part and moved >= part[0].nbytes:
                moved -= part.pop(0).nbytes
            if part:
                part[0] = part[0][moved:]
    return True


def _crc(tokens: Int32Array, buffers: Sequence[Bytes]) -> int:
    crc = zlib.crc32(np.ascontiguousarray(tokens).data)
    for buffer in buffers:
        crc = zlib.crc32(buffer.data, crc)
    return crc
