"""What an ingress counts of HTTP: requests that generate now, and how each is answered."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.deployments.telemetry.ingress_counters import IngressCounters

POOLING = (
    *("/v1/embeddings", "/v2/embed", "/score", "/v1/score", "/classify", "/pooling"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
GENERATING = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/generative_scoring",
        "/inference/v1/generate",
        "/v1/decisions",
        "/v1/systemone",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/invocations",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        *POOLING,
    }
)


class Load:
    """Counts the requests that generate now, of waiting clients and in the background."""

    def __init__(self) -> None:
        self.in_flight = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class LoadCounter:
    """ASGI: counts requests for tokens from their first line to their last event."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or get_route_path(scope) not in GENERATING:
            return await self._app(scope, receive, send)
        with self._load.one_more():
            await self._app(scope, receive, send)


EVENTS = b"text/event-stream"


class RequestMeter:
    """ASGI: counts every answer, and leaves ``arrival`` in the request's state.

    A route sets ``state.counts`` to the counters of the model that it resolved.
    """

    def __init__(self, app: ASGIApp, counts: IngressCounters) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        arrival = time.monotonic()
        scope.setdefault("state", {})["arrival"] = arrival
        status: int | None = None
        flushing = False  # a stream whose first event has not been sent

        def counts() -> IngressCounters:  # layers on the way replace the state
            chosen: IngressCounters = scope["state"].get("counts", self._counts)
            return chosen

        async def metered(message: Message) -> None:
            nonlocal status, flushing
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
                flushing = _is_stream(message)
            elif flushing and message.get("body"):
                flushing = False
                counts().first_flush.observe(time.monotonic() - arrival)

        try:
            await self._app(scope, receive, metered)
        finally:
            counts().answered(get_route_path(scope), status)


def _is_stream(start: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(EVENTS) for name, value in start["headers"]
    )
