"""Moves of whole pages that the runner has yet to make: copies, and ways to and from host memory.

Whoever decides a move (a preemption, an admission, a fork) appends it here; the next step carries
all of them, and the runner makes them in this order before anything else of that step. Ids may
therefore change hands as soon as a move is decided:

* A page to be read may be given back and taken again at once. Steps in flight ran before the move,
  so what they wrote is in it; whoever takes it writes to it in the step of the move or later.
* A step without rows is not sent, and moves wait for one that is. Nothing can be written
  meanwhile, for the same reason: the first step to write anything brings the moves along.
* A move whose target was given back again before it went out is made in vain. Its target's next
  content comes from a later move or from a row, and both come after it.
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
        """Each source page goes to its target; ``kind`` is COPY, SWAP_OUT or SWAP_IN."""
        for source, target in zip(sources, targets, strict=True):
            self._moves.append((kind, source, target))

    def drain(self) -> Int32Array:
        """The moves [M, 3] as ``SchedulerInfo.moves`` has them; none are left."""
        if not self._moves:
            return no_moves()
        moves = np.array(self._moves, np.int32)
        self._moves.clear()
        return moves

    def clear(self) -> None:
        """Forgets them: the memory that they were for is gone."""
        self._moves.clear()
