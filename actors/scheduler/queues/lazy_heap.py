"""A heap from which any item can be removed cheaply."""

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

SLACK = 64
"""Stale entries, beyond the number of live ones, before the heap is rebuilt."""


class LazyHeap(Generic[Item]):
    """Items by key, smallest first; equal keys in the order in which they were pushed.

    ``push`` and ``pop`` are O(log n). ``discard`` is O(1) amortised: the entry stays until it
    reaches the top or half of all entries are stale, so memory is proportional to live items.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._turn: dict[Item, int] = {}  # number of each item's valid entry
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._turn)

    def __contains__(self, item: Item) -> bool:
        return item in self._turn

    def push(self, key: Any, item: Item) -> None:
        """Adds the item, or moves it to the new key."""
        self._pushed += 1
        self._turn[item] = self._pushed
        heapq.heappush(self._heap, (key, self._pushed, item))
        self._sweep()

    def first(self) -> tuple[Any, Item] | None:
        """Returns the smallest key and its item, which stay, or None if the heap is empty."""
        while self._heap:
            key, turn, item = self._heap[0]
            if self._turn.get(item) == turn:
                return key, item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Item:
        """Removes and returns the item of ``first``.

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
        """Removes the item, if it is in the heap."""
        if self._turn.pop(item, None) is not None:
            self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._turn) + SLACK:
            live = self._turn
            self._heap = [entry for entry in self._heap if live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
