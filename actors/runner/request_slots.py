"""The runner's mirror of the running requests: one permanent row per slot, fed by diffs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayfin.actors.messages import (
    BoolArray,
    Int32Array,
    Int64Array,
    NewRequest,
    Sampling,
    SchedulerInfo,
)
from rayfin.actors.stop_table import StopTable
from rayfin.kernels.shapes import SamplingRows, all_to_device

NO_LOGPROBS = -1
"""In ``RequestSlots.logprobs``: the slot does not ask for any."""


class RequestSlots:
    """Page tables, last tokens and sampling settings by slot.

    The scheduler decides every id here; a step carries what changed. Every field of a slot is set
    anew when a request enters it, so nothing of the one before can leak.
    """

    def __init__(self, num_slots: int, pages_per_request: int, beside: int = 0) -> None:
        self.entries = np.zeros(num_slots, np.int64)  # requests that have been in a slot
        self.page_tables: Int32Array = np.zeros((num_slots, pages_per_request), np.int32)
        # The tables of groups of layers beside those: pages behind their windows are any.
        self.beside: Int32Array = np.zeros((beside, num_slots, pages_per_request), np.int32)
        self.num_pages: Int32Array = np.zeros(num_slots, np.int32)
        self.last_token: Int32Array = np.zeros(num_slots, np.int32)
        self.settings = RowSettings(num_slots)
        self.stops = StopTable(num_slots)
        self.logprobs = np.full(num_slots, NO_LOGPROBS, np.int64)  # how many of the likeliest
        self.asking: set[int] = set()  # slots that ask for any
        self.logprob_ids: dict[int, tuple[int, ...]] = {}  # only slots that name theirs
        self.processed: set[int] = set()  # slots whose log probabilities are of what is drawn
        self.scored: dict[int, NewRequest] = {}  # only slots that want their prompt's

    def apply(self, info: SchedulerInfo) -> None:
        """Takes in a step's news: who left, who is new, which pages were appended."""
        for handle in info.finished:
            self.num_pages[handle] = 0
            self.scored.pop(handle, None)
            self.logprob_ids.pop(handle, None)
            self.asking.discard(handle)
            self.processed.discard(handle)
        for new in info.new_requests:
            self._enter(new)
        if len(info.new_pages):
            self._append_pages(info)

    def remember(self, info: SchedulerInfo, tokens: Int32Array) -> None:
        """Keeps the tokens [R] just sampled for the placeholders of the steps to come."""
        sampled = tokens >= 0
        self.last_token[info.ids[sampled]] = tokens[sampled]

    def still_decoding(
        self, info: SchedulerInfo, tokens: Int32Array, counts: Int64Array | int = 1
    ) -> BoolArray:
        """Whether decoding rows [R] sample another token after ``tokens`` [R] in the same call.

        Those are the last of the ``counts`` [R] that each has just sampled.
        """
        # Known tokens: the cached ones, the input, and the sampled ones.
        stopped, full = self.stops.ended(info.ids, tokens, info.kv_len + 1 + counts)
        return (tokens >= 0) & ~stopped & ~full

    def _enter(self, new: NewRequest) -> None:
        slot, sampling = new.handle, new.sampling
        self.entries[slot] += 1
        self.num_pages[slot] = 0
        self.last_token[slot] = 0
        self.settings.set(slot, sampling)
        self.stops.set(slot, new.stop_token_ids, new.cap)
        self.logprobs[slot] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self.asking.discard(slot)
        if sampling.logprobs is not None:
            self.asking.add(slot)
        self.processed.discard(slot)
        if sampling.processed and sampling.logprobs is not None:
            self.processed.add(slot)
        self.logprob_ids.pop(slot, None)
        if sampling.logprob_ids:
            self.logprob_ids[slot] = sampling.logprob_ids
        self.scored.pop(slot, None)
        if sampling.prompt_logprobs is not None:
            self.scored[slot] = new

    def _append_pages(self, info: SchedulerInfo) -> None:
        counts = info.new_pages_len
        slots = np.repeat(info.ids, counts)
        starts = np.cumsum(counts) - counts
        within = np.arange(len(slots)) - np.repeat(starts, counts)
        columns = np.repeat(self.num_pages[info.ids], counts) + within
        pages = info.new_pages.reshape(len(slots), -1)  # of each group
        self.page_tables[slots, columns] = pages[:, 0]
        if len(self.beside):
            self.beside[:, slots, columns] = pages[:, 1:].T
        self.num_pages[info.ids] += counts


class RowSettings:
    """How each slot's request samples, and the same as tensors of a step's rows.

    Arrays by slot. Steady decode asks for the same rows in each step, and gets the same tensors.

    Owned by ``RequestSlots``.
    """

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.int64)
        # The last rows: their slots, the device, and their tensors.
        self._kept: tuple[bytes, torch.device, partial[SamplingRows]] | None = None

    def set(self, slot: int, sampling: Sampling) -> None:
        """Replaces the slot's settings."""
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self._kept = None

    def of(
        self, slots: Int32Array, positions: Int64Array | Int32Array, device: torch.device
    ) -> SamplingRows:
        """The settings of rows in ``slots`` [S], which sample tokens at ``positions`` [S]."""
        arrays = [positions.astype(np.int64), *self.unsent(slots, device)]
        position, *sent = all_to_device(arrays, device)
        return self.rows(slots, position, sent)

    def unsent(self, slots: Int32Array, device: torch.device) -> list[npt.NDArray[Any]]:
        """The arrays that ``rows`` takes as tensors for ``slots`` [S]; none if it has them."""
        if self._kept is not None and self._kept[:2] == (slots.tobytes(), device):
            return []
        arrays = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        return [array[slots] for array in arrays]

    def rows(
        self, slots: Int32Array, position: torch.Tensor, sent: Sequence[torch.Tensor]
    ) -> SamplingRows:
        """As ``of``, of rows whose arrays are on the device: ``position`` [S] int64 is.

        Args:
            sent: the arrays of ``unsent``, on the device of ``position``.
        """
        if sent:
            temperature, top_k, top_p, min_p, seed = sent
            self._kept = (
                slots.tobytes(),
                position.device,
                partial(
                    SamplingRows,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    seed=seed,
                    all_greedy=not self.temperature[slots].any(),
                    any_top_k=bool(self.top_k[slots].any()),
                    any_top_p=bool((self.top_p[slots] < 1).any()),
                    any_min_p=bool(self.min_p[slots].any()),
                ),
            )
        assert self._kept is not None
        return self._kept[2](position=position)
