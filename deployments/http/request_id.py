"""An id for each HTTP request, for logs and support. Nothing is looked up by it."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.processes.logs import REQUEST
from rayfin.deployments.http.errors import http_error_response

REQUEST_ID = "x-request-id"
LABEL = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIds:
    """ASGI: adds the client's X-Request-Id, or a fresh one, to every answer.

    The engine uses keys that the server makes: elsewhere, ids that clients choose let one request
    answer or abort another (vLLM CVE-2026-105755, SGLang CVE-2026-112266).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).getlist(REQUEST_ID)
        good = len(given) <= 1 and all(LABEL.fullmatch(label) for label in given)
        label = given[0] if given and good else uuid.uuid4().hex

        async def add_header(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                MutableHeaders(scope=message)[REQUEST_ID] = label
            await send(message)

        if not good:
            refusal = http_error_response(
                400, "X-Request-Id must be 1 to 128 of the characters A-Z a-z 0-9 . _ -"
            )
            return await refusal(scope, receive, add_header)
        scope["state"] = {**scope.get("state", {}), "request_id": label}
        others = [pair for pair in scope["headers"] if pair[0] != REQUEST_ID.encode()]
        scope["headers"] = [*others, (REQUEST_ID.encode(), label.encode())]
        token = REQUEST.set(label)
        try:
            await self._app(scope, receive, add_header)
        finally:
            REQUEST.reset(token)
