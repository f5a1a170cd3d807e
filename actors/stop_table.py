"""Stop token ids by slot, compared for many slots at once."""

from collections.abc import Collection

import numpy as np

from rayfin.actors.messages import BoolArray, Int32Array, Int64Array

WIDTH = 8  # ids compared in one vector operation; a slot with more is looked up singly
NOTHING = -2  # no token: neither an id nor NO_TOKEN


class StopTable:
    """The stop token ids of each slot; scheduler and runner end requests by the same rule."""

    def __init__(self, num_slots: int) -> None:
        self._first: Int32Array = np.full((num_slots, WIDTH), NOTHING, np.int32)
        self._has_more = np.zeros(num_slots, np.bool_)
        self._all: list[frozenset[int]] = [frozenset()] * num_slots

    def set(self, slot: int, token_ids: Collection[int]) -> None:
        """Replaces what the slot had."""
        first = sorted(token_ids)[:WIDTH]
        self._first[slot] = NOTHING
        self._first[slot, : len(first)] = first
        self._has_more[slot] = len(token_ids) > WIDTH
        self._all[slot] = frozenset(token_ids)

    def hits(self, slots: Int64Array | Int32Array, tokens: Int32Array) -> BoolArray:
        """Whether each of ``tokens`` [N] is a stop token of its slot of ``slots`` [N]."""
        hits: BoolArray = (self._first[slots] == tokens[:, None]).any(axis=1)
        for row in np.flatnonzero(self._has_more[slots]).tolist():
            hits[row] = int(tokens[row]) in self._all[slots[row]]
        return hits
