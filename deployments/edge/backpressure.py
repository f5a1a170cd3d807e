"""What Serve does not carry, or carries slowly, between its proxy and a replica: a pair of layers.

Serve takes all of an answer from the replica whether or not its client takes it from the proxy, and
asks for a request's body whether or not the replica wants it. So the two ends, one ASGI layer in
each process, tell each other what Serve does not, in messages of ASGI's two channels, which Serve
carries as they are:

    replica --{CONTINUE}--> proxy     the application asks for the body: 100 Continue may be said
    replica --start with WINDOWED-->  this answer waits when WINDOW_BYTES have not been taken
    proxy --{TAKEN, bytes}--> replica as many bytes have left for the client since the last one

On one machine the answer itself takes a lane past Serve (``reply_socket.py``). When it is over
the replica says so by Serve's way: a start and an end with PASSED, which the proxy's end drops.
Serve needs them to know how the request ended.

    proxy --offer: LANE, BODY--> replica   where to send the answer; the request's body, if short
    replica ==start, pieces, end==> proxy  by the lane
    replica --start, end with PASSED-->    by Serve

The proxy's end offers this in ``scope["extensions"]``, which no client can write. A replica that
does not know it gets no such message; without the offer the replica's end does nothing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.timing import (
    CONTINUE_SECONDS,
    SHORT_BODY_SECONDS,
    SLOW_READER_SECONDS,
    STALLED_SECONDS,
)
from rayfin.deployments.edge import reply_socket
from rayfin.deployments.edge.reply_socket import Landing, Lane, Lanes
from rayfin.deployments.http.body_limits import WINDOW_BYTES
from rayfin.deployments.http.request_id import REQUEST_ID

logger = logging.getLogger("rayfin.http")

OFFER = "rayfin.flow"
LANE = "lane"  # of the offer: the address and the number of the stream
BODY = "body"  # of the offer: the request's message with its whole body
CONTINUE = "rayfin.continue"
WINDOWED = "rayfin.windowed"
PASSED = "rayfin.passed"
TAKEN = "rayfin.taken"
TELL_BYTES = WINDOW_BYTES // 2  # taken, from which on the proxy's end tells; it costs a call
JOIN_BYTES = 32 * 1024  # of pieces that leave together; a slow reader must take one in time
EXTRA = 64  # bytes that a message counts for beside its own
SHORT_BODY_BYTES = 64 * 1024  # of a request, which travels with its first lines


class ReplicaFlow:
    """ASGI, the replica's end: ``send`` waits for the client.

    The application must listen for its client's leaving while it streams, as ours all do: what the
    proxy's end tells comes in by the same ``receive``.
    """

    def __init__(self, app: ASGIApp, window: int = WINDOW_BYTES) -> None:
        self._app = app
        self._window = window
        self._lanes = Lanes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or OFFER not in scope.get("extensions", {}):
            return await self._app(scope, receive, send)
        offer = scope["extensions"].pop(OFFER)
        address, number = offer.get(LANE, (None, 0))
        lane = await self._lanes.find(address)
        # One that carries this number has another answer to the same request: Serve tries again.
        if lane is None or lane.carries(number):
            passage = _Passage(send)
        else:
            passage = _LanePassage(send, lane, number)
        asked = not _awaits_continue(scope)
        answer = _Answer(receive, passage, self._window, offer.get(BODY), asked=asked)
        with passage.open(answer.leave):
            try:
                await self._app(scope, answer.receive, answer.send)
            finally:
                await passage.report()


class _Answer:
    """One request in a replica."""

    def __init__(
        self,
        receive: Receive,
        passage: "_Passage",
        window: int,
        body: Message | None,
        *,
        asked: bool,
    ) -> None:
        self._receive = receive
        self._passage = passage
        self._window = window
        self._body = body
        self._repeated = body is not None  # Serve brings it as well, to those who know no offer
        self._asked = asked  # for the body
        self._untaken = 0  # bytes
        self._left = False
        self._news = asyncio.Event()  # of the two

    async def receive(self) -> Message:
        if self._body is not None:
            message, self._body = self._body, None
            return message
        if not self._asked:
            self._asked = True
            await self._passage.ask()
        while True:
            message = await self._receive()
            if message["type"] == TAKEN:
                self._untaken -= message["bytes"]
                self._news.set()
            elif message["type"] == "http.request" and self._repeated:
                self._repeated = False
            else:
                break
        if message["type"] == "http.disconnect":
            self.leave()
        return message

    def leave(self) -> None:
        """No client takes the answer any more."""
        self._left = True
        self._news.set()

    async def send(self, message: Message) -> None:
        while self._untaken >= self._window and not self._left:
            self._news.clear()
            await self._news.wait()
        self._untaken += _cost(message)
        await self._passage.send(message)


class _Passage:
    """How an answer goes to the proxy: by Serve."""

    def __init__(self, send: Send) -> None:
        self._send = send

    @contextmanager
    def open(self, broken: Callable[[], None]) -> Iterator[None]:
        """``broken`` is called if the proxy is seen to go meanwhile."""
        yield

    async def ask(self) -> None:
        """Asks for the request's body."""
        await self._send({"type": CONTINUE})

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, WINDOWED: True}
        await self._send(message)

    async def report(self) -> None:
        """Tells Serve of the answer once the application has returned."""


