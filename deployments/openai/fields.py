"""A request's body as a checked model, and the names of the fields that were ignored."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.openai.errors import invalid_request
from rayfin.deployments.openai.json_body import read_json

IGNORED_FIELDS = "x-rayfin-ignored-fields"
FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")  # names that may stand in a header
MAX_NAMED = 16

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as a ``kind``; see :func:`checked`."""
    return checked(await read_json(request), kind)


def checked(value: dict[str, Any], kind: type[Body]) -> Body:
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
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Lets errors name fields as this route's clients do: ``names`` maps our names to theirs."""
    try:
        yield
    except InvalidRequest as error:
        name, rest = _split(error.param or "")
        if name in names:
            error.message = error.message.replace(name, names[name])
            error.param = names[name] + rest
        raise


def _split(param: str) -> tuple[str, str]:
    """``stop[1]`` is ``stop`` and ``[1]``."""
    end = next((i for i, character in enumerate(param) if character in ".["), len(param))
    return param[:end], param[end:]
