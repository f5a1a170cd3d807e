"""The clients of an engine: their output queues, and when each last called."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.messages import TokenDeltas
from rayfin.actors.transport.channel import Channel

logger = logging.getLogger(__name__)

MAX_CLIENTS = 64
MESSAGES_PER_CALL = 1_000
"""Most messages of one ``read``: Ray keeps some hundred bytes of each item, at both ends, until a
streaming call ends."""


@dataclass(slots=True)
class _Subscription:
    last_call: float
    seat: int | None = None
    messages: queue.SimpleQueue[TokenDeltas | None] = field(default_factory=queue.SimpleQueue)
    channel: Channel | None = None  # the client's socket, which gets all messages

    def send(self, message: TokenDeltas) -> None:
        if self.channel is None:
            self.messages.put(message)
        else:
            self.channel.send(message)

    def end(self) -> None:
        """Ends the ``read`` after what was sent."""
        self.messages.put(None)
        if self.channel is not None:
            self.channel.end()

    def break_off(self) -> None:
        """Ends the ``read``; a socket whose client reads nothing keeps nothing for it."""
        self.messages.put(None)
        if self.channel is not None:
            self.channel.close()


class Subscriptions:
    """Thread-safe: the engine posts, one thread per client reads, or a socket takes it all.

    A client exists from its first call, whether it subscribes or submits first. One that subscribes
    has a *seat*, the number of its thread: Ray gives calls to the threads of a group in turn, and
    each thread that has run one keeps some 50 KiB.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_client: dict[str, _Subscription] = {}
        self._closing = False
        self._reading: set[int] = set()  # seats, also of clients that were closed meanwhile

    def seat(self, client: str) -> int:
        """Returns the client's seat, from 0, or gives it the first free one.

        Raises:
            EngineUnavailable: there are ``MAX_CLIENTS`` clients, or the engine is being stopped.
        """
        subscription = self._subscription(client)
        if self._closing and subscription.seat is None:
            self.close(client)
            raise EngineUnavailable("the engine is being stopped")
        with self._lock:
            if subscription.seat is None:
                taken = self._reading | {other.seat for other in self._by_client.values()}
                free = (seat for seat in range(MAX_CLIENTS) if seat not in taken)
                subscription.seat = next(free, None)
        if subscription.seat is None:
            self.close(client)
            raise EngineUnavailable(f"the engine has {MAX_CLIENTS} clients and takes no more")
        return subscription.seat

    def link(self, client: str, channel: Channel) -> bool:
        """Has all further messages of a client written to its socket; False if it is no client."""
        with self._lock:
            subscription = self._by_client.get(client)
            if subscription is None or self._closing:
                return False
            subscription.channel = channel
            return True

    def renew(self, client: str) -> None:
        """Records a call of the client."""
        self._subscription(client).last_call = self._clock()

    def read(
        self,
        client: str,
        beat: Callable[[], TokenDeltas],
        seconds: float | None = None,
        *,
        again: bool = False,
    ) -> Iterator[TokenDeltas]:
        """Yields the client's messages until it is closed, and every ``seconds`` a ``beat``.

        Ends after ``MESSAGES_PER_CALL``; a call with ``again`` continues, and yields nothing if the
        client was closed meanwhile. Beats are sent with and without output: they prove that this
        process runs. A client with a socket gets all of these by the socket.
        """
        # A generator, not just an iterator: Ray calls `send` on what it streams.
        if again and client not in self._by_client:
            return
        seat = self.seat(client)
        endless = self._endless(client, beat, seconds)
        self._reading.add(seat)
        try:
            for _ in range(MESSAGES_PER_CALL):
                if (message := next(endless, None)) is None:
                    return
                yield message
        finally:
            self._reading.discard(seat)

    def _endless(
        self, client: str, beat: Callable[[], TokenDeltas], seconds: float | None
    ) -> Iterator[TokenDeltas]:
        subscription = self._subscription(client)
        messages = subscription.messages
        due = None if seconds is None else self._clock()
        while True:
            if due is not None and seconds is not None and (now := self._clock()) >= due:
                due = now + seconds
                if subscription.channel is None:
                    yield beat()
                else:
                    subscription.send(beat())
            try:
                left = None if due is None else max(0.0, due - self._clock())
                message = messages.get(timeout=left)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message

    def post(self, messages: dict[str, TokenDeltas]) -> None:
        """Queues each client's message; those of closed clients are dropped.

        A client whose message cannot be sent is cut off, and the others go on.
        """
        for client, message in messages.items():
            if (subscription := self._by_client.get(client)) is None:
                continue
            try:
                subscription.send(message)
            except Exception:
                logger.exception("client %s is cut off", client)
                subscription.break_off()

    def close_subscriptions(self) -> int:
        """Ends every ``read`` after its queued messages, and accepts no more clients.

        Returns:
            The number of clients left; one that has read to the end closes its subscription.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                for subscription in self._by_client.values():
                    subscription.end()
            return len(self._by_client)

    def silent(self, seconds: float) -> list[str]:
        """Clients without a call for longer than ``seconds``."""
        oldest = self._clock() - seconds
        with self._lock:
            return [name for name, one in self._by_client.items() if one.last_call < oldest]

    def close(self, client: str) -> None:
        """Ends the client's ``read``."""
        with self._lock:
            subscription = self._by_client.pop(client, None)
        if subscription is not None:
            subscription.break_off()

    def _subscription(self, client: str) -> _Subscription:
        with self._lock:
            return self._by_client.setdefault(client, _Subscription(self._clock()))
