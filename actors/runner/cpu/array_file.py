"""A file of arrays that processes map and share, and that shows when it is not as it was written.

    magic, length of the header, its SHA-256
    header, JSON: what the arrays mean; of each its type, shape, place and SHA-256 of its chunks
    the arrays, the large ones at the start of a page of memory

A file appears under its name when it is complete. It is not synced: one that a power cut has torn
has other digests, and can be made again.
"""

import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfin.actors.errors import BrokenFile

Array = npt.NDArray[Any]

MAGIC = b"rayfin arrays 1\n"
START = struct.Struct("<16sQ32s")
PAGE, LINE = 4096, 64
LARGE_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20
PART_SUFFIX = ".part"
"""How the name of a file ends while it is written."""


def write_arrays(path: Path, meta: dict[str, Any], arrays: Sequence[Array], *, mode: int) -> None:
    """Writes ``arrays`` and what they mean, JSON; replaces a file of this name in one go.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    listed: list[tuple[str, tuple[int, ...], int, list[str]]] = []
    end = 0
    with ThreadPoolExecutor(_threads()) as pool:
        for array in arrays:
            end = _rounded(end, PAGE if array.nbytes >= LARGE_BYTES else LINE)
            digests = list(pool.map(_digest, _chunks(_octets(array))))
            listed.append((array.dtype.str, array.shape, end, digests))
            end += array.nbytes
    header = json.dumps({"meta": meta, "arrays": listed, "bytes": end}).encode()
    first = _rounded(START.size + len(header), PAGE)
    handle, name = tempfile.mkstemp(PART_SUFFIX, path.name + ".", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(START.pack(MAGIC, len(header), hashlib.sha256(header).digest()) + header)
            for array, (_, _, offset, _) in zip(arrays, listed, strict=True):
                file.seek(first + offset)
                file.write(_octets(array).data)
            file.truncate(first + end)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def read_arrays(path: Path) -> tuple[dict[str, Any], list[Array]]:
    """What ``write_arrays`` was given; the arrays are read-only memory of the file's pages.

    Reads all of it once, to compare digests; pages stay in the system's memory, and are shared by
    all processes that map them. They remain when the file's name is gone.

    Raises:
        BrokenFile: it is not as it was written.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(START.size)
        if len(start) < START.size:
            raise BrokenFile("it is cut short")
        magic, length, digest = START.unpack(start)
        size = os.fstat(file.fileno()).st_size
        if magic != MAGIC or length > size:
            raise BrokenFile("it is of another form")
        text = file.read(length)
        if hashlib.sha256(text).digest() != digest:
            raise BrokenFile("its header has changed")
        header = json.loads(text)
        first = _rounded(START.size + length, PAGE)
        if size != first + header["bytes"]:
            raise BrokenFile(f"it has {size} bytes, not {first + header['bytes']}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with suppress(OSError, AttributeError):  # a step reads all of it: large pages, where they are
        mapped.madvise(mmap.MADV_HUGEPAGE)
    arrays = []
    for dtype, shape, offset, _ in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(mapped, np.dtype(dtype), count, first + offset) if count else None
        empty = np.zeros(0, np.dtype(dtype))
        arrays.append((empty if flat is None else flat).reshape(shape))
    _compare(arrays, [digests for _, _, _, digests in header["arrays"]])
    return header["meta"], arrays


def _compare(arrays: Sequence[Array], digests: Sequence[Sequence[str]]) -> None:
    chunks = [chunk for array in arrays for chunk in _chunks(_octets(array))]
    with ThreadPoolExecutor(_threads()) as pool:
        computed = list(pool.map(_digest, chunks))
    if computed != [digest for array_digests in digests for digest in array_digests]:
        raise BrokenFile("its content has changed")


def _octets(array: Array) -> npt.NDArray[np.uint8]:
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


def _chunks(octets: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for start in range(0, octets.size, CHUNK_BYTES):
        yield octets[start : start + CHUNK_BYTES]


def _digest(octets: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(octets.data).hexdigest()


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
