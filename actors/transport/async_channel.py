"""A channel's end in an event loop."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from rayfin.actors.transport.channel import Unpacker, connect, packed


class AsyncChannel(asyncio.Protocol):
    """One end of a connection.

    Args:
        received: called with each message.
        broken: called when the other end has closed it.
    """

    def __init__(self, received: Callable[[Any], None], broken: Callable[[], None]) -> None:
        self._received = received
        self._broken = broken
        self._unpacker = Unpacker()
        self._transport: Any = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def open(self) -> bool:
        """Whether it takes messages."""
        return not self.ended.done()

    def send(self, message: Any) -> None:
        """Sends a message; one behind the end is dropped.

        Raises:
            Exception: it cannot be packed, and nothing was sent.
        """
        data = packed(message)
        if self.open:
            self._transport.write(data)

    async def until_ended(self, seconds: float) -> None:
        """Returns when all that the other end has sent has come, or after so many seconds."""
        await asyncio.wait({self.ended}, timeout=seconds)

    def close(self) -> None:
        """Breaks the connection off."""
        self._end()
        self._transport.abort()

    def _end(self) -> None:
        if self.open:
            self.ended.set_result(None)

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            if self.open:
                self._received(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self.open:
            self._end()
            self._broken()


async def take_channel(
    connected: socket.socket, received: Callable[[Any], None], broken: Callable[[], None]
) -> AsyncChannel:
    """Returns the channel of a connected socket."""
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(
        lambda: AsyncChannel(received, broken), sock=connected
    )
    return channel


async def open_channel(
    address: str,
    received: Callable[[Any], None],
    broken: Callable[[], None],
    seconds: float,
    *hello: Any,
) -> AsyncChannel:
    """Connects, says hello and waits to be welcomed.

    Args:
        address: of ``Acceptor.address``.
        seconds: for the welcome.
        hello: the first messages.

    Raises:
        TimeoutError, ConnectionAbortedError: the other end has said nothing, or has closed. It may
            have taken the hello all the same, and then sees this end leave.
        OSError: nothing listens there: it is on another machine, say.
    """
    welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hear(message: Any) -> None:
        if welcome.done():
            received(message)
        else:
            welcome.set_result(None)

    channel = await take_channel(
        connect(address), hear, lambda: broken() if welcome.done() else None
    )
    welcomed = False
    try:
        for message in hello:
            channel.send(message)
        await asyncio.wait(
            {welcome, channel.ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        # An event loop that stood still hears the welcome and the end of the time in one turn.
        if not channel.open:
            raise ConnectionAbortedError("the other end has closed")
        if not welcome.done():
            raise TimeoutError
        welcomed = True
    finally:
        if not welcomed:
            channel.close()
    return channel
