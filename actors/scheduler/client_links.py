"""Clients on the engine's machine send requests and get tokens by a socket each, past Ray.

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

from rayfin.actors.processes.local_socket import Acceptor, SocketWriter, messages_of, packed
from rayfin.actors.scheduler.inbox import ClientMessage, EngineCall
from rayfin.actors.scheduler.subscriptions import Subscriptions

WELCOME = None


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
        messages = messages_of(connected)
        client, writer = str(next(messages, "")), SocketWriter(connected)
        if not self._subscriptions.link(client, writer):
            return
        writer.write(packed(WELCOME))
        try:
            for requests, aborts, stopped in messages:
                self._subscriptions.renew(client)
                self._inbox.put(ClientMessage(client, requests, aborts, stopped))
        finally:
            writer.close()
            self._inbox.put(ClientMessage(client, leaves=True))
