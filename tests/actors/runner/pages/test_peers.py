"""Pages of another runner come bit by bit, or not at all, and never in part."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.actors import failpoints
from rayfin.actors.failpoints import Failpoints
from rayfin.actors.messages import PageTransfer
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages import peers
from rayfin.actors.runner.pages.peers import (
    MISSING,
    MOST_HASHES,
    NO,
    QUESTION,
    YES,
    PageServer,
    Peers,
)
from rayfin.actors.runner.pages.peers import PAGES as KIND
from rayfin.actors.runner.pages.records import head_of
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.actors.transport.channel import Acceptor, connect
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.cache.prefix_index import PageName

PAGES, SIZE = 8, 2
HASHES = [sha256(bytes([number])).digest() for number in range(PAGES)]
TOKENS = np.arange(PAGES * SIZE, dtype=np.int32).reshape(PAGES, SIZE)
STEP = (5, 7)
GREETING = sha256(b"the same model").digest()


class Runner:
    """What a runner has of pages: a cache with names, and the two ends of a connection."""

    def __init__(self, ask: Any = lambda engine: "", dtype: torch.dtype = torch.float32) -> None:
        self.greeting = GREETING
        self.names = PageNames()
        self.peers = Peers(ask, lambda: self.greeting)
        self.transfers = PageTransfers(
            0, lambda: (STEP[0], STEP[1] + 1), self.names.overwritten, self.names, self.peers
        )
        layouts = [KVLayout(2, 3, 3), KVLayout(1, 4, 0)]
        self.cache = KVTensors(layouts, PAGES, SIZE, dtype, torch.device("cpu"))
        self.transfers.use(self.cache, STEP[0])
        self.server = PageServer(self.names, lambda: self.transfers, lambda: self.greeting)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [own.view(torch.uint8) for own in (*self.cache.keys, *self.cache.values)]

    def fill(self, *numbers: int) -> None:
        """Pages have something, and names: page n that of number n."""
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 120, tensor.shape, dtype=torch.uint8))
        for number in numbers:
            name = PageName(HASHES[number], TOKENS[number].tobytes())
            self.names._names[number] = name
            self.names._pages[HASHES[number]] = number, name

    def read(self, pages: list[int], numbers: list[int], seconds: float = 5.0) -> int:
        return self.transfers.run(
            PageTransfer(
                write=False,
                pages=pages,
                hashes=[HASHES[number] for number in numbers],
                tokens=TOKENS[numbers],
                before=[],
                after=STEP,
                source="other",
                seconds=seconds,
            )
        )


@pytest.fixture(params=[torch.float32, torch.float8_e4m3fn], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Runner, Runner]:
    source = Runner(dtype=request.param)
    return source, Runner(lambda engine: source.server.address(), request.param)


@pytest.fixture
def plain() -> tuple[Runner, Runner]:
    source = Runner()
    return source, Runner(lambda engine: source.server.address())


def test_all_bits(pair: tuple[Runner, Runner]) -> None:
    source, reader = pair
    source.fill(0, 1, 2)
    assert reader.read([7, 0, 3], [0, 1, 2]) == 3
    for held, sent in zip(reader.tensors, source.tensors, strict=True):
        assert torch.equal(held[[7, 0, 3]], sent[[0, 1, 2]]) and not held[[1, 2, 4, 5, 6]].any()


def test_one_connection_for_several_reads(plain: tuple[Runner, Runner]) -> None:
    source, reader = plain
    source.fill(0, 1, 2)
    assert (reader.read([0, 1], [0, 1]), reader.read([0, 1, 2], [1, 5, 2])) == (2, 1)
    source.server.address = lambda: ""  # type: ignore[method-assign]
    assert reader.read([3], [2]) == 1


def test_more_than_a_question_takes(
    plain: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MOST_HASHES", 2)
    source, reader = plain
    source.fill(*range(5))
    assert reader.read([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]) == 5
    assert reader.read([0, 1, 2], [3, 4, 6]) == 2
    assert reader.read([0], [1]) == 1 and len(reader.peers._open) == 1


def test_weights_that_change_leave_no_connections_behind(plain: tuple[Runner, Runner]) -> None:
    """Else an engine has none left for readers after some updates."""
    source, reader = plain
    source.fill(0, 1)
    for number in range(2 * peers.MOST_READERS):
        source.greeting = reader.greeting = sha256(bytes([number])).digest()
        assert reader.read([3, 4], [0, 1]) == 2, number
    assert len(reader.peers._open) == 1


def test_a_connection_that_the_source_has_closed(
    plain: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader opens another one, and misses nothing."""
    source, reader = plain
    source.fill(0, 1)
    answer = source.server._answer
    monkeypatch.setattr(source.server, "_answer", lambda *question: answer(*question) and False)
    assert reader.read([3], [0]) == 1
    ((_, connected),) = reader.peers._open.values()
    assert peers._has_come(connected, 5.0)
    assert reader.read([4], [1]) == 1


