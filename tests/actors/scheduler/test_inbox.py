"""Clients' sockets at the engine: real ones, and no Ray."""

import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rayfin.actors.messages import Ended, TokenDeltas
from rayfin.actors.scheduler.inbox import ClientLinks, ClientMessage, EngineCall
from rayfin.actors.scheduler.subscriptions import Subscriptions
from rayfin.actors.transport.channel import WELCOME, Channel, connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
PATIENCE = 30.0  # seconds; only a failure waits so long
BEAT = TokenDeltas.only(Ended(0, "beat"))


class Engine:
    """What stands behind the sockets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.subscriptions = Subscriptions(lambda: self.now)
        self.inbox: queue.SimpleQueue[ClientMessage | EngineCall] = queue.SimpleQueue()
        self.links = ClientLinks(self.subscriptions, self.inbox)

    def heard(self) -> ClientMessage:
        message = self.inbox.get(timeout=PATIENCE)
        assert isinstance(message, ClientMessage)
        return message


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def client(engine: Engine) -> Iterator[Channel]:
    """A client that has attached and connected."""
    engine.subscriptions.seat("a")
    with connect(engine.links.address()) as connected:
        channel = introduced(connected, "a")
        assert channel.receive(PATIENCE) is WELCOME
        yield channel


def introduced(connected: socket.socket, name: str) -> Channel:
    channel = Channel(connected)
    channel.send(name)
    return channel


def keys(client: Channel, count: int) -> list[int]:
    return [client.receive(PATIENCE).ended[0].key for _ in range(count)]


def ended(key: int) -> TokenDeltas:
    return TokenDeltas.only(Ended(key, "length"))


def test_requests_reach_the_inbox_in_order_and_renew_the_lease(
    engine: Engine, client: Channel
) -> None:
    engine.now = 9.0
    sent: list[Any] = ["request"]  # whatever it is
    client.send((sent, [], []))
    client.send(([], [1], [2]))
    first, second = engine.heard(), engine.heard()
    assert (first.client, first.requests, first.aborts) == ("a", sent, [])
    assert (second.requests, second.aborts, second.stopped) == ([], [1], [2])
    engine.now = 10.0
    assert engine.subscriptions.silent(5.0) == []


def test_the_socket_takes_all_messages_and_the_call_only_ends(
    engine: Engine, client: Channel
) -> None:
    engine.subscriptions.post({"a": ended(1)})
    reading = engine.subscriptions.read("a", lambda: BEAT, 0.0)
    engine.subscriptions.close_subscriptions()
    assert list(reading) == []
    assert keys(client, 1) == [1]
    assert list(client) == []


def test_beats_go_by_the_socket(engine: Engine, client: Channel) -> None:
    def beat() -> TokenDeltas:
        engine.now += 1.0
        if engine.now > 3.0:
            engine.subscriptions.close("a")
        return BEAT

    assert list(engine.subscriptions.read("a", beat, 0.5)) == []
    assert keys(client, 3) == [0, 0, 0]


def test_a_client_that_closes_its_socket_has_left(engine: Engine, client: Channel) -> None:
    client.send(([], [3], []))
    client.close()
    assert engine.heard().aborts == [3]
    last = engine.heard()
    assert (last.client, last.leaves) == ("a", True)


def test_a_client_whose_lease_has_run_out_is_cut_off(engine: Engine, client: Channel) -> None:
    engine.subscriptions.close("a")
    assert list(client) == []
    assert engine.heard().leaves


def test_one_that_has_not_attached_is_not_taken(engine: Engine) -> None:
    with connect(engine.links.address()) as connected:
        assert list(introduced(connected, "stranger")) == []
    engine.subscriptions.close_subscriptions()
    with connect(engine.links.address()) as connected:
        assert list(introduced(connected, "late")) == []
    assert engine.inbox.empty()


def test_a_message_that_cannot_be_packed_cuts_off_its_client_only(
    engine: Engine, client: Channel
) -> None:
    engine.subscriptions.seat("b")
    broken: Any = threading.Lock()  # has no pickle
    engine.subscriptions.post({"a": broken, "b": ended(2)})
    assert list(client) == []
    left = engine.heard()
    assert (left.client, left.leaves) == ("a", True)
    assert list(engine.subscriptions.read("a", lambda: BEAT)) == []
    assert next(engine.subscriptions.read("b", lambda: BEAT)).ended[0].key == 2


def test_other_clients_are_read_by_calls(engine: Engine, client: Channel) -> None:
    engine.subscriptions.seat("b")
    engine.subscriptions.post({"a": ended(1), "b": ended(2)})
    assert next(engine.subscriptions.read("b", lambda: BEAT)).ended[0].key == 2
    assert keys(client, 1) == [1]
