"""Suffixes: what followed the last tokens of a request in it, or in requests that have ended.

Suffix decoding (Oliaro et al., 2024), on tables of n-grams in the place of trees. Each tenant has
archives of its own: how long an answer takes says nothing of what another tenant has said.
"""

from collections import OrderedDict, deque

import numpy as np

from rayfin.actors.messages import Int32Array, Int64Array, NewRequest
from rayfin.actors.runner.speculation.interface import Drafts, TokenTable
from rayfin.actors.runner.speculation.ngram import (
    LONGEST_MATCH,
    NGramProposer,
    hashes,
    run_length,
    trust,
    windows,
)

ARCHIVE_TOKENS = 1 << 20
ARCHIVES = 32
"""Most archives; the one that was used least recently is dropped."""

TABLE_BITS = 20
SIZES = (6, 3)
END = -1
"""Between two texts."""

Group = tuple[str, tuple[str, ...]]
"""Tenant and ``extra_keys``: requests that may read each other's texts."""


class Archive:
    """The texts of the last requests of one group: a ring of tokens, and where n-grams go on."""

    def __init__(self, size: int, most_texts: int) -> None:
        self._tokens: Int32Array = np.full(size, END, np.int32)
        self._places: dict[int, Int64Array] = {
            n: np.zeros(1 << TABLE_BITS, np.int64) for n in SIZES
        }
        self._end = 0  # places count on; the ring has the last ``size`` of them
        self._starts: deque[int] = deque()
        self._most_texts = most_texts

    def add(self, text: Int32Array) -> None:
        """Keeps a text [N], or the end of one that is too long."""
        text = text[-(len(self._tokens) // 2) :]
        if not self._most_texts or len(text) <= SIZES[-1]:
            return
        self._starts.append(self._end)
        if len(self._starts) > self._most_texts:
            self._starts.popleft()
        start = self._end
        self._tokens[(start + np.arange(len(text) + 1)) % len(self._tokens)] = [*text, END]
        self._end += len(text) + 1
        for n in SIZES:
            if len(text) > n:
                keys = hashes(windows(text[:-1], n), TABLE_BITS, 0)
                self._places[n][keys] = start + np.arange(n, len(text))

    def find(self, last: Int32Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(places [N], matched tokens [N]) of texts that end with ``last`` [N, LONGEST_MATCH].

        Args:
            last: the last token first; of texts of ``lengths`` [N] tokens.
        """
        places, matched = np.zeros(len(last), np.int64), np.zeros(len(last), np.int64)
        if not self._starts:
            return places, matched
        oldest = max(self._starts[0], self._end - len(self._tokens))
        back = np.arange(1, LONGEST_MATCH + 1)
        for n in SIZES:
            keys = hashes(last[:, n - 1 :: -1], TABLE_BITS, 0)
            candidates = self._places[n][keys]
            here = self._tokens[(candidates[:, None] - back) % len(self._tokens)]
            within = candidates[:, None] - back >= oldest
            same = (here == last) & within & (back <= lengths[:, None])
            better = run_length(same)
            better[better < n] = 0
            places = np.where(better > matched, candidates, places)
            matched = np.maximum(matched, better)
        return places, matched

    def after(self, places: Int64Array, count: int) -> tuple[Int32Array, Int64Array]:
        """(tokens [N, count], how many of them [N] there are) from ``places`` [N] on."""
        tokens = self._tokens[(places[:, None] + np.arange(count)) % len(self._tokens)]
        return tokens, run_length(tokens != END)


class SuffixProposer:
    """N-grams of the request's own text, and of the archive of its group; the longer match wins.

    A match of M tokens allows ``factor`` times M drafts.
    """

    def __init__(
        self, num_slots: int, max_len: int, *, most_texts: int, factor: float, ngrams: NGramProposer
    ) -> None:
        self._ngrams = ngrams
        self._factor = factor
        self._most_texts = most_texts
        self._size = min(ARCHIVE_TOKENS, max(8 * num_slots * max_len, 1024))
        self._groups: list[Group] = [("", ())] * num_slots
        self._archives: OrderedDict[Group, Archive] = OrderedDict()

    @property
    def _texts(self) -> TokenTable:
        return self._ngrams.texts

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""
        self._ngrams.add(slot, request)
        self._groups[slot] = (request.tenant, request.extra_keys)

    def remove(self, slot: int) -> None:
        """Drops the slot's request, and archives its text."""
        archive = self._archive(self._groups[slot])
        archive.add(self._texts.tokens[slot, : self._texts.lengths[slot]])
        self._ngrams.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        self._ngrams.accept(slots, tokens, counts)

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        texts = self._texts
        places = self._ngrams.find(slots)
        matched = np.where(places > 0, self._ngrams.match(slots, places), 0)
        longest = int(room.max())
        tokens = texts.after(slots, places, longest)
        lengths = np.where(matched > 0, room, 0)
        last = texts.last(slots, LONGEST_MATCH)
        by_group: dict[Group, list[int]] = {}
        for row, slot in enumerate(slots.tolist()):
            by_group.setdefault(self._groups[slot], []).append(row)
        for group, rows in by_group.items():
            archive, at = self._archive(group), np.array(rows)
            candidates, length = archive.find(last[at], texts.lengths[slots[at]])
            better = at[length > matched[at]]
            if len(better):
                wins = length > matched[at]
                tokens[better], known = archive.after(candidates[wins], longest)
                lengths[better] = np.minimum(known, room[better])
                matched[better] = length[wins]
        allowed = np.ceil(matched * self._factor).astype(np.int64)
        return Drafts(tokens, np.minimum(lengths, allowed), trust(matched))

    def _archive(self, group: Group) -> Archive:
        if (archive := self._archives.get(group)) is None:
            archive = self._archives[group] = Archive(self._size, self._most_texts)
            if len(self._archives) > ARCHIVES:
                self._archives.popitem(last=False)
        self._archives.move_to_end(group)
        return archive
