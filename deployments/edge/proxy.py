"""Layers for Ray Serve's own proxy: what a replica behind it can neither see nor answer.

Serve's proxy answers some requests itself, as plain text, and takes an answer from the replica
whether or not its client takes it from the proxy. It runs the middlewares of the function that the
environment variable CALLBACK of listen_options.py names; ``rayfin serve`` sets it for a Ray of its
own, and an operator for a cluster. Everything holds without it but what docs/security.md says.
"""

import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.timing import RETRY_AFTER_SECONDS
from rayfin.deployments.edge.backpressure import ProxyFlow
from rayfin.deployments.edge.listening import install as install_listening
from rayfin.deployments.http.anthropic_errors import AnthropicErrors
from rayfin.deployments.http.body_limits import TransportLimits
from rayfin.deployments.http.errors import http_error_response
from rayfin.deployments.http.layers import ErrorResponses, arrange
from rayfin.deployments.http.request_id import RequestIds

logger = logging.getLogger("rayfin.http")

CLOSED_PATHS = frozenset({"/-/routes"})  # names every application to anybody
SERVE_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
MESSAGES = {
    404: "Unknown request URL.",
    408: "The request took too long.",
    429: "Too many requests are waiting already.",
    503: "The server cannot take the request now; please try again.",
}


def middlewares() -> list[Middleware]:
    """Returns the layers, the innermost first, and puts our HTTP protocol below them.

    Serve calls this in the proxy before it asks uvicorn for a server.
    """
    limit_heads()
    install_listening()
    layers: dict[str, Middleware | None] = {
        "anthropic_errors": Middleware(AnthropicErrors),
        "request_id": Middleware(RequestIds),
        "errors": Middleware(ErrorResponses),
        "transport_limits": Middleware(TransportLimits),
        "hide_serve_routes": Middleware(HideServeRoutes),
        "serve_errors": Middleware(ServeErrors),
        "proxy_flow": Middleware(ProxyFlow),
    }
    return arrange("proxy", layers)[::-1]


def limit_heads() -> None:
    """Makes servers that uvicorn creates from now on in this process use our HTTP protocol."""
    try:
        from rayfin.deployments.edge import protocol
    except ImportError as error:  # uvicorn's modules are not where they were, or httptools is not
        logger.warning("uvicorn speaks HTTP its own way (docs/security.md): %s", error)
    else:
        protocol.install()


class HideServeRoutes:
    """ASGI: hides Serve's list of routes, and drops headers by which a client would steer Serve.

    Raises:
        HTTPException: 404 the list of routes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] in CLOSED_PATHS:
                raise HTTPException(404)
            headers = scope["headers"]
            scope["headers"] = [pair for pair in headers if pair[0] not in SERVE_HEADERS]
        await self._app(scope, receive, send)


class ServeErrors:
    """ASGI: gives Serve's own failures the form of error bodies.

    Serve sends them as plain text; where a replica died, it may send nothing. An application that
    stops has no route from the first moment on, and Serve says 404 while its requests finish: 503.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._served: set[str] = set()  # prefixes of applications that have answered; few

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, root = scope["path"], scope.get("root_path", "")
        begun = False
        replaced: Message | None = None

        async def answered(message: Message) -> None:
            nonlocal begun, replaced
            if message["type"] == "http.response.start" and _is_serves_own(message):
                begun, replaced = True, message
            elif replaced is None:
                begun = True
                await send(message)

        await self._app(scope, receive, answered)
        if begun and replaced is None:
            # Serve has put the application's prefix there, nothing where it is "/".
            self._served.add(scope.get("root_path", "").removeprefix(root))
        else:
            status = 503 if replaced is None else replaced["status"]
            headers = {}
            if status == 404 and any(f"{path}/".startswith(f"{at}/") for at in self._served):
                status, headers = 503, {"Connection": "close"}
            if status in (429, 503):
                serve_headers = Headers(raw=replaced["headers"]) if replaced is not None else {}
                headers["Retry-After"] = serve_headers.get("retry-after", str(RETRY_AFTER_SECONDS))
            message = MESSAGES.get(status, "The server cannot answer this request.")
            await http_error_response(status, message, headers)(scope, receive, send)


def _is_serves_own(start: Message) -> bool:
    kind = Headers(raw=list(start.get("headers", ()))).get("content-type", "")
    return int(start["status"]) >= 400 and kind.startswith("text/plain")
