"""Snapshots of recurrent layers' states: where a prefix hit may start.

Pages hold the keys and values of every position, a recurrent layer keeps only its last state. So a
prefix of pages counts only up to a position whose state was saved: near the end of a prompt, and
every ``EVERY`` tokens of it, at page ends. A snapshot is known by the hash of all tokens before it,
like the page that ends there. The one that was not used for longest is replaced.

A prompt's chunk ends where a snapshot is due, and the move that saves it is part of the next step,
which runs after that chunk and before the slot's state changes.
"""

from collections import OrderedDict
from collections.abc import Sequence

EVERY = 512
"""Tokens between two snapshots of a prompt; a multiple of the page size makes them exact."""

READ_SHARE = 2
"""One snapshot in so many may wait for a state that is read."""

SHORTEST = 64
"""Tokens behind the snapshot before, for which the next one is worth a step that ends there."""


class StateSnapshots:
    """Which snapshot holds the state behind which tokens. The states are in the runners."""

    def __init__(self, count: int, page_size: int) -> None:
        self._page_size = page_size
        self._free = list(range(count))
        self._of: OrderedDict[bytes, int] = OrderedDict()  # by hash, oldest use first
        self.latest: dict[int, int] = {}  # slot -> tokens behind its last snapshot, or at its start
        self._most_lent, self._lent = count // READ_SHARE, 0  # for states that are read
        self._saved: dict[int, bytes] = {}  # since ``saved`` was last called

    def __len__(self) -> int:
        return len(self._of)

    def next_end(self, computed: int, known: int, latest: int = 0) -> int:
        """The next position behind ``computed`` at which a chunk of ``known`` tokens has to end.

        The last snapshot was taken at ``latest``.
        """
        step = max(EVERY // self._page_size, 1) * self._page_size
        last = self.last_end(known, latest)
        periodic = (computed // step + 1) * step
        ends = (end for end in (periodic, last) if end - latest >= SHORTEST)
        return min((end for end in ends if computed < end < known), default=known)

    def last_end(self, known: int, latest: int = 0) -> int:
        """The position of the last snapshot of ``known`` tokens; 0 if they are too few for one."""
        end = (known - 1) // self._page_size * self._page_size
        return end if end - latest >= SHORTEST else 0

    def is_due(self, computed: int, known: int, latest: int = 0) -> bool:
        """Whether a chunk has ended at ``computed`` of ``known`` tokens for a snapshot."""
        step = max(EVERY // self._page_size, 1) * self._page_size
        return computed > 0 and (computed % step == 0 or computed == self.last_end(known, latest))

    def add(self, page_hash: bytes) -> int | None:
        """The snapshot to save the state to, or None if it is there already."""
        if page_hash in self._of:
            self._of.move_to_end(page_hash)
            return None
        snapshot = self._free.pop() if self._free else self._of.popitem(last=False)[1]
        self._of[page_hash], self._saved[snapshot] = snapshot, page_hash
        return snapshot

    def saved(self) -> dict[int, bytes] | None:
        """Hashes by snapshot that ``add`` has given away since the last call; None: none."""
        saved, self._saved = self._saved, {}
        return saved or None

    def lend(self) -> int | None:
        """Takes a snapshot for a state that is read, until ``give_back``; None if too many are."""
        if self._lent >= self._most_lent:
            return None
        self._lent += 1
        return self._free.pop() if self._free else self._of.popitem(last=False)[1]

    def give_back(self, snapshot: int, page_hash: bytes | None) -> None:
        """A snapshot has the state behind a page by now; None: it has none."""
        self._lent -= 1
        if page_hash is None or page_hash in self._of:
            self._free.append(snapshot)
        else:
            self._of[page_hash] = snapshot

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of the pages ``hashes`` [N] a request may share: up to the last snapshot."""
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._of:
                return count
        return 0

    def find(self, page_hash: bytes) -> int:
        """The snapshot behind the page; it is used now."""
        self._of.move_to_end(page_hash)
        return self._of[page_hash]

    def clear(self) -> None:
        """Forgets all: the runners are new, or a state may be wrong."""
        self._free += self._of.values()
        self._of.clear()
