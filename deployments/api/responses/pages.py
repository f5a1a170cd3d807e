"""Pages of items, and other numbers and words of a query."""

from collections.abc import Sequence
from itertools import islice

from fastapi import Request

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.replies import Item, ItemList

MAX_PAGE = 100  # items
PAGE = 20
MAX_DIGITS = 12  # of a number in a query


def tenant_of(request: Request) -> str:
    """Returns the tenant of the request's API key; it is empty without keys."""
    return getattr(request.state, "tenant", "")


def page_of(request: Request, given: Sequence[Item]) -> ItemList:
    """Returns the page of items that a query asks for; the newest first if it does not say."""
    limit = number_of(request, "limit", PAGE, 1, MAX_PAGE)
    items = list(given)
    if word_of(request, "order", ("desc", "asc")) == "desc":
        items.reverse()
    after = request.query_params.get("after")
    start = 0
    if after is not None:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequest(f"There is no item with id {after[:128]!r}.", "after")
        start = places[0] + 1
    page = list(islice(items, start, start + limit))
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )


def number_of(
    request: Request, name: str, default: int, low: int, high: int = 10**MAX_DIGITS
) -> int:
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
