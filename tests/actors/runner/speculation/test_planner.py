"""As many drafts as gain time: the planner on a clock and a table that the test owns."""

from typing import Any

import numpy as np
import pytest

from rayfin.actors.runner.speculation.interface import Drafts
from rayfin.actors.runner.speculation.planner import DraftPlanner
from rayfin.actors.step_cost import StepCost
from rayfin.actors.timing import DRAFT_PAUSE_SECONDS, DRAFT_WINDOW_SECONDS

CHEAP = StepCost((1, 128), (0.010, 0.011))  # reading weights is all
DEAR = StepCost((1, 128), (0.001, 0.128))  # each token costs as much as the first
ONE = np.zeros(1, np.int64)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def planner_of(cost: StepCost, clock: Clock | None = None, **settings: Any) -> DraftPlanner:
    return DraftPlanner(8, 5, cost, clock=clock or Clock(), **settings)


def drafts(rows: int, trust: int = 4) -> Drafts:
    lengths = np.full(rows, 5)
    return Drafts(np.zeros((rows, 5), np.int32), lengths, np.full(rows, trust))


def test_cheap_tokens_are_drafted_and_dear_ones_not() -> None:
    slots = np.arange(4)
    assert planner_of(CHEAP).pick(slots, drafts(4), 4, 4, 100).tolist() == [5] * 4
    assert planner_of(DEAR).pick(slots, drafts(4), 4, 4, 100).tolist() == [0] * 4


def test_the_budget_is_kept_and_better_drafts_go_first() -> None:
    slots, trust = np.arange(4), np.array([0, 7, 0, 7])
    mixed = Drafts(np.zeros((4, 5), np.int32), np.full(4, 5), trust)
    picked = planner_of(CHEAP).pick(slots, mixed, 4, 4, 8)
    assert picked.sum() == 8 and picked[1] == picked[3] == 4
    fixed = planner_of(DEAR, adaptive=False).pick(slots, mixed, 4, 4, 8)
    assert fixed.tolist() == [5, 3, 0, 0]


def test_wrong_drafts_end_and_right_ones_grow() -> None:
    cost = StepCost((1, 128), (0.010, 0.200))
    planner = planner_of(cost)
    for _ in range(30):
        picked = planner.pick(ONE, drafts(1), 1, 1, 100)
        if picked[0]:
            planner.learn(ONE, picked, np.zeros(1, np.int64))
    assert not planner.pick(ONE, drafts(1), 1, 1, 100)[0]
    planner = planner_of(cost)
    first = planner.pick(ONE, drafts(1, 1), 1, 1, 100)
    for _ in range(30):
        planner.pick(ONE, drafts(1, 1), 1, 1, 100)
        planner.learn(ONE, np.array([5]), np.array([5]))
    assert planner.pick(ONE, drafts(1, 1), 1, 1, 100)[0] > first[0]


@pytest.mark.parametrize("follow", [True, False])
def test_the_guard_pauses_what_costs_more_than_it_gives(follow: bool) -> None:
    clock = Clock()
    planner = planner_of(CHEAP, clock, follow=follow)
    pauses = []
    for _ in range(2):
        spent = 0.0
        while spent <= DRAFT_WINDOW_SECONDS:  # one token in twice the time of a plain step
            seconds = 2 * float(CHEAP.seconds(1))
            planner.observe(6, 5, 1, 1, seconds)
            spent += seconds
        start = clock.now
        while not planner.room(np.array([5]), 1, 1, 64)[0]:
            clock.now += 1.0
        pauses.append(clock.now - start)
    assert pauses == ([DRAFT_PAUSE_SECONDS, 2 * DRAFT_PAUSE_SECONDS] if follow else [0.0, 0.0])


def modelled(seconds: float) -> DraftPlanner:
    """A planner whose drafts take ``seconds`` each."""
    cost = StepCost((1, 128), (0.010, 0.011))
    return DraftPlanner(8, 5, cost, draft_seconds=lambda _: seconds, clock=Clock())


@pytest.mark.parametrize(("seconds", "depth"), [(0.0, 5), (0.001, 4), (0.004, 2), (0.02, 0)])
def test_drafts_that_cost_time_are_as_long_as_they_gain_some(seconds: float, depth: int) -> None:
    planner, left = modelled(seconds), np.full(2, 9)
    assert planner.room(left, 2, 2, 100).tolist() == [depth] * 2
    assert planner.room(left, 2, 2, 4).tolist() == [min(depth, 2)] * 2  # no more than fit
    assert planner.room(np.array([1, 9]), 2, 2, 100).tolist() == [min(depth, 1), depth]


def test_their_length_follows_what_was_right() -> None:
    planner, left = modelled(0.002), np.full(1, 9)
    assert planner.room(left, 1, 1, 100)[0] > 2
    for _ in range(30):
        counts = planner.pick(ONE, drafts(1, trust=7), 1, 1, 100)
        planner.learn(ONE, counts, ONE)  # none is ever right
    assert planner.room(left, 1, 1, 100)[0] == 0
    while not planner.room(left, 1, 1, 100)[0]:  # one day it is tried again
        pass


def test_a_pause_ends_with_the_slow_spell_that_began_it() -> None:
    """Others on the machine made steps with drafts slow, and plain ones as well."""
    clock = Clock()
    planner = planner_of(StepCost((1, 128), (0.010, 0.011)), clock)
    spent = 0.0
    while spent <= DRAFT_WINDOW_SECONDS:
        planner.observe(6, 5, 1, 1, 0.040)
        spent += 0.040
    assert not planner.room(np.array([5]), 1, 1, 64)[0]
    for seconds in [0.030] * 60 + [0.010] * 30:
        clock.now += seconds
        planner.observe(1, 0, 1, 1, seconds)
    assert clock.now < DRAFT_PAUSE_SECONDS / 2 and planner.room(np.array([5]), 1, 1, 64)[0]
