"""Failures as OpenAI's error body: ``{"error": {"message", "type", "param", "code"}}``."""

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException

from rayfin.actors.errors import (
    ClientGone,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RayfinError,
)
from rayfin.actors.timing import RETRY_AFTER_SECONDS

logger = logging.getLogger("rayfin.http")

MAX_MESSAGE = 1000  # characters; values of requests are quoted in messages
CLIENT_CLOSED = 499  # the status that access logs show for a client that left

HTTP_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "idempotency_key_reused",
    413: "request_too_large",
    414: "url_too_long",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    CLIENT_CLOSED: "client_closed_request",
    500: "internal_error",
    503: "unavailable",
}


OLLAMAS = "/api/"
"""Begins the paths of Ollama's routes."""

EXPECTED = (RayfinError, RequestValidationError, ValidationError, HTTPException)
"""Failures that have a status and words of their own."""

OBJECT_TYPES = ("dict_type", "model_type", "model_attributes_type")
"""Types of pydantic's errors whose message names Python's classes."""


def error_body(error: Exception) -> dict[str, Any]:
    """The body for ``error``; the text of an error that is not a RayfinError is not shown."""
    if not isinstance(error, RayfinError):
        error = RayfinError("The server had an error while processing the request.")
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    body = _body(message, error.type, error.param, error.code)
    if isinstance(error, InvalidRequest) and error.details is not None:
        body["error"]["details"] = dict(error.details)
    return body


def error_response(error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RayfinError) else 500
    headers = dict(error.headers) if isinstance(error, RateLimited) else {}
    if isinstance(error, Overloaded | EngineUnavailable):
        seconds = error.retry_after if isinstance(error, Overloaded) else None
        headers["Retry-After"] = str(seconds or RETRY_AFTER_SECONDS)
    if isinstance(error, EngineUnavailable):  # the next connection may reach another ingress
        headers["Connection"] = "close"
    return JSONResponse(error_body(error), status, headers)


def http_error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error about the HTTP request itself rather than a field of its body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = HTTP_CODES.get(status, "http_error")
    return JSONResponse(_body(message, kind, None, code), status, headers)


def invalid_request(errors: Sequence[Any]) -> InvalidRequest:
    """The first of pydantic's errors, with the path of the field in the client's body."""
    first = errors[0]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in first["loc"]
        if part != "body"
    ).lstrip(".")
    kind = first["type"]
    if kind == "missing":
        return InvalidRequest(
            f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
        )
    if kind == "extra_forbidden":
        return InvalidRequest(f"Unknown parameter: '{path}'.", path, "unknown_parameter")
    message = "Input should be an object" if kind in OBJECT_TYPES else first["msg"]
    code = "invalid_type" if kind.endswith("_type") or kind == "int_from_float" else "invalid_value"
    return InvalidRequest(f"Invalid '{path}': {message}.", path or None, code)


def failure_response(
    error: Exception, method: str, path: str, *, log_stack: bool = False
) -> JSONResponse:
    """The answer to any exception; failures of the server are logged.

    Args:
        path: of the route, without a path that a proxy in front has added.
        log_stack: whether refusals are logged too, all with their stack traces.
    """
    if isinstance(error, ClientGone):
        logger.info("%s %s: %s the client left", method, path, CLIENT_CLOSED)
        return http_error_response(CLIENT_CLOSED, "The client closed the connection.")
    response = _answer(error, method, path)
    if path.startswith(OLLAMAS):
        response = _as_text(response)
    if not isinstance(error, EXPECTED):
        logger.error("%s %s failed", method, path, exc_info=error)
    elif log_stack:
        # Not the exception's own trace: its message may quote a body of any length.
        stack = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        summary = (response.status_code, type(error).__name__, str(error)[:MAX_MESSAGE])
        logger.warning("%s %s: %d %s: %r\n%s", method, path, *summary, stack)
    elif isinstance(error, RayfinError) and response.status_code >= 500:
        logger.warning("%s %s: %s", method, path, error)
    return response


def _answer(error: Exception, method: str, path: str) -> JSONResponse:
    if isinstance(error, HTTPException):
        message = str(error.detail)
        if error.status_code == 404:
            message = f"Unknown request URL: {method[:16]} {path[:128]}."
        elif error.status_code == 405:
            message = f"{path[:128]} does not answer {method[:16]}."
        return http_error_response(error.status_code, message, error.headers)
    if isinstance(error, RequestValidationError | ValidationError):
        error = invalid_request(error.errors())
    return error_response(error)


def _as_text(response: JSONResponse) -> JSONResponse:
    """Returns the same error as Ollama's clients read it: a message, and nothing beside it."""
    message = json.loads(bytes(response.body))["error"]["message"]
    written = JSONResponse({"error": message}, response.status_code)
    kept = {name: value for name, value in response.headers.items() if name not in written.headers}
    written.headers.update(kept)
    return written


def add_error_handlers(app: FastAPI, *, log_stack: bool = False) -> None:
    """Answers every exception that leaves a route of ``app``; see ``failure_response``."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        path = get_route_path(request.scope)
        return failure_response(error, request.method, path, log_stack=log_stack)

    for kind in (*EXPECTED, ClientGone, Exception):
        app.add_exception_handler(kind, answer)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
