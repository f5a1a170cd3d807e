"""The adapters of running requests in tables on a GPU, which CUDA graphs read by row."""

import numpy as np
import torch

from rayfin.actors.messages import BoolArray, Int32Array, Int64Array
from rayfin.actors.runner.gpu.decoder import GpuDecoder, Place
from rayfin.actors.runner.parts.lora.reader import LowRank
from rayfin.actors.runner.parts.lora.store import AdapterStore
from rayfin.kernels.triton.low_rank import LowRankTable

BASE = -1


class DeviceTables:
    """Numbers the adapters of running requests, and keeps them where kernels find a number.

    An entry is written over when its adapter has no running request. The copies are queued behind
    the steps that read the one before.
    """

    def __init__(self, decoder: GpuDecoder, store: AdapterStore, entries: int, rank: int) -> None:
        self._store = store
        self._tables = {
            place: LowRankTable(
                entries, rank, place.inputs, place.outputs, store.dtype, store.device
            )
            for places in decoder.places
            for place in places
        }
        self._digests: list[str | None] = [None] * entries

    @staticmethod
    def fit(decoder: GpuDecoder, store: AdapterStore) -> bool:
        """Whether all layers that may have an adapter are products of the decoder."""
        known = {path for places in decoder.places for place in places for path in place.paths}
        return store.sizes.keys() <= known

    def add(self, place: Place, x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to ``out`` [T, N] what the adapters ``rows`` [T] int64 make of ``x`` [T, K]."""
        self._tables[place].add(x, out, rows)

    def left_out(self, slots: Int32Array) -> BoolArray | None:
        """Which of the ``slots`` [R] have an adapter that is not here, or not all fit."""
        digests = self._store.digests(slots)
        if digests is None:
            return None
        there = {digest for digest in digests if digest is not None and digest in self._store}
        fits = len(self._store.used()) <= len(self._digests)
        left: BoolArray = np.array(
            [one is not None and not (fits and one in there) for one in digests], np.bool_
        )
        return left

    def numbers(self, slots: Int32Array) -> Int64Array | None:
        """The entries [R] of the adapters of ``slots`` [R]; None if none of them has any."""
        digests = self._store.digests(slots)
        if digests is None:
            return None
        number = {digest: self._entry(digest) for digest in set(digests) if digest is not None}
        return np.array([BASE if one is None else number[one] for one in digests], np.int64)

    def _entry(self, digest: str) -> int:
        if digest in self._digests:
            return self._digests.index(digest)
        used = self._store.used()
        entry = next(at for at, one in enumerate(self._digests) if one is None or one not in used)
        self._digests[entry] = None
        layers = self._store.get(digest).layers
        for place, table in self._tables.items():
            table.clear(entry)
            for part, path in enumerate(place.paths):
                if (layer := layers.get(path)) is not None:
                    assert isinstance(layer, LowRank)
                    table.put(entry, part, layer.a, layer.b, layer.scale)
        self._digests[entry] = digest
        return entry
