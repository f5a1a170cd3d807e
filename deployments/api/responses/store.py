"""The stored responses of all ingress replicas of an application, in one place."""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfin.actors.errors import EngineUnavailable, InvalidRequest, NotFound, Overloaded
from rayfin.actors.timing import RESPONSE_OWNER_SECONDS, RESPONSE_STORE_POLL_SECONDS
from rayfin.deployments.api.responses.conversations import ConversationState
from rayfin.deployments.api.responses.state import Progress, ResponseState
from rayfin.deployments.api.responses.store_log import Record, StoreLog
from rayfin.deployments.http.tenant_store import TenantStore

MAX_RESPONSES = 4096
MAX_BYTES = 128 * 2**20
MAX_AGE = 24 * 3600.0  # seconds


@dataclass(slots=True)
class _Owner:
    """An ingress replica that runs responses."""

    seen: float
    unwanted: list[str] = field(default_factory=list)  # ids of its responses
    ordered: asyncio.Event = field(default_factory=asyncio.Event)


class ResponseStore:
    """Responses by id, in the memory of one process; bounded as a ``TenantStore`` is.

    The ingress replica that runs a response (its owner) sends snapshots, which all replicas read.
    An owner polls for those of its responses that others want ended. Lives in one event loop.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
        log: StoreLog | None = None,
        alone: bool = False,
    ) -> None:
        bounds = (max_responses, max_bytes, max_age, clock, self._record_forgotten)
        self._states: TenantStore[ResponseState] = TenantStore(*bounds)
        self._conversations: TenantStore[ConversationState] = TenantStore(*bounds)
        self._clock = clock
        self._since = time.time()
        self._owners: dict[str, _Owner] = {}
        self._owner_of: dict[str, str] = {}  # of each response that runs
        self._log: StoreLog | None = None
        if log is not None:
            self._restore(log, time.time() - max_age, alone)

    @classmethod
    def over(cls, folder: str | None, *, alone: bool = False) -> "ResponseStore":
        """Returns a store whose content outlives this process, if there is a folder.

        Args:
            alone: the process runs no responses: those that still run may go on.

        Raises:
            InvalidConfig: the folder cannot be written.
        """
        return cls(log=None if folder is None else StoreLog(Path(folder)), alone=alone)

    def _restore(self, log: StoreLog, since: float, alone: bool) -> None:
        """Takes over what another process has recorded. What has ended with it has failed."""
        for record in log.records():
            match record:
                case ("forget", item_id):
                    self._forget(item_id)
                case ("converse", conversation):
                    if conversation.changed_at >= since:
                        self.add_conversation(conversation)
                case ("keep", owner, state):
                    self._forget(state.id)
                    if state.created_at >= since and self._states.add(state) and not state.done:
                        self._owner_of[state.id] = owner or ""
        for state in self._states:
            if not state.done and alone:
                self._seen(self._owner_of[state.id])  # or soon to be gone
            elif not state.done:
                self._lose(state)
        log.rewrite(self._records())
        self._log = log

    def _records(self) -> Iterator[Record]:
        yield from map(self._kept, self._states)
        yield from (("converse", state) for state in self._conversations)

    def _kept(self, state: ResponseState) -> Record:
        return "keep", self._owner_of.get(state.id), state.snapshot()

    def _record(self, record: Record) -> None:
        if self._log is not None:
            self._log.append(record, self._records)

    def _record_forgotten(self, item_id: str) -> None:
        self._record(("forget", item_id))

    def _forget(self, item_id: str) -> None:
        if (state := self._states.find(item_id)) is not None:
            self._states.remove(state)
        if (conversation := self._conversations.find(item_id)) is not None:
            self._conversations.remove(conversation)
        self._owner_of.pop(item_id, None)

    def __len__(self) -> int:
        return len(self._states)

    async def call(self, method: str, *args: object) -> Any:
        """Returns what the named method returns."""
        answer = getattr(self, method)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    def add(self, owner: str, state: ResponseState) -> None:
        """Adds a response that its owner is about to run, or has run while another store began.

        Raises:
            InvalidRequest: the response alone is larger than the store.
            Overloaded: the store is full of responses that still run.
        """
        if self._states.find(state.id) is not None:
            return
        if state.size() > self._states.max_bytes:
            raise InvalidRequest("The conversation is too large to store.", "store")
        if not self._states.add(state):
            raise Overloaded("Too many stored responses are in progress.")
        self._seen(owner)
        if not state.done:
            self._owner_of[state.id] = owner
        if state.done or state.created.background:
            self._record(self._kept(state))

    def grow(self, response_id: str, tenant: str, progress: Progress) -> float | None:
        """Takes over what the owner reports.

        Returns:
            None, or of a response that is not here the seconds since 1970 at which this store
            began: one that began before that was not deleted.
        """
        state = self._states.get(response_id, tenant)
        if state is not None:
            state.apply(progress)
        if state is None or state.done:
            self._owner_of.pop(response_id, None)
        if state is not None and state.done:
            self._states.settle(state)
            self._record(self._kept(state))
        return self._since if state is None else None

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """Returns a copy of a response.

        Raises:
            NotFound: the tenant has no such response.
        """
        return self._find(response_id, tenant, param).snapshot()

    async def progress(self, response_id: str, tenant: str, version: int) -> Progress:
        """Returns how a response stands; waits a while for what comes after ``version``.

        Raises:
            NotFound: the tenant has no such response, or no longer.
        """
        state = self._find(response_id, tenant)
        if not state.done and state.version == version:
            await _set_within(state.changed(), RESPONSE_STORE_POLL_SECONDS)
            state = self._find(response_id, tenant)
        return state.progress()

    def remove(self, response_id: str, tenant: str) -> None:
        """Deletes a response; its owner ends it if it runs."""
        state = self._states.get(response_id, tenant)
        if state is None:
            return
        self._states.remove(state)
        self._record_forgotten(response_id)
        self._end(response_id)
        self._owner_of.pop(response_id, None)
        state.finish("cancelled")  # wakes those who wait for changes

    def cancel(self, response_id: str, tenant: str) -> None:
        """Orders its owner to cancel a response, if it runs.

        Raises:
            NotFound: the tenant has no such response.
        """
        if not self._find(response_id, tenant).done:
            self._end(response_id)

    def add_conversation(self, state: ConversationState) -> None:
        """Adds a conversation, or what one has become.

        Raises:
            InvalidRequest: it alone is larger than the store.
        """
        if state.size() > self._conversations.max_bytes:
            raise InvalidRequest("The conversation is too large to store.", "items")
        if (known := self._conversations.get(state.id, state.tenant)) is not None:
            self._conversations.remove(known)
        self._conversations.add(state)
        self._record(("converse", state))

    def conversation(
        self, conversation_id: str, tenant: str, param: str = "conversation_id"
    ) -> ConversationState:
        """Returns a conversation, which no one changes.

        Raises:
            NotFound: the tenant has no such conversation.
        """
        state = self._conversations.get(conversation_id, tenant)
        if state is None:
            said = f"There is no conversation with id {conversation_id[:128]!r}."
            raise NotFound(said, param)
        return state

    def change_conversation(
        self, conversation_id: str, tenant: str, changes: dict[str, Any]
    ) -> ConversationState:
        """Puts what ``changed`` makes of a conversation into its place, and returns it.

        Raises:
            NotFound: the tenant has no such conversation.
            InvalidRequest: it is larger than the store then.
        """
        state = self.conversation(conversation_id, tenant).changed(**changes)
        self.add_conversation(state)
        return state

    def remove_conversation(self, conversation_id: str, tenant: str) -> None:
        """Raises:
        NotFound: the tenant has no such conversation.
        """
        self._conversations.remove(self.conversation(conversation_id, tenant))
        self._record_forgotten(conversation_id)

    async def unwanted(self, owner: str) -> list[str]:
        """Returns the ids of an owner's responses that are to end; waits a while for some."""
        replica = self._seen(owner)
        if not replica.unwanted:
            await _set_within(replica.ordered, RESPONSE_STORE_POLL_SECONDS)
        replica.ordered.clear()
        ids, replica.unwanted = replica.unwanted, []
        self._seen(owner)
        return ids

    def _find(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """Returns the stored state; a response whose owner is gone has failed."""
        state = self._states.get(response_id, tenant)
        if state is None:
            raise NotFound(f"There is no response with id {response_id[:128]!r}.", param)
        if not state.done and not self._is_alive(self._owner_of.get(response_id)):
            self._lose(state)
        return state

    def _lose(self, state: ResponseState) -> None:
        """Ends a response with the process that ran it."""
        state.fail(EngineUnavailable("The server that ran this response has ended."))
        self._owner_of.pop(state.id, None)
        self._states.settle(state)

    def _end(self, response_id: str) -> None:
        """Tells the owner of a response to end it."""
        if (owner := self._owner_of.get(response_id)) is not None:
            replica = self._owners[owner]
            replica.unwanted.append(response_id)
            replica.ordered.set()

    def _seen(self, owner: str) -> _Owner:
        replica = self._owners.setdefault(owner, _Owner(self._clock()))
        replica.seen = self._clock()
        for name in [name for name in self._owners if not self._is_alive(name)]:
            if name not in self._owner_of.values():
                del self._owners[name]
        return replica

    def _is_alive(self, owner: str | None) -> bool:
        replica = self._owners.get(owner or "")
        return replica is not None and self._clock() - replica.seen <= RESPONSE_OWNER_SECONDS


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
