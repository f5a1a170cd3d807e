"""Writes tensors, one after the other, into a safetensors file whose header comes last."""

import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from rayfin.actors.errors import InvalidRequest, StorageFull
from rayfin.actors.model_files.digests import digest_of

FILE_SUFFIX, PART_SUFFIX = ".safetensors", ".part"
HEADER_BYTES = 1 << 20
"""Room for the names of about 8,000 tensors; spaces fill it up. More are written once again."""

SIZES = {"F32": 4, "F16": 2, "BF16": 2}
FILLER = "rayfin.filler."
"""Tensors of a byte each, in front of one that would begin at an odd place."""


class TensorWriter:
    """A file below ``folder`` that gets its name with ``finish``. One thread uses it."""

    def __init__(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(PART_SUFFIX, dir=folder)
        self._path = Path(name)
        self._file: IO[bytes] = os.fdopen(handle, "w+b")
        self._file.seek(8 + HEADER_BYTES)
        self._entries: dict[str, dict[str, object]] = {}
        self._digests: list[tuple[str, str, tuple[int, ...], str]] = []
        self._end = 0
        self._pool = ThreadPoolExecutor(1)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def num_bytes(self) -> int:
        """Of all tensors so far."""
        return self._end

    def add(self, name: str, dtype: str, shape: tuple[int, ...], content: memoryview) -> None:
        """Appends a tensor, whose numbers lie in ``content`` as in memory.

        Args:
            dtype: F32, F16 or BF16.

        Raises:
            InvalidRequest: the name came before.
            StorageFull: there is no room.
        """
        if name in self._entries:
            raise InvalidRequest(f"weights hold {name} twice", name)
        while self._end % SIZES[dtype]:
            self._append(f"{FILLER}{len(self._entries)}", "U8", (1,), memoryview(b"\0"))
        self._append(name, dtype, shape, content)

    def _append(self, name: str, dtype: str, shape: tuple[int, ...], content: memoryview) -> None:
        hashing = self._pool.submit(lambda: hashlib.blake2b(content).hexdigest())
        try:
            self._file.write(content)
        except OSError as error:
            raise _full(self._path, error) from None
        finally:
            digest = hashing.result()  # who gave the memory may write to it from now on
        self._digests.append((name, dtype, shape, digest))
        offsets = [self._end, self._end + len(content)]
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        self._end += len(content)

    def finish(self) -> tuple[Path, str]:
        """Returns the file, which is whole, and the digest that is its name.

        Raises:
            StorageFull: there is no room.
        """
        self._pool.shutdown()
        digest = digest_of(self._digests)
        path = self._path.with_name(digest + FILE_SUFFIX)
        header = json.dumps(self._entries).encode()
        try:
            if len(header) > HEADER_BYTES:
                self._move(-(-len(header) // HEADER_BYTES) * HEADER_BYTES)
            else:
                self._write_header(self._file, header, HEADER_BYTES)
            self._file.close()
            os.replace(self._path, path)
        except OSError as error:
            self.abandon()
            raise _full(self._path, error) from None
        return path, digest

    def _move(self, room: int) -> None:
        """Writes the file again, with ``room`` for its header."""
        handle, name = tempfile.mkstemp(PART_SUFFIX, dir=self._path.parent)
        with os.fdopen(handle, "w+b") as file:
            self._write_header(file, json.dumps(self._entries).encode(), room)
            file.seek(8 + room)
            self._file.seek(8 + HEADER_BYTES)
            shutil.copyfileobj(self._file, file, 8 << 20)
        os.replace(name, self._path)

    def _write_header(self, file: IO[bytes], header: bytes, room: int) -> None:
        file.seek(0)
        file.write(room.to_bytes(8, "little") + header.ljust(room))

    def abandon(self) -> None:
        """Removes what was written."""
        self._pool.shutdown()
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink()


def _full(path: Path, error: OSError) -> StorageFull:
    return StorageFull(f"{path.parent} has no room for the weights: {error.strerror}", "weights")
