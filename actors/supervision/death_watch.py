"""Notices at once that an actor's process has died, where a pulse would only tell by and by."""

import asyncio
import logging
from typing import Any

from ray.exceptions import ActorDiedError

from rayfin.actors.timing import PULSE_SECONDS

logger = logging.getLogger(__name__)


class DeathWatch:
    """One call that an actor never answers: Ray fails it when the actor's process dies."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._end: asyncio.Task[None] | None = None

    async def wait(self, actor: Any, seconds: float) -> None:
        """Returns after so many seconds, or as soon as the actor is dead.

        Args:
            actor: a handle with a method ``wait_for_end``; another one than before ends that
                watch.
        """
        if self._end is None or actor is not self._actor:
            self.close()
            self._actor, self._end = actor, asyncio.create_task(_until_dead(actor))
        await asyncio.wait({self._end}, timeout=seconds)

    def close(self) -> None:
        """Ends the watch."""
        if self._end is not None:
            self._end.cancel()


async def _until_dead(actor: Any) -> None:
    while True:
        try:
            await actor.wait_for_end.remote()
        except ActorDiedError:
            return
        except Exception as error:  # any of Ray's; pulses tell meanwhile
            logger.debug("the watch begins again: %s", error)
        await asyncio.sleep(PULSE_SECONDS)
