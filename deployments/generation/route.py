"""One request that generates text, from its body to its reply or its stream.

Every API has an adapter; the order of the steps is the same for all.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from rayfin.actors.errors import ClientGone, RayfinError
from rayfin.actors.timing import SSE_COMMENT_SECONDS
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.http.sse import (
    EventStream,
    cancelled,
    ended,
    until_disconnect,
    wait_for_some_time,
)
from rayfin.deployments.text.output import TextDelta

T = TypeVar("T")


class GenerationAdapter(ABC):
    """What one API adds to a generation; made for one HTTP request."""

    streamed: bool  # the body says "stream": true
    opens_late = False  # ``opening`` has what is known with the first token only
    media_type = "application/json"  # of the whole answer
    stream_type = EventStream.media_type  # of a stream; one of others has no comments
    stream_interval: int | None = None  # tokens per event; the first and the last event never wait

    @abstractmethod
    async def prepare(self, request: Request) -> Generation:
        """Checks the body and builds its engine requests; none runs yet.

        Raises:
            RayfinError: the request cannot run.
        """

    async def open(self, request: Request, generation: Generation) -> None:  # noqa: B027
        """Runs after ``prepare`` and before the first token: stores, or resumes an earlier stream.

        Raises:
            RayfinError: the request cannot run.
        """

    def run(self, generation: Generation) -> Deltas:
        """Returns the choice stream."""
        return generation.run()

    def discard(self) -> None:  # noqa: B027
        """Runs if the request fails after ``open``, before its client has received a byte."""

    @abstractmethod
    def reply(self, generation: Generation) -> str:
        """Returns the whole answer, JSON unless ``media_type`` says otherwise."""

    def opening(self) -> Iterable[str]:
        """Returns the events before the first token."""
        return ()

    def is_new(self, choice: Choice, delta: TextDelta) -> bool:
        """Whether the client does not have ``delta`` yet."""
        return True

    @abstractmethod
    def events(self, choice: Choice, delta: TextDelta) -> Iterable[str]:
        """Returns the events of one delta."""

    def closing(self) -> Iterable[str]:
        """Returns the events after the last token."""
        return ()

    @abstractmethod
    def failure(self, error: Exception) -> Iterable[str]:
        """Returns the last events of a stream that failed."""


class GenerationRoute:
    """Runs the steps of a generating request: prepare, run, then a reply or a stream."""

    def __init__(self, adapter: GenerationAdapter) -> None:
        self._adapter = adapter

    async def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """Returns the whole answer, or its stream once the first token is there.

        Raises:
            RayfinError: the request cannot run, or failed before its first byte.
            ClientGone: the client left before its first byte.
        """
        adapter = self._adapter
        # A grammar waits for its check, which is dropped when its last client has left.
        generation = await while_connected(request, adapter.prepare(request))
        headers |= generation.headers
        await opened(adapter, request, generation)
        deltas = adapter.run(generation)
        try:
            if adapter.streamed:
                is_events = adapter.stream_type == EventStream.media_type
                seconds = generation.comment_seconds if is_events else 0
                first = await first_of(request, deltas, seconds)
                events = stream_events(adapter, first, deltas)
                kind = adapter.stream_type
                return EventStream(events, deltas, headers, first, kind, comment_seconds=seconds)
            await while_connected(request, generation.finish(deltas))
        except BaseException:
            adapter.discard()
            raise
        reply = await generation.render(adapter.reply)
        return Response(reply, 200, headers, adapter.media_type)


async def opened(adapter: GenerationAdapter, request: Request, generation: Generation) -> None:
    """Has the adapter open the request; one that cannot run costs its tenant nothing."""
    try:
        await adapter.open(request, generation)
    except RayfinError:
        generation.refund()
        raise


class DeltaBuffer:
    """Joins deltas of a choice into ``interval`` tokens or more; its first and last never wait."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval or 1
        self._waiting: dict[int, TextDelta] = {}  # by choice

    def add(self, choice: Choice, delta: TextDelta) -> TextDelta | None:
        """Returns what is to be sent now, or None if ``delta`` waits for more."""
        if self._interval == 1:
            return delta
        first = choice.index not in self._waiting
        waiting = self._waiting.setdefault(choice.index, TextDelta())
        waiting.append(delta)
        if not (first or len(waiting.token_ids) >= self._interval or delta.finish_reason):
            return None
        self._waiting[choice.index] = TextDelta()
        return waiting


async def stream_events(
    adapter: GenerationAdapter,
    first: "asyncio.Task[tuple[Choice, TextDelta] | None]",
    deltas: Deltas,
) -> AsyncGenerator[str, None]:
    """Yields the server-sent events of a stream: ``first`` holds its first delta, if it has one."""
    buffer = DeltaBuffer(adapter.stream_interval)
    try:
        if adapter.opens_late:
            await first
        for text in adapter.opening():
            yield text
        if (item := await first) is not None:
            choice, delta = item
            if adapter.is_new(choice, delta) and (ready := buffer.add(choice, delta)) is not None:
                for text in adapter.events(choice, ready):
                    yield text
        async for choice, delta in deltas:
            if adapter.is_new(choice, delta) and (ready := buffer.add(choice, delta)) is not None:
                for text in adapter.events(choice, ready):
                    yield text
        for text in adapter.closing():
            yield text
    except Exception as error:
        for text in adapter.failure(error):
            yield text


async def first_of(
    request: Request, items: AsyncGenerator[T, None], comment_seconds: float = SSE_COMMENT_SECONDS
) -> asyncio.Task[T | None]:
    """Returns the task that awaits the first item, or None; ``items`` is closed if that fails.

    An engine's refusal thus becomes an HTTP status. The task may still run when it is returned: a
    client gets its first byte within ``comment_seconds``, or 10 if those are more or none. Then the
    stream reports failures.
    ``EventStream`` ends the task.

    Raises:
        ClientGone: the client left before the first item.
    """

    async def pull() -> T | None:
        return await anext(items, None)

    first = asyncio.create_task(pull())
    try:
        await while_connected(request, wait_for_some_time(first, comment_seconds))
        if first.done():
            first.result()
    except BaseException:
        await ended(first)
        await items.aclose()
        raise
    return first


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``, which is cancelled if the client leaves.

    Raises:
        ClientGone: the client left. The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        leaving.cancel()
        if not working.done():
            await cancelled(working, leaving)
