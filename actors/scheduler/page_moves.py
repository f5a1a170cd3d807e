"""Moves of whole pages that the runners must make: copies, and swaps to and from host memory.

A preemption, an admission or a fork appends its moves here. The next step carries all of them, and
the runners make them in this order before the rest of that step. Page ids may therefore be reused
as soon as a move is appended:

* A source page may be freed and allocated again at once. Steps in flight run before the move, so
  their writes are moved; the next owner writes in the step of the move or later.
* Moves wait for a step with rows, since an empty step is not sent. No page is written meanwhile.
* A move is useless but harmless if its target is freed before it is sent: the target's next content
  comes from a later move or row.
"""

from collections.abc import Iterable

import numpy as np

from rayfin.actors.messages import Int32Array, no_moves


class PageMoves:
    """The moves of the next step, in order."""

    def __init__(self) -> None:
        self._moves: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._moves)

    def add(self, kind: int, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Moves each source page to its target; ``kind`` is COPY, SWAP_OUT or SWAP_IN."""
        for source, target in zip(sources, targets, strict=True):
            self._moves.append((kind, source, target))

    def drain(self) -> Int32Array:
        """Removes and returns the moves [M, 3] in the form of ``SchedulerInfo.moves``."""
        if not self._moves:
            return no_moves()
        moves = np.array(self._moves, np.int32)
        self._moves.clear()
        return moves

    def clear(self) -> None:
        """Drops the moves: the runners and their memory are new."""
        self._moves.clear()
