"""What is kept of requests that have ended, for how long, and for whom."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayfin.actors.messages import EngineRequest, Receipt, Sampling, StopRules, TokenLog
from rayfin.actors.scheduler.faults import token_logs
from rayfin.actors.scheduler.faults.token_logs import TokenLogs
from rayfin.actors.scheduler.request import Request
from rayfin.actors.weights.spans import VersionSpan
from rayfin.actors.weights.version import BASE_LABEL
from rayfin.cache.prefix_index import HashChain

Make = Callable[..., Any]
RECEIPT = Receipt("cmpl-1", 7, b"digest")


def source(name: str, receipt: Receipt | None = RECEIPT, max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(
        name,
        np.arange(5, dtype=np.int32),
        Sampling(seed=3),
        StopRules(max_tokens),
        client="a",
        key=hash(name),
        tenant="me",
        receipt=receipt,
    )


def spans_of(tokens: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(BASE_LABEL, tokens),)


def ended(name: str, tokens: int, receipt: Receipt | None = RECEIPT) -> Request:
    return Request(
        source(name, receipt), 0, 0.0, HashChain(4, ()), np.arange(tokens, dtype=np.int32)
    )


def test_only_for_its_tenant_and_its_time() -> None:
    now = 100.0
    logs = TokenLogs(lambda: now, seconds=60.0)
    logs.keep(ended("r1", 2), "length")
    found = logs.find("me", "r1")
    assert found == TokenLog(RECEIPT, 3, [0, 1], "length", spans=spans_of(2))
    assert logs.find("other", "r1") is None
    assert logs.find("me", "r3") is None
    now = 160.0
    assert logs.find("me", "r1") == found
    now = 160.1
    assert logs.find("me", "r1") is None
    assert (len(logs), logs.num_tokens) == (0, 0)


def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = TokenLogs(lambda: 0.0, max_tokens=10)
    for name in "abc":
        logs.keep(ended(name, 4))
    assert [logs.find("me", name) is not None for name in "abc"] == [False, True, True]
    logs.keep(ended("b", 5))  # ended again, after somebody went on with it
    assert (len(logs), logs.num_tokens) == (2, 9)
    monkeypatch.setattr(token_logs, "MAX_LOGS", 1)
    logs.keep(ended("d", 0))
    assert len(logs) == 1 and logs.find("me", "d") is not None
    logs.keep(ended("e", 11))  # larger than all there may be
    assert (len(logs), logs.num_tokens) == (0, 0)


def test_engine_recalls_what_ended_and_takes_back_what_runs(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, prefix_caching=False)
    h.engine.add(source("done", max_tokens=2))
    h.engine.add(source("runs"))
    received: dict[int, list[int]] = {}
    while len(received.get(hash("runs"), ())) < 3:
        message = h.engine.step().get("a")
        if message is not None:
            for key, token in zip(message.keys.tolist(), message.tokens.tolist(), strict=True):
                received.setdefault(key, []).append(token)
    done, runs, other = h.engine.recall("me", ["done", "runs", "never"])
    tokens = received[hash("done")]
    assert done == TokenLog(RECEIPT, 3, tokens, "length", spans=spans_of(len(tokens)))
    tokens = received[hash("runs")]
    assert runs == TokenLog(RECEIPT, 3, tokens, None, spans=spans_of(len(tokens)))
    assert other is None
    assert h.engine.recall("you", ["done", "runs"]) == [None, None]
    (ended,) = h.engine.step()["a"].ended  # a client that still reads it gets an end
    assert (ended.key, ended.finish_reason) == (hash("runs"), "abort")
    while h.engine.has_work:  # steps in flight
        assert h.engine.step() == {}
    h.engine.check_integrity()
    assert h.engine.stats().finished == {"length": 1, "abort": 1}


def test_recall_of_another_tenant_takes_nothing(harness: Make) -> None:
    h = harness()
    h.engine.add(source("runs"))
    assert h.engine.recall("you", ["runs"]) == [None]
    assert h.engine.stats().waiting == 1
    (log,) = h.engine.recall("me", ["runs"])
    assert log is not None and log.tokens == []
    assert not h.engine.has_work


def test_resubmitted_is_not_counted_as_new(harness: Make) -> None:
    """An engine that takes over another one's streams turns none of them away."""
    h = harness(max_waiting_requests=1)
    h.engine.add(source("new"))
    for name in ("old", "older"):
        moved = source(name)
        moved.output = [1, 2]
        h.engine.add(moved)
    assert h.engine.stats().waiting == 3
