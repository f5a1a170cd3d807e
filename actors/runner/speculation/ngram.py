"""N-grams: what followed the last tokens of a request when they stood in it before.

Prompt lookup decoding (Saxena, 2023). A table of hashes says where each n-gram stood last, so a
guess costs a few vector operations over all rows, whatever their lengths.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from rayfin.actors.messages import Int32Array, Int64Array, NewRequest
from rayfin.actors.runner.speculation.interface import Drafts, TokenTable

MIX = 0x9E3779B97F4A7C15
LEAST_BITS, MOST_BITS = 12, 21
LONGEST_MATCH = 32
MATCHES = (3, 4, 6, 10, 16, 32)
"""Matched tokens at which a guess is trusted more."""


class NGramProposer:
    """Looks up the last ``longest`` tokens of each request, then one less, down to ``shortest``.

    A hit is compared token by token, since hashes collide: one table of a size serves all slots.
    The longest n-gram wins, and its latest place.
    """

    def __init__(
        self, num_slots: int, max_len: int, *, shortest: int = 2, longest: int = 4
    ) -> None:
        self.texts = TokenTable(num_slots, max_len)
        self._sizes = np.arange(longest, shortest - 1, -1)
        bits = min(max((2 * num_slots * max_len).bit_length(), LEAST_BITS), MOST_BITS)
        self._bits = bits
        self._places: Int32Array = np.zeros((len(self._sizes), 1 << bits), np.int32)
        self._table = np.arange(len(self._sizes))
        # Of the n-grams at the end of each slot's text: looked up by the next guess, and written by
        # the next token.
        self._ends: Int64Array = np.zeros((num_slots, len(self._sizes)), np.int64)

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""
        assert request.history is not None
        history = request.history
        self.texts.add(slot, history)
        for places, n in zip(self._places, self._sizes.tolist(), strict=True):
            if len(history) > n:
                keys = hashes(windows(history[:-1], n), self._bits, slot + 1)
                places[keys] = np.arange(n, len(history))  # the last of equal keys stays
        self._hash_ends(np.array([slot]))

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""
        self.texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        texts = self.texts
        for column in range(int(counts.max(initial=0))):
            more = counts > column
            accepting = slots[more]
            # Texts shorter than n leave an n-gram that is none: its place is below n.
            self._places[self._table, self._ends[accepting]] = texts.lengths[accepting, None]
            texts.append(accepting, tokens[more, column])
            self._hash_ends(accepting)

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        places = self.find(slots)
        lengths = np.where(places > 0, room, 0)
        longest = int(lengths.max(initial=0))
        if not longest:
            return Drafts(np.zeros((len(slots), 0), np.int32), lengths)
        return Drafts(
            self.texts.after(slots, places, longest), lengths, trust(self.match(slots, places))
        )

    def find(self, slots: Int64Array) -> Int64Array:
        """Where [N] the last tokens of the ``slots`` [N] went on before; 0 if they are new."""
        candidates = self._places[self._table, self._ends[slots]].astype(np.int64)  # [N, sizes]
        lengths = self.texts.lengths[slots]
        fits = (candidates >= self._sizes) & (candidates < lengths[:, None])
        places = np.zeros(len(slots), np.int64)
        if fits.any():
            for column, n in enumerate(self._sizes.tolist()):
                rows = np.flatnonzero(fits[:, column] & (places == 0))
                if not len(rows):
                    continue
                row_slots, ends = slots[rows], candidates[rows, column]
                last = self.texts.before(row_slots, lengths[rows], n)
                equal = (self.texts.before(row_slots, ends, n) == last).all(axis=1)
                places[rows[equal]] = ends[equal]
        return places

    def match(self, slots: Int64Array, places: Int64Array) -> Int64Array:
        """How many tokens [N] before ``places`` [N] are those at the end, of LONGEST_MATCH."""
        back = np.arange(1, LONGEST_MATCH + 1)
        here = self.texts.tokens[slots[:, None], np.maximum(places[:, None] - back, 0)]
        same = (here == self.texts.last(slots, LONGEST_MATCH)) & (back <= places[:, None])
        return run_length(same)

    def _hash_ends(self, slots: Int64Array) -> None:
        """The hashes of all sizes at once: each n-gram is a part of the longest."""
        longest = int(self._sizes[0])
        sums = _sums(self.texts.last(slots, longest), slots[:, None] + 1)
        self._ends[slots] = _top(sums[:, self._sizes - 1], self._bits)


def windows(tokens: Int32Array, n: int) -> Int32Array:
    """The n-grams [N - n + 1, n] of ``tokens`` [N]."""
    grams: Int32Array = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return grams


def hashes(grams: Int32Array, bits: int, salt: int) -> Int64Array:
    """A number [N] of so many ``bits`` for each of the n-grams [N, n]."""
    return _top(_sums(grams[:, ::-1], np.full((1, 1), salt))[:, -1], bits)


# A sum of products, of which the first bits count (multiply-shift, Dietzfelbinger, 1996).


def _sums(tokens: Int32Array, salt: Int64Array) -> npt.NDArray[np.uint64]:
    """[N, n] sums over the first 1 to n of ``tokens`` [N, n], the last of a text first.

    ``salt`` [N, 1] or [1, 1] is in each.
    """
    factors = _factors(tokens.shape[1] + 1)
    products = tokens.astype(np.uint64) * factors[1:]
    products[:, :1] += salt.astype(np.uint64) * factors[:1]
    sums: npt.NDArray[np.uint64] = products.cumsum(axis=1)
    return sums


def _top(sums: npt.NDArray[np.uint64], bits: int) -> Int64Array:
    numbers: Int64Array = (sums >> np.uint64(64 - bits)).astype(np.int64)
    return numbers


@cache
def _factors(count: int) -> npt.NDArray[np.uint64]:
    return np.array([pow(MIX, 1 + place, 1 << 64) for place in range(count)], np.uint64)


def run_length(same: "np.ndarray") -> Int64Array:
    """How many of the columns of ``same`` [N, K] are true before the first that is not."""
    lengths: Int64Array = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return lengths


def trust(matched: Int64Array) -> Int64Array:
    """The classes [N] of guesses with so many tokens [N] that match (``Drafts.trust``)."""
    classes: Int64Array = np.searchsorted(MATCHES, matched, side="right")
    return classes
