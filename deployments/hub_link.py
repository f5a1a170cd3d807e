"""An ingress' connection to the metrics hub of its application, which it starts if there is none.

Nothing of a request waits for the hub. Every few seconds the ingress tells it its counters and gets
the totals of all; should the hub die, the next one starts from the totals that an ingress has.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from rayfin.actors.hub.ledger import Ledger, Report

logger = logging.getLogger(__name__)

REPORT_SECONDS = 2.0
ANSWER_SECONDS = 3.0
MISSES, STARTING_MISSES = 3, 12
"""A hub that leaves so many reports in a row unanswered is hung, and is killed; a new one that has
answered none yet gets a minute to start."""


class HubLink:
    """Reports to the hub until it is closed.

    Args:
        start: returns the handle of the hub, a new one that knows the ledger if there is none; it
            may block.
        kill: ends a hub that does not answer.
        report: what to tell it.
    """

    def __init__(
        self,
        start: Callable[[Ledger], Any],
        kill: Callable[[Any], None],
        report: Callable[[], Report],
    ) -> None:
        self.known = Ledger()  # as of the hub's last answer; who tells it may add to it
        self._start = start
        self._kill = kill
        self._report = report
        self._hub: Any = None
        self._misses, self._allowed = 0, STARTING_MISSES
        self._task = asyncio.create_task(self._run())

    async def scrape(self) -> bytes | None:
        """The text of all metrics now; None if there is no hub, or it does not answer."""
        if self._hub is None:
            return None
        text: bytes | None = await self._ask(lambda hub: hub.scrape.remote(self._report()))
        return text

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            if self._hub is None:
                try:
                    self._hub = await asyncio.to_thread(self._start, self.known.copy())
                except Exception as error:  # Ray's own, whatever it is: the registry is away
                    logger.warning("the metrics hub cannot be started: %s", error)
            if self._hub is not None:
                await self._tell()
            await asyncio.sleep(REPORT_SECONDS)

    async def _tell(self) -> None:
        hub = self._hub
        known = await self._ask(lambda hub: hub.report.remote(self._report()))
        if known is not None:
            self.known = known
            self._misses, self._allowed = 0, MISSES
            return
        self._misses += 1
        if self._hub is hub and self._misses >= self._allowed:
            logger.warning("the metrics hub does not answer: it is killed")
            self._forget(hub)
            try:
                await asyncio.to_thread(self._kill, hub)
            except Exception as error:  # Ray's own, whatever it is
                logger.warning("the metrics hub cannot be killed: %s", type(error).__name__)

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """The hub's answer; None if there is none, and without a hub from then on if it is dead."""
        hub = self._hub
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await ask(hub)
        except TimeoutError:
            pass
        except RayError as error:
            logger.warning("the metrics hub is gone: %s", type(error).__name__)
            self._forget(hub)
        return None

    def _forget(self, hub: Any) -> None:
        if self._hub is hub:
            self._hub, self._misses, self._allowed = None, 0, STARTING_MISSES
