"""The adapters that a runner holds, and which slot computes with which."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from rayfin.actors.adapters.files import AdapterFiles
from rayfin.actors.adapters.part import AdapterRef, AdapterUsage, short
from rayfin.actors.errors import AdapterUnavailable, RayfinError
from rayfin.actors.messages import BoolArray, Int32Array, SchedulerInfo, StepResult
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.parts.lora.reader import Adapter, LayerSizes, read_adapter
from rayfin.kernels.cpu.kernels import CpuKernels

logger = logging.getLogger(__name__)

Fetch = Callable[[AdapterRef], AdapterFiles]


@dataclass(slots=True)
class _News:
    """What the next result says."""

    changed: bool = False
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    evicted: int = 0


class AdapterStore(Observer):
    """Reads each adapter once. ``prepare`` may run beside steps, ahead of the requests.

    As an observer it learns from each step which slot has which adapter. A step that meets an
    adapter that is not here reads it: what the scheduler knows is a hint. The least recently used
    go first, never those of a slot. No step has more of those than the budget has room for.

    Args:
        sizes: of the model's layers.
        fetch: gets an adapter's files.
        most: adapters that are kept, unless more are of running requests ...
        budget: ... and bytes.
        kernels: multiply by them, with the bits that a row has alone.
    """

    in_turn = False  # no step with a new adapter is queued ahead

    def __init__(
        self,
        sizes: LayerSizes,
        fetch: Fetch,
        *,
        max_adapters: int,
        budget: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None = None,
    ) -> None:
        self.sizes = sizes
        self._fetch = fetch
        self._max_adapters = max_adapters
        self.budget = budget
        self._max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self._kernels = kernels
        self._lock = threading.Lock()
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()  # by digest
        self._of_slot: dict[int, AdapterRef] = {}
        self._failures: dict[str, RayfinError] = {}  # of adapters that running requests wait for
        self._news = _News()

    @property
    def packs(self) -> bool:
        """Whether its adapters are packed for the compiled kernels."""
        return self._kernels is not None

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def prepare(self, refs: Iterable[AdapterRef]) -> None:
        """Reads the adapters that are not here yet.

        Raises:
            InvalidRequest: one cannot be served with this model.
            AdapterUnavailable: its content is gone.
        """
        for ref in refs:
            self._read(ref)

    def before(self, info: SchedulerInfo) -> None:
        """Notes which slots have adapters; reads those that are missing."""
        for handle in info.finished:
            self._of_slot.pop(handle, None)
        for new in info.new_requests:
            self._of_slot.pop(new.handle, None)
            ref = new.part(AdapterRef)
            if ref is not None:
                self._of_slot[new.handle] = ref
                self._failures.pop(ref.digest, None)
                try:
                    self._read(ref)
                except RayfinError as error:  # its rows fail, the others of the step do not
                    logger.error("adapter %r cannot be read: %s", ref.name, error)
                    self._failures[ref.digest] = error

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        """Adds to the result what has changed since the last one."""
        with self._lock:
            news, self._news = self._news, _News()
            if news.changed:
                resident = tuple(map(short, self._adapters))
                since = tuple(news.seconds), news.failed, news.evicted
                result.usage.append(AdapterUsage(resident, self._bytes, *since))

    def close(self) -> None:
        """A start empties all slots; a new scheduler hears what is here."""
        self._of_slot.clear()
        self._news = _News(changed=bool(self._adapters))

    def of_rows(self, slots: Int32Array | None) -> list[Adapter | None]:
        """Each row's adapter, None for the base model; empty if no slot has any.

        Raises:
            AdapterUnavailable: the adapter of a row cannot be had.
        """
        if not self._of_slot or slots is None:
            return []
        rows: list[Adapter | None] = []
        for slot in slots.tolist():
            ref = self._of_slot.get(slot)
            if ref is not None and ref.digest not in self._adapters:
                why = self._failures.get(ref.digest, "it is not loaded")
                raise AdapterUnavailable(f"The adapter {ref.name!r} cannot be used: {why}", "model")
            rows.append(None if ref is None else self._adapters[ref.digest])
        return rows if any(adapter is not None for adapter in rows) else []

    def adapted(self, slots: Int32Array) -> BoolArray | None:
        """Which of the ``slots`` [R] have an adapter; None if none has."""
        if not self._of_slot:
            return None
        adapted: BoolArray = np.isin(slots, list(self._of_slot))
        return adapted if adapted.any() else None

    def digests(self, slots: Int32Array) -> list[str | None] | None:
        """The adapters of ``slots`` [R]; None if none of them has any."""
        if self.adapted(slots) is None:
            return None
        refs = (self._of_slot.get(slot) for slot in slots.tolist())
        return [None if ref is None else ref.digest for ref in refs]

    def used(self) -> set[str]:
        """The adapters of running requests."""
        return {ref.digest for ref in list(self._of_slot.values())}

    def get(self, digest: str) -> Adapter:
        """Returns an adapter that is here."""
        return self._adapters[digest]

    def _read(self, ref: AdapterRef) -> None:
        with self._lock:
            if ref.digest in self._adapters:
                self._adapters.move_to_end(ref.digest)
                return
        started = time.perf_counter()
        try:
            files = self._fetch(ref)  # two threads may read the same: rare, and both are right
            where = (self.dtype, self.device, self._kernels)
            adapter = read_adapter(files, self.sizes, self._max_rank, *where)
        except RayfinError:
            with self._lock:
                self._news.failed += 1
                self._news.changed = True
            raise
        with self._lock:
            self._adapters[ref.digest] = adapter
            self._news.seconds.append(time.perf_counter() - started)
            self._news.changed = True
            self._evict()

    def _evict(self) -> None:
        used = self.used()
        used.add(next(reversed(self._adapters)))  # what was just read is about to be used
        for digest in [digest for digest in self._adapters if digest not in used]:
            if len(self._adapters) <= self._max_adapters and self._bytes <= self.budget:
                break
            del self._adapters[digest]
            self._news.evicted += 1

    @property
    def _bytes(self) -> int:
        return sum(adapter.bytes for adapter in self._adapters.values())
