"""The responses that an ingress remembers."""

import itertools
import time
from collections.abc import Callable, Iterator

from rayfin.actors.errors import InvalidRequest, NotFound, Overloaded
from rayfin.deployments.openai.responses.state import ResponseState

MAX_RESPONSES = 4096
MAX_BYTES = 128 * 2**20
MAX_AGE = 24 * 3600.0  # seconds


class ResponseStore:
    """Responses by id, each its tenant's own, bounded in number, bytes and age.

    It lives in the memory of one ingress replica: another replica does not know its responses, and
    they end with it. What is over a bound goes first where the most is held: the oldest response
    that has ended of the tenant with the most bytes, so that no tenant can drive out another.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._states: dict[str, ResponseState] = {}  # oldest first
        self._sizes: dict[str, int] = {}
        self._births: dict[str, float] = {}
        self._bytes: dict[str, int] = {}  # of each tenant

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: ResponseState) -> None:
        """Takes in a response that has just been created.

        Raises:
            InvalidRequest: it alone is larger than the store.
            Overloaded: the store is full of responses that still run.
        """
        self._drop_old()
        size = state.size()
        if size > self._max_bytes:
            raise InvalidRequest("The conversation is too large to store.", "store")
        self._make_room(1, size)
        if len(self._states) >= self._max_responses:
            raise Overloaded("Too many stored responses are in progress.")
        self._states[state.id] = state
        self._births[state.id] = self._clock()
        self._sizes[state.id] = 0
        self._resize(state, size)

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """A response of that tenant's.

        Raises:
            NotFound: there is none; another tenant's is none.
        """
        self._drop_old()
        state = self._states.get(response_id)
        if state is None or state.tenant != tenant:
            raise NotFound(f"There is no response with id {response_id[:128]!r}.", param)
        return state

    def settle(self, state: ResponseState) -> None:
        """Counts what a response has become, now that it has ended."""
        if state.id in self._states:
            self._resize(state, state.size())
            self._make_room(0, 0)

    def remove(self, state: ResponseState) -> None:
        if self._states.pop(state.id, None) is not None:
            self._resize(state, 0)
            del self._sizes[state.id], self._births[state.id]

    def _resize(self, state: ResponseState, size: int) -> None:
        held = self._bytes.get(state.tenant, 0) + size - self._sizes[state.id]
        self._sizes[state.id] = size
        self._bytes[state.tenant] = held
        if not held:
            del self._bytes[state.tenant]

    def _drop_old(self) -> None:
        limit = self._clock() - self._max_age
        old = itertools.takewhile(lambda item: item[1] <= limit, self._births.items())
        for state in [self._states[response_id] for response_id, _ in old]:
            if state.done:
                self.remove(state)

    def _make_room(self, responses: int, size: int) -> None:
        ended = self._ended_by_weight()
        while (
            len(self._states) + responses > self._max_responses
            or sum(self._bytes.values()) + size > self._max_bytes
        ):
            victim = next(ended, None)
            if victim is None:
                return
            self.remove(victim)

    def _ended_by_weight(self) -> Iterator[ResponseState]:
        """The responses that may go, in the order in which they should."""
        while self._states:
            for tenant in sorted(self._bytes, key=self._bytes.__getitem__, reverse=True):
                mine = (state for state in self._states.values() if state.tenant == tenant)
                oldest = next((state for state in mine if state.done), None)
                if oldest is not None:
                    yield oldest
                    break
            else:
                return