class _LanePassage(_Passage):
    """An answer that takes a lane past Serve."""

    def __init__(self, send: Send, lane: Lane, number: int) -> None:
        super().__init__(send)
        self._lane = lane
        self._number = number
        self._started: Message | None = None
        self._ended = False

    @contextmanager
    def open(self, broken: Callable[[], None]) -> Iterator[None]:
        self._lane.watch(self._number, broken)
        try:
            yield
        finally:
            self._lane.forget(self._number)

    async def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            ConnectionResetError: the proxy has gone.
        """
        if message["type"] == "http.response.start":
            # Serve's proxy gives the answer its request's id, as the layer outside of this knows.
            headers = [pair for pair in message["headers"] if pair[0] != REQUEST_ID.encode()]
            message = {**message, "headers": headers}
            self._lane.put(self._number, message)
            self._started = message
        else:
            self._lane.put(self._number, message)
            self._ended = not message.get("more_body", False)

    async def report(self) -> None:
        if self._started is None:
            return
        if not self._ended:
            self._lane.cut(self._number)
        await self._send({**self._started, PASSED: True})
        if self._ended:
            end = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._send({**end, PASSED: True})


class ProxyFlow:
    """ASGI, the proxy's end: tells what the client takes, and that it has left.

    A client that takes nothing for ``seconds`` has left, as far as the application can tell.
    """

    def __init__(
        self, app: ASGIApp, seconds: float = STALLED_SECONDS, *, with_lanes: bool = True
    ) -> None:
        self._app = app
        self._seconds = seconds
        self._landing = Landing() if with_lanes else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        offer: dict[str, Any] = {}
        scope["extensions"] = {**scope.get("extensions", {}), OFFER: offer}
        exchange = _Exchange(receive, send, self._seconds, asked=not _awaits_continue(scope))
        number = None
        if self._landing is not None and (address := self._landing.address()):
            number = self._landing.expect(exchange)
            offer[LANE] = (address, number)
        if _is_short(scope) and (body := await exchange.short_body()) is not None:
            offer[BODY] = body
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            if self._landing is not None and number is not None:
                self._landing.forget(number)
            exchange.close()


class _Landed:
    """An answer's pieces that have come by a lane."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Any]] = deque()  # to be passed on
        self.news = asyncio.Event()  # one has come
        self.started = False  # the first one has gone to the client
        self.complete = False  # the last one has come
        self.broken = False  # no more will come, and it is too late for another answer


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
        self._landed = _Landed()
        self._begun = asyncio.Event()  # an answer, by a lane or by Serve
        self._passing: asyncio.Task[None] | None = None  # has a lane's pieces sent to the client
        self._refused = False  # a second answer has come

    async def short_body(self) -> Message | None:
        """The request's whole body if it comes with the first lines, as most do, and is short.

        ``receive`` gives it again.
        """
        if not self._asked.is_set():
            return None
        self._arriving = asyncio.create_task(self._next())
        await asyncio.wait([self._arriving], timeout=SHORT_BODY_SECONDS)
        if not self._arriving.done():
            return None
        message = self._arriving.result()
        whole = message["type"] == "http.request" and not message.get("more_body", False)
        return message if whole and len(message.get("body", b"")) <= SHORT_BODY_BYTES else None

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
        message = arrived.result()
        if message["type"] == "http.disconnect" and self._landed.complete:
            # uvicorn says so after the last piece; Serve would cancel a request that is over.
            await asyncio.Event().wait()
        return message

    async def send(self, message: Message) -> None:
        """Takes what Serve brings."""
        if message["type"] == CONTINUE:
            return self._asked.set()
        if PASSED in message:
            return await self._end_of_pieces()
        if self._passing is not None:  # it broke off: what Serve says of that comes too late
            if self._landed.complete:  # or only its replica has gone
                return await self._end_of_pieces()
            return await asyncio.sleep(0)
        self._begun.set()
        await self._pass_on(message, _cost(message))

    def arrived(self, kind: int, data: Any) -> bool:
        """A piece of the answer came by a lane; returns False for the start of a second answer.

        Serve tries another replica where it cannot tell whether the first has the request.
        """
        if kind == reply_socket.START and self._begun.is_set():
            self._refused = True
            if self._landed.broken:  # nothing more will come for the client
                self._leave()
            return False
        landed = self._landed
        landed.waiting.append((kind, data))
        landed.complete = landed.complete or kind == reply_socket.END
        landed.news.set()
        if self._passing is None:
            self._begun.set()
            self._passing = asyncio.create_task(self._pass_pieces())
        return True

    def lost(self) -> None:
        """The lane broke off; Serve will say that the replica has gone, or try another one."""
        if self._passing is None:
            return
        self._passing.cancel()
        if self._landed.started or self._refused:
            self._landed.broken = True
            if self._refused:
                self._leave()
            return
        self._passing = None
        self._landed = _Landed()
        self._begun.clear()

    def close(self) -> None:
        for task in (self._arriving, self._passing):
            if task is not None:
                task.cancel()

    async def _end_of_pieces(self) -> None:
        """Returns when all of the answer has been passed on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await self._begun.wait()
        passing = self._passing
        if passing is not None:
            await asyncio.wait([passing])
            if not passing.cancelled():
                passing.result()

    def _leave(self) -> None:
        self._left = True
        self._news.set()

    async def _pass_pieces(self) -> None:
        try:
            while not await self._pass_piece():
                pass
        except Exception:
            self._leave()
            raise

    async def _pass_piece(self) -> bool:
        """Passes on a piece, with those of the body behind it; returns whether it is the last."""
        landed = self._landed
        if not landed.waiting:
            landed.news.clear()
            await landed.news.wait()
        kind, data = landed.waiting.popleft()
        if kind == reply_socket.START:
            landed.started = True
            await self._pass_on({**data, WINDOWED: True}, EXTRA)
            return False
        if kind == reply_socket.CUT:
            return True
        parts, size = [data], len(data)
        while (
            kind != reply_socket.END and landed.waiting and landed.waiting[0][0] != reply_socket.CUT
        ):
            size += len(landed.waiting[0][1])
            if size > JOIN_BYTES:
                break
            kind, data = landed.waiting.popleft()
            parts.append(data)
        body, ended = b"".join(parts), kind == reply_socket.END
        message = {"type": "http.response.body", "body": body, "more_body": not ended}
        await self._pass_on(message, len(body) + EXTRA * len(parts))
        return ended

    async def _pass_on(self, message: Message, cost: int) -> None:
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
        self._taken += cost
        due = self._taken >= TELL_BYTES or loop.time() - began > SLOW_READER_SECONDS
        if self._left or (self._windowed and due):
            self._news.set()

    async def _next(self) -> Message:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_SECONDS):
                await self._asked.wait()
        return await self._receive()


def _awaits_continue(scope: Scope) -> bool:
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


def _is_short(scope: Scope) -> bool:
    """Whether the body may be worth a short wait."""
    sizes = [value for name, value in scope["headers"] if name == b"content-length"]
    return len(sizes) == 1 and sizes[0].isdigit() and int(sizes[0][:20]) <= SHORT_BODY_BYTES


def _cost(message: Message) -> int:
    return len(message.get("body", b"")) + EXTRA
