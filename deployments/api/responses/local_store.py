"""Where the responses of an ingress are kept, for the routes that ask for them again."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from rayfin.deployments.api.responses.events import follow
from rayfin.deployments.api.responses.replies import ResponseStreamEvent
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.api.responses.store import ResponseStore


class Responses(Protocol):
    """Stored responses by id, each its tenant's; those that run here, and those that do not."""

    async def add(self, state: ResponseState) -> None:
        """Takes in a response that is to run here.

        Raises:
            InvalidRequest: it alone is larger than the store.
            Overloaded: the store is full of responses that still run.
        """
        ...

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """A response of that tenant's, or a copy of it as it stands where it runs elsewhere.

        Raises:
            NotFound: there is none; another tenant's is none.
        """
        ...

    def follow(
        self, state: ResponseState, number: int
    ) -> AsyncGenerator[ResponseStreamEvent, None]:
        """The events of one that ``get`` gave, from that number to the last, as they happen."""
        ...

    async def settle(self, state: ResponseState) -> None:
        """Takes note of the end of a response that ran here, stored or not."""
        ...

    async def cancel(self, state: ResponseState) -> None:
        """Ends a background response, wherever it runs; ``state`` then says so."""
        ...

    async def remove(self, state: ResponseState) -> None:
        """Deletes it, and ends it if it runs."""
        ...

    def forget(self, state: ResponseState) -> None:
        """As ``remove``, of a response that ran here; does not wait."""
        ...


class LocalResponseStore:
    """The responses of the only ingress replica that there is, in its memory: they end with it."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = ResponseStore() if store is None else store

    def __len__(self) -> int:
        return len(self._store)

    async def add(self, state: ResponseState) -> None:
        self._store.add(state)

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        return self._store.get(response_id, tenant, param)

    def follow(
        self, state: ResponseState, number: int
    ) -> AsyncGenerator[ResponseStreamEvent, None]:
        return follow(state, number)

    async def settle(self, state: ResponseState) -> None:
        self._store.settle(state)

    async def cancel(self, state: ResponseState) -> None:
        await cancel_here(state)

    async def remove(self, state: ResponseState) -> None:
        self.forget(state)

    def forget(self, state: ResponseState) -> None:
        self._store.remove(state)
        if state.task is not None:
            state.task.cancel()


async def cancel_here(state: ResponseState) -> None:
    """Ends a background response of this process."""
    if state.task is not None:
        state.task.cancel()
        await asyncio.wait({state.task})
    state.finish("cancelled")  # where it had not even begun
