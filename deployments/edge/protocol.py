"""HTTP/1.1 in Ray Serve's proxy: uvicorn's own protocol, with limits and answers of ours.

uvicorn answers what is no HTTP itself, as plain text and always 400, and waits for headers as long,
and keeps as many of them, as a client likes; no application ever sees such a request. uvicorn knows
no setting for it, but Serve lets it choose its protocol (``http="auto"``) and calls a function of
ours first (``proxy.middlewares``), which puts ``HttpProtocol`` where uvicorn will look. What that
adds to uvicorn's class, and nothing else:

* a time limit for the headers, and a limit of bytes before and between what the parser tells of;
* refusals as error bodies of OpenAI's form, after which the rest of what arrives is thrown away for
  a moment: closing at once makes the kernel reset the connection, and the answer may be lost;
* trailers are dropped: uvicorn adds them to the headers of a request that runs already;
* of pipelined requests, the one that runs learns that its client has left, not the last one;
* a bound on what the kernel keeps of an answer.

Where uvicorn's class is not what this was written for, it is left alone, with a warning.
"""

import asyncio
import logging
import socket
import uuid
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rayfin.actors.timing import HEADER_SECONDS, LINGER_SECONDS
from rayfin.deployments.http.body_limits import MAX_HEAD_BYTES, MAX_URL, SEND_BUFFER_BYTES
from rayfin.deployments.http.errors import http_error_response
from rayfin.deployments.http.request_id import REQUEST_ID

logger = logging.getLogger("rayfin.http")

EXPECTED = ("connection_made", "connection_lost", "data_received", "send_400_response") + (
    *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    "_start_asgi_task",
)  # what the class below replaces, each of which uvicorn or its parser calls


def install() -> bool:
    """Makes ``HttpProtocol`` the one that uvicorn chooses.

    Returns:
        Whether it is; not where uvicorn has chosen otherwise, or works in another way.
    """
    if auto.AutoHTTPProtocol is HttpProtocol:
        return True
    if auto.AutoHTTPProtocol is not HttpToolsProtocol or not all(
        callable(getattr(HttpToolsProtocol, name, None)) for name in EXPECTED
    ):
        logger.warning("Unknown uvicorn: no limit on the time for headers (docs/security.md)")
        return False
    auto.AutoHTTPProtocol = HttpProtocol
    return True


class HttpProtocol(HttpToolsProtocol):
    """One connection. A *head* is a request's first line and headers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None  # the others are queued behind it
        self._deadline: asyncio.TimerHandle | None = None  # for the end of a head
        self._in_head = False
        self._parsed = False  # the parser reported something that is no part of a head or trailer
        self._untold = 0  # bytes since it did
        self._refused = False

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # some transports have none
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._await_head()
        self._parsed = False
        super().data_received(data)
        self._untold = 0 if self._parsed else self._untold + len(data)
        if self._untold > MAX_HEAD_BYTES:
            if self._in_head and len(self.url) > MAX_URL:
                self._refuse(414, f"The URL is longer than {MAX_URL} bytes.")
            else:
                self._refuse(431, f"The headers are longer than {MAX_HEAD_BYTES} bytes.")

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._parsed = self._in_head = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._parsed, self._in_head = True, False
        self._head_is_there()
        if len(self.url) > MAX_URL:  # over 64 KiB the parser cannot take it apart
            self._refuse(414, f"The URL is longer than {MAX_URL} bytes.")
            raise ValueError("refused")  # stops the parser
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._parsed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._parsed = True
        self._head_is_there()
        super().on_message_complete()

    # What uvicorn's class calls

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """The parser has failed, whose message would be ``msg``."""
        self._refuse(400, "This is not a valid HTTP request.")

    # Time and refusals

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._head_is_late)

    def _head_is_there(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        if self._refused or self._answering is not None:
            return  # what follows may take its time; after it, uvicorn's limit for idling holds
        if self._in_head:
            self._refuse(408, f"The request's headers did not arrive in {HEADER_SECONDS:g} s.")
        else:
            self.transport.close()

    @property
    def _answering(self) -> RequestResponseCycle | None:
        cycle = self._running
        return cycle if cycle is not None and not cycle.response_complete else None

    def _refuse(self, status: int, message: str) -> None:
        """Answers instead of the application and closes; an answer that has begun is cut off."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        answering = self._answering
        label = uuid.uuid4().hex
        logger.info("%s: %d %s (%s)", self.client, status, message, label)
        if answering is not None and answering.response_started:
            self.transport.close()
            return
        self._abandon()
        self.pipeline.clear()
        headers = {"Connection": "close", REQUEST_ID: label}
        response = http_error_response(status, message, headers)
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _abandon(self) -> None:
        """Tells the request that is being answered that its client has left."""
        if (answering := self._answering) is not None:
            answering.disconnected = True
            answering.message_event.set()
