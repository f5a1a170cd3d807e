"""Messages to the engine's thread: from the scheduler actor's methods, and from clients' sockets.

A client on the engine's machine sends requests and gets tokens by a socket, past Ray:

    client --its address' token, then its name--> engine
    client <--WELCOME--- engine     if the client has attached; else the engine closes
    client --(requests, aborts, stopped), as of ``SchedulerActor.submit``--> engine
    client <--TokenDeltas-- engine  those of its subscription, which then yields none

A client that closes its socket has left, even before it has read WELCOME: one that gives its socket
up goes on under another name. So an ingress that dies loses its requests at once. Ray still
carries the subscription's end, and says why a scheduler has gone.
"""

import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.subscriptions import Subscriptions
from rayfin.actors.transport.channel import WELCOME, Acceptor, Channel


@dataclass(slots=True)
class ClientMessage:
    """A client's requests and aborts, or an order of the actor's other methods."""

    client: str
    requests: list[EngineRequest] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    leaves: bool = False
    drain: bool = False  # accept no more requests
    evict: bool = False  # hand all requests back
    broken: str | None = None  # the runners died while nothing ran


WAKE = ClientMessage("")
"""Only wakes the thread of an idle engine."""


@dataclass(slots=True)
class EngineCall:
    """A function that the engine's thread calls between two steps."""

    ask: Callable[[Engine], Any]
    answer: Future[Any] = field(default_factory=Future)

    def reply(self, engine: Engine) -> None:
        """Sets the answer, or the exception: a failing call does not stop the loop."""
        try:
            self.answer.set_result(self.ask(engine))
        except Exception as error:
            self.answer.set_exception(error)


class ClientLinks:
    """The engine's end of all its clients' sockets.

    Args:
        inbox: gets their messages.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        inbox: "queue.SimpleQueue[ClientMessage | EngineCall]",
    ) -> None:
        self._subscriptions = subscriptions
        self._inbox = inbox
        self._acceptor = Acceptor(self._serve, "client")

    def address(self) -> str:
        """Returns what one client connects to; empty where there are no such sockets."""
        return self._acceptor.address()

    def _serve(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        messages = iter(channel)
        client = str(next(messages, ""))
        if not self._subscriptions.link(client, channel):
            return
        channel.send(WELCOME)
        try:
            for requests, aborts, stopped in messages:
                self._subscriptions.renew(client)
                self._inbox.put(ClientMessage(client, requests, aborts, stopped))
        finally:
            channel.close()
            self._inbox.put(ClientMessage(client, leaves=True))
