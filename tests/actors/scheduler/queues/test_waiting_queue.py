"""The waiting queue alone: first come, first served, and by priority with aging."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.scheduler.queues.ranked_queue import RankedQueue
from rayfin.actors.scheduler.request import Request
from rayfin.cache.prefix_index import HashChain


def _request(order: int, priority: int = 0, arrival: float = 0.0) -> Request:
    source = EngineRequest(
        str(order), np.array([1], np.int32), Sampling(), StopRules(1), priority=priority
    )
    return Request(source, order, arrival, HashChain(4))


def _fcfs() -> RankedQueue:
    return RankedQueue(by_priority=False, aging=0.0)


def test_preempted_request_comes_back_in_front() -> None:
    waiting = _fcfs()
    first, second = _request(0), _request(1)
    waiting.push(first)
    waiting.push(second)
    assert waiting.pop() is first
    waiting.push(first)
    assert waiting.peek() is first and len(waiting) == 2


def test_discarded_requests_are_skipped() -> None:
    waiting = _fcfs()
    requests = [_request(order) for order in range(4)]
    for request in requests:
        waiting.push(request)
    waiting.discard(requests[0])
    waiting.discard(requests[2])
    assert len(waiting) == 2
    assert [waiting.pop(), waiting.pop()] == [requests[1], requests[3]]
    assert waiting.peek() is None
    with pytest.raises(IndexError):
        waiting.pop()


@given(priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=20))
def test_order(priorities: list[int]) -> None:
    for by_priority in (False, True):
        waiting = RankedQueue(by_priority, aging=0.0)
        requests = [_request(order, priority) for order, priority in enumerate(priorities)]
        for request in reversed(requests):
            waiting.push(request)
        expected = requests
        if by_priority:
            expected = sorted(requests, key=lambda request: request.source.priority)
        assert [waiting.pop() for _ in requests] == expected


def test_a_level_is_worth_its_aging() -> None:
    waiting = RankedQueue(by_priority=True, aging=30.0)
    old, better, late, later = (
        _request(0, priority=2, arrival=0.0),
        _request(1, priority=0, arrival=59.0),
        _request(2, priority=0, arrival=60.0),
        _request(3, priority=-1, arrival=91.0),
    )
    for request in (later, late, better, old):
        waiting.push(request)
    assert [waiting.pop() for _ in range(4)] == [better, old, late, later]
    assert waiting.victim([better, later, old]) is later


@given(
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.floats(0, 1e9)), max_size=20),
    st.floats(0.001, 1e6),
)
def test_first_come_within_a_level(wishes: list[tuple[int, float]], aging: float) -> None:
    """I10, also where a sum of arrival and priority loses digits."""
    waiting = RankedQueue(by_priority=True, aging=aging)
    arrivals = sorted(arrival for _, arrival in wishes)
    requests = [
        _request(order, priority, arrival)
        for order, ((priority, _), arrival) in enumerate(zip(wishes, arrivals, strict=True))
    ]
    for request in requests:
        waiting.push(request)
    popped = [waiting.pop() for _ in requests]
    for level in {priority for priority, _ in wishes}:
        orders = [request.order for request in popped if request.source.priority == level]
        assert orders == sorted(orders)
