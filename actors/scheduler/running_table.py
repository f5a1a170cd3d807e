"""The running requests as arrays, one row per slot.

There is no prefill phase and no decode phase (vLLM V1's one counter): every request has
``num_computed`` tokens that catch up with ``num_known + num_pending``.

    tokens[slot]:   p p p p p p o o o ? ?            p prompt, o output, ? sampled, not yet seen
                    ─────────── num_known  (9)
                                      ─── num_pending (2)
                    ──────────────────    num_computed (10): in the cache once all steps have run

A request may hold several slots (the beams of a search, ``beam_groups.py``). Such slots are in
*lockstep*: they decode only tokens that are known here, so none of them runs ahead of a result.

Everything that a step does to decoding requests is index arithmetic over these arrays, so its cost
hardly grows with their number; Python loops touch only what changes.
"""

from collections.abc import Iterable

import numpy as np

from rayfin.actors.messages import BoolArray, Int32Array, Int64Array
from rayfin.actors.scheduler.request import Request
from rayfin.actors.stop_table import StopTable


class RunningTable:
    """Slot-indexed state of the running requests. Only ``Lifecycle`` admits and evicts."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.requests: list[Request | None] = [None] * num_slots
        self.tokens: Int32Array = np.zeros((num_slots, max_len), np.int32)
        self.num_known: Int64Array = np.zeros(num_slots, np.int64)
        self.num_pending: Int64Array = np.zeros(num_slots, np.int64)
        self.num_computed: Int64Array = np.zeros(num_slots, np.int64)
        self.stops = StopTable(num_slots)
        self.key: Int64Array = np.zeros(num_slots, np.int64)
        self.client: Int32Array = np.zeros(num_slots, np.int32)
        self.admission: Int64Array = np.zeros(num_slots, np.int64)  # 0: free; unique otherwise
        self.lockstep: BoolArray = np.zeros(num_slots, np.bool_)  # decode known tokens only
        self.prefilling: dict[int, None] = {}  # slots in admission order
        self._decoding: dict[int, None] = {}
        self._decoding_slots: Int64Array | None = None
        self._free = list(range(num_slots - 1, -1, -1))
        self.last_admission = 0

    def __len__(self) -> int:
        return len(self.prefilling) + len(self._decoding)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def slots(self) -> list[int]:
        """The slots in use."""
        return [*self._decoding, *self.prefilling]

    def holders(self) -> list[Request]:
        """The requests that hold slots, each once."""
        return list(dict.fromkeys(self.request(slot) for slot in self.slots()))

    def request(self, slot: int) -> Request:
        """The request of a slot in use."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def enter(self, request: Request, client: int, num_computed: int = 0) -> int:
        """Gives the request a slot and lays out its tokens; it starts as prefilling."""
        slot = self._take_slot(request, client)
        prompt_len, known = len(request.source.prompt), request.num_tokens
        self.tokens[slot, :prompt_len] = request.source.prompt
        self.tokens[slot, prompt_len:known] = request.output
        self.num_known[slot] = known
        self.num_computed[slot] = num_computed
        self.prefilling[slot] = None
        return slot

    def reserve(self, request: Request, client: int) -> int:
        """Gives the request one more slot, which stays empty until ``copy`` fills it."""
        slot = self._take_slot(request, client)
        self.empty(slot)
        self._decoding[slot] = None
        self._decoding_slots = None
        return slot

    def leave(self, slot: int) -> Request:
        """Frees the slot; the request takes its token log along, unless it is in lockstep."""
        request = self.request(slot)
        prompt_len, known = len(request.source.prompt), int(self.num_known[slot])
        if not self.lockstep[slot]:
            request.output = self.tokens[slot, prompt_len:known].copy()
        request.slots.remove(slot)
        self.requests[slot] = None
        self.admission[slot] = 0
        self.lockstep[slot] = False
        self.prefilling.pop(slot, None)
        if self._decoding.pop(slot, 0) is None:
            self._decoding_slots = None
        self._free.append(slot)
        return request

    def copy(self, source: int, target: int) -> None:
        """The empty slot ``target`` of the same request stands where ``source`` stands."""
        known = self.num_known[source]
        self.tokens[target, :known] = self.tokens[source, :known]
        for counts in (self.num_known, self.num_pending, self.num_computed):
            counts[target] = counts[source]

    def empty(self, slot: int) -> None:
        """The slot has no tokens any more, but is not free."""
        for counts in (self.num_known, self.num_pending, self.num_computed):
            counts[slot] = 0

    def start_decoding(self, slots: Iterable[int]) -> None:
        """The slots' prompts are scheduled to their end."""
        for slot in slots:
            del self.prefilling[slot]
            self._decoding[slot] = None
            self._decoding_slots = None

    def decodable(self) -> Int64Array:
        """Slots [N] that can take one more token: decoding, and not already at their cap.

        Those in lockstep only where the token to feed is known.
        """
        if self._decoding_slots is None:
            self._decoding_slots = np.fromiter(self._decoding, np.int64, len(self._decoding))
        slots = self._decoding_slots
        ready = self.room(slots) > 0
        if self.lockstep.any():
            ready &= ~self.lockstep[slots] | (self.num_computed[slots] < self.num_known[slots])
        return slots if ready.all() else slots[ready]

    def room(self, slots: Int64Array) -> Int64Array:
        """Tokens [N] that the slots [N] may still sample, those on their way not counted."""
        return self.stops.num_left(slots, self.num_known[slots] + self.num_pending[slots])

    def append(self, slots: Int64Array, tokens: Int32Array) -> None:
        """Sampled tokens [N] become known, one for each of the slots [N]."""
        self.tokens[slots, self.num_known[slots]] = tokens
        self.num_known[slots] += 1
        self.num_pending[slots] -= 1

    def take_back(self, slots: Int64Array, counts: Int64Array) -> None:
        """Of the tokens scheduled for the slots [N], ``counts`` [N] were not sampled: their drafts
        were wrong. The slots keep their pages."""
        self.num_computed[slots] -= counts
        self.num_pending[slots] -= counts

    def _take_slot(self, request: Request, client: int) -> int:
        slot = self._free.pop()
        source = request.source
        self.num_pending[slot] = 0
        stopping = source.stopping
        self.stops.set(slot, stopping.stop_token_ids, len(source.prompt) + stopping.max_tokens)
        self.key[slot] = source.key
        self.client[slot] = client
        self.lockstep[slot] = source.beams is not None
        self.last_admission += 1
        self.admission[slot] = self.last_admission
        self.requests[slot] = request
        request.slots.append(slot)
        return slot
