"""The body of a request as a JSON object, with everything refused that would fail later."""

import asyncio
import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.openai.errors import ClientGone

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 64
READ_SECONDS = 30.0
LARGE = 256 * 1024  # bytes from which parsing leaves the event loop
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
SURROGATE = re.compile("[\ud800-\udfff]")


async def read_json(request: Request) -> dict[str, Any]:
    """The body's JSON object.

    Raises:
        HTTPException: 415 another media type or encoding, 413 over 4 MiB, 408 sent too slowly.
        InvalidRequest: not one JSON object of finite numbers and valid text, depth at most 64.
        ClientGone: the client left while sending.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(READ_SECONDS):
            raw = await _read(request)
    except TimeoutError:
        raise HTTPException(408, "The request body did not arrive in time.") from None
    except ClientDisconnect:
        raise ClientGone from None
    return await asyncio.to_thread(parse_json, raw) if len(raw) > LARGE else parse_json(raw)


def parse_json(raw: bytes) -> dict[str, Any]:
    """As :func:`read_json`, from the bytes."""
    try:
        value = json.loads(
            raw.decode("utf-8"),
            parse_constant=_refuse_number,
            parse_float=_finite,
            object_pairs_hook=_object,
        )
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.", None, "invalid_json") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.", None, "invalid_json"
        ) from None
    except ValueError:  # an integer of thousands of digits
        raise InvalidRequest("A number is too large.", None, "invalid_number") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", None, "invalid_type")
    surrogates = SURROGATE_ESCAPE.search(raw) is not None
    if surrogates or raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_nested(value, surrogates)
    return value


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type, _, parameters = content_type.lower().partition(";")
    charset = parameters.strip().removeprefix("charset=").strip("\"' ")
    if media_type.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise HTTPException(415, "The Content-Type must be application/json in UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "The body must not have a Content-Encoding.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BYTES:
        raise _too_large()


async def _read(request: Request) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BYTES:
            raise _too_large()
    return bytes(raw)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        count = Counter(name for name, _ in pairs)
        twice = next(name for name in value if count[name] > 1)[:64]
        raise InvalidRequest(f"The key {twice!r} is there twice.", twice, "duplicate_key")
    return value


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse_number(literal)


def _refuse_number(literal: str) -> NoReturn:
    raise InvalidRequest(
        f"{literal[:32]} is not a finite JSON number.", None, "invalid_number"
    ) from None


def _check_nested(value: object, surrogates: bool) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if surrogates and any(_has_surrogate(item) for item in level):
            raise InvalidRequest(
                "A string holds half of a surrogate pair.", None, "invalid_unicode"
            )
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep()


def _has_surrogate(item: object) -> bool:
    texts = [item] if isinstance(item, str) else item.keys() if isinstance(item, dict) else ()
    return any(SURROGATE.search(text) for text in texts)


def _children(item: object) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else []


def _too_large() -> HTTPException:
    return HTTPException(413, f"The request body is larger than {MAX_BYTES} bytes.")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(
        f"The body is nested deeper than {MAX_DEPTH} levels.", None, "invalid_json"
    )
