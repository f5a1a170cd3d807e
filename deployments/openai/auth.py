"""The API key, checked before any route sees the request."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.deployments.openai.errors import http_error_response

OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})


class BearerAuth:
    """Answers 401 on every path that is not open, unless the request carries the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            written = Headers(scope=scope).getlist("authorization")
            if len(written) > 1:
                response = http_error_response(400, "There are two Authorization headers.")
                return await response(scope, receive, send)
            if not self._knows(written[0] if written else ""):
                response = http_error_response(
                    401, "Incorrect or missing API key.", {"WWW-Authenticate": "Bearer"}
                )
                return await response(scope, receive, send)
        await self._app(scope, receive, send)

    def _knows(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace"))
        return hmac.compare_digest(given, self._digest) and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
