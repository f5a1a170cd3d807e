"""Measures each HTTP request: arrival, status of the answer, time to the first event."""

import time

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.deployments.telemetry.ingress_counters import IngressCounters

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
