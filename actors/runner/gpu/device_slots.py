"""A copy of the request slots on the device, updated by what has changed."""

import numpy as np
import torch

from rayfin.actors.messages import Int32Array
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.kernels.staging import to_device


class DeviceSlots:
    """Page tables and sampling settings by slot, on the device.

    vLLM's V1 runner keeps such tables for its batch. Here they are indexed by slot, whichever
    requests are in a step: only new requests copy settings, and only new pages are copied.
    """

    def __init__(self, slots: RequestSlots, pages_per_request: int, device: torch.device) -> None:
        num_slots = len(slots.num_pages)
        self._slots = slots
        self._entries = np.zeros(num_slots, np.int64)  # generation on the device
        self._num_pages = np.zeros(num_slots, np.int64)
        self.tables = torch.zeros(num_slots, pages_per_request, dtype=torch.int32, device=device)
        self.integers = torch.zeros(2, num_slots, dtype=torch.int64, device=device)  # top_k, seed
        self.numbers = torch.zeros(3, num_slots, dtype=torch.float32, device=device)
        """Temperature, top_p, min_p."""
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """What the last graph with the slot sampled; the steps write it, for those behind them."""

    def use(self, slots: RequestSlots) -> None:
        """Copies from ``slots`` from now on, which are new and of the same sizes."""
        self._slots = slots
        self._entries[:] = 0
        self._num_pages[:] = 0

    def update(self, ids: Int32Array) -> None:
        """Copies what changed in slots ``ids`` [R], in stream order on a GPU."""
        slots, device = self._slots, self.tables.device
        entered = ids[self._entries[ids] != slots.entries[ids]]
        if len(entered):
            self._entries[entered] = slots.entries[entered]
            self._num_pages[entered] = 0
            index = to_device(entered.astype(np.int64), device)
            settings = slots.settings
            integers = np.stack([settings.top_k[entered], settings.seed[entered]])
            floats = (settings.temperature, settings.top_p, settings.min_p)
            numbers = tuple(values[entered] for values in floats)
            self.integers[:, index] = to_device(integers, device)
            self.numbers[:, index] = to_device(np.stack(numbers), device)
        counts = slots.num_pages[ids] - self._num_pages[ids]
        if not counts.any():
            return
        rows = np.repeat(ids, counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = np.repeat(self._num_pages[ids], counts) + within
        self._num_pages[ids] = slots.num_pages[ids]
        new = np.stack([rows, columns, slots.page_tables[rows, columns]]).astype(np.int64)
        at, column, page = to_device(new, device)
        self.tables[at, column] = page.int()
