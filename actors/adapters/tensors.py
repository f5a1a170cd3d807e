"""The tensors of an adapter, from the header of its safetensors file alone."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rayfin.actors.adapters.files import WEIGHTS, AdapterFiles, invalid
from rayfin.actors.adapters.settings import AdapterSettings

MAX_HEADER_BYTES = 64 << 20
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.default)?\.weight"
)


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True, slots=True)
class LowRankEntries:
    """A [rank, inputs] and B [outputs, rank] at one module."""

    a: Entry
    b: Entry

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def inputs(self) -> int:
        return self.a.shape[1]

    @property
    def outputs(self) -> int:
        return self.b.shape[0]


def read_pairs(files: AdapterFiles, settings: AdapterSettings) -> dict[str, LowRankEntries]:
    """Returns the pairs of A and B by the module's path.

    Raises:
        InvalidRequest: a broken header, a tensor that is no A or B, one without its partner, or
            shapes that contradict each other or the settings. The message names the tensor.
    """
    modules: dict[str, dict[str, Entry]] = {}
    for entry in _entries(files.weights):
        match = NAME.fullmatch(entry.name)
        if match is None:
            raise invalid(f"{WEIGHTS}: {entry.name[:200]!r} is no A or B of a linear layer.")
        if len(entry.shape) != 2:
            raise invalid(f"{WEIGHTS}: {entry.name[:200]!r} has {len(entry.shape)} dimensions.")
        kinds = modules.setdefault(match["module"], {})
        if match["kind"] in kinds:
            raise invalid(f"{WEIGHTS}: {entry.name[:200]!r} is there twice.")
        kinds[match["kind"]] = entry
    if not modules:
        raise invalid(f"{WEIGHTS} has no tensors.")
    return {module: _pair(module, kinds, settings) for module, kinds in sorted(modules.items())}


def _pair(module: str, kinds: Mapping[str, Entry], settings: AdapterSettings) -> LowRankEntries:
    for kind in "AB":
        if kind not in kinds:
            raise invalid(f"{WEIGHTS}: {module[:200]} has no lora_{kind}.")
    pair, rank = LowRankEntries(kinds["A"], kinds["B"]), settings.rank(module)
    if pair.a.shape[0] != rank or pair.b.shape[1] != rank:
        raise invalid(
            f"{WEIGHTS}: {module[:200]} has A {list(pair.a.shape)} and B {list(pair.b.shape)}, "
            f"and its rank is {rank}."
        )
    return pair


def _entries(data: bytes) -> list[Entry]:
    """The tensors that the header lists, each within the file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > MAX_HEADER_BYTES or 8 + length > len(data):
        raise invalid(f"{WEIGHTS} is truncated, or not in the format of safetensors.")
    try:
        header = json.loads(data[8 : 8 + length])
        return [
            _entry(name, value, 8 + length, len(data))
            for name, value in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise invalid(f"{WEIGHTS}: its header cannot be read: {error}.") from None


def _entry(name: str, value: Mapping[str, Any], offset: int, size: int) -> Entry:
    dtype, shape = value["dtype"], tuple(value["shape"])
    start, end = value["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise invalid(f"{WEIGHTS}: {name[:200]!r} is of type {dtype}, not F32, F16 or BF16.")
    count = ITEM_BYTES[dtype]
    for length in shape:
        count *= length
    whole = all(isinstance(length, int) and length > 0 for length in shape)
    if not whole or not 0 <= start <= end <= size - offset or end - start != count:
        raise invalid(f"{WEIGHTS}: {name[:200]!r} does not lie within the file.")
    return Entry(name, dtype, shape, offset + start, offset + end)
