"""The runner's mirror: diffs in, and nothing left of a slot's former request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.request_slots import RequestSlots

Make = Callable[..., Any]


def _fields(slots: RequestSlots) -> dict[str, Any]:
    return {**vars(slots), **vars(slots.settings)}


def _poison(slots: RequestSlots) -> None:
    for array in _fields(slots).values():
        if isinstance(array, np.ndarray):
            array[:] = 99
    for handle in range(len(slots.num_pages)):
        slots.scored[handle] = NewRequest(handle, Sampling(prompt_logprobs=9), 99)
        slots.stops.set(handle, range(20), 100)
    slots.settings.of(np.arange(2, dtype=np.int32), np.zeros(2, np.int64), torch.device("cpu"))


def test_a_used_slot_is_as_good_as_a_fresh_one(step_of: Make, row: Make) -> None:
    """I20: every field of the slot, poisoned by the one before, is set anew."""
    fresh, used = RequestSlots(2, 4), RequestSlots(2, 4)
    _poison(used)
    odd = Sampling(0.7, 5, 0.9, 0.2, 123, logprobs=3, prompt_logprobs=2)
    for sampling in (Sampling(), odd, Sampling()):
        info = step_of(
            row(1, [1, 2, 3, 4, 5], held=2, new_pages=[3, 0]),
            new=[NewRequest(1, sampling, 100, frozenset([5]))],
            finished=[1],
        )
        fresh.apply(info)
        used.apply(info)
        kept = _fields(used)
        for name, array in _fields(fresh).items():
            if name == "page_tables":
                assert used.page_tables[1, :2].tolist() == array[1, :2].tolist() == [3, 0]
            # Entries only grow, and there is no group beside.
            elif isinstance(array, np.ndarray) and name not in ("entries", "beside"):
                assert kept[name][1] == array[1], name
        rows = (np.array([1], np.int32), np.zeros(1, np.int64), torch.device("cpu"))
        assert str(used.settings.of(*rows)) == str(fresh.settings.of(*rows))
        assert used.scored.get(1) == fresh.scored.get(1)
        tokens = np.arange(25, dtype=np.int32)
        assert np.flatnonzero(used.stops.hits(np.full(25, 1), tokens)).tolist() == [5]


def test_an_entry_has_a_page_of_each_group(step_of: Make, row: Make) -> None:
    slots = RequestSlots(2, 4, beside=2)
    pages = [8, 6, 7, 1, 0, 0]
    info = step_of(row(1, [1] * 5, held=2, new_pages=pages), new=[NewRequest(1, Sampling(), 9)])
    info.new_pages_len[:] = 2
    slots.apply(info)
    assert slots.page_tables[1, :2].tolist() == [8, 1] and slots.num_pages[1] == 2
    assert slots.beside[:, 1, :2].tolist() == [[6, 0], [7, 0]]


def test_pages_are_appended_row_by_row(step_of: Make, row: Make) -> None:
    slots = RequestSlots(3, 4)
    slots.apply(
        step_of(
            row(2, [1] * 5, held=2, new_pages=[8, 6]),
            row(0, [1] * 9, held=3, new_pages=[1, 5, 3]),
            new=[NewRequest(2, Sampling(), 100), NewRequest(0, Sampling(), 100)],
        )
    )
    slots.apply(
        step_of(
            row(0, [-1], kv_len=9, held=3, decoding=True),
            row(2, [-1], kv_len=8, held=3, new_pages=[4], decoding=True),
        )
    )
    assert slots.page_tables[0, :3].tolist() == [1, 5, 3]
    assert slots.page_tables[2, :3].tolist() == [8, 6, 4]
    assert slots.num_pages.tolist() == [3, 0, 3]


def test_slot_changes_hands_in_one_step(step_of: Make, row: Make) -> None:
    """``finished`` comes before ``new_requests``."""
    slots = RequestSlots(1, 4)
    scored = Sampling(logprobs=3, prompt_logprobs=2)
    slots.apply(step_of(row(0, [1] * 5, new_pages=[0, 1]), new=[NewRequest(0, scored, 100)]))
    slots.apply(
        step_of(row(0, [1], new_pages=[3]), new=[NewRequest(0, Sampling(), 100)], finished=[0])
    )
    assert slots.num_pages[0] == 1 and slots.page_tables[0, 0] == 3
    assert slots.scored == {} and slots.logprobs[0] == -1


def test_remembers_sampled_tokens_only(step_of: Make, row: Make) -> None:
    slots = RequestSlots(3, 1)
    info = step_of(row(2, [1]), row(0, [1]), row(1, [1]))
    slots.remember(info, np.array([7, -1, 5], np.int32))
    assert slots.last_token.tolist() == [0, 5, 7]
