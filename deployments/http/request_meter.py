"""The outermost layer: when a request arrived, what it was answered, when its first event left."""

import time

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.deployments.telemetry.ingress_counters import IngressCounters

EVENTS = b"text/event-stream"


class RequestMeter:
    """ASGI: counts every answer, and leaves ``arrival`` in the request's state.

    An answer counts where ``counts`` in that state says, which is the model that was asked.
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
        flushing = False  # the first event of a stream is still to come

        def counts() -> IngressCounters:  # layers on the way replace the state
            own: IngressCounters = scope["state"].get("counts", self._counts)
            return own

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
