"""The responses of one of several ingress replicas: its own while they run, all others by copy."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from rayfin.actors.errors import RayfinError
from rayfin.actors.timing import RESPONSE_STORE_RETRY_SECONDS
from rayfin.deployments.api.responses.events import follow
from rayfin.deployments.api.responses.local_store import cancel_here
from rayfin.deployments.api.responses.replies import ResponseStreamEvent
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.http.sse import cancelled

logger = logging.getLogger("rayfin.http")


Call = Callable[..., Coroutine[Any, Any, Any]]


class SharedResponseStore:
    """``Responses`` over a ``ResponseStoreActor`` in another process.

    A response runs where it was asked for, and is told to the keeper: at its start and its end, and
    on its way where it runs in the background. Other replicas read copies from there, and have it
    cancelled through there.

    Args:
        owner: a name of this replica that no other has.
        call: a method of the keeper by its name, with arguments.

            Raises:
                RayfinError: what the method raises, or that the keeper does not answer.
    """

    def __init__(self, owner: str, call: Call) -> None:
        self._owner = owner
        self._remote = call
        self._running: dict[str, ResponseState] = {}  # here, and stored
        self._telling: dict[str, asyncio.Task[None]] = {}  # of those, which in the background
        self._sent: set[asyncio.Task[Any]] = set()
        # Serve cancels the calls that a cancelled request has made; these are nobody's.
        self._context = contextvars.copy_context()
        self._listening = asyncio.create_task(self._listen())

    async def add(self, state: ResponseState) -> None:
        adding = self._send("add", self._owner, state.snapshot())
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:  # it will be there, and nobody will run it
            adding.add_done_callback(lambda _: self._send("remove", state.id, state.tenant))
            raise
        self._running[state.id] = state
        if state.created.background:
            self._telling[state.id] = asyncio.create_task(self._tell(state), context=self._context)

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> ResponseState:
        own = self._running.get(response_id)
        if own is not None and own.tenant == tenant:
            return own
        copy: ResponseState = await self._call("get", response_id, tenant, param)
        return copy

    async def follow(
        self, state: ResponseState, number: int
    ) -> AsyncGenerator[ResponseStreamEvent, None]:
        here = self._running.get(state.id) is state
        reading = None if here else asyncio.create_task(self._read_or_fail(state))
        try:
            async for event in follow(state, number):
                yield event
        finally:
            if reading is not None:
                await cancelled(reading)

    async def settle(self, state: ResponseState) -> None:
        if state.id not in self._running:
            return
        try:
            if (telling := self._telling.get(state.id)) is not None:
                await asyncio.shield(telling)
            else:
                await self._call("grow", state.id, state.tenant, state.change(0))
        except RayfinError as error:
            logger.warning("The response %s could not be stored: %s", state.id, error)
        finally:
            self._running.pop(state.id, None)
            self._telling.pop(state.id, None)

    async def cancel(self, state: ResponseState) -> None:
        if self._running.get(state.id) is state:
            return await self._cancel(state)
        await self._call("cancel", state.id, state.tenant)
        await self._read(state)

    async def remove(self, state: ResponseState) -> None:
        await self._call("remove", state.id, state.tenant)
        self._drop(state.id)

    def forget(self, state: ResponseState) -> None:
        self._drop(state.id)
        self._send("remove", state.id, state.tenant)

    def close(self) -> None:
        """Asks for no more orders: others then learn that what runs here is lost."""
        self._listening.cancel()

    async def _tell(self, state: ResponseState) -> None:
        """Tells what happens, as often as the keeper can hear it, to the end."""
        told = 0
        while True:
            done, news = state.done, state.news()
            change = state.change(told)
            try:
                await self._remote("grow", state.id, state.tenant, change)
                told += len(change.pieces)
            except RayfinError as error:
                logger.warning("The response %s could not be stored: %s", state.id, error)
            if done:
                return
            await news.wait()

    async def _read(self, copy: ResponseState) -> None:
        """Brings a copy up to date until its response has ended."""
        while not copy.done:
            since = len(copy.pieces)
            copy.apply(await self._call("after", copy.id, copy.tenant, since, copy.status))

    async def _read_or_fail(self, copy: ResponseState) -> None:
        try:
            await self._read(copy)
        except RayfinError as error:  # deleted, or the keeper is gone
            copy.fail(error)

    async def _cancel(self, state: ResponseState) -> None:
        await cancel_here(state)
        await self.settle(state)  # where it had not even begun

    async def _listen(self) -> None:
        """Does what others want done with the responses that run here."""
        while True:
            try:
                for kind, response_id in await self._remote("orders", self._owner):
                    state = self._running.get(response_id)
                    if kind == "forget":
                        self._drop(response_id)
                    elif state is not None:
                        await self._cancel(state)
            except RayfinError as error:
                logger.warning("The store of responses does not answer: %s", error)
                await asyncio.sleep(RESPONSE_STORE_RETRY_SECONDS)

    def _drop(self, response_id: str) -> None:
        """Ends it, with nothing more to tell."""
        state = self._running.pop(response_id, None)
        if (telling := self._telling.pop(response_id, None)) is not None:
            telling.cancel()
        if state is not None and state.task is not None:
            state.task.cancel()

    async def _call(self, method: str, *args: object) -> Any:
        """The answer; the call is made even where whoever waits for it leaves."""
        return await asyncio.shield(self._send(method, *args))

    def _send(self, method: str, *args: object) -> "asyncio.Task[Any]":
        task = asyncio.create_task(self._remote(method, *args), context=self._context)
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        return task
