"""The heap that items can leave from the middle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.scheduler.queues.lazy_heap import SLACK, LazyHeap


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "discard", "pop"]), st.integers(0, 5), st.integers(0, 9))
    )
)
def test_agrees_with_a_sorted_list(actions: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    plain: list[tuple[int, int, int]] = []  # key, turn, item
    for turn, (action, key, item) in enumerate(actions):
        if action == "pop":
            assert (heap.pop() if plain else None) == (plain.pop(0)[2] if plain else None)
            continue
        plain = [entry for entry in plain if entry[2] != item]
        heap.discard(item)
        if action == "push":
            heap.push(key, item)
            plain = sorted([*plain, (key, turn, item)])
        assert len(heap) == len(plain)
        assert heap.first() == ((plain[0][0], plain[0][2]) if plain else None)


def test_push_moves_an_item() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push(1, "a")
    heap.push(2, "b")
    heap.push(3, "a")
    assert heap.first() == (2, "b") and len(heap) == 2 and "a" in heap
    assert [heap.pop(), heap.pop()] == ["b", "a"]
    with pytest.raises(IndexError):
        heap.pop()


def test_memory_follows_what_is_live() -> None:
    """Items that come and go behind one that stays at the top are not kept."""
    heap: LazyHeap[int] = LazyHeap()
    heap.push(-1, -1)
    for item in range(10_000):
        heap.push(item, item)
        heap.discard(item)
    assert len(heap) == 1 and len(heap._heap) <= SLACK + 2
