"""Messages between two processes of one machine by a socket, where a call of Ray's costs more.

A call of Ray's wakes several threads of both processes, which takes a millisecond and more of the
processors. The sockets here have names but no files (Linux), so there is nothing to remove, and a
process of another machine finds nothing under the name: then Ray carries the messages.

A message is a pickle, which may run code. So each end talks only to a process of its own user, and
the one that listens reads nothing before a token, which it has given away by Ray: the system lists
the names to all.
"""

import errno
import hmac
import logging
import os
import pickle
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rayfin.actors.timing import ACCEPT_PAUSE_SECONDS, TOKEN_SECONDS

logger = logging.getLogger(__name__)

WELCOME = None
"""What the end that listens says first where the other one waits for it."""

NAME_BYTES = 16
TOKEN_BYTES = 32
MAX_TOKENS = 1_024
"""Most tokens that an acceptor keeps: those of processes on other machines are never shown."""

SIZE = struct.Struct("<Q")  # of a message's pickle in bytes; it stands before each
READ_BYTES = 256 * 1024
PEER = struct.Struct("iII")  # what Linux says of a peer: process, user, group


def connect(address: str) -> socket.socket:
    """Returns a socket, which does not block, connected to the process that gave the address.

    Args:
        address: of ``Acceptor.address``, or ``Acceptor.address_on``, which may take a while.

    Raises:
        OSError: it is on another machine, or another user's.
    """
    name, _, token = address.partition("/")
    host, colon, port = name.rpartition(":")
    if colon:  # of another machine
        connected = socket.create_connection((host, int(port)), TOKEN_SECONDS)
        connected.sendall(token.encode())
        return connected
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.connect(f"\0{name}")  # at once, or never
        if not same_user(connected):
            raise PermissionError(errno.EACCES, "another user listens there")
        connected.send(token.encode())  # a new socket holds it
    except OSError:
        connected.close()
        raise
    return connected


def same_user(connected: socket.socket) -> bool:
    """Returns whether the process at the other end of a socket is of this one's user.

    Raises:
        OSError: the other end has gone.
    """
    said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return bool(PEER.unpack(said)[1] == os.getuid())


def packed(message: Any) -> bytes:
    """Returns the bytes of a message.

    Raises:
        Exception: it has something that only Ray can carry.
    """
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(data)) + data


class Unpacker:
    """Cuts what a socket gives into messages again."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that are whole with ``data``.

        Raises:
            Exception: bytes that are no message.
        """
        held, at = self._held, 0
        held += data
        try:
            while len(held) - at >= SIZE.size:
                (size,) = SIZE.unpack_from(held, at)
                start = at + SIZE.size
                if start + size > len(held):
                    break
                at = start + size
                yield pickle.loads(bytes(held[start:at]))
        finally:
            del held[:at]


