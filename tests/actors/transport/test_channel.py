"""Sockets between processes of one machine: real ones, between threads of this process."""

import errno
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rayfin.actors.transport.channel import (
    SIZE,
    TOKEN_BYTES,
    Acceptor,
    Channel,
    Unpacker,
    connect,
    packed,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
PATIENCE = 30.0  # seconds; only a failure waits so long
LARGE = bytes(4 << 20)  # more than a socket holds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_messages_come_whole_however_they_are_cut() -> None:
    sent: list[Any] = ["name", (1, [2]), None, {"a": np.arange(3)}]
    data = b"".join(packed(message) for message in sent)
    for step in (1, 7, len(data)):
        unpacker, got = Unpacker(), []
        for at in range(0, len(data), step):
            got += list(unpacker.feed(data[at : at + step]))
        assert got[:3] == sent[:3] and got[3]["a"].tolist() == [0, 1, 2]


def test_bytes_that_are_no_message_are_an_error() -> None:
    with pytest.raises(pickle.UnpicklingError):
        list(Unpacker().feed(SIZE.pack(3) + b"abc"))


def test_a_writer_waits_for_no_reader_and_keeps_the_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    writer = Channel(ours)
    sent = ["first", LARGE, "second", LARGE, "third"]
    for message in sent:
        writer.send(message)  # returns, though nothing is read
    writer.end()
    writer.send("too late")
    assert list(Channel(theirs)) == sent
    writer.close()


def test_a_writer_that_is_closed_keeps_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = Channel(ours)
    for _ in range(3):
        writer.send(LARGE)
    writer.close()
    writer.send("more")
    assert list(Channel(theirs)) == []
    assert not writer._kept


def test_a_reader_that_has_gone_is_no_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = Channel(ours)
    theirs.close()
    for _ in range(3):
        writer.send("lost")
    writer.end()


def echo(connected: socket.socket) -> None:
    channel = Channel(connected)
    for message in channel:
        channel.send(("heard", message))


def test_each_that_connects_is_served() -> None:
    acceptor = Acceptor(echo, "echo")
    sockets = [connect(acceptor.address()) for _ in range(3)]
    ends = [Channel(connected) for connected in sockets]
    for number, end in enumerate(ends):
        end.send(number)
    assert [end.receive(PATIENCE) for end in ends] == [("heard", n) for n in range(3)]
    with pytest.raises(TimeoutError):
        ends[0].receive(0.01)
    sockets[0].sendall(SIZE.pack(1) + b"?")  # no message: this one is closed, the others are not
    with pytest.raises(EOFError):
        ends[0].receive(PATIENCE)
    ends[1].send("still")
    assert ends[1].receive(PATIENCE) == ("heard", "still")
    for connected in sockets:
        connected.close()


@pytest.mark.parametrize("of_the_caller", [True, False])
def test_a_process_of_another_user_is_not_talked_to(
    of_the_caller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, served = os.getuid(), threading.Event()
    acceptor = Acceptor(lambda connected: served.set(), "other")

    def other_user() -> int:
        accepts = threading.current_thread().name == "other"
        return user + (accepts == of_the_caller)

    monkeypatch.setattr(os, "getuid", other_user)
    if of_the_caller:
        with pytest.raises(OSError), connect(acceptor.address()) as end:
            end.settimeout(PATIENCE)
            if end.recv(1) == b"":
                raise ConnectionError("it is closed")
    else:
        with pytest.raises(PermissionError):
            connect(acceptor.address())
    assert not (of_the_caller and served.is_set())


def test_a_name_that_no_process_of_this_machine_has_is_refused() -> None:
    with pytest.raises(OSError):
        connect("rayfin-of-another-machine")


HARM = threading.Event()


def harm() -> None:
    HARM.set()


class Bomb:
    """Its pickle runs code where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return harm, ()


@pytest.mark.parametrize("token", ["", "0" * TOKEN_BYTES, "used"])
def test_nothing_is_read_of_a_process_that_was_not_invited(token: str) -> None:
    HARM.clear()
    taken = threading.Event()

    def read(connected: socket.socket) -> None:
        taken.set()
        list(Channel(connected))

    acceptor = Acceptor(read, "guarded")
    name, _, good = acceptor.address().partition("/")
    if token == "used":
        token = good
        connect(f"{name}/{good}").close()
        assert taken.wait(PATIENCE)  # else the next one may be the first to show it
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(PATIENCE)
        end.connect(f"\0{name}")
        end.sendall(token.encode() + packed(Bomb()))
        end.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError):
            if end.recv(1) == b"":
                raise ConnectionError("it is closed")
    assert not HARM.is_set()


def test_an_address_for_many_opens_many_connections() -> None:
    acceptor = Acceptor(echo, "many", once=False)
    address = acceptor.address()
    for number in range(3):
        with connect(address) as connected:
            channel = Channel(connected)
            channel.send(number)
            assert channel.receive(PATIENCE) == ("heard", number)


def test_one_that_was_invited_is_read() -> None:
    HARM.clear()
    acceptor = Acceptor(lambda connected: list(Channel(connected)) and None, "open")
    with connect(acceptor.address()) as end:
        end.sendall(packed(Bomb()))
        assert HARM.wait(PATIENCE)


class Failing:
    """A socket whose ``send`` fails otherwise than because its peer has gone."""

    def __init__(self, real: socket.socket) -> None:
        self.shutdown, self.setblocking, self.fileno = real.shutdown, real.setblocking, real.fileno

    def send(self, data: bytes, flags: int) -> int:
        raise OSError(errno.ENOBUFS, "no memory for it")


def test_a_writer_that_fails_lets_the_reader_know(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    failing: Any = Failing(ours)
    Channel(failing).send("lost")
    assert list(Channel(ours)) == []  # it would wait


def test_a_writer_without_a_thread_breaks_off(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = pair
    writer = Channel(ours)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", no_threads)
        writer.send(LARGE)
    writer.send("after it")
    assert list(Channel(theirs)) == list(writer) == []


def test_a_system_without_such_sockets_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Acceptor(echo, "none").address() == ""
