"""A lane: a socket by which a replica's answers reach Serve's proxy, those of a turn in one write.

Serve carries each message of an answer as an item of one of Ray's calls, for which threads of both
processes wake, and four tasks are made. A step of 32 streams is 32 items. On a lane it is one write
and one read. Serve still brings the request, its cancellation, and at the end the news that it is
over (``flow.py``).

The proxy listens on a socket without a file (Linux), so there is nothing to remove, and a replica
on another machine finds no proxy there: then Serve carries its answers. Only processes of the same
user are let in, and hear so; a replica sends only to a proxy of its own user. What replicas send
must name a stream by a number that cannot be guessed.
"""

import asyncio
import errno
import json
import logging
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Message

from rayfin.actors.processes.local_socket import same_user
from rayfin.actors.timing import LANE_WELCOME_SECONDS

logger = logging.getLogger("rayfin.http")

START, BODY, END, CUT = range(4)
"""Kinds of pieces: status and headers, a part of the body, its last part; the answer broke off."""

HEAD = struct.Struct("<QIB")  # of a piece: its stream, its size in bytes, its kind
NUMBER_BITS = 64
NAME_BYTES = 16
WELCOME = b"\1"  # what the proxy sends, once, on a lane that it takes
# A socket that fails with one of these may be had later. The last one: too many connect at once.
SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}
MAX_REFUSED = 1024  # addresses; each proxy has one, and few are on other machines


class Stream(Protocol):
    """What the proxy keeps for each answer."""

    def arrived(self, kind: int, data: bytes) -> bool:
        """A piece of the answer; returns False for a START that is refused."""

    def lost(self) -> None:
        """The lane broke off, and nothing more will arrive."""


class Landing:
    """The proxy's end of all lanes."""

    def __init__(self) -> None:
        self._address: str | None = None
        self._server: asyncio.AbstractServer | None = None
        self._opening: asyncio.Task[None] | None = None
        self._streams: dict[int, Stream] = {}

    async def address(self) -> str | None:
        """Where replicas connect to; None if this system has no such sockets."""
        if self._address is None and sys.platform == "linux":
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
            await asyncio.shield(self._opening)
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

    async def _open(self) -> None:
        name = f"rayfin-{secrets.token_hex(NAME_BYTES)}"
        listener: socket.socket | None = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{name}")
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Arrivals(self), sock=listener)
        except OSError as error:
            logger.warning("Serve carries all answers itself: %s", error)
            if listener is not None:
                listener.close()
            if error.errno in SCARCE:  # the next request tries again
                self._opening = None
        else:
            self._address = name


class _Arrivals(asyncio.Protocol):
    """One replica's lane, at the proxy."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._held = bytearray()
        self._met: dict[int, Stream] = {}  # streams that have begun and not ended

    def connection_made(self, transport: Any) -> None:
        try:
            known = same_user(transport.get_extra_info("socket"))
        except OSError:
            known = False
        if known:
            transport.write(WELCOME)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        held, at = self._held, 0
        held += data
        while len(held) - at >= HEAD.size:
            number, size, kind = HEAD.unpack_from(held, at)
            end = at + HEAD.size + size
            if end > len(held):
                break
            self._deliver(number, kind, bytes(held[at + HEAD.size : end]))
            at = end
        del held[:at]

    def _deliver(self, number: int, kind: int, data: bytes) -> None:
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

    def connection_lost(self, error: Exception | None) -> None:
        for stream in self._met.values():
            stream.lost()


class Lane(asyncio.Protocol):
    """A replica's end of one lane.

    Attributes:
        broken: the proxy has closed it.
        welcome: whether the proxy takes it, once that is known.
    """

    def __init__(self) -> None:
        self.broken = False
        self.welcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._transport: Any = None
        self._waiting: list[bytes] = []
        self._watching: dict[int, Callable[[], None]] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.welcome.done():
            self.welcome.set_result(True)

    def connection_lost(self, error: Exception | None) -> None:
        self.broken = True
        if not self.welcome.done():
            self.welcome.set_result(False)
        for broken in list(self._watching.values()):
            broken()

    def watch(self, number: int, broken: Callable[[], None]) -> None:
        """Has ``broken`` called if the proxy closes the lane before ``forget``."""
        self._watching[number] = broken

    def carries(self, number: int) -> bool:
        """Whether an answer to the same request goes by this lane."""
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
            self._put(number, START, _start(message))
        else:
            kind = BODY if message.get("more_body") else END
            self._put(number, kind, message.get("body", b""))

    def cut(self, number: int) -> None:
        """Says that an answer has broken off."""
        if not self.broken:
            self._put(number, CUT, b"")

    def _put(self, number: int, kind: int, data: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += (HEAD.pack(number, len(data), kind), data)

    def close(self) -> None:
        self._transport.close()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not self.broken:
            self._transport.write(b"".join(waiting))


class Lanes:
    """A replica's lanes, by the proxies' addresses."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._connecting: dict[str, asyncio.Task[Lane | None]] = {}
        self._refused: set[str] = set()

    async def find(self, address: str | None) -> Lane | None:
        """Returns the lane to a proxy; None if there is none, and Serve must carry the answer."""
        if address is None or address in self._refused:
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
        made: socket.socket | None = None
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.setblocking(False)
            made.connect(f"\0{address}")  # at once, or never
            if not same_user(made):
                raise PermissionError
            loop = asyncio.get_running_loop()
            _, lane = await loop.create_unix_connection(Lane, sock=made)
        except OSError as error:
            if made is not None:
                made.close()
            if error.errno not in SCARCE:
                self._refuse(address)
            return None
        try:
            async with asyncio.timeout(LANE_WELCOME_SECONDS):
                welcome = await lane.welcome
        except TimeoutError:  # the next request tries again
            lane.close()
            return None
        if not welcome:
            self._refuse(address)
            return None
        self._lanes[address] = lane
        return lane

    def _refuse(self, address: str) -> None:
        if len(self._refused) < MAX_REFUSED:
            self._refused.add(address)


def _start(message: Message) -> bytes:
    pairs = [[part.decode("latin-1") for part in pair] for pair in message["headers"]]
    return json.dumps([message["status"], pairs]).encode()


def read_start(data: bytes) -> Message:
    """Returns the message that a piece of the kind START holds."""
    status, pairs = json.loads(data)
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    return {"type": "http.response.start", "status": status, "headers": headers}
