"""The one list of HTTP layers, in Serve's proxy and in a replica, and their settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from starlette._utils import get_route_path
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.errors import ClientGone
from rayfin.actors.timing import BODY_SECONDS
from rayfin.deployments.http.auth import OPEN_PATHS, AdminAuth, BearerAuth
from rayfin.deployments.http.body_limits import MAX_BODY_BYTES, BodyLimits, TransportLimits
from rayfin.deployments.http.errors import failure_response
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import ADAPTER_LIST, ADAPTER_PATHS, ADMIN_PATHS, PAGE_PATHS
from rayfin.deployments.http.request_id import REQUEST_ID, RequestIds

Place = Literal["proxy", "replica"]

EXPOSED = (  # headers of answers that a web page's script may read
    *(REQUEST_ID, "retry-after", "idempotent-replayed"),
    *("x-rayfin-ignored-fields", "x-rayfin-unenforced", "x-rayfin-messages-repaired"),
    *(f"x-ratelimit-{name}-tokens" for name in ("limit", "remaining", "reset")),
)


class ErrorResponses:
    """ASGI: answers every exception with an error body, unless an answer has begun.

    ``log_stack`` is that of ``failure_response``.
    """

    def __init__(self, app: ASGIApp, *, log_stack: bool = False) -> None:
        self._app = app
        self._log_stack = log_stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if begun:  # the server closes the connection: the answer cannot change any more
                raise
            if isinstance(error, ClientDisconnect):
                error = ClientGone()
            method, path = scope.get("method", "GET"), get_route_path(scope)
            response = failure_response(error, method, path, log_stack=self._log_stack)
            await response(scope, receive, send)


class PlainRequests:
    """ASGI: reads the path ``/x/`` as ``/x``, and answers HEAD as GET, without the body.

    It stands behind the keys, which know paths in one form only: ``/health/`` needs a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if get_route_path(scope) != "/" and scope["path"].endswith("/"):
            raw = scope.get("raw_path")
            cut = {"path": scope["path"][:-1], "raw_path": raw and raw.removesuffix(b"/")}
            scope = {**scope, **cut}
        if scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Which web pages may call the API from a browser; none by default."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(slots=True, kw_only=True)
class HttpSettings:
    """What stands between a socket and a route."""

    keys: ApiKeys | None = None  # None: the API needs no key
    admin_keys: ApiKeys | None = None  # None: /admin/* is disabled
    cors: Cors = Cors()
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    docs: bool = False  # a page at /docs
    web: bool = True  # a page at /ui
    root_path: str = ""  # where a proxy in front offers the API
    plugins: tuple[str, ...] = ()  # of all models: their routes are added
    middleware: tuple[str, ...] = ()  # the operator's own, the innermost first
    tokenizer_info: bool = False  # /tokenizer_info
    log_error_stack: bool = False  # refusals are logged, with their stack traces
    client_adapters: bool = False  # clients may load adapters, not only operators
    priority_tenants: frozenset[str] | None = None  # who may set a priority; None: every tenant
    max_upload_bytes: int | None = None  # of the body of an upload; None: as any other
    max_recording_bytes: int | None = None  # the same, of audio that is to be written down


@dataclass(frozen=True, slots=True)
class Layer:
    """One ASGI layer of ours."""

    name: str
    places: frozenset[Place]
    purpose: str


PROXY: frozenset[Place] = frozenset({"proxy"})
REPLICA: frozenset[Place] = frozenset({"replica"})
# Serve's proxy answers some requests itself, so these layers stand there. They stand in the replica
# as well, since an operator may run a cluster without the proxy callback (docs/security.md).
BOTH: frozenset[Place] = PROXY | REPLICA

LAYERS = (
    Layer("serve_adapter", REPLICA, "undoes what Serve's proxy changes in requests and answers"),
    Layer("flow", REPLICA, "stops sending when the proxy's window is full"),
    Layer("root_path", REPLICA, "names the path that a proxy in front adds (--root-path)"),
    Layer("meter", REPLICA, "counts requests and answers, times the first event"),
    Layer("anthropic_errors", BOTH, "gives errors of Anthropic's routes Anthropic's form"),
    Layer("request_id", BOTH, "names the request in logs and in the answer's headers"),
    Layer("cors", REPLICA, "answers a browser's preflight requests"),
    Layer("errors", BOTH, "turns every exception into an error body"),
    Layer("middleware", REPLICA, "is the operator's own (--middleware)"),
    Layer("admin_auth", REPLICA, "asks for the operator's key on /admin/*"),
    Layer("auth", REPLICA, "asks for the API key"),
    Layer("plain", REPLICA, "reads the path /x/ as /x, answers HEAD as GET without the body"),
    Layer("transport_limits", BOTH, "refuses long addresses, many headers, and WebSockets"),
    Layer("hide_serve_routes", PROXY, "hides Serve's list of routes, drops Serve's own headers"),
    Layer("serve_errors", PROXY, "gives Serve's own failures the form of error bodies"),
    Layer("proxy_flow", PROXY, "tells the replica how much of its answer the client has read"),
    Layer("body_limits", REPLICA, "counts and times the body while it is read"),
    Layer("idempotency", REPLICA, "answers a repeated Idempotency-Key from the first answer"),
    Layer("tracing", REPLICA, "opens a span for the request"),
    Layer("load", REPLICA, "counts requests in flight"),
)
"""Every ASGI layer of ours, once, the outermost first: a request passes them from the top down."""


def arrange(place: Place, layers: Mapping[str, Middleware | None]) -> list[Middleware]:
    """The layers of a place in the order of LAYERS, the outermost first; None leaves one out.

    Raises:
        ValueError: a name is not in LAYERS, or does not belong to the place.
    """
    names = [layer.name for layer in LAYERS if place in layer.places]
    if unknown := set(layers) - set(names):
        raise ValueError(f"no layers of the {place}: {', '.join(sorted(unknown))}")
    chosen = [layers.get(name) for name in names]
    return [layer for layer in chosen if layer is not None]


def settings_layers(settings: HttpSettings) -> dict[str, Middleware | None]:
    """The layers of a replica that depend on nothing but its settings, by name."""
    keys, admin_keys, cors = settings.keys, settings.admin_keys, settings.cors
    open_paths = OPEN_PATHS | PAGE_PATHS if settings.web else OPEN_PATHS
    operators = ADMIN_PATHS | {ADAPTER_LIST}
    operators |= frozenset() if settings.client_adapters else ADAPTER_PATHS
    if admin_keys is not None:
        open_paths |= operators  # they have a key of their own
    return {
        "request_id": Middleware(RequestIds),
        "cors": Middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=EXPOSED,
        )
        if cors.origins
        else None,
        "errors": Middleware(ErrorResponses, log_stack=settings.log_error_stack),
        "admin_auth": None
        if admin_keys is None
        else Middleware(AdminAuth, keys=admin_keys, paths=operators, clients=keys),
        "auth": None if keys is None else Middleware(BearerAuth, keys=keys, open_paths=open_paths),
        "plain": Middleware(PlainRequests),
        "transport_limits": Middleware(TransportLimits),
        "body_limits": Middleware(
            BodyLimits,
            max_bytes=settings.max_body_bytes,
            seconds=settings.body_seconds,
            max_upload_bytes=settings.max_upload_bytes,
            max_recording_bytes=settings.max_recording_bytes,
        ),
    }
