"""The waiting queue alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.scheduler.queues import WaitingQueue
from rayfin.actors.scheduler.request import Request
from rayfin.cache.prefix_index import HashChain


def _request(order: int, priority: int = 0) -> Request:
    source = EngineRequest(
        str(order), np.array([1], np.int32), Sampling(), StopRules(1), priority=priority
    )
    return Request(source, order, HashChain(4))


def test_preempted_request_comes_back_in_front() -> None:
    waiting = WaitingQueue("fcfs")
    first, second = _request(0), _request(1)
    waiting.push(first)
    waiting.push(second)
    assert waiting.pop() is first
    waiting.push(first)
    assert waiting.peek() is first and len(waiting) == 2


def test_discarded_requests_are_skipped() -> None:
    waiting = WaitingQueue("fcfs")
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
@settings(deadline=None)
def test_order(priorities: list[int]) -> None:
    for policy in ("fcfs", "priority"):
        waiting = WaitingQueue(policy)  # type: ignore[arg-type]
        requests = [_request(order, priority) for order, priority in enumerate(priorities)]
        for request in reversed(requests):
            waiting.push(request)
        expected = sorted(requests, key=waiting.rank)
        if policy == "fcfs":
            assert expected == requests
        assert [waiting.pop() for _ in requests] == expected
