"""States by slot: rows in turn, snapshots, and drafts of which a part turns out to be right."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.runner.state_tensors import NOWHERE, StateLayout, StateRows, StateTensors
from rayfin.cache.errors import CacheError

CPU = torch.device("cpu")
LAYOUTS = [StateLayout((2,), torch.int64), StateLayout((1,), torch.int64)]


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def behind(tokens: Sequence[int]) -> int:
    """The state of a layer behind so many tokens."""
    state = 7
    for token in tokens:
        state = (31 * state + token) % (1 << 40)
    return state


def compute(states: StateTensors, rows: StateRows, chunks: Sequence[Sequence[int]]) -> list[int]:
    """What layers do with a step: [R] the states that its rows have started from."""
    found, at = [], 0
    for row, chunk in enumerate(chunks):
        state = int(states.tensors[0][rows.read[row], 0]) if rows.before[row] else 7
        found.append(state)
        for place, token in enumerate(chunk):
            state = (31 * state + token) % (1 << 40)
            targets = [] if rows.each is None or rows.each[at] == NOWHERE else [rows.each[at]]
            targets += [rows.write[row]] if place == len(chunk) - 1 else []
            for target in targets:
                assert target != rows.read[row]
                for tensor in states.tensors:
                    tensor[target] = state
            at += 1
    return found


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed: int) -> None:
    """Each step starts from the tokens that count, whatever was drafted, failed or copied."""
    rng = random.Random(seed)
    slots, drafts = 5, 6
    states = StateTensors(LAYOUTS, slots, 3, CPU, drafts)
    texts: list[list[int]] = [[] for _ in range(slots)]
    snapshots: dict[int, list[int]] = {}
    drafted = 0
    for _ in range(400):
        own = rng.sample(range(slots), rng.randint(1, slots))
        room, chunks, drafting = drafts, [], []
        for slot in own:
            count = rng.randint(0, min(room, 4)) if texts[slot] and rng.random() < 0.6 else 0
            length = count + 1 if count else rng.choice([1, 1, 1, 5])
            chunks.append([rng.randrange(100) for _ in range(length)])
            drafting.append(count > 0)
            room -= count
        before = ints([len(texts[slot]) for slot in own])
        after = before + ints([len(chunk) for chunk in chunks])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):  # a step that fails is computed again
            rows = states.begin(ints(own), before, after, np.array(drafting))
            found = compute(states, rows, chunks)
            assert all(
                not texts[slot] or state == behind(texts[slot])
                for slot, state in zip(own, found, strict=True)
            )
            if rng.random() < 0.5:
                states.commit(rows)
        states.commit(rows)
        kept = [
            rng.randint(1, len(c)) if d else len(c) for c, d in zip(chunks, drafting, strict=True)
        ]
        if any(drafting):
            drafted += 1
            states.settle(before + ints(kept))
        for slot, chunk, count in zip(own, chunks, kept, strict=True):
            texts[slot] += chunk[:count]
        _move(rng, states, texts, snapshots)
    assert drafted > 50


def _move(
    rng: random.Random,
    states: StateTensors,
    texts: list[list[int]],
    snapshots: dict[int, list[int]],
) -> None:
    """Sometimes a copy, a snapshot, a request from a snapshot, or a new one."""
    slot, other, snapshot = *rng.sample(range(len(texts)), 2), rng.randrange(3)
    kind = rng.random()
    if kind < 0.1 and texts[slot]:
        states.copy(ints([slot]), ints([other]))
        texts[other] = list(texts[slot])
    elif kind < 0.2 and texts[slot]:
        states.save(ints([slot]), ints([snapshot]))
        snapshots[snapshot] = list(texts[slot])
    elif kind < 0.3 and snapshot in snapshots:
        states.load(ints([snapshot]), ints([slot]))
        texts[slot] = list(snapshots[snapshot])
    elif kind < 0.35:
        texts[slot] = []


def test_nothing_kept() -> None:
    """A row whose first token fails stands where it was."""
    states = StateTensors(LAYOUTS, 2, 0, CPU, 3)
    for before, after in ((0, 4), (4, 5)):
        rows = states.begin(ints([1]), ints([before]), ints([after]))
        compute(states, rows, [[5] * (after - before)])
        states.commit(rows)
    rows = states.begin(ints([1]), ints([5]), ints([8]), np.array([True]))
    compute(states, rows, [[1, 2, 3]])
    states.commit(rows)
    states.settle(ints([5]))
    states.copy(ints([1]), ints([0]))
    again = states.begin(ints([0, 1]), ints([5, 5]), ints([6, 6]))
    assert compute(states, again, [[1], [1]]) == [behind([5] * 5)] * 2


def test_refused() -> None:
    """A state that is not there, and more drafts than there are states for."""
    states = StateTensors(LAYOUTS, 2, 0, CPU, 2)
    with pytest.raises(CacheError, match="slot 1 has no state of 4 tokens"):
        states.begin(ints([1]), ints([4]), ints([5]))
    rows = states.begin(ints([1]), ints([0]), ints([4]))
    states.commit(rows)
    with pytest.raises(CacheError, match="3 drafts, and there are states for 2"):
        states.begin(ints([1]), ints([4]), ints([8]), np.array([True]))
    rows = states.begin(ints([1]), ints([4]), ints([7]), np.array([True]))
    states.commit(rows)
    states.settle(ints([6]))
    for gone in (5, 7):
        with pytest.raises(CacheError, match=f"slot 1 has no state of {gone} tokens"):
            states.begin(ints([1]), ints([gone]), ints([8]))
    assert states.begin(ints([1]), ints([6]), ints([8])).before.tolist() == [6]


def test_assumed_states_are_forgotten() -> None:
    states = StateTensors(LAYOUTS, 3, 0, CPU, 2)
    states.assume(ints([0, 2]), ints([9, 8]))
    states.commit(states.begin(ints([0, 2]), ints([9, 8]), ints([10, 9])))
    states.forget()
    with pytest.raises(CacheError, match="slot 0 has no state of 10 tokens"):
        states.begin(ints([0]), ints([10]), ints([11]))


@given(
    steps=st.lists(st.lists(st.integers(1, 4), min_size=3, max_size=3), min_size=1, max_size=6),
    prompts=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_steps_at_once_are_steps_one_by_one(steps: list[list[int]], prompts: list[int]) -> None:
    """Which rows the first one reads and writes, and where each request stands afterwards."""
    layouts = [StateLayout((1,), torch.float32)]
    both = [StateTensors(layouts, 3, 0, torch.device("cpu")) for _ in range(2)]
    slots, lengths = ints([0, 1, 2]), ints(prompts)
    for states in both:
        states.commit(states.begin(slots, ints([0, 0, 0]), lengths))
    for counts in steps:
        at_once, one_by_one = both
        rows = at_once.advance(slots, lengths, ints(counts))
        for step in range(max(counts)):
            left = ints([slot for slot in range(3) if counts[slot] > step])
            single = one_by_one.begin(left, lengths[left] + step, lengths[left] + step + 1)
            if step == 0:
                assert single.read.tolist() == rows.read.tolist()
                assert single.write.tolist() == rows.write.tolist()
            one_by_one.commit(single)
        assert at_once._lengths.tolist() == one_by_one._lengths.tolist()
        assert at_once._current.tolist() == one_by_one._current.tolist()
        lengths = lengths + ints(counts)
    assert all(len(states.tensors[0]) == states.padding + 1 for states in both)
