"""Clients of an engine: their output, their heartbeats, their silence."""

import inspect

import pytest

from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.messages import Ended, TokenDeltas
from rayfin.actors.scheduler import subscriptions as module
from rayfin.actors.scheduler.subscriptions import Subscriptions

BEAT = TokenDeltas.only()


def runner_diff(key: int) -> TokenDeltas:
    return TokenDeltas.only(Ended(key, "length"))


def test_news_until_it_is_closed() -> None:
    subscriptions = Subscriptions()
    subscriptions.renew("a")
    first, second = runner_diff(1), runner_diff(2)
    subscriptions.post({"a": first, "b": runner_diff(3)})  # b is no client
    subscriptions.post({"a": second})
    reading = subscriptions.read("a", lambda: BEAT)
    assert next(reading) is first and next(reading) is second
    subscriptions.close("a")
    assert list(reading) == []


def test_who_is_dismissed_reads_to_the_end_and_leaves() -> None:
    subscriptions = Subscriptions()
    sent = [runner_diff(1), runner_diff(2)]
    for client in ("a", "b"):
        subscriptions.seat(client)
    for message in sent:
        subscriptions.post({"a": message})
    assert subscriptions.close_subscriptions() == 2
    assert list(subscriptions.read("a", lambda: BEAT)) == sent
    assert subscriptions.close_subscriptions() == 2
    subscriptions.close("a")
    assert subscriptions.close_subscriptions() == 1
    with pytest.raises(EngineUnavailable, match="being stopped"):
        subscriptions.seat("c")
    assert list(subscriptions.read("b", lambda: BEAT)) == []
    subscriptions.close("b")
    assert subscriptions.close_subscriptions() == 0


def test_a_call_ends_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is lost between them, none comes of a client that has left."""
    monkeypatch.setattr(module, "MESSAGES_PER_CALL", 3)
    subscriptions = Subscriptions()
    reading = subscriptions.read("a", lambda: BEAT)
    subscriptions.renew("a")
    sent = [runner_diff(key) for key in range(7)]
    for message in sent:
        subscriptions.post({"a": message})
    assert inspect.isgenerator(reading)  # as Ray wants it
    assert list(reading) == sent[:3]
    assert list(subscriptions.read("a", lambda: BEAT, again=True)) == sent[3:6]
    subscriptions.close("a")
    assert list(subscriptions.read("a", lambda: BEAT, again=True)) == []
    assert subscriptions.silent(-1.0) == []


def test_each_client_has_a_seat_of_its_own() -> None:
    """From its first call to its last: another client gets it when no call reads in it."""
    subscriptions = Subscriptions()
    assert [subscriptions.seat(client) for client in "aba"] == [0, 1, 0]
    reading, first = subscriptions.read("a", lambda: BEAT), runner_diff(1)
    subscriptions.post({"a": first})
    assert next(reading) is first
    subscriptions.close("a")
    assert subscriptions.seat("c") == 2
    assert list(reading) == []
    assert subscriptions.seat("d") == 0


def test_a_client_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 2)
    subscriptions = Subscriptions()
    assert [subscriptions.seat(client) for client in "ab"] == [0, 1]
    with pytest.raises(EngineUnavailable, match="2 clients"):
        subscriptions.seat("c")
    subscriptions.close("a")
    assert subscriptions.seat("c") == 0


def test_beats_come_between_news() -> None:
    """However many there are: one that is due goes first."""
    now = 0.0
    subscriptions = Subscriptions(lambda: now)
    reading = subscriptions.read("a", lambda: BEAT, 10.0)
    assert next(reading) is BEAT
    first, second, third = runner_diff(1), runner_diff(2), runner_diff(3)
    for message in (first, second, third):
        subscriptions.post({"a": message})
    assert next(reading) is first
    now = 10.0
    assert next(reading) is BEAT
    assert next(reading) is second
    now = 19.0
    assert next(reading) is third


def test_beats_come_without_news() -> None:
    subscriptions = Subscriptions()
    reading = subscriptions.read("a", lambda: BEAT, 0.001)
    assert [next(reading) is BEAT for _ in range(3)] == [True] * 3


def test_silence() -> None:
    now = 0.0
    subscriptions = Subscriptions(lambda: now)
    subscriptions.renew("a")
    now = 5.0
    subscriptions.renew("b")
    assert subscriptions.silent(4.0) == ["a"]
    subscriptions.close("a")
    assert subscriptions.silent(4.0) == []
