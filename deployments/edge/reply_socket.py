"""A lane: a channel by which a replica's answers reach Serve's proxy, those of a turn in one write.

Serve carries each message of an answer as an item of one of Ray's calls, for which threads of both
processes wake, and four tasks are made. A step of 32 streams is 32 items. On a lane it is one write
and one read. Serve still brings the request, its cancellation, and at the end the news that it is
over (``backpressure.py``).

A replica on another machine finds no proxy at the address: then Serve carries its answers. What
replicas send names a stream by a number that cannot be guessed.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Message

from rayfin.actors.timing import LANE_WELCOME_SECONDS
from rayfin.actors.transport.async_channel import open_channel, take_channel
from rayfin.actors.transport.channel import WELCOME, Acceptor

logger = logging.getLogger("rayfin.http")

START, BODY, END, CUT = range(4)
"""Kinds of pieces: the first message, a part of the body, its last part; the answer broke off."""

NUMBER_BITS = 64


class Stream(Protocol):
    """What the proxy keeps for each answer."""

    def arrived(self, kind: int, data: Any) -> bool:
        """Takes a piece of the answer; returns False for a START that is refused."""

    def lost(self) -> None:
        """Hears that the lane broke off, and nothing more will arrive."""


class Landing:
    """The proxy's end of all lanes."""

    def __init__(self) -> None:
        self._address = ""
        self._streams: dict[int, Stream] = {}

    def address(self) -> str:
        """Returns where replicas connect to; empty if this system has no such sockets.

        Call it in the event loop in which answers shall arrive.
        """
        if not self._address:
            loop = asyncio.get_running_loop()

            def take(connected: socket.socket) -> None:
                kept = socket.socket(fileno=connected.detach())
                kept.setblocking(False)
                asyncio.run_coroutine_threadsafe(self._take(kept), loop)

            self._address = Acceptor(take, "lane", once=False).address()
        return self._address

    def expect(self, stream: Stream) -> int:
        """Returns the number by which pieces name the stream, until ``forget``."""
        number = secrets.randbits(NUMBER_BITS)
        self._streams[number] = stream
        return number

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def stream(self, number: int) -> Stream | None:
        """Returns the stream of a number, None if it is over."""
        return self._streams.get(number)

    async def _take(self, connected: socket.socket) -> None:
        arrivals = _Arrivals(self)
        channel = await take_channel(connected, arrivals.deliver, arrivals.lose)
        channel.send(WELCOME)


class _Arrivals:
    """What comes by one replica's lane."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._met: dict[int, Stream] = {}  # streams that have begun and not ended

    def deliver(self, pieces: list[tuple[int, int, Any]]) -> None:
        """Hands each piece to its stream."""
        for piece in pieces:
            self._deliver(*piece)

    def _deliver(self, number: int, kind: int, data: Any) -> None:
        """Hands a piece to its stream.

        Serve may send a request to a second replica as well. One answer is taken: of the others
        START is refused, and their pieces are dropped.
        """
        stream = self._landing.stream(number)
        if kind == START:
            if stream is not None and stream.arrived(kind, data):
                self._met[number] = stream
            return
        begun = self._met.get(number)
        if begun is None:
            return
        if stream is not begun or kind in (END, CUT):
            del self._met[number]
        if stream is begun:
            begun.arrived(kind, data)

    def lose(self) -> None:
        for stream in self._met.values():
            stream.lost()


class Lane:
    """A replica's end of one lane, which ``open`` connects."""

    def __init__(self) -> None:
        self._channel: Any = None  # an AsyncChannel
        self._waiting: list[tuple[int, int, Any]] = []
        self._watching: dict[int, Callable[[], None]] = {}

    async def open(self, address: str) -> None:
        """Connects to a proxy.

        Raises:
            OSError: it takes no lane, or says nothing.
        """
        self._channel = await open_channel(
            address, lambda message: None, self._lose, LANE_WELCOME_SECONDS
        )

    @property
    def broken(self) -> bool:
        """Whether the proxy has closed it."""
        return not self._channel.open

    def watch(self, number: int, broken: Callable[[], None]) -> None:
        """Has ``broken`` called if the proxy closes the lane before ``forget``."""
        self._watching[number] = broken

    def carries(self, number: int) -> bool:
        """Returns whether an answer to the same request goes by this lane."""
        return number in self._watching

    def forget(self, number: int) -> None:
        self._watching.pop(number, None)

    def put(self, number: int, message: Message) -> None:
        """Sends a message of an answer, with all others of this turn of the event loop.

        Raises:
            ConnectionResetError: the proxy has closed the lane.
        """
        if self.broken:
            raise ConnectionResetError("Serve's proxy has gone")
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            begun = {"type": message["type"], "status": int(message["status"]), "headers": headers}
            self._put(number, START, begun)
        else:
            kind = BODY if message.get("more_body") else END
            self._put(number, kind, bytes(message.get("body", b"")))

    def cut(self, number: int) -> None:
        """Says that an answer has broken off."""
        self._put(number, CUT, b"")

    def _put(self, number: int, kind: int, data: Any) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((number, kind, data))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._channel.send(waiting)

    def _lose(self) -> None:
        for broken in list(self._watching.values()):
            broken()


class Lanes:
    """A replica's lanes, by the proxies' addresses."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._connecting: dict[str, asyncio.Task[Lane | None]] = {}

    async def find(self, address: str | None) -> Lane | None:
        """Returns the lane to a proxy; None if there is none, and Serve must carry the answer."""
        if not address:
            return None
        lane = self._lanes.get(address)
        if lane is not None and not lane.broken:
            return lane
        connecting = self._connecting.get(address)
        if connecting is None:
            connecting = asyncio.create_task(self._connect(address))
            self._connecting[address] = connecting
            connecting.add_done_callback(lambda _: self._connecting.pop(address))
        return await asyncio.shield(connecting)

    async def _connect(self, address: str) -> Lane | None:
        lane = Lane()
        try:
            await lane.open(address)
        except OSError as error:  # the proxy is on another machine, say; to ask again takes no time
            logger.debug("Serve carries the answers to %s: %s", address.partition("/")[0], error)
            return None
        self._lanes[address] = lane
        return lane
