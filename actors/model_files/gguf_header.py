"""The header of a GGUF file, read once: its fields, and where its tensors lie.

The package ``gguf`` reads it too, and takes ten seconds for a large vocabulary.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""By a field's type: how a value lies in the file."""
UINT32, STRING, ARRAY, F32 = 4, 8, 9, 0
TOKENIZER = "tokenizer.ggml."


class GgufTensor(NamedTuple):
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]  # rows first
    kind: int  # of ggml's types
    offset: int  # from the file's beginning


@dataclass(slots=True)
class Header:
    """Fields by their names, and tensors in order."""

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[GgufTensor] = field(default_factory=list)
    raw: dict[str, bytes] = field(default_factory=dict)  # fields that are no list of tokens

    @property
    def architecture(self) -> str:
        """Returns the model's kind, in llama.cpp's words."""
        return str(self.fields["general.architecture"])

    def get(self, key: str) -> Any:
        """Returns a field of the model's kind by the rest of its name, or None."""
        return self.fields.get(f"{self.architecture}.{key}")

    def write_short(self, path: Path) -> None:
        """Writes a file without tokens, of tensors with these names and one number."""
        raw, size = dict(self.raw), f"{self.architecture}.vocab_size"
        if size not in raw and f"{TOKENIZER}tokens" in self.fields:
            count = len(self.fields[f"{TOKENIZER}tokens"])
            raw[size] = _text(size) + struct.pack("<II", UINT32, count)
        text = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(self.tensors), len(raw))
        text += b"".join(raw.values())
        for one in self.tensors:
            text += _text(one.name) + struct.pack("<IQIQ", 1, 1, F32, 0)
        alignment = int(self.fields.get("general.alignment", ALIGNMENT))
        path.write_bytes(text + bytes(-len(text) % alignment + alignment))


def read_header(path: str | Path) -> Header:
    """Reads a file's header.

    Raises:
        ValueError: it is no such file, or it ends too early.
    """
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ValueError("it is empty") from error
        with data:
            try:
                return _Reader(data).read()
            except (struct.error, IndexError, OverflowError) as error:
                raise ValueError("it ends within its header") from error


def _text(text: str) -> bytes:
    octets = text.encode()
    return struct.pack("<Q", len(octets)) + octets


class _Reader:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def read(self) -> Header:
        if self._data[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin as a GGUF file")
        version, tensors, fields = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"it has version {version} of the format, and 2 and 3 are read")
        header = Header()
        for _ in range(fields):
            start, name = self._at, self._string()
            value = header.fields[name] = self._value(*self._numbers("I"))
            if not (name.startswith(TOKENIZER) and isinstance(value, list)):
                header.raw[name] = self._data[start : self._at]
        places = [self._place() for _ in range(tensors)]
        alignment = int(header.fields.get("general.alignment", ALIGNMENT))
        begin = -(-self._at // alignment) * alignment
        header.tensors = [one._replace(offset=begin + one.offset) for one in places]
        return header

    def _place(self) -> GgufTensor:
        name, (dimensions,) = self._string(), self._numbers("I")
        shape = self._numbers(f"{dimensions}Q")
        return GgufTensor(name, shape[::-1], *self._numbers("IQ"))

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        form = f"<{kinds}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        if size > len(self._data) - start:
            raise IndexError
        self._at = start + size
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"it has a field of type {kind}, which is not known")
        item, count = self._numbers("IQ")
        if item in SCALARS:
            return list(self._numbers(f"{count}{SCALARS[item]}"))
        if count > len(self._data):
            raise IndexError
        read: Callable[[], Any] = self._string if item == STRING else lambda: self._value(item)
        return [read() for _ in range(count)]
