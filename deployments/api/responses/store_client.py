"""The stored responses as one ingress replica sees them: those it runs, and copies of others."""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from rayfin.actors.errors import RayfinError
from rayfin.actors.timing import RESPONSE_STORE_RETRY_SECONDS
from rayfin.deployments.api.responses.events import events_from
from rayfin.deployments.api.responses.replies import ResponseStreamEvent
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.api.responses.store import ResponseStore

logger = logging.getLogger("rayfin.http")


Call = Callable[..., Coroutine[Any, Any, Any]]


class ResponseStoreClient:
    """A ``ResponseStore`` in this process or another one, and the responses that run here.

    A response runs where its request arrived. Its state is sent to the store at its start and its
    end, and in between if it runs in the background. Other replicas read copies from the store, and
    cancel through it.

    Args:
        owner: this replica's name, unique among all replicas.
        call: calls a method of a store in another process by name, with arguments.

            Raises:
                RayfinError: the method's own error, or the store does not answer.
        store: the store in this process if there is no ``call``; by default an empty one.
    """

    def __init__(
        self, owner: str = "", call: Call | None = None, store: ResponseStore | None = None
    ) -> None:
        self._owner = owner
        self._local: ResponseStore | None = None  # the store, if it is in this process
        if call is None:
            self._local = ResponseStore() if store is None else store
            call = self._local.call
        self._remote: Call = call
        self._running: dict[str, ResponseState] = {}  # here, and stored
        self._reports: dict[str, asyncio.Task[None]] = {}  # of those, which in the background
        self._sent: set[asyncio.Task[Any]] = set()
        # Serve cancels the calls that a cancelled request has made, unless they have a context of
        # their own.
        self._context = contextvars.copy_context()
        self._listening: asyncio.Task[None] | None = None

    async def add(self, state: ResponseState) -> None:
        """Stores a response that is to run here.

        Raises:
            InvalidRequest: the response alone is larger than the store.
            Overloaded: the store is full of responses that still run.
        """
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen(), context=self._context)
        adding = self._send("add", self._owner, state.snapshot())
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:  # it is stored, and will not run
            adding.add_done_callback(lambda _: self._send("remove", state.id, state.tenant))
            raise
        self._running[state.id] = state
        if state.created.background and self._local is None:
            report = self._report(state)
            self._reports[state.id] = asyncio.create_task(report, context=self._context)

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        """Returns the state of a response that runs here, or a copy.

        Raises:
            NotFound: the tenant has no such response.
        """
        running = self._running.get(response_id)
        if running is not None and running.tenant == tenant:
            return running
        copy: ResponseState = await self.call("get", response_id, tenant, param)
        return copy

    async def follow(
        self, state: ResponseState, number: int
    ) -> AsyncGenerator[ResponseStreamEvent, None]:
        """Yields the events of a state that ``get`` returned, from that number to the last."""
        here = self._running.get(state.id) is state
        while True:
            done, changed = state.done, state.changed()
            for event in list(events_from(state, number)):
                yield event
                number = event.sequence_number + 1
            if done:
                return
            try:
                await (changed.wait() if here else self._read(state))
            except RayfinError as error:  # deleted, or the store is gone
                state.fail(error)

    async def settle(self, state: ResponseState) -> None:
        """Reports the end of a response that ran here, stored or not."""
        if state.id not in self._running:
            return
        if (report := self._reports.pop(state.id, None)) is not None:
            report.cancel()
        try:
            await self._grow(state)
        finally:
            self._running.pop(state.id, None)

    async def cancel(self, state: ResponseState) -> None:
        """Ends a background response on any replica, and brings ``state`` up to date."""
        if self._running.get(state.id) is state:
            return await self._cancel(state)
        await self.call("cancel", state.id, state.tenant)
        while not state.done:
            await self._read(state)

    async def remove(self, state: ResponseState) -> None:
        """Deletes a response, and ends it if it runs."""
        await self.call("remove", state.id, state.tenant)
        self._drop(state.id)

    async def call(self, method: str, *args: object) -> Any:
        """Returns what a method of the store returns: of conversations, which none runs.

        The call completes even if its caller is cancelled.

        Raises:
            RayfinError: the method's own error, or the store does not answer.
        """
        if self._local is not None:
            return await self._remote(method, *args)
        return await asyncio.shield(self._send(method, *args))

    def forget(self, state: ResponseState) -> None:
        """As ``remove``, of a response that ran here; does not wait."""
        self._drop(state.id)
        if self._local is not None:
            self._local.remove(state.id, state.tenant)
        else:
            self._send("remove", state.id, state.tenant)

    def close(self) -> None:
        """Stops polling; other replicas then see what runs here as failed."""
        if self._listening is not None:
            self._listening.cancel()

    async def _report(self, state: ResponseState) -> None:
        """Sends snapshots on the way, with pauses: each one is the whole output."""
        while True:
            changed, began = state.changed(), time.monotonic()
            await self._grow(state)
            took = time.monotonic() - began
            await asyncio.sleep(min(9 * took, RESPONSE_STORE_RETRY_SECONDS))
            await changed.wait()

    async def _grow(self, state: ResponseState) -> None:
        """Reports how a response stands: all of it to a store that began after it."""
        try:
            since = await self.call("grow", state.id, state.tenant, state.progress())
            if since is not None and state.created_at + 1 <= since:
                await self.call("add", self._owner, state.snapshot())
        except RayfinError as error:
            logger.warning("The response %s could not be stored: %s", state.id, error)

    async def _read(self, copy: ResponseState) -> None:
        """Brings a copy up to date when its response has changed, or after a while."""
        copy.apply(await self.call("progress", copy.id, copy.tenant, copy.version))

    async def _cancel(self, state: ResponseState) -> None:
        await _cancel_task(state)
        await self.settle(state)  # if it had not started

    async def _listen(self) -> None:
        """Ends what other replicas want ended; a response with a client goes on, but unstored."""
        while True:
            try:
                for response_id in await self._remote("unwanted", self._owner):
                    state = self._running.get(response_id)
                    if state is not None and state.task is not None:
                        await self._cancel(state)
                    else:
                        self._drop(response_id)
            except RayfinError as error:
                logger.warning("The store of responses does not answer: %s", error)
                await asyncio.sleep(RESPONSE_STORE_RETRY_SECONDS)

    def _drop(self, response_id: str) -> None:
        """Ends a response without a report."""
        state = self._running.pop(response_id, None)
        if (report := self._reports.pop(response_id, None)) is not None:
            report.cancel()
        if state is not None and state.task is not None:
            state.task.cancel()

    def _send(self, method: str, *args: object) -> "asyncio.Task[Any]":
        task = asyncio.create_task(self._remote(method, *args), context=self._context)
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        return task


async def _cancel_task(state: ResponseState) -> None:
    if state.task is not None:
        state.task.cancel()
        await asyncio.wait({state.task})
    state.finish("cancelled")  # if it had not started
