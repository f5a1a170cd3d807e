"""What a request's query says: numbers, words, and the place in a list that a page begins at."""

from collections.abc import Sequence

from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest

MAX_DIGITS = 12  # of a number in a query


def tenant_of(request: Request) -> str:
    """Returns the tenant of the request's API key; it is empty without keys."""
    return getattr(request.state, "tenant", "")


def place_behind(request: Request, ids: Sequence[str], name: str = "after") -> int:
    """Returns the place behind the object that a query names; 0 if it names none.

    Raises:
        InvalidRequest: there is none of this id.
    """
    wanted = request.query_params.get(name)
    if wanted is None:
        return 0
    if wanted not in ids:
        raise InvalidRequest(f"There is no object with id {wanted[:64]!r}.", name)
    return ids.index(wanted) + 1


def number_of(
    request: Request, name: str, default: int, low: int, high: int = 10**MAX_DIGITS
) -> int:
    """Returns a whole number of the query from ``low`` to ``high``, or ``default``.

    Raises:
        InvalidRequest: it is none.
    """
    written = request.query_params.get(name)
    if written is None:
        return default
    if not (written.isascii() and written.isdecimal() and len(written) <= MAX_DIGITS):
        raise InvalidRequest(f"{name} must be a whole number.", name, "invalid_type")
    if not low <= int(written) <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {written}.", name)
    return int(written)


def word_of(request: Request, name: str, choices: tuple[str, ...]) -> str:
    """Returns the query parameter, by default the first of ``choices``."""
    word = request.query_params.get(name, choices[0])
    if word not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}.", name)
    return word
