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
        self.texts = TokenTable(num_slots, max_len)
        self._sizes = range(longest, shortest - 1, -1)
        bits = min(max((2 * num_slots * max_len).bit_length(), LEAST_BITS), MOST_BITS)
        self._bits = bits
        self._places = {n: np.zeros(1 << bits, np.int32) for n in self._sizes}

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""
        assert request.history is not None
        history = request.history
        self.texts.add(slot, history)
        for n in self._sizes:
            if len(history) > n:
                keys = hashes(windows(history[:-1], n), self._bits, np.int64(slot + 1))
                self._places[n][keys] = np.arange(n, len(history))  # the last of equal keys stays

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""
        self.texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        texts = self.texts
        for column in range(int(counts.max(initial=0))):
            more = counts > column
            own = slots if more.all() else slots[more]
            lengths = texts.lengths[own]
            for n in self._sizes:
                long = lengths >= n
                some, ends = (own, lengths) if long.all() else (own[long], lengths[long])
                if len(some):
                    self._places[n][self._keys(some, texts.before(some, ends, n))] = ends
            texts.append(own, tokens[more, column])

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        places = self.find(slots)
        lengths = np.where(places > 0, room, 0)
        most = int(lengths.max(initial=0))
        if not most:
            return Drafts(np.zeros((len(slots), 0), np.int32), lengths)
        return Drafts(
            self.texts.after(slots, places, most), lengths, trust(self.match(slots, places))
        )

    def find(self, slots: Int64Array) -> Int64Array:
        """Where [N] the last tokens of the ``slots`` [N] went on before; 0 if they are new."""
        texts, rows = self.texts, np.arange(len(slots))
        places = np.zeros(len(slots), np.int64)
        for n in self._sizes:
            rows = rows[(places[rows] == 0) & (texts.lengths[slots[rows]] > n)]
            if not len(rows):
                break
            own, ends = slots[rows], texts.lengths[slots[rows]]
            last = texts.before(own, ends, n)
            found = self._places[n][self._keys(own, last)].astype(np.int64)
            fits = (found >= n) & (found < ends)
            fits[fits] = (texts.before(own[fits], found[fits], n) == last[fits]).all(axis=1)
            places[rows[fits]] = found[fits]
        return places

    def match(self, slots: Int64Array, places: Int64Array) -> Int64Array:
        """How many tokens [N] before ``places`` [N] are those at the end, of LONGEST_MATCH."""
        back = np.arange(1, LONGEST_MATCH + 1)
        here = self.texts.tokens[slots[:, None], np.maximum(places[:, None] - back, 0)]
        same = (here == self.texts.last(slots, LONGEST_MATCH)) & (back <= places[:, None])
        return run_length(same)

    def _keys(self, slots: Int64Array, grams: Int32Array) -> Int64Array:
        return hashes(grams, self._bits, slots + 1)


def windows(tokens: Int32Array, n: int) -> Int32Array:
    """The n-grams [N - n + 1, n] of ``tokens`` [N]."""
    grams: Int32Array = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return grams


def hashes(grams: Int32Array, bits: int, salt: "Int64Array | np.int64") -> Int64Array:
    """A number [N] of so many ``bits`` for each of the n-grams [N, n]."""
    keys = np.broadcast_to(salt, len(grams)).astype(np.uint64)
    for column in grams.T:
        keys = (keys * MIX) ^ (column.astype(np.uint64) + (keys >> np.uint64(29)))
    numbers: Int64Array = ((keys * MIX) >> np.uint64(64 - bits)).astype(np.int64)
    return numbers


def run_length(same: "np.ndarray") -> Int64Array:
    """How many of the columns of ``same`` [N, K] are true before the first that is not."""
    lengths: Int64Array = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return lengths


def trust(matched: Int64Array) -> Int64Array:
    """The classes [N] of guesses with so many tokens [N] that match (``Drafts.trust``)."""
    classes: Int64Array = np.searchsorted(MATCHES, matched, side="right")
    return classes
