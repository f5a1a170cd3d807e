"""A heap that items can leave from the middle, for what waits in an order."""

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

SLACK = 64
"""Entries of items that have left, beyond as many as are live, before they are swept out."""


class LazyHeap(Generic[Item]):
    """Items by key, smallest first; equal keys in the order in which they were pushed.

    ``push`` and taking the first out are O(log n). ``discard`` is O(1) amortised: the entry stays
    until it reaches the top or half of all entries are such, so memory follows what is live.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._turn: dict[Item, int] = {}  # the entry that counts of each item
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._turn)

    def __contains__(self, item: Item) -> bool:
        return item in self._turn

    def push(self, key: Any, item: Item) -> None:
        """Puts the item in; one that is in already moves to the new key."""
        self._pushed += 1
        self._turn[item] = self._pushed
        heapq.heappush(self._heap, (key, self._pushed, item))
        self._sweep()

    def first(self) -> tuple[Any, Item] | None:
        """The smallest key and its item, left where they are; None when empty."""
        while self._heap:
            key, turn, item = self._heap[0]
            if self._turn.get(item) == turn:
                return key, item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Item:
        """Takes out the item of ``first``.

        Raises:
            IndexError: the heap is empty.
        """
        first = self.first()
        if first is None:
            raise IndexError("the heap is empty")
        heapq.heappop(self._heap)
        del self._turn[first[1]]
        return first[1]

    def discard(self, item: Item) -> None:
        """Takes the item out, wherever it is; one that is not in is ignored."""
        if self._turn.pop(item, None) is not None:
            self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._turn) + SLACK:
            live = self._turn
            self._heap = [entry for entry in self._heap if live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
