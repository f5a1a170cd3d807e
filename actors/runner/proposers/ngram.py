"""N-grams: what followed the last tokens of a request when they stood in it before.

Prompt lookup decoding (Saxena, 2023). A table of hashes says where each n-gram stood last, so a
guess costs a few vector operations over all rows, whatever their lengths.
"""

import numpy as np

from rayfin.actors.messages import Int32Array, Int64Array, NewRequest
from rayfin.actors.runner.proposers.interface import Drafts, TokenTable

MIX = np.uint64(0x9E3779B97F4A7C15)
LEAST_BITS, MOST_BITS = 12, 21
LONGEST_MATCH = 32
MATCHES = (3, 4, 6, 10, 16, 32)
"""Matched tokens at which a guess is trusted more."""


class NGramProposer:
    """Looks up the last ``longest`` tokens of each request, then one less, down to ``shortest``.

    A hit is compared token by token, since hashes collide: one table serves all slots. The longest
    n-gram wins, and its latest place.
    """

    def __init__(
        self, num_slots: int, max_len: int, *, shortest: int = 2, longest: int = 4
    ) -> None:
        self._texts = TokenTable(num_slots, max_len)
        self._sizes = range(longest, shortest - 1, -1)
        entries = 2 * num_slots * max_len
        self._shift = np.uint64(64 - min(max(entries.bit_length(), LEAST_BITS), MOST_BITS))
        size = 1 << (64 - int(self._shift))
        self._places = {n: np.zeros(size, np.int32) for n in self._sizes}

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""
        assert request.history is not None
        history = request.history
        self._texts.add(slot, history)
        for n in self._sizes:
            if len(history) > n:
                windows = np.lib.stride_tricks.sliding_window_view(history[:-1], n)
                keys = self._keys(np.full(len(windows), slot), windows)
                self._places[n][keys] = np.arange(n, len(history))  # the last of equal keys stays

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""
        self._texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        texts = self._texts
        for column in range(int(counts.max(initial=0))):
            more = counts > column
            own = slots if more.all() else slots[more]
            lengths = texts.lengths[own]
            for n in self._sizes:
                long = lengths >= n
                some, ends = (own, lengths) if long.all() else (own[long], lengths[long])
                if len(some):
                    self._places[n][self._keys(some, self._last(some, ends, n))] = ends
            texts.append(own, tokens[more, column])

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        texts, rows = self._texts, np.arange(len(slots))
        places = np.zeros(len(slots), np.int64)
        for n in self._sizes:
            rows = rows[(places[rows] == 0) & (texts.lengths[slots[rows]] > n)]
            if not len(rows):
                break
            own, ends = slots[rows], texts.lengths[slots[rows]]
            last = self._last(own, ends, n)
            found = self._places[n][self._keys(own, last)].astype(np.int64)
            fits = (found >= n) & (found < ends)
            fits[fits] = (self._last(own[fits], found[fits], n) == last[fits]).all(axis=1)
            places[rows[fits]] = found[fits]
        lengths = np.where(places > 0, room, 0)
        most = int(lengths.max(initial=0))
        if not most:
            return Drafts(np.zeros((len(slots), 0), np.int32), lengths)
        return Drafts(texts.after(slots, places, most), lengths, self._trust(slots, places))

    def _trust(self, slots: Int64Array, places: Int64Array) -> Int64Array:
        """A class [N] by how many tokens before ``places`` [N] are those at the end."""
        back = np.arange(1, LONGEST_MATCH + 1)
        ends = self._texts.lengths[slots]
        tokens = self._texts.tokens
        here = tokens[slots[:, None], np.maximum(places[:, None] - back, 0)]
        there = tokens[slots[:, None], np.maximum(ends[:, None] - back, 0)]
        same = (here == there) & (back <= places[:, None])
        matched = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        classes: Int64Array = np.searchsorted(MATCHES, matched, side="right")
        return classes

    def _last(self, slots: Int64Array, ends: Int64Array, n: int) -> Int32Array:
        """The ``n`` tokens [N, n] before ``ends`` [N] in the slots [N]."""
        index = ends[:, None] + np.arange(-n, 0)
        tokens: Int32Array = self._texts.tokens[slots[:, None], index]
        return tokens

    def _keys(self, slots: Int64Array, windows: Int32Array) -> Int64Array:
        """The places [N] in a table of n-grams [N, n] of the slots [N]."""
        keys = slots.astype(np.uint64) + np.uint64(1)
        for column in windows.T:
            keys = (keys * MIX) ^ (column.astype(np.uint64) + (keys >> np.uint64(29)))
        return ((keys * MIX) >> self._shift).astype(np.int64)
