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

from rayfin.actors.processes.local_socket import (
    SIZE,
    TOKEN_BYTES,
    Acceptor,
    SocketWriter,
    Unpacker,
    connect,
    messages_of,
    packed,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
PATIENCE = 30.0  # seconds; only a failure waits so long
LARGE = bytes(4 << 20)  # more than a socket holds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(PATIENCE)
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
    writer = SocketWriter(ours)
    sent = ["first", LARGE, "second", LARGE, "third"]
    for message in sent:
        writer.write(packed(message))  # returns, though nothing is read
    writer.end()
    writer.write(packed("too late"))
    assert list(messages_of(theirs)) == sent
    writer.close()


def test_a_writer_that_is_closed_keeps_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = SocketWriter(ours)
    for _ in range(3):
        writer.write(packed(LARGE))
    writer.close()
    writer.write(packed("more"))
    assert list(messages_of(theirs)) == []
    assert not writer._kept


def test_a_reader_that_has_gone_is_no_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = SocketWriter(ours)
    theirs.close()
    for _ in range(3):
        writer.write(packed("lost"))
    writer.end()


def echo(connected: socket.socket) -> None:
    for message in messages_of(connected):
        connected.sendall(packed(("heard", message)))


def test_each_that_connects_is_served() -> None:
    acceptor = Acceptor(echo, "echo")
    ends = [connect(acceptor.address()) for _ in range(3)]
    for number, end in enumerate(ends):
        end.settimeout(PATIENCE)
        end.sendall(packed(number))
    assert [next(messages_of(end)) for end in ends] == [("heard", n) for n in range(3)]
    ends[0].sendall(SIZE.pack(1) + b"?")  # no message: this one is closed, the others are not
    assert list(messages_of(ends[0])) == []
    ends[1].sendall(packed("still"))
    assert next(messages_of(ends[1])) == ("heard", "still")
    for end in ends:
        end.close()


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
        list(messages_of(connected))

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


def test_one_that_was_invited_is_read() -> None:
    HARM.clear()
    acceptor = Acceptor(lambda connected: list(messages_of(connected)) and None, "open")
    with connect(acceptor.address()) as end:
        end.sendall(packed(Bomb()))
        assert HARM.wait(PATIENCE)


class Failing:
    """A socket whose ``send`` fails otherwise than because its peer has gone."""

    def __init__(self, real: socket.socket) -> None:
        self.shutdown = real.shutdown

    def send(self, data: bytes, flags: int) -> int:
        raise OSError(errno.ENOBUFS, "no memory for it")


def test_a_writer_that_fails_lets_the_reader_know(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    failing: Any = Failing(ours)
    SocketWriter(failing).write(packed("lost"))
    assert list(messages_of(ours)) == []  # it would wait


def test_a_writer_without_a_thread_breaks_off(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = pair
    writer = SocketWriter(ours)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", no_threads)
        writer.write(packed(LARGE))
    writer.write(packed("after it"))
    assert list(messages_of(theirs)) == list(messages_of(ours)) == []


def test_a_system_without_such_sockets_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Acceptor(echo, "none").address() == ""
