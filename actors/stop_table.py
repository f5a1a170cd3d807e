"""When a request ends: at a stop token or at its cap, compared for many slots at once."""

from collections.abc import Collection

import numpy as np

from rayfin.actors.messages import BoolArray, Int32Array, Int64Array

WIDTH = 8  # ids compared in one vector operation; a slot with more is looked up singly
NOTHING = -2  # no token: neither an id nor NO_TOKEN


class StopTable:
    """Stop token ids and cap of each slot: the one rule by which scheduler and runner end requests.

    The cap is the most tokens of a request, prompt included. A request ends with the token that is
    a stop token or reaches the cap. The runner applies the rule within a multi-step call, the GPU's
    decode graphs only the cap, since there the device compares stop tokens. Stop strings are the
    ingress's.
    """

    def __init__(self, num_slots: int) -> None:
        self.cap: Int64Array = np.zeros(num_slots, np.int64)
        self._first: Int32Array = np.full((num_slots, WIDTH), NOTHING, np.int32)
        self._has_more: BoolArray = np.zeros(num_slots, bool)  # more than WIDTH ids
        self._num_longer = 0  # slots of them
        self._all: list[frozenset[int]] = [frozenset()] * num_slots

    def set(self, slot: int, token_ids: Collection[int], cap: int) -> None:
        """Replaces the slot's rule."""
        self.cap[slot] = cap
        first = sorted(token_ids)[:WIDTH]
        self._first[slot] = NOTHING
        self._first[slot, : len(first)] = first
        self._num_longer += (len(token_ids) > WIDTH) - int(self._has_more[slot])
        self._has_more[slot] = len(token_ids) > WIDTH
        self._all[slot] = frozenset(token_ids)

    def ended(
        self, slots: Int64Array | Int32Array, tokens: Int32Array, num_known: Int64Array | Int32Array
    ) -> tuple[BoolArray, BoolArray]:
        """Whether the slots [N] end with ``tokens`` [N], the last of ``num_known`` [N] each.

        Returns:
            (stopped, full) [N]: by a stop token, by the cap. Both may hold; then a stop token
            counts, as in vLLM.
        """
        return self.hits(slots, tokens), self.num_left(slots, num_known) <= 0

    def num_left(
        self, slots: Int64Array | Int32Array, num_known: Int64Array | Int32Array
    ) -> Int64Array:
        """Tokens [N] up to the caps of the slots [N] that have ``num_known`` [N] tokens."""
        return self.cap[slots] - num_known

    def hits(self, slots: Int64Array | Int32Array, tokens: Int32Array) -> BoolArray:
        """Whether each of ``tokens`` [N] is a stop token of its slot of ``slots`` [N]."""
        hits: BoolArray = (self._first[slots] == tokens[:, None]).any(axis=1)
        if self._num_longer:
            for row in np.flatnonzero(self._has_more[slots]).tolist():
                hits[row] = int(tokens[row]) in self._all[int(slots[row])]
        return hits
