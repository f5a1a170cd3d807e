"""The responses of all ingress replicas of an application, in one place."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rayfin.actors.errors import EngineUnavailable, NotFound
from rayfin.actors.timing import RESPONSE_OWNER_SECONDS, RESPONSE_STORE_POLL_SECONDS
from rayfin.deployments.api.responses.state import Change, ResponseState
from rayfin.deployments.api.responses.store import ResponseStore

Order = tuple[Literal["cancel", "forget"], str]


@dataclass(slots=True)
class _Owner:
    """One ingress replica."""

    seen: float
    orders: list[Order] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class ResponseStoreActor:
    """Copies of stored responses, told by the ingress that runs each (its owner), for all others.

    It lives in one event loop. What an owner is to do with a response of its own, it learns from
    ``orders``, which it keeps asking for.
    """

    def __init__(
        self, store: ResponseStore | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = ResponseStore() if store is None else store
        self._clock = clock
        self._owners: dict[str, _Owner] = {}
        self._owned: dict[str, str] = {}  # response that runs -> owner

    def add(self, owner: str, state: ResponseState) -> None:
        """Takes in a response that its owner is about to run.

        Raises:
            InvalidRequest, Overloaded: see ``ResponseStore.add``.
        """
        self._store.add(state)
        self._owned[state.id] = owner
        self._seen(owner)

    def grow(self, response_id: str, tenant: str, change: Change) -> None:
        """What its owner says of it; of one that was deleted nothing is kept."""
        try:
            state = self._store.get(response_id, tenant)
        except NotFound:
            self._owned.pop(response_id, None)
            return
        state.apply(change)
        if state.done:
            self._owned.pop(response_id, None)
            self._store.settle(state)

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """A copy of a response as it stands.

        Raises:
            NotFound: there is none of that tenant's.
        """
        return self._find(response_id, tenant, param).snapshot()

    async def after(self, response_id: str, tenant: str, since: int, status: str) -> Change:
        """What has happened since it had so many pieces and that status; waits a while for it.

        Raises:
            NotFound: there is none of that tenant's, or no longer.
        """
        state = self._find(response_id, tenant)
        if not state.done and len(state.pieces) == since and state.status == status:
            await _set_within(state.news(), RESPONSE_STORE_POLL_SECONDS)
            state = self._find(response_id, tenant)
        return state.change(since)

    def remove(self, response_id: str, tenant: str) -> None:
        """Deletes it; if it runs, its owner is told to end it."""
        try:
            state = self._store.get(response_id, tenant)
        except NotFound:
            return
        self._store.remove(state)
        self._order(response_id, "forget")
        self._owned.pop(response_id, None)
        state.finish("cancelled")  # for those who wait for news

    def cancel(self, response_id: str, tenant: str) -> None:
        """Its owner is told to cancel it, if it runs.

        Raises:
            NotFound: there is none of that tenant's.
        """
        if not self._find(response_id, tenant).done:
            self._order(response_id, "cancel")

    async def orders(self, owner: str) -> list[Order]:
        """What an owner is to do, in order; waits a while for something."""
        own = self._seen(owner)
        if not own.orders:
            await _set_within(own.news, RESPONSE_STORE_POLL_SECONDS)
        own.news.clear()
        orders, own.orders = own.orders, []
        self._seen(owner)
        return orders

    def _find(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """As ``get``, not copied. One whose owner is gone has failed."""
        state = self._store.get(response_id, tenant, param)
        if not state.done and not self._is_there(self._owned.get(response_id)):
            state.fail(EngineUnavailable("The server that ran this response has ended."))
            self._owned.pop(response_id, None)
            self._store.settle(state)
        return state

    def _order(self, response_id: str, kind: Literal["cancel", "forget"]) -> None:
        if (owner := self._owned.get(response_id)) is not None:
            own = self._owners[owner]
            own.orders.append((kind, response_id))
            own.news.set()

    def _seen(self, owner: str) -> _Owner:
        own = self._owners.setdefault(owner, _Owner(self._clock()))
        own.seen = self._clock()
        for name in [name for name in self._owners if not self._is_there(name)]:
            if name not in self._owned.values():
                del self._owners[name]
        return own

    def _is_there(self, owner: str | None) -> bool:
        own = self._owners.get(owner or "")
        return own is not None and self._clock() - own.seen <= RESPONSE_OWNER_SECONDS


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
