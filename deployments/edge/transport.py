"""What is refused before a byte of the body: the address, the headers, the kind of connection."""

import re
from http import HTTPMethod

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.deployments.edge.limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL

METHODS = frozenset(HTTPMethod)
HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class TransportLimits:
    """ASGI: raises what is wrong with a request's first lines.

    Raises:
        HTTPException: 400 no host, two or a malformed one, a path that is none, a method that is
            none of HTTP's own, a WebSocket; 414 a long URL; 431 many or long headers.
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
                raise HTTPException(400, "There are no WebSockets here.")
            if scope["method"] not in METHODS:
                raise HTTPException(400, "This is no method of HTTP.")
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
    if not hosts and scope.get("http_version") == "1.0":  # which probes of balancers still speak
        return
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
        raise HTTPException(400, "There must be one Host header, a name and perhaps a port.")
