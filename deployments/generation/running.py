"""The requests that run in this process, by ids, so that others can end them."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.http.sse import cancelled
from rayfin.deployments.text.output import TextDelta

ABORTED = "abort"


class RunningRequests:
    """Runs requests, each in a task of its own that may be cancelled."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, request_id: str, generation: Generation) -> Deltas:
        """Yields the choice stream; choices that are aborted end with the reason "abort".

        Raises:
            InvalidRequest: a request of that id runs.
        """
        if request_id in self._tasks:
            generation.refund()
            raise InvalidRequest(f"A request {request_id!r} runs.", "request_id")
        arrived: asyncio.Queue[tuple[Choice, TextDelta] | None] = asyncio.Queue()

        async def pump() -> None:
            async with aclosing(generation.run()) as deltas:
                async for item in deltas:
                    arrived.put_nowait(item)

        task = self._tasks[request_id] = asyncio.create_task(pump())
        task.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            if not task.cancelled():
                task.result()
                return
            for choice in generation.choices:
                if choice.last.finish_reason is None:
                    delta = TextDelta(finish_reason=ABORTED)
                    choice.append(delta)
                    yield choice, delta
        finally:
            del self._tasks[request_id]
            if not task.done():
                await cancelled(task)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """Ends requests, None: all; returns the ids of those that ran."""
        names = [*self._tasks] if request_ids is None else request_ids
        known = [name for name in names if name in self._tasks]
        for name in known:
            self._tasks[name].cancel()
        return known
