"""The number of requests that an ingress generates tokens for."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

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
        "/v1/responses",
        "/v1/messages",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/invocations",
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
