"""Failures as Anthropic's error body, on the routes that are Anthropic's."""

import json
from collections.abc import Mapping
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.errors import RayfinError
from rayfin.deployments.http.errors import error_body
from rayfin.deployments.http.request_id import REQUEST_ID

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
VERSION = "anthropic-version"  # the header that every client of Anthropic's sends
CLAUDE = "claude-"  # begins the names of models that such clients have built in


class AnthropicErrors:
    """ASGI, around all other layers: whatever they refuse is said in Anthropic's words.

    Every answer carries the request's id under Anthropic's name too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_anthropics(scope):
            return await self._app(scope, receive, send)
        refusal: Message | None = None  # its first line and headers, held until the body is there
        body = bytearray()

        async def translated(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers.get(REQUEST_ID, "")
                if message["status"] >= 400:
                    refusal = message
                    return
            elif refusal is not None and message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if message.get("more_body", False):
                    return
                message = {"type": "http.response.body", "body": _translate(refusal, bytes(body))}
                headers = MutableHeaders(scope=refusal)
                headers["content-length"] = str(len(message["body"]))
                headers["content-type"] = "application/json"
                await send(refusal)
            await send(message)

        await self._app(scope, receive, translated)


def anthropic_error(status: int, written: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Returns the body for OpenAI's ``error`` object.

    There is no place for ``param`` in it, so the message names it; behind its first words, by which
    clients recognise some of them.
    """
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, param = written["message"], written.get("param")
    if param is not None and param not in message:
        message = f"{message} ({param})"
    error = {"type": kind, "message": message}
    if "details" in written:
        error["details"] = written["details"]
    return {"type": "error", "error": error, "request_id": request_id}


def error_event(error: Exception, request_id: str) -> str:
    """The last event of a stream that failed."""
    status = error.status if isinstance(error, RayfinError) else 500
    body = anthropic_error(status, error_body(error)["error"], request_id)
    return f"event: error\ndata: {json.dumps(body)}\n\n"


def _is_anthropics(scope: Scope) -> bool:
    path = get_route_path(scope)
    return path.startswith("/v1/messages") or (
        path.startswith("/v1/models") and VERSION in Headers(scope=scope)
    )


def _translate(refusal: Message, body: bytes) -> bytes:
    request_id = MutableHeaders(scope=refusal)["request-id"]
    try:
        written = json.loads(body)
        if written.get("type") == "error":  # a layer inside has done it
            return body
        error = anthropic_error(refusal["status"], written["error"], request_id)
    except (ValueError, KeyError, AttributeError):  # plain text, as browsers are answered
        said = {"message": body.decode(errors="replace")}
        error = anthropic_error(refusal["status"], said, request_id)
    return json.dumps(error).encode()