class Channel:
    """One end of a connection, for threads: any may send, one receives.

    ``send`` waits for no reader: what the socket does not take yet is kept, in the order of the
    calls. A thread writes it, and ends with it.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        self._socket = connected
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._unpacker = Unpacker()
        self._arrived: deque[Any] = deque()
        self._lock = threading.Lock()  # of what follows
        self._kept: deque[bytes | memoryview] = deque()
        self._writing = False  # the thread is there
        self._over = False  # nothing more is written

    def send(self, message: Any) -> None:
        """Sends a message; one behind the end is dropped.

        Raises:
            Exception: it cannot be packed, and nothing was sent.
        """
        data = packed(message)
        with self._lock:
            if self._over:
                return
            if self._writing:
                self._kept.append(data)
                return
            try:
                taken = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                taken = 0
            except OSError as error:  # the other end has gone, say
                self._fail(error)
                return
            if taken < len(data):
                self._kept.append(memoryview(data)[taken:])
                self._start_writing()

    def receive(self, seconds: float | None = None) -> Any:
        """Returns the next message.

        Raises:
            TimeoutError: none has come in so many seconds.
            EOFError: the other end has closed.
            OSError: the connection broke.
            Exception: bytes that are no message.
        """
        while not self._arrived:
            if not self._readable.poll(None if seconds is None else 1000 * seconds):
                raise TimeoutError
            if not (data := self._socket.recv(READ_BYTES)):
                raise EOFError("the other end has closed")
            self._arrived.extend(self._unpacker.feed(data))
        return self._arrived.popleft()

    def __iter__(self) -> Iterator[Any]:
        """Yields what arrives, until the other end closes.

        Raises:
            OSError: the connection broke.
        """
        while True:
            try:
                message = self.receive()
            except EOFError:
                return
            yield message

    def end(self) -> None:
        """Has the other end read what was sent, then the end."""
        with self._lock:
            self._over = True
            if not self._writing:
                self._shut(socket.SHUT_WR)

    def close(self) -> None:
        """Breaks the connection off."""
        with self._lock:
            self._break_off()

    def _start_writing(self) -> None:
        writer = threading.Thread(target=self._write_kept, name="writer", daemon=True)
        try:
            writer.start()
        except RuntimeError as error:  # the system has no more threads
            self._fail(error)
            return
        self._writing = True

    def _write_kept(self) -> None:
        while True:
            with self._lock:
                if not self._kept:
                    self._writing = False
                    if self._over:
                        self._shut(socket.SHUT_WR)
                    return
                data = self._kept.popleft()
            try:
                self._socket.sendall(data)
            except OSError as error:
                with self._lock:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.debug("a connection takes no more: %s", error)
        self._break_off()

    def _break_off(self) -> None:
        self._over = True
        self._kept.clear()
        self._shut(socket.SHUT_RDWR)  # it wakes the threads that wait for the other end

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:  # it is already
            pass


class Acceptor:
    """Serves each process that connects in a thread of its own.

    Args:
        serve: gets a connected socket, which is closed when it returns.
        name: of its threads.
        once: whether an address opens one connection, else any number of them.
    """

    def __init__(
        self, serve: Callable[[socket.socket], None], name: str, *, once: bool = True
    ) -> None:
        self._serve = serve
        self._name = name
        self._once = once
        self._listens_at = self._listens_on = ""
        self._tokens: deque[bytes] = deque(maxlen=MAX_TOKENS)
        self._lock = threading.Lock()  # of the tokens
        if sys.platform == "linux":
            self._listen()

    def address(self) -> str:
        """Returns what one process connects to; empty where there are no such sockets.

        It is a secret: with it a process of this user can run code in this one.
        """
        return self._with_token(self._listens_at)

    def address_on(self, host: str, port: int) -> str:
        """Returns what one process of another machine connects to, by TCP; bytes are not encrypted.

        Args:
            host: this machine's own address; it listens at no other.
            port: 0: any.

        Raises:
            OSError: the port is taken.
        """
        with self._lock:
            if not self._listens_on:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, port), family=family)
                self._listens_on = f"{host}:{listener.getsockname()[1]}"
                self._start(self._accept, listener)
        return self._with_token(self._listens_on)

    def _with_token(self, name: str) -> str:
        if not name:
            return ""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        with self._lock:
            self._tokens.append(token.encode())
        return f"{name}/{token}"

    def _listen(self) -> None:
        name = f"rayfin-{secrets.token_hex(NAME_BYTES)}"
        listener: socket.socket | None = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{name}")
            listener.listen()
        except OSError as error:
            logger.warning("Ray carries all messages: %s", error)
            if listener is not None:
                listener.close()
            return
        self._listens_at = name
        self._start(self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError as error:
                logger.warning("a process cannot connect: %s", error)
                time.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            self._start(self._serve_one, connected)

    def _serve_one(self, connected: socket.socket) -> None:
        with connected:
            try:
                local = connected.family == socket.AF_UNIX
                if not local:  # a machine that is gone says nothing
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if (not local or same_user(connected)) and self._invited(connected):
                    self._serve(connected)
            except OSError as error:
                logger.debug("a connection broke: %s", error)
            except Exception:  # bytes that are no message
                logger.exception("a connection is closed")

    def _invited(self, connected: socket.socket) -> bool:
        """Reads the token, as bytes and no more of them; returns whether it was given."""
        connected.settimeout(TOKEN_SECONDS)
        shown = connected.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        connected.settimeout(None)
        with self._lock:
            known = [token for token in self._tokens if hmac.compare_digest(token, shown)]
            for token in known if self._once else ():
                self._tokens.remove(token)
        if not known:
            logger.warning("a process that was not invited has tried to connect")
        return bool(known)

    def _start(self, work: Callable[[socket.socket], None], on: socket.socket) -> None:
        threading.Thread(target=work, args=(on,), name=self._name, daemon=True).start()
