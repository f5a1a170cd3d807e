"""Limits on requests: bytes and time of the body, sizes of the address and the headers."""

import asyncio
import math
import re
from http import HTTPMethod

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.timing import RECORDING_SECONDS, UPLOAD_SECONDS, WEIGHTS_CALL_SECONDS

UPLOAD_PATH = "/v1/files"
WEIGHTS_PATH = "/admin/weights/update"
RECORDING_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
RECORDING_FORM_BYTES = 512 * 1024  # of such a form, beside the file
CLOSE = {"Connection": "close"}  # the rest of a refused body is not read


class BodyLimits:
    """ASGI: ``receive`` fails when the body is too large or too slow.

    A Content-Length over the limit is refused before the body is read, so a client that waits for
    100 Continue sends nothing.

    Args:
        max_upload_bytes, max_recording_bytes: of routes that may have more; None: as all others.

    Raises:
        HTTPException: 413 too large, 408 too slow, 415 compressed.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        seconds: float,
        max_upload_bytes: int | None = None,
        max_recording_bytes: int | None = None,
    ) -> None:
        self._app = app
        self._usual = (max_bytes, seconds)
        # By path. Weights come with an operator's key, and are as large as the disk allows.
        self._own: dict[str, tuple[float, float]] = {WEIGHTS_PATH: (math.inf, WEIGHTS_CALL_SECONDS)}
        if max_upload_bytes is not None:
            self._own[UPLOAD_PATH] = (max_upload_bytes, UPLOAD_SECONDS)
        if max_recording_bytes is not None:
            recording = (max_recording_bytes, RECORDING_SECONDS)
            self._own |= dict.fromkeys(RECORDING_PATHS, recording)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        max_bytes, seconds = self._own.get(get_route_path(scope), self._usual)
        _check_headers(Headers(scope=scope), max_bytes)
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + seconds

        async def counted() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"The request body did not arrive in {seconds:g} s.", CLOSE
                ) from None
            size += len(message.get("body", b""))
            if size > max_bytes:
                raise _too_large(max_bytes)
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, counted, send)


def _check_headers(headers: Headers, max_bytes: float) -> None:
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "The body must not have a Content-Encoding.", CLOSE)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: float) -> HTTPException:
    return HTTPException(413, f"The request body is larger than {max_bytes} bytes.", CLOSE)


MAX_URL = 8 * 1024  # bytes of path and query
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 1024  # of all names and values together
MAX_HEAD_BYTES = MAX_URL + MAX_HEADER_BYTES + 4 * MAX_HEADERS + 1024  # before anything is parsed
MAX_BODY_BYTES = 4 * 2**20  # --max-body-bytes
MAX_MEDIA_BODY_BYTES = 64 * 2**20  # of a model that takes images, audio or embeddings
WINDOW_BYTES = 256 * 1024  # of an answer that a client has not read; then its stream waits
SEND_BUFFER_BYTES = 128 * 1024  # of a socket; the kernel doubles it


METHODS = frozenset(HTTPMethod)
HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class TransportLimits:
    """ASGI: refuses a request by its first lines, before a byte of the body is read.

    Raises:
        HTTPException: 400 no, several or malformed Host headers, a target that is no path, an
            unknown method, a WebSocket; 414 a long URL; 431 many or long headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            check_size(scope)
            _check_host(scope)
            if not scope["path"].startswith("/"):
                raise HTTPException(400, "The request's target must be a path.")
            if scope["type"] == "websocket":
                raise HTTPException(400, "WebSockets are not supported.")
            if scope["method"] not in METHODS:
                raise HTTPException(400, "Unknown HTTP method.")
        await self._app(scope, receive, send)


def check_size(scope: Scope) -> None:
    """Raises:
    HTTPException: 414 the URL is too long; 431 there are too many headers, or too long ones.
    """
    close = {"Connection": "close"}
    path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
    if len(path) + len(scope["query_string"]) > MAX_URL:
        raise HTTPException(414, f"The URL is longer than {MAX_URL} bytes.", close)
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HTTPException(431, f"There are more than {MAX_HEADERS} headers.", close)
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise HTTPException(431, f"The headers are longer than {MAX_HEADER_BYTES} bytes.", close)


def _check_host(scope: Scope) -> None:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if not hosts and scope.get("http_version") == "1.0":  # probes of load balancers
        return
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
        raise HTTPException(400, "The request needs exactly one valid Host header.")
