"""Streams that leave an engine for another one: their pages go first, while it sends their tokens.

    the engine drains, or has only computed a prompt for others and sent the first token
                     ──► ``Router.next_home`` ──► ``warm`` there reads pages here, tokens come on
                     ──► the stream is handed back here, and replayed there: it computes its tail

A move is a replay, so no engine knows of it. Where pages do not come the stream stays, unless it is
computed in no time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfin.actors.messages import EngineRequest, PagesAt
from rayfin.actors.timing import MOVE_COMPUTED_SECONDS
from rayfin.deployments.client.connection import EngineConnection
from rayfin.deployments.client.replay import Replay
from rayfin.deployments.client.routing import Router

MOVES_AT_ONCE = 4

MOST_COMPUTED_TOKENS = 32
"""A stream moves where so few of its tokens are missing, or two pages, or what is computed so soon
that reading it does not pay (``MOVE_COMPUTED_SECONDS``)."""


@dataclass(slots=True, eq=False)
class OpenStream:
    """An attempt of a request at an engine."""

    request: EngineRequest
    replay: Replay
    connection: EngineConnection
    key: int  # of the attempt
    moving: bool = False
    next_home: EngineConnection | None = None  # which has its pages

    @property
    def reason(self) -> str:
        """Why it should leave its engine; empty: it should not."""
        draining = self.connection.stats.draining
        return "drain" if draining else "prefill" if self.connection.prefill else ""

    @property
    def may_move(self) -> bool:
        """Whether its pages are worth something elsewhere."""
        computes_all = any(part.computes_all for part in self.request.parts)
        return self.replay.begun and self.request.beams is None and not computes_all


class Moves:
    """Moves the streams of one ingress, a few at once.

    Args:
        streams: those that are open.
        ready: returns the engines that take requests.
        moved: called with the reason and the result of each move.
    """

    def __init__(
        self,
        router: Router,
        streams: Mapping[int, OpenStream],
        ready: Callable[[], list[EngineConnection]],
        moved: Callable[[str, str], None],
    ) -> None:
        self._router = router
        self._streams = streams
        self._ready = ready
        self._moved = moved
        self._met: set[EngineConnection] = set()  # engines that know another one
        self._turns = asyncio.Semaphore(MOVES_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()

    def look(self) -> None:
        """Begins to move the streams that should leave; called with each heartbeat."""
        self._introduce(self._ready())
        for stream in self._streams.values():
            self.consider(stream)

    def consider(self, stream: OpenStream) -> None:
        """Begins to move a stream if it should leave its engine, and may."""
        if stream.reason and stream.may_move and not (stream.moving or stream.next_home):
            stream.moving = True
            self._begin(self._move(stream, stream.reason))

    def close(self) -> None:
        """Ends all that has begun."""
        for task in self._tasks:
            task.cancel()

    def _introduce(self, ready: list[EngineConnection]) -> None:
        """Has engines that are new meet another one, before there is a stream to move."""
        self._met.intersection_update(ready)
        for engine in ready if len(ready) > 1 else ():
            if engine not in self._met:
                self._met.add(engine)
                other = next(peer for peer in ready if peer is not engine)
                self._begin(engine.warm(np.zeros(0, np.int32), (), PagesAt(other.name, 0)))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _move(self, stream: OpenStream, reason: str) -> None:
        try:
            async with self._turns:
                if (home := self._next_home(stream)) is not None:
                    warm = await self._warm(stream, home)
                    if self._streams.get(stream.request.key) is stream:  # it has not ended
                        self._moved(reason, "moved" if warm else "stayed")
                        if warm:
                            stream.next_home = home
                            stream.connection.hand_over(stream.key)
        finally:
            stream.moving = False

    def _next_home(self, stream: OpenStream) -> EngineConnection | None:
        ready = {
            connection.name: connection
            for connection in self._ready()
            if connection is not stream.connection
        }
        whole = replace(stream.request, prompt=stream.replay.tokens)
        candidates = [connection.candidate() for connection in ready.values()]
        chosen = self._router.next_home(whole, stream.connection.candidate(), candidates)
        return None if chosen is None else ready[chosen.name]

    async def _warm(self, stream: OpenStream, home: EngineConnection) -> bool:
        """Has the next home read the stream's pages; returns whether it may go on there."""
        tokens, at = stream.replay.tokens, stream.connection
        size = at.candidate().page_size
        # The last one may have no name yet, and who gives nothing is left alone for a while.
        pages_at = PagesAt(at.name, len(tokens) // size - 1)
        pages, seconds = await home.warm(tokens, stream.request.prefix_keys, pages_at)
        missing = len(tokens) - pages * size
        few = missing <= max(MOST_COMPUTED_TOKENS, 2 * size)
        return home.ready and (few or 0.0 < seconds <= MOVE_COMPUTED_SECONDS)
