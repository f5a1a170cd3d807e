"""The body of a request as a JSON object, with everything refused that would fail later.

Python's parser reads it, because pydantic_core's keeps the last of two equal keys and reads 1e999
as infinity.
"""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from rayfin.actors.errors import ClientGone, InvalidRequest
from rayfin.deployments.http.errors import invalid_request

MAX_DEPTH = 64
MAX_KEYS = 2**16  # of all objects together
MAX_ITEMS = 2**19  # members and elements of all objects and arrays together
LARGE = 256 * 1024  # bytes from which parsing leaves the event loop
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, *, any_type: bool = False) -> dict[str, Any]:
    """The body's JSON object; how much of it there may be, and how slow, is ``BodyLimits``'s.

    Args:
        any_type: its Content-Type does not matter.

    Raises:
        HTTPException: 415 another media type.
        InvalidRequest: not one JSON object of finite numbers and valid text, depth at most 64.
        ClientGone: the client left while sending.
    """
    if not any_type:
        _check_type(request)
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    return await asyncio.to_thread(parse_json, raw) if len(raw) > LARGE else parse_json(raw)


def parse_json(raw: bytes) -> dict[str, Any]:
    """As :func:`read_json`, from the bytes."""
    try:
        text = raw.decode("utf-8")
        _check_structure(raw)
        value = json.loads(
            text,
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
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", None, "invalid_type")
    if SURROGATE_ESCAPE.search(raw) is not None:
        _check_surrogates(value)
    return value


def _check_structure(raw: bytes) -> None:
    """Refuses what would cost too much to parse, before it is parsed.

    Counting bytes settles almost every body; only one with many brackets or commas is looked at
    closer, with its strings left out.
    """
    if (
        raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH
        and raw.count(b",") < MAX_ITEMS
        and raw.count(b":") <= MAX_KEYS
    ):
        return
    unescaped = raw.replace(rb"\\", b"__").replace(rb"\"", b"__")
    characters = np.frombuffer(unescaped, np.uint8)
    outside = np.cumsum(characters == ord('"')) % 2 == 0
    marks = characters[outside]
    opened = (marks == ord("[")) | (marks == ord("{"))
    closed = (marks == ord("]")) | (marks == ord("}"))
    depth = np.cumsum(opened.astype(np.int32) - closed)
    if depth.max(initial=0) > MAX_DEPTH:
        raise InvalidRequest(
            f"The body is nested deeper than {MAX_DEPTH} levels.", None, "invalid_json"
        )
    if np.count_nonzero(marks == ord(":")) > MAX_KEYS:
        raise _too_many("keys", MAX_KEYS)
    if np.count_nonzero(marks == ord(",")) >= MAX_ITEMS:
        raise _too_many("elements", MAX_ITEMS)


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type, _, parameters = content_type.lower().partition(";")
    charset = parameters.strip().removeprefix("charset=").strip("\"' ")
    if media_type.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise HTTPException(415, "The Content-Type must be application/json in UTF-8.")


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


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "A string holds half of a surrogate pair.", None, "invalid_unicode"
        ) from None


def _too_many(what: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"The body has more than {limit} {what}.", None, "body_too_complex")


# A request's body as a checked model, and the names of the fields that were ignored.

IGNORED_FIELDS = "x-rayfin-ignored-fields"
FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")  # names that may stand in a header
MAX_NAMED = 16

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body], *, any_type: bool = False) -> Body:
    """Returns the body as a ``kind``; see :func:`read_json` and :func:`validate`."""
    return validate(await read_json(request, any_type=any_type), kind)


async def read_optional(request: Request, kind: type[Body]) -> Body:
    """Returns the body as a ``kind``, all of whose fields have defaults if there is none."""
    return await read_body(request, kind) if await request.body() else kind()


def validate(value: dict[str, Any], kind: type[Body]) -> Body:
    """A JSON object as a ``kind``.

    Raises:
        InvalidRequest: it is none; ``param`` is the path of the first field that is wrong.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error.errors(include_input=False)) from None


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Names what was ignored; a name that is no plain word stands as a question mark."""
    shown = [name if FIELD_NAME.fullmatch(name) else "?" for name in names[:MAX_NAMED]]
    return {IGNORED_FIELDS: ",".join(shown)} if shown else {}


@contextmanager
def renamed_paths(inner: str, outer: str) -> Iterator[None]:
    """Errors that name ``inner``, or a path inside of it, name the same place of ``outer``.

    Raises:
        InvalidRequest: the body raised it.
    """
    try:
        yield
    except InvalidRequest as error:
        path = error.param or ""
        if path == inner:
            error.param = outer
        if inner == outer or not path.startswith(f"{inner}["):
            raise
        moved = outer + path.removeprefix(inner)
        raise InvalidRequest(str(error).replace(path, moved), moved, error.code) from error


@contextmanager
def rename_error_params(names: Mapping[str, str]) -> Iterator[None]:
    """Lets errors name fields as this route's clients do: ``names`` maps our names to theirs."""
    try:
        yield
    except InvalidRequest as error:
        name, rest = _split(error.param or "")
        if name in names:
            error.message = error.message.replace(name, names[name])
            error.param = names[name] + rest
        raise


@contextmanager
def rename_error_paths(names: Mapping[str, str]) -> Iterator[None]:
    """As ``rename_error_params``, with any part of a path: each in turn is replaced."""
    try:
        yield
    except InvalidRequest as error:
        for ours, theirs in names.items():
            error.message = error.message.replace(ours, theirs)
            error.param = error.param and error.param.replace(ours, theirs)
        raise


def _split(param: str) -> tuple[str, str]:
    """``stop[1]`` is ``stop`` and ``[1]``."""
    end = next((i for i, character in enumerate(param) if character in ".["), len(param))
    return param[:end], param[end:]
