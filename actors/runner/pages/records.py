"""One page as bytes: a record in a file and on a socket, and the page's share of each tensor.

A record is a header with a CRC-32, the page's tokens, then its bytes of each tensor: keys of all
layers, then values.
"""

import zlib
from collections.abc import Iterator
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


class PageBytes:
    """The bytes of each page of a cache, in the order of a record."""

    def __init__(self, cache: KVTensors) -> None:
        tensors = [tensor for tensor in (*cache.keys, *cache.values) if tensor.numel()]
        self._bytes = [tensor.view(torch.uint8).view(cache.num_pages, -1) for tensor in tensors]
        self._ends = np.cumsum([pages.shape[1] for pages in self._bytes]).tolist()
        self.page_bytes = self._ends[-1] if self._ends else 0
        on_host = cache.device.type == "cpu"
        self._arrays: list[Bytes] = [pages.numpy() for pages in self._bytes] if on_host else []
        make: Any = torch.cuda.Stream  # which torch leaves without types
        self._stream: torch.cuda.Stream | None = None if on_host else make(cache.device)

    def write(self, page: int, content: Bytes) -> None:
        """Fills a page with ``content`` [page_bytes]."""
        parts = np.split(content, self._ends[:-1])
        if self._stream is None:
            for array, part in zip(self._arrays, parts, strict=True):
                array[page] = part
            return
        # A step that has sampled nothing may have returned while the device computes.
        self._stream.wait_stream(torch.cuda.default_stream(self._bytes[0].device))
        with torch.cuda.stream(self._stream):
            for pages, part in zip(self._bytes, parts, strict=True):
                pages[page].copy_(torch.from_numpy(part))
        self._stream.synchronize()

    def read(self, page: int) -> Bytes:
        """Copies what a page holds: one piece is summed and sent several times as fast as those
        of all layers."""
        if self._stream is None:
            return np.concatenate([array[page] for array in self._arrays])
        self._stream.wait_stream(torch.cuda.default_stream(self._bytes[0].device))
        with torch.cuda.stream(self._stream):
            return np.concatenate([pages[page].cpu().numpy() for pages in self._bytes])


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
