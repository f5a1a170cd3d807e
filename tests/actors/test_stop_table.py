"""Stop tokens and caps of many slots at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.messages import NO_TOKEN
from rayfin.actors.stop_table import NOTHING, WIDTH, StopTable

CAP = 100
SETS = st.frozensets(st.integers(0, 30), max_size=WIDTH + 5)


def _hits(table: StopTable, slots: list[int], tokens: list[int]) -> list[bool]:
    hits = table.hits(np.array(slots, np.int64), np.array(tokens, np.int32))
    assert hits.dtype == np.bool_ and hits.shape == (len(slots),)
    return hits.tolist()


def test_empty() -> None:
    table = StopTable(3)
    assert _hits(table, [0, 1, 2], [0, NO_TOKEN, NOTHING + 1]) == [False] * 3
    assert _hits(table, [], []) == []


def test_each_slot_has_its_own() -> None:
    table = StopTable(3)
    table.set(0, {5, 7}, CAP)
    table.set(2, {7}, CAP)
    assert _hits(table, [0, 1, 2, 0, 2], [5, 5, 5, 7, 7]) == [True, False, False, True, True]


def test_no_token_never_hits() -> None:
    """Whatever the slot has: a row that sampled nothing does not stop."""
    table = StopTable(2)
    table.set(0, set(range(WIDTH + 3)), CAP)
    table.set(1, {0}, CAP)
    assert _hits(table, [0, 1], [NO_TOKEN, NO_TOKEN]) == [False, False]


def test_around_the_width() -> None:
    for count in (WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH):
        table = StopTable(2)
        ids = [10 * i for i in range(count)]
        table.set(1, ids, CAP)
        assert _hits(table, [1] * count, ids) == [True] * count
        assert _hits(table, [0] * count, ids) == [False] * count
        assert _hits(table, [1] * count, [i + 1 for i in ids]) == [False] * count


def test_ids_that_int32_ends_at() -> None:
    table = StopTable(1)
    table.set(0, {0, 2**31 - 1}, CAP)
    assert _hits(table, [0, 0, 0], [0, 2**31 - 1, 1]) == [True, True, False]


def test_int32_slots() -> None:
    """The runner's handles are int32, the scheduler's slots int64."""
    table = StopTable(2)
    table.set(1, range(20), CAP)
    slots, tokens = np.array([1, 0], np.int32), np.array([19, 19], np.int32)
    assert table.hits(slots, tokens).tolist() == [True, False]


@given(
    changes=st.lists(st.tuples(st.integers(0, 3), SETS), max_size=12),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 30)), max_size=20),
)
def test_the_last_set_counts(
    changes: list[tuple[int, frozenset[int]]], rows: list[tuple[int, int]]
) -> None:
    """Nothing of a slot's former request is left, whatever their sizes."""
    table, model = StopTable(4), [frozenset[int]()] * 4
    for slot, ids in changes:
        table.set(slot, ids, CAP)
        model[slot] = ids
    expected = [token in model[slot] for slot, token in rows]
    assert _hits(table, [slot for slot, _ in rows], [token for _, token in rows]) == expected


@given(st.frozensets(st.integers(0, 5), max_size=3), st.lists(st.integers(-1, 5), max_size=6))
def test_one_rule(stop: frozenset[int], tokens: list[int]) -> None:
    """A token ends the request if it is a stop token or the last one below the cap."""
    table, prompt, max_tokens = StopTable(1), 3, 4
    table.set(0, stop, prompt + max_tokens)
    slots, known = np.zeros(len(tokens), np.int64), prompt + 1 + np.arange(len(tokens))
    stopped, full = table.ended(slots, np.array(tokens, np.int32), known)
    assert stopped.tolist() == [token in stop for token in tokens]
    assert full.tolist() == [number >= max_tokens for number in range(1, len(tokens) + 1)]
    assert table.num_left(slots, known).tolist() == [3 - index for index in range(len(tokens))]
