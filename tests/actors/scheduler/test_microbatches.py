"""Decoding rows take turns in a pipeline, each in one stage while others are in the next."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher


class Rows(SimpleNamespace):
    """As much of a RunningTable as turns look at."""

    def __init__(self, *slots: int) -> None:
        super().__init__(requests=[None] * 8, lockstep=np.zeros(8, np.bool_))
        self.slots = slots

    def decodable(self) -> Any:
        return np.array(self.slots, np.int64)


def take(turns: DecodeMicrobatcher, count: int) -> list[list[int]]:
    return [turns.next_rows().tolist() for _ in range(count)]


def test_one_stage_takes_all() -> None:
    rows: Any = Rows(0, 3, 5)
    turns = DecodeMicrobatcher(rows, 1)
    assert take(turns, 3) == [[0, 3, 5]] * 3 and not turns.alternate


@pytest.mark.parametrize("stages", [2, 3])
def test_a_row_rests_until_all_others_went(stages: int) -> None:
    rows: Any = Rows(0, 2, 3, 5, 7)
    turns = DecodeMicrobatcher(rows, stages)
    steps = take(turns, 4 * stages)
    assert turns.alternate
    for at in range(len(steps) - stages + 1):
        together = [slot for step in steps[at : at + stages] for slot in step]
        assert sorted(together) == [0, 2, 3, 5, 7]


def test_newcomers_fill_up_and_those_who_leave_hold_up_nobody() -> None:
    rows: Any = Rows(0, 1)
    turns = DecodeMicrobatcher(rows, 2)
    assert take(turns, 3) == [[0], [1], [0]]
    rows.slots = (0, 1, 2, 3)
    assert take(turns, 4) == [[2, 3], [0, 1], [2, 3], [0, 1]]
    rows.slots = (2, 3)
    assert sorted(sum(take(turns, 4), [])) == [2, 2, 3, 3]


def test_all_at_once_where_there_are_few_or_some_must_stay_together() -> None:
    rows: Any = Rows(4)
    turns = DecodeMicrobatcher(rows, 2)
    assert take(turns, 2) == [[4], [4]]
    rows.slots = (4, 5, 6)
    rows.lockstep[5] = True
    assert take(turns, 2) == [[4, 5, 6]] * 2
