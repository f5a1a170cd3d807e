"""What the next step brings to the runners beside its rows: requests, freed slots, page moves."""

from collections.abc import Iterable

import numpy as np

from rayfin.actors.messages import Int32Array, NewRequest, no_moves


class RunnerDiff:
    """Collects the changes for the next step, and tracks which slots the runners know.

    A request that enters and leaves a slot between two steps is not sent, and a slot that the
    runners do not know is not freed there.
    """

    def __init__(self, *, send_history: bool = False) -> None:
        self.send_history = send_history  # with every request, not only where sampling needs it
        self._new: dict[int, NewRequest] = {}  # by handle
        self._freed: list[int] = []
        self._known: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        """Returns whether the slot's request was not sent to the runners yet."""
        return slot in self._new

    def enter(self, new: NewRequest) -> None:
        """Adds a request in slot ``new.handle``; it is sent with its first row."""
        self._new[new.handle] = new

    def leave(self, slot: int) -> None:
        """Frees the slot."""
        self._new.pop(slot, None)
        if slot in self._known:
            self._known.remove(slot)
            self._freed.append(slot)

    def drain(self, slots: Iterable[int]) -> tuple[list[NewRequest], list[int]]:
        """Returns the changes for a step with rows of ``slots``.

        Returns:
            The new requests among its rows, and the slots to free, which comes first.
        """
        new = [self._new.pop(slot) for slot in slots if slot in self._new] if self._new else []
        freed, self._freed = self._freed, []
        self._known.update(request.handle for request in new)
        return new, freed

    def clear(self) -> None:
        """Drops all changes: the runners are new."""
        self._new.clear()
        self._freed.clear()
        self._known.clear()


class PageMoves:
    """Moves of whole pages that the runners must make: copies, and swaps to and from host memory.

    A preemption, an admission or a fork appends its moves here. The next step carries all of them,
    and the runners make them in this order before the rest of that step. Page ids may therefore be
    reused as soon as a move is appended:

    * A source page may be freed and allocated again at once. Steps in flight run before the move,
      so their writes are moved; the next owner writes in the step of the move or later.
    * Moves wait for a step with rows, since an empty step is not sent. No page is written
      meanwhile.
    * A move is useless but harmless if its target is freed before it is sent: the target's next
      content comes from a later move or row.
    """

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