def test_it_ends_at_the_first_that_is_missing(plain: tuple[Runner, Runner]) -> None:
    source, reader = plain
    source.fill(0, 2)
    assert reader.read([4, 5, 6], [0, 1, 2]) == 1
    assert not any(held[[5, 6]].any() for held in reader.tensors)


@pytest.mark.parametrize("end", ["source", "reader"])
def test_another_model_is_refused(plain: tuple[Runner, Runner], end: str) -> None:
    source, reader = plain
    source.fill(0)
    (source if end == "source" else reader).greeting = sha256(b"another").digest()
    assert reader.read([0], [0]) == 0


@pytest.mark.parametrize("end", ["source", "reader"])
def test_new_weights_end_a_connection(plain: tuple[Runner, Runner], end: str) -> None:
    """Which has greeted before them."""
    source, reader = plain
    source.fill(0, 1)
    assert reader.read([0], [0]) == 1
    (source if end == "source" else reader).greeting = sha256(b"new weights").digest()
    assert reader.read([1], [1]) == 0


def test_a_page_that_changes_while_it_is_copied(
    plain: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked at again, and the same name may have come back with other bytes."""
    source, reader = plain
    source.fill(0, 1)
    content = source.transfers.content

    def change(page: int, epoch: int | None = None) -> Any:
        copied = content(page, epoch)
        if page == 1:
            source.names.overwritten(np.array([1], np.int32))
            name = PageName(HASHES[1], TOKENS[1].tobytes())
            source.names._names[1] = name
            source.names._pages[HASHES[1]] = 1, name
        return copied

    monkeypatch.setattr(source.transfers, "content", change)
    assert reader.read([4, 5], [0, 1]) == 1


def test_a_source_that_sleeps_and_one_that_is_gone(plain: tuple[Runner, Runner]) -> None:
    source, reader = plain
    source.fill(0)
    source.transfers.use(None, STEP[0])
    assert reader.read([0], [0]) == 0
    assert Runner().read([0], [0]) == 0
    assert Runner(lambda engine: "rayfin-nowhere/" + "0" * 32).read([0], [0]) == 0


def test_a_reader_of_another_epoch_takes_nothing(plain: tuple[Runner, Runner]) -> None:
    source, reader = plain
    source.fill(0)
    reader.transfers.use(reader.cache, STEP[0] + 1)
    assert reader.read([0], [0]) == 0 and not any(held.any() for held in reader.tensors)


@contextmanager
def liar(record: bytes, answer: bytes = YES) -> Iterator[Runner]:
    """A reader whose source says what it likes, then nothing more."""
    over = threading.Event()

    def serve(connected: socket.socket) -> None:
        connected.recv(len(GREETING), socket.MSG_WAITALL)
        connected.sendall(answer)
        connected.recv(QUESTION.size + len(GREETING), socket.MSG_WAITALL)
        connected.sendall(record)
        over.wait(10)

    acceptor = Acceptor(serve, "liar")
    yield Runner(lambda engine: acceptor.address())
    over.set()


def _whole() -> bytes:
    pages = Runner().transfers._pages
    assert pages is not None
    content = np.arange(pages.row_bytes, dtype=np.uint8)
    return head_of(TOKENS[0], content) + content.tobytes()


@pytest.mark.parametrize("damage", ["none", "flip", "head", "tokens", "cut", "silent", "no"])
def test_what_is_wrong_is_not_taken(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PAGE_READ_SECONDS", 0.05)
    record = bytearray(_whole())
    match damage:
        case "flip":
            record[-3] ^= 4
        case "head":
            record[0] ^= 1
        case "tokens":
            record[16] ^= 1
        case "cut":
            record = record[:-1]
        case "silent":
            record.clear()
    with liar(bytes(record), NO if damage == "no" else YES) as reader:
        taken = reader.read([3], [0])
        assert taken == (damage == "none")
        assert any(held.any() for held in reader.tensors) == (damage == "none")
        assert len(reader.peers._open) == (damage == "none"), "it is closed: nothing comes late"


@pytest.mark.parametrize("fault", ["drop", "flip"])
def test_faults_on_purpose(
    plain: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What chaos plants: the page is not taken, and what came before it is."""
    monkeypatch.setattr(failpoints, "ACTIVE", Failpoints(f"runner.record={fault}@nth:2"))
    source, reader = plain
    source.fill(0, 1, 2)
    assert reader.read([3, 4, 5], [0, 1, 2]) == 1
    assert not any(held[[4, 5]].any() for held in reader.tensors)
    assert reader.read([3, 4, 5], [0, 1, 2]) == 3


@given(said=st.lists(st.binary(max_size=80), max_size=4), greets=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_source_hears_anything(said: list[bytes], greets: bool) -> None:
    """It gives no page that was not asked for by its name, and goes on serving others."""
    source = Runner()
    source.fill(0)
    with connect(source.server.address()) as connected:
        connected.settimeout(0.01)
        with suppress(OSError):
            connected.sendall(b"".join([GREETING if greets else b"", *said]))
            connected.shutdown(socket.SHUT_WR)
        heard = b""
        with suppress(OSError):
            while piece := connected.recv(4096):
                heard += piece
    assert len(heard) <= 1 + len(said) * 80 * len(MISSING) // QUESTION.size
    assert Runner(lambda engine: source.server.address()).read([0], [0]) == 1


def test_a_slow_source_ends_with_the_time_of_the_read() -> None:
    with liar(_whole()[:40]) as reader:
        began = time.monotonic()
        assert reader.read([3], [0], seconds=0.05) == 0
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("said", ["nothing", "half", "too many", "garbage"])
def test_a_reader_that_is_none(plain: tuple[Runner, Runner], said: str) -> None:
    """The source goes on serving others."""
    source, reader = plain
    source.fill(0)
    connected = connect(source.server.address())
    connected.setblocking(True)
    if said != "nothing":
        connected.sendall(GREETING if said != "garbage" else bytes(range(32)))
    if said == "half":
        connected.sendall(QUESTION.pack(KIND, 3) + bytes(40))
    if said == "too many":
        assert connected.recv(1) == YES
        connected.sendall(QUESTION.pack(KIND, MOST_HASHES + 1))
        assert connected.recv(1) == b"", "it is closed before memory is taken"
    connected.close()
    assert reader.read([0], [0]) == 1


def test_a_reader_on_another_machine() -> None:
    """By TCP, at one address of this machine; an address opens one connection."""
    source = Runner()
    source.fill(0, 1)
    addresses: list[str] = []

    def ask(engine: str) -> str:
        addresses.append(source.server.address("127.0.0.1"))
        return addresses[-1]

    reader = Runner(ask)
    assert reader.read([3, 4], [0, 1]) == 2 == reader.read([4, 5], [0, 1])
    assert len(addresses) == 1 and addresses[0].startswith("127.0.0.1:")
    again = Runner(lambda engine: addresses[0])
    assert again.read([3, 4], [0, 1]) == 0, "the address was used"
    host, _, port = addresses[0].partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port)), 5) as guest:
        guest.sendall(b"0" * 32)
        assert guest.recv(1) == b"", "it has no token"


def test_readers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_READERS", 2)
    source = Runner()
    source.fill(0, 1)
    readers = [Runner(lambda engine: source.server.address()) for _ in range(3)]
    assert [own.read([3, 4], [0, 1]) for own in readers] == [2, 2, 0]


def test_an_engine_with_wrong_pages_is_barred() -> None:
    source = Runner()
    source.fill(0, 1)
    asked: list[str] = []

    def ask(engine: str) -> str:
        asked.append(engine)
        return source.server.address()

    reader = Runner(ask)
    name = PageName(HASHES[1], TOKENS[2].tobytes())  # another page's tokens
    source.names._names[1], source.names._pages[HASHES[1]] = name, (1, name)
    assert [reader.read([3, 4], [0, 1]) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert len(asked) == 3
