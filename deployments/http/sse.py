"""Server-sent events, and a response that always closes what it streams from."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rayfin.actors.timing import SSE_COMMENT_SECONDS, STALLED_SECONDS

logger = logging.getLogger("rayfin.http")

DONE = "data: [DONE]\n\n"
COMMENT = ": waiting\n\n"
FAILURES = (
    *(b'data: {"error"', b"event: error\n", b"event: response.failed\n"),
    b'{"error"',  # a line of Ollama's
)


def event(data: str, event_id: str | None = None) -> str:
    """Returns an event; ``data`` is JSON text without newlines."""
    return f"data: {data}\n\n" if event_id is None else f"data: {data}\nid: {event_id}\n\n"


def tells_failure(chunk: bytes) -> bool:
    """Whether a piece of a stream is one of our ways to say that it went wrong."""
    return chunk.startswith(FAILURES)


class EventStream(Response):
    """Streams events until they end, the client leaves, or it stops reading.

    Whatever happens, ``first``, which awaits the source's first item, is ended, and ``events`` and
    then ``source`` are closed before the response returns.

    Args:
        comment_seconds: of silence until a comment is sent, again and again; 0: none is.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        source: AsyncGenerator[Any, None],
        headers: Mapping[str, str] | None = None,
        first: asyncio.Task[Any] | None = None,
        media_type: str = media_type,
        *,
        comment_seconds: float = SSE_COMMENT_SECONDS,
    ) -> None:
        cached = {"Cache-Control": "no-cache", **(headers or {})}
        super().__init__(headers=cached, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._first = first
        self._comment_seconds = comment_seconds
        self._writing = asyncio.Lock()
        self._written = 0  # events and comments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            sending = asyncio.create_task(self._send(send))
            commenting = asyncio.create_task(self._comment(send))
            leaving = asyncio.create_task(until_disconnect(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancelled(sending, commenting, leaving)
                if self._first is not None and not self._first.done():
                    await ended(self._first)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        async with self._writing:
            await send({**start, "headers": self.raw_headers})
        try:
            waited = self._first is not None and not self._first.done()
            if waited and self._comment_seconds:
                await self._write(send, COMMENT)
            async for text in self._events:
                await self._write(send, text)
            async with self._writing:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (OSError, TimeoutError):
            logger.info("A client left its stream")

    async def _comment(self, send: Send) -> None:
        """A comment whenever nothing else was said for a while: an engine may be slow, or lost."""
        if not self._comment_seconds:
            return
        with suppress(OSError, TimeoutError):  # the next event finds that out as well
            while True:
                written = self._written
                await asyncio.sleep(self._comment_seconds)
                if written == self._written:
                    await self._write(send, COMMENT)

    async def _write(self, send: Send, text: str) -> None:
        async with self._writing, asyncio.timeout(STALLED_SECONDS):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            self._written += 1


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and waits until all have ended; raises the first failure."""
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancels the task and waits until it has ended, however it does."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def wait_for_some_time(task: asyncio.Task[Any], comment_seconds: float) -> None:
    """Until the task is done, or a client should hear of us."""
    seconds = min(comment_seconds or SSE_COMMENT_SECONDS, SSE_COMMENT_SECONDS)
    await asyncio.wait({task}, timeout=seconds)
