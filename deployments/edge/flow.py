"""How much of an answer may be on its way: a window between Serve's proxy and a replica.

Serve takes all of an answer from the replica whether or not its client takes it from the proxy, and
asks for a request's body whether or not the replica wants it. So the two ends, one ASGI layer in
each process, tell each other what Serve does not, in messages of ASGI's two channels, which Serve
carries as they are:

    replica --{CONTINUE}--> proxy     the application asks for the body: 100 Continue may be said
    replica --start with WINDOWED-->  this answer waits when WINDOW_BYTES have not been taken
    proxy --{TAKEN, bytes}--> replica as many bytes have left for the client since the last one

The proxy's end offers this in ``scope["extensions"]``, which no client can write. A replica that
does not know it gets no such message; without the offer the replica's end does nothing.
"""

import asyncio
import logging
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.timing import CONTINUE_SECONDS, SLOW_READER_SECONDS, STALLED_SECONDS
from rayfin.deployments.http.body_limits import WINDOW_BYTES

logger = logging.getLogger("rayfin.http")

OFFER = "rayfin.flow"
CONTINUE = "rayfin.continue"
WINDOWED = "rayfin.windowed"
TAKEN = "rayfin.taken"
TELL_BYTES = WINDOW_BYTES // 2  # taken, from which on the proxy's end tells; it costs a call
EXTRA = 64  # bytes that a message counts for beside its own


class ReplicaFlow:
    """ASGI, the replica's end: ``send`` waits for the client.

    The application must listen for its client's leaving while it streams, as ours all do: what the
    proxy's end tells comes in by the same ``receive``.
    """

    def __init__(self, app: ASGIApp, window: int = WINDOW_BYTES) -> None:
        self._app = app
        self._window = window

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or OFFER not in scope.get("extensions", {}):
            return await self._app(scope, receive, send)
        untaken, left, asked = 0, False, not _awaits_continue(scope)
        news = asyncio.Event()  # of untaken or left

        async def receive_window() -> Message:
            nonlocal untaken, left, asked
            if not asked:
                asked = True
                await send({"type": CONTINUE})
            while (message := await receive())["type"] == TAKEN:
                untaken -= message["bytes"]
                news.set()
            left = left or message["type"] == "http.disconnect"
            news.set()
            return message

        async def windowed(message: Message) -> None:
            nonlocal untaken
            if message["type"] == "http.response.start":
                message = {**message, WINDOWED: True}
            while untaken >= self._window and not left:
                news.clear()
                await news.wait()
            untaken += _cost(message)
            await send(message)

        await self._app(scope, receive_window, windowed)


class ProxyFlow:
    """ASGI, the proxy's end: tells what the client takes, and that it has left.

    A client that takes nothing for ``seconds`` has left, as far as the application can tell.
    """

    def __init__(self, app: ASGIApp, seconds: float = STALLED_SECONDS) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["extensions"] = {**scope.get("extensions", {}), OFFER: {}}
        exchange = _Exchange(receive, send, self._seconds, asked=not _awaits_continue(scope))
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.close()


class _Exchange:
    """One request in the proxy. Serve listens all the time, also while it sends."""

    def __init__(self, receive: Receive, send: Send, seconds: float, *, asked: bool) -> None:
        self._receive = receive
        self._send = send
        self._seconds = seconds
        self._arriving: asyncio.Task[Message] | None = None
        self._asked = asyncio.Event()  # for the body
        if asked:
            self._asked.set()
        self._windowed = False
        self._taken = 0  # bytes, not reported yet
        self._left = False
        self._news = asyncio.Event()  # enough was taken, or the client has left

    async def receive(self) -> Message:
        if self._arriving is None:
            self._arriving = asyncio.create_task(self._next())
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait([self._arriving, news], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if self._left:
            return {"type": "http.disconnect"}
        if self._news.is_set():
            self._news.clear()
            taken, self._taken = self._taken, 0
            return {"type": TAKEN, "bytes": taken}
        arrived, self._arriving = self._arriving, None
        return arrived.result()

    async def send(self, message: Message) -> None:
        if message["type"] == CONTINUE:
            return self._asked.set()
        if self._left:
            return await asyncio.sleep(0)  # lets those run who wait for it
        if message["type"] == "http.response.start":
            self._windowed = message.pop(WINDOWED, False)
            self._asked.set()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            logger.info("a client takes nothing of its answer")
            self._left = True
        self._taken += _cost(message)
        due = self._taken >= TELL_BYTES or loop.time() - began > SLOW_READER_SECONDS
        if self._left or (self._windowed and due):
            self._news.set()

    def close(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()

    async def _next(self) -> Message:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_SECONDS):
                await self._asked.wait()
        return await self._receive()


def _awaits_continue(scope: Scope) -> bool:
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


def _cost(message: Message) -> int:
    return len(message.get("body", b"")) + EXTRA
