"""The layers around the API's routes, and what an operator may set about them."""

import logging
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.errors import ClientGone
from rayfin.actors.timing import BODY_SECONDS
from rayfin.deployments.http.auth import OPEN_PATHS, AdminAuth, BearerAuth
from rayfin.deployments.http.body_limits import MAX_BODY_BYTES, BodyLimits, TransportLimits
from rayfin.deployments.http.errors import failure_response
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import ADMIN_PATHS, PAGE_PATHS
from rayfin.deployments.http.request_id import REQUEST_ID, RequestIds

EXPOSED = (  # headers of answers that a web page's script may read
    *(REQUEST_ID, "retry-after", "idempotent-replayed", "x-rayfin-ignored-fields"),
    *(f"x-ratelimit-{name}-tokens" for name in ("limit", "remaining", "reset")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Which web pages may call the API from a browser; nobody's by default."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(slots=True, kw_only=True)
class HttpSettings:
    """What stands between a socket and a route."""

    keys: ApiKeys | None = None  # None lets everybody in
    admin_keys: ApiKeys | None = None  # None: there are no routes of operators
    cors: Cors = Cors()
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    docs: bool = False  # a page at /docs
    web: bool = True  # a page at /ui
    priority_tenants: frozenset[str] | None = None  # who may set a priority; None is everybody


def add_layers(app: FastAPI, settings: HttpSettings) -> None:
    """Puts the layers around the routes of ``app``; the last one added is the outermost.

    A request passes them from the bottom up: it gets a name, a browser's questions are answered,
    then the key is asked for, then its lines and its body are measured.
    """
    app.add_middleware(BodyLimits, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    app.add_middleware(TransportLimits)
    if settings.keys is not None:
        open_paths = OPEN_PATHS | PAGE_PATHS if settings.web else OPEN_PATHS
        if settings.admin_keys is not None:
            open_paths |= ADMIN_PATHS  # which ask for a key of their own
        app.add_middleware(BearerAuth, keys=settings.keys, open_paths=open_paths)
    if settings.admin_keys is not None:
        app.add_middleware(AdminAuth, keys=settings.admin_keys)
    app.add_middleware(ErrorResponses)
    if settings.cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors.origins,
            allow_methods=settings.cors.methods,
            allow_headers=settings.cors.headers,
            allow_credentials=settings.cors.credentials,
            expose_headers=EXPOSED,
        )
    app.add_middleware(RequestIds)


# The last net: whatever leaves the layers inside becomes an error body of OpenAI's form.

logger = logging.getLogger("rayfin.http")


class ErrorResponses:
    """ASGI: answers every exception, as long as no answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun:  # the server breaks the connection off, which is all that is left to say
                raise
            if isinstance(error, ClientDisconnect):
                error = ClientGone()
            response = failure_response(error, scope.get("method", "GET"), scope["path"])
            await response(scope, receive, send)
