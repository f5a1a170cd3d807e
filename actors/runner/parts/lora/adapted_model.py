"""Models whose rows compute with the adapters of their slots, around layers and compiled decoders.

Rows are grouped by adapter once per step; rows of the base model are not touched.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import BoolArray, Int32Array, Int64Array
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.parts.lora.reader import Adapter, LowRank
from rayfin.actors.runner.parts.lora.store import AdapterStore
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.cpu.decoder import StepAdapters
from rayfin.kernels.cpu.low_rank import AdapterParts, AdapterRows, PackedLowRank

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.decoder import GpuDecoder, ProductPlace


class AdaptedModel:
    """A ``StepModel`` over ``paged``, which adds to the outputs of its linear layers.

    The layers stay as they are, whatever they compute with (packed, 8-bit, on a GPU).

    Args:
        model: computes steps without adapters: ``paged``, or what shares its weights.
    """

    def __init__(self, paged: PagedModel, store: AdapterStore, model: StepModel) -> None:
        self._paged, self._model = paged, model
        self._store = store
        self._tokens = 0
        self._groups: list[tuple[Adapter, torch.Tensor]] = []  # of the current step
        for path in store.sizes:
            module = paged.transformer.get_submodule(path)
            module.register_forward_hook(partial(self._add, path))

    @property
    def layouts(self) -> list[KVLayout]:
        return self._paged.layouts

    @property
    def dtype(self) -> torch.dtype:
        return self._paged.dtype

    @property
    def transformer(self) -> nn.Module:
        return self._paged.transformer

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self._model.bind(cache)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        self._groups = group_tokens(self._store.of_rows(inputs.slots), inputs)
        if not self._groups:
            return self._model.forward(inputs)
        self._tokens = len(inputs.input_ids)
        try:
            return self._paged.forward(inputs)
        finally:
            self._groups = []

    def _add(self, path: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """The module's output with the adapters' parts; a hook of torch's."""
        groups = [
            (adapter.layers[path], rows) for adapter, rows in self._groups if path in adapter.layers
        ]
        if not groups:
            return output
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        if len(x) != self._tokens:
            raise InvalidRequest(f"An adapter's layer {path} sees some of the tokens only.")
        y = output.reshape(-1, output.shape[-1]).clone()
        for low_rank, rows in groups:
            y[rows] += low_rank.delta(x[rows]).to(y.dtype)
        return y.view(output.shape)


def group_tokens(
    adapters: list[Adapter | None], inputs: StepInputs
) -> list[tuple[Adapter, torch.Tensor]]:
    """The tokens [N] int64 of each adapter of a step, by the adapters of its rows."""
    if not adapters:
        return []
    starts = np.asarray(inputs.batch.query_start_cpu).tolist()
    tokens: dict[str, tuple[Adapter, list[int]]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            indices = tokens.setdefault(adapter.digest, (adapter, []))[1]
            indices.extend(range(starts[row], starts[row + 1]))
    device = inputs.input_ids.device
    return [(adapter, torch.tensor(rows, device=device)) for adapter, rows in tokens.values()]


def can_adapt(decoder: CpuDecoder, store: AdapterStore) -> bool:
    """Whether the decoder knows all layers that may have an adapter."""
    return store.sizes.keys() <= {place.path for places in decoder.places for place in places}


class AdaptedDecoder:
    """A ``StepModel`` over ``decoder``, which is one C call, with the adapters of the rows' slots.

    A step without adapters runs what it runs without ``--enable-lora``.
    """

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
            -1 if adapter is None else numbers.setdefault(adapter.digest, len(numbers))
            for adapter in adapters
        ]
        tables = [self._table(adapter) for adapter in {a.digest: a for a in adapters if a}.values()]
        lengths = np.diff(np.asarray(inputs.batch.query_start_cpu))
        of_token = np.repeat(np.array(of_row), lengths)
        sampled = of_token[inputs.sampled.numpy()]
        return StepAdapters(AdapterRows(tables, of_token), AdapterRows(tables, sampled))

    def _table(self, adapter: Adapter) -> AdapterParts:
        table = self._tables.get(adapter.digest)
        if table is None:
            kept = self._tables.items()  # those that the store has given up are freed here
            self._tables = {digest: parts for digest, parts in kept if digest in self._store}
            layers = {
                path: layer
                for path, layer in adapter.layers.items()
                if isinstance(layer, PackedLowRank)
            }
            table = self._tables[adapter.digest] = AdapterParts(self.decoder.places, layers)
        return table


BASE = -1


class DeviceTables:
    """Numbers the adapters of running requests, and keeps them where kernels find a number.

    An entry is written over when its adapter has no running request. The copies are queued behind
    the steps that read the one before.
    """

    def __init__(self, decoder: "GpuDecoder", store: AdapterStore, entries: int, rank: int) -> None:
        from rayfin.kernels.triton.low_rank import LowRankTable  # Triton is not everywhere

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
    def fit(decoder: "GpuDecoder", store: AdapterStore) -> bool:
        """Whether all layers that may have an adapter are products of the decoder."""
        known = {path for places in decoder.places for place in places for path in place.paths}
        return store.sizes.keys() <= known

    def add(
        self, place: "ProductPlace", x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor
    ) -> None:
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
