"""A file in which responses and conversations outlive the process that stores them."""

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.api.responses.conversations import ConversationState
from rayfin.deployments.api.responses.state import ResponseState

logger = logging.getLogger("rayfin.http")
NAME = "responses.jsonl"
OLD_NAME = "responses.log"  # of versions that wrote pickles, which run code when they are read
MAX_GROWTH = 64 * 2**20  # bytes beyond twice its size, from which on it is written anew
Record = (
    tuple[Literal["keep"], str | None, ResponseState]  # with the owner of one that runs
    | tuple[Literal["converse"], ConversationState]
    | tuple[Literal["forget"], str]  # the id of either
)
RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def _private(path: str, flags: int) -> int:
    """Opens a file that only this user may read: it has what clients have said."""
    return os.open(path, flags, 0o600)


def _line(record: Record) -> bytes:
    return RECORD.dump_json(record) + b"\n"


class StoreLog:
    """Records in the order in which they came, a line of JSON each; the last one may be torn.

    A record is in the file, though not on the disk, when ``append`` returns: it outlives the
    process, not the machine.

    Raises:
        InvalidConfig: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._size = 0  # of the file as it was last written anew
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0, opener=_private)
        except OSError as error:
            said = f"response_dir {folder} cannot be written: {error.strerror}"
            raise InvalidConfig(said, "response_dir") from None
        if (folder / OLD_NAME).exists():
            logger.warning("%s is of an earlier version: it is not read", folder / OLD_NAME)

    def records(self) -> Iterator[Record]:
        """Yields what was recorded, but lines that no longer say what a record holds."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield RECORD.validate_json(line)
                except ValidationError as error:
                    said = error.errors(include_input=False, include_url=False)[0]["msg"]
                    logger.warning("Line %d of %s is left out: %s", number, self._path, said)

    def append(self, record: Record, current: Callable[[], Iterable[Record]]) -> None:
        """Adds a record.

        Args:
            current: all that is stored, from which the file is written anew where it has grown.
        """
        try:
            self._write(_line(record))
            if self._file.tell() > 2 * self._size + MAX_GROWTH:
                self._size = self._file.tell()
                self.rewrite(current())
        except OSError as error:  # what is stored is served all the same
            logger.error("%s cannot be written: %s", self._path, error.strerror)

    def _write(self, record: bytes) -> None:
        """Adds a record, or nothing: those behind a torn one would not be read."""
        whole = self._file.tell()
        try:
            if self._file.write(record) < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(whole)
            raise

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replaces the file; it is the old or the new one at any moment."""
        fresh = self._path.with_suffix(".new")
        with open(fresh, "wb", opener=_private) as file:
            for record in records:
                file.write(_line(record))
        os.replace(fresh, self._path)
        self._file.close()
        self._file = open(self._path, "ab", buffering=0, opener=_private)
        self._size = self._path.stat().st_size
