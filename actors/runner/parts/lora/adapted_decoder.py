"""A whole decoder on the compiled kernels, whose rows compute with the adapters of their slots.

A step without adapters runs what it runs without ``--enable-lora``.
"""

import numpy as np
import torch

from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.parts.lora.reader import Adapter
from rayfin.actors.runner.parts.lora.store import AdapterStore
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.cpu.decoder import StepAdapters
from rayfin.kernels.cpu.lora import AdapterParts, AdapterRows, PackedLowRank


def can_adapt(decoder: CpuDecoder, store: AdapterStore) -> bool:
    """Whether the decoder knows all layers that may have an adapter."""
    return store.sizes.keys() <= {place.path for places in decoder.places for place in places}


class AdaptedDecoder:
    """A ``StepModel`` over ``decoder``."""

    def __init__(self, decoder: CpuDecoder, store: AdapterStore) -> None:
        self.decoder = decoder
        self._store = store
        self._tables: dict[str, AdapterParts] = {}  # by digest

    @property
    def layouts(self) -> list[KVLayout]:
        return self.decoder.layouts

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self.decoder.bind(cache)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        adapters = self._store.of_rows(inputs.slots)
        return self.decoder.forward(inputs, self._group(adapters, inputs) if adapters else None)

    def _group(self, adapters: list[Adapter | None], inputs: StepInputs) -> StepAdapters:
        """The tokens of a step by the adapters of its rows."""
        numbers: dict[str, int] = {}
        of_row = [
            -1 if own is None else numbers.setdefault(own.digest, len(numbers)) for own in adapters
        ]
        tables = [self._table(own) for own in {a.digest: a for a in adapters if a}.values()]
        lengths = np.diff(np.asarray(inputs.batch.query_start_cpu))
        of_token = np.repeat(np.array(of_row), lengths)
        sampled = of_token[inputs.sampled.numpy()]
        return StepAdapters(AdapterRows(tables, of_token), AdapterRows(tables, sampled))

    def _table(self, adapter: Adapter) -> AdapterParts:
        table = self._tables.get(adapter.digest)
        if table is None:
            kept = self._tables.items()  # those that the store has given up are freed here
            self._tables = {digest: own for digest, own in kept if digest in self._store}
            layers = {
                path: own for path, own in adapter.layers.items() if isinstance(own, PackedLowRank)
            }
            table = self._tables[adapter.digest] = AdapterParts(self.decoder.places, layers)
        return table
