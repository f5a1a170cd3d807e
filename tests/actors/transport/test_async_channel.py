"""A channel in an event loop against one for threads, over real sockets."""

import asyncio
import socket
import sys
import threading
from typing import Any

import pytest

from rayfin.actors.transport.async_channel import AsyncChannel, open_channel
from rayfin.actors.transport.channel import WELCOME, Acceptor, Channel

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's"),
]
PATIENCE = 30.0  # seconds; only a failure waits so long
LARGE = bytes(4 << 20)  # more than a socket holds


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Heard:
    """What one end has received."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.news = asyncio.Event()
        self.broken = False

    def received(self, message: Any) -> None:
        self.messages.append(message)
        self.news.set()

    def lost(self) -> None:
        self.broken = True
        self.news.set()

    async def until(self, messages: int) -> None:
        while len(self.messages) < messages and not self.broken:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), PATIENCE)


def echo(connected: socket.socket) -> None:
    """Welcomes who says hello, and says everything again until it hears "end"."""
    channel = Channel(connected)
    assert channel.receive(PATIENCE) == "hello"
    channel.send(WELCOME)
    for message in channel:
        channel.send(message)
        if message == "end":
            channel.end()


async def opened(serve: Any, heard: Heard, seconds: float = PATIENCE) -> AsyncChannel:
    address = Acceptor(serve, "test").address()
    return await open_channel(address, heard.received, heard.lost, seconds, "hello")


async def test_all_messages_come_back_in_order_and_then_the_end() -> None:
    heard = Heard()
    channel = await opened(echo, heard)
    sent: list[Any] = [1, None, LARGE, "end"]
    for message in sent:
        channel.send(message)
    await heard.until(len(sent))
    assert heard.messages == sent
    await channel.until_ended(PATIENCE)
    assert heard.broken and not channel.open
    channel.send("too late")


async def test_one_that_closes_hears_no_more_and_is_not_broken() -> None:
    heard = Heard()
    channel = await opened(echo, heard)
    channel.send("lost")
    channel.close()
    await asyncio.sleep(0.01)
    assert not heard.messages and not heard.broken and not channel.open


async def test_what_has_no_pickle_is_not_sent() -> None:
    heard = Heard()
    channel = await opened(echo, heard)
    with pytest.raises(TypeError):
        channel.send(threading.Lock())
    channel.send("next")
    await heard.until(1)
    assert heard.messages == ["next"]
    channel.close()


def silent(connected: socket.socket) -> None:
    while connected.recv(1):
        pass


async def test_no_welcome_in_time() -> None:
    heard = Heard()
    with pytest.raises(TimeoutError):
        await opened(silent, heard, 0.01)
    assert not heard.messages and not heard.broken


async def test_one_that_is_closed_is_not_welcome() -> None:
    heard = Heard()
    with pytest.raises(ConnectionAbortedError):
        await opened(lambda connected: None, heard)
    assert not heard.broken


async def test_nothing_listens_there() -> None:
    with pytest.raises(ConnectionRefusedError):
        await open_channel("rayfin-of-another-machine", id, lambda: None, PATIENCE)


async def test_an_opening_that_is_cancelled_closes_its_socket() -> None:
    accepted, closed = threading.Event(), threading.Event()

    def serve(connected: socket.socket) -> None:
        accepted.set()
        silent(connected)
        closed.set()

    opening = asyncio.create_task(opened(serve, Heard()))
    assert await asyncio.to_thread(accepted.wait, PATIENCE)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert await asyncio.to_thread(closed.wait, PATIENCE)
