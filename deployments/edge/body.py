"""A request's body is counted and timed while it is read, whoever reads it."""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSE = {"Connection": "close"}  # what is left of a refused body is not waited for


class BodyLimits:
    """ASGI: ``receive`` fails when the body is too large or too slow.

    A size that Content-Length tells is refused before the body is asked for, so that a client that
    waits for 100 Continue sends nothing.

    Raises:
        HTTPException: 413 too large, 408 not there in time, 415 it is compressed.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._check_headers(Headers(scope=scope))
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"The request body did not arrive in {self._seconds:g} s.", CLOSE
                ) from None
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, counted, send)

    def _check_headers(self, headers: Headers) -> None:
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPException(415, "The body must not have a Content-Encoding.", CLOSE)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413, f"The request body is larger than {self._max_bytes} bytes.", CLOSE
        )
