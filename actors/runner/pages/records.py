"""One page as bytes: a record in a file and on a socket, and the page's share of each tensor.

A record is a header with a CRC-32, the page's tokens, then its bytes of each tensor: keys of all
layers, then values. The state of recurrent layers behind a page is a record too, with the tokens of
that page and a name of its own.
"""

import zlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rayfin.actors.messages import Int32Array, PageTransfer
from rayfin.cache.kv_tensors import KVTensors

MAGIC = b"rfpage1\0"
HEADER = Struct("<8sII")  # magic, CRC-32 of tokens and bytes, number of tokens

Bytes = npt.NDArray[np.uint8]


class PageSource(Protocol):
    """Where pages are read from."""

    def records(self, what: PageTransfer, into: Bytes) -> Iterator[None]:
        """Reads the pages of ``what`` one after the other, a verified one ``into`` at each turn.

        It ends at the first that is missing or wrong.
        """
        ...

    def state(self, what: PageTransfer, into: Bytes) -> int:
        """Reads the last state behind one of the pages of ``what``; returns how many pages end
        there, 0 if it has none."""
        ...


def state_name(page_hash: bytes) -> bytes:
    """Returns the name of the record with the state behind a page."""
    return sha256(b"state" + page_hash).digest()


class RowBytes:
    """The bytes of each row of tensors [rows, ...], in the order of a record: of pages, say."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._bytes = [
            tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors if tensor.numel()
        ]
        self._ends = np.cumsum([rows.shape[1] for rows in self._bytes]).tolist()
        self.row_bytes = self._ends[-1] if self._ends else 0
        device = self._bytes[0].device if self._bytes else torch.device("cpu")
        on_host = device.type == "cpu"
        self._arrays: list[Bytes] = [rows.numpy() for rows in self._bytes] if on_host else []
        make: Any = torch.cuda.Stream  # which torch leaves without types
        self._stream: torch.cuda.Stream | None = None if on_host else make(device)

    @classmethod
    def of_pages(cls, cache: KVTensors) -> "RowBytes":
        """Those of each page of a cache: keys of all layers, then values."""
        return cls([*cache.keys, *cache.values])

    def write(self, row: int, content: Bytes) -> None:
        """Fills a row with ``content`` [row_bytes]."""
        parts = np.split(content, self._ends[:-1])
        if self._stream is None:
            for array, part in zip(self._arrays, parts, strict=True):
                array[row] = part
            return
        # A step that has sampled nothing may have returned while the device computes.
        self._stream.wait_stream(torch.cuda.default_stream(self._bytes[0].device))
        with torch.cuda.stream(self._stream):
            for rows, part in zip(self._bytes, parts, strict=True):
                rows[row].copy_(torch.from_numpy(part))
        self._stream.synchronize()

    def read(self, row: int) -> Bytes:
        """Copies what a row holds: one piece is summed and sent several times as fast as those
        of all layers."""
        if self._stream is None:
            return np.concatenate([array[row] for array in self._arrays])
        self._stream.wait_stream(torch.cuda.default_stream(self._bytes[0].device))
        with torch.cuda.stream(self._stream):
            return np.concatenate([rows[row].cpu().numpy() for rows in self._bytes])


def head_of(tokens: Int32Array, content: Bytes) -> bytes:
    """Returns the header and the tokens, which stand before ``content``."""
    return HEADER.pack(MAGIC, _crc(tokens, content), len(tokens)) + tokens.tobytes()


def head_bytes(tokens: Int32Array) -> int:
    """Returns how many bytes these take."""
    return HEADER.size + tokens.nbytes


def why_wrong(head: bytes | bytearray, content: Bytes, tokens: Int32Array) -> str | None:
    """Says why a record is not that of a page with ``tokens``; None: it is."""
    magic, crc, length = HEADER.unpack_from(head)
    held = np.frombuffer(head, np.int32, offset=HEADER.size)
    if magic != MAGIC or length != len(tokens):
        return "it is not whole"
    if crc != _crc(held, content):
        return "its checksum is wrong"
    return None if np.array_equal(held, tokens) else "it holds other tokens"


def _crc(tokens: Int32Array, content: Bytes) -> int:
    return zlib.crc32(content.data, zlib.crc32(np.ascontiguousarray(tokens).data))
