"""Every failure as OpenAI's error body: ``{"error": {"message", "type", "param", "code"}}``."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from rayfin.actors.errors import EngineUnavailable, InvalidRequest, Overloaded, RayfinError

logger = logging.getLogger("rayfin.http")

MAX_MESSAGE = 1000  # characters; values of requests are quoted in messages
RETRY_AFTER = "1"  # seconds
CLIENT_CLOSED = 499  # the status that access logs show for a client that left

HTTP_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class ClientGone(Exception):
    """The client closed its connection before the answer."""


def error_body(error: Exception) -> dict[str, Any]:
    """The body for ``error``; one that is no RayfinError shows nothing of itself."""
    if not isinstance(error, RayfinError):
        error = RayfinError("The server had an error while processing the request.")
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    return _body(message, error.type, error.param, error.code)


def error_response(error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RayfinError) else 500
    retry = isinstance(error, Overloaded | EngineUnavailable)
    headers = {"Retry-After": RETRY_AFTER} if retry else None
    return JSONResponse(error_body(error), status, headers)


def http_error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A refusal that is about the HTTP request itself rather than a field of its body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = HTTP_CODES.get(status, "http_error")
    return JSONResponse(_body(message, kind, None, code), status, headers)


def invalid_request(errors: Sequence[Any]) -> InvalidRequest:
    """The first of pydantic's errors, by the path of the field as the client wrote it."""
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
    code = "invalid_value"
    if kind == "extra_forbidden":
        code = "unknown_parameter"
    elif kind.endswith("_type") or kind == "int_from_float":
        code = "invalid_type"
    return InvalidRequest(f"Invalid '{path}': {first['msg']}.", path or None, code)


def add_error_handlers(app: FastAPI) -> None:
    """Answers every exception that leaves a route of ``app``."""

    async def rayfin_error(request: Request, error: Exception) -> JSONResponse:
        response = error_response(error)
        if response.status_code >= 500:
            logger.warning("%s %s: %s", request.method, request.url.path, error)
        return response

    async def validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError | ValidationError)
        return error_response(invalid_request(error.errors()))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"Unknown request URL: {request.method} {request.url.path[:128]}."
        elif error.status_code == 405:
            message = f"{request.url.path} does not answer {request.method[:16]}."
        return http_error_response(error.status_code, message, error.headers)

    async def client_gone(request: Request, error: Exception) -> JSONResponse:
        return http_error_response(CLIENT_CLOSED, "The client closed the connection.")

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error)

    app.add_exception_handler(RayfinError, rayfin_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(ValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(Exception, unexpected)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
