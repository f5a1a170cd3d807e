"""An ingress' connection to its application's metrics hub, which it starts if there is none.

No request waits for the hub. Every few seconds the ingress reports its counters and gets the totals
of all; if the hub dies, the next one starts from an ingress' totals. A scrape asks the hub; if that
does not answer quickly, the ingress renders the totals itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from rayfin.actors.metrics.ledger import CounterReport, Ledger
from rayfin.actors.timing import (
    HUB_REPORT_ANSWER_SECONDS,
    HUB_REPORT_SECONDS,
    INGRESS_SCRAPE_SECONDS,
)

logger = logging.getLogger(__name__)

MISSES, STARTING_MISSES = 3, 12
"""Unanswered reports in a row after which a hub counts as hung and is killed. A new one, which has
answered none yet, gets a minute to start."""


class HubClient:
    """Reports to the hub until it is closed.

    Args:
        start: returns the handle of the hub, a new one that knows the ledger if there is none; it
            may block.
        kill: ends a hub that does not answer.
        report: returns the counters to report.
    """

    def __init__(
        self,
        start: Callable[[Ledger], Any],
        kill: Callable[[Any], None],
        report: Callable[[], CounterReport],
    ) -> None:
        self.known = Ledger()  # as of the hub's last answer
        self._start = start
        self._kill = kill
        self._report = report
        self._hub: Any = None
        self._misses, self._allowed = 0, STARTING_MISSES
        self._task = asyncio.create_task(self._run())

    async def scrape(self) -> bytes | None:
        """Returns the text of all metrics, or None if no hub answers at once."""
        if self._hub is None:
            return None
        text: bytes | None = await self._ask(
            lambda hub: hub.scrape.remote(self._report()), INGRESS_SCRAPE_SECONDS
        )
        return text

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            if self._hub is None:
                try:
                    self._hub = await asyncio.to_thread(self._start, self.known.copy())
                except Exception as error:  # any error of Ray: the registry is away
                    logger.warning("the metrics hub cannot be started: %s", error)
            if self._hub is not None:
                await self._send_report()
            await asyncio.sleep(HUB_REPORT_SECONDS)

    async def _send_report(self) -> None:
        hub = self._hub
        known: Ledger | None = await self._ask(
            lambda hub: hub.report.remote(self._report()), HUB_REPORT_ANSWER_SECONDS
        )
        if known is not None:
            self.known = known
            self._misses, self._allowed = 0, MISSES
            return
        self._misses += 1
        if self._hub is hub and self._misses >= self._allowed:
            logger.warning("the metrics hub does not answer; killing it")
            self._forget(hub)
            try:
                await asyncio.to_thread(self._kill, hub)
            except Exception as error:  # any error of Ray
                logger.warning("the metrics hub cannot be killed: %s", type(error).__name__)

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]], seconds: float) -> Any:
        """Returns the hub's answer within ``seconds``, or None; forgets the hub if it is dead."""
        hub = self._hub
        try:
            async with asyncio.timeout(seconds):
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
