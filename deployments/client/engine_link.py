"""A socket to an engine on this machine, by which requests and tokens go past Ray.

``actors/scheduler/client_links.py`` is the engine's end.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rayfin.actors.messages import EngineRequest, TokenDeltas
from rayfin.actors.processes import local_socket
from rayfin.actors.processes.local_socket import Unpacker, packed
from rayfin.actors.timing import LINK_WELCOME_SECONDS

logger = logging.getLogger(__name__)


class EngineLink(asyncio.Protocol):
    """The client's end.

    Args:
        received: called with each message of the subscription.
        broken: called when the engine has closed it. Ray says why.
    """

    def __init__(self, received: Callable[[TokenDeltas], None], broken: Callable[[], None]) -> None:
        self._received = received
        self._broken = broken
        self._unpacker = Unpacker()
        self._transport: Any = None
        self._welcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether it takes requests."""
        return not self._ended.is_set()

    def send(self, requests: list[EngineRequest], aborts: list[int], stopped: list[int]) -> None:
        """See ``SchedulerActor.submit``.

        Raises:
            Exception: a request has something that only Ray can carry; nothing was sent.
        """
        self._transport.write(packed((requests, aborts, stopped)))

    async def introduce(self, client: str) -> bool:
        """Names the client; returns whether the engine is known to take its messages by this."""
        self._transport.write(packed(client))
        await asyncio.wait({self._welcome}, timeout=LINK_WELCOME_SECONDS)
        # An event loop that stood still hears the welcome and the end of the time in one turn.
        return self._welcome.done() and self._welcome.result() and self.open

    async def until_ended(self, seconds: float) -> None:
        """Returns when all that the engine has sent has come, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def close(self) -> None:
        """Leaves the engine, which aborts the client's requests."""
        self._ended.set()
        self._transport.abort()

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            if not self._welcome.done():
                self._welcome.set_result(True)
            elif self.open:
                self._received(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._welcome.done():
            self._welcome.set_result(False)
        if self.open:
            self._ended.set()
            self._broken()


async def open_link(
    address: str,
    client: str,
    received: Callable[[TokenDeltas], None],
    broken: Callable[[], None],
) -> EngineLink | None:
    """Connects a client that has attached; None where Ray must carry its messages.

    Args:
        address: of the client's ``Seat``.

    Raises:
        ConnectionRefusedError: the engine has the client's name and has not welcomed it. It may do
            so still, and then sees the client leave: the name is used up.
    """
    if not address:
        return None
    loop = asyncio.get_running_loop()
    try:
        connected = local_socket.connect(address)
        _, link = await loop.create_unix_connection(
            lambda: EngineLink(received, broken), sock=connected
        )
    except OSError as error:  # the engine is on another machine, say
        logger.debug("Ray carries the messages of %s: %s", client, error)
        return None
    welcome = False
    try:
        welcome = await link.introduce(client)
    finally:
        if not welcome:
            link.close()
    if not welcome:
        raise ConnectionRefusedError(f"the engine does not take {client}")
    return link
