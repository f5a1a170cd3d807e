"""The responses that an ingress remembers."""

import time
from collections.abc import Callable

from rayfin.actors.errors import InvalidRequest, NotFound, Overloaded
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.http.tenant_store import TenantStore

MAX_RESPONSES = 4096
MAX_BYTES = 128 * 2**20
MAX_AGE = 24 * 3600.0  # seconds


class ResponseStore:
    """Responses by id, in the memory of one process; bounded as a ``TenantStore`` is."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._states: TenantStore[ResponseState] = TenantStore(
            max_responses, max_bytes, max_age, clock
        )

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: ResponseState) -> None:
        """Takes in a response that has just been created.

        Raises:
            InvalidRequest: it alone is larger than the store.
            Overloaded: the store is full of responses that still run.
        """
        if state.size() > self._states.max_bytes:
            raise InvalidRequest("The conversation is too large to store.", "store")
        if not self._states.add(state):
            raise Overloaded("Too many stored responses are in progress.")

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """A response of that tenant's.

        Raises:
            NotFound: there is none; another tenant's is none.
        """
        state = self._states.get(response_id, tenant)
        if state is None:
            raise NotFound(f"There is no response with id {response_id[:128]!r}.", param)
        return state

    def settle(self, state: ResponseState) -> None:
        """Counts what a response has become, now that it has ended."""
        self._states.settle(state)

    def remove(self, state: ResponseState) -> None:
        self._states.remove(state)
