"""Readers of events know exactly the pages of the index, whenever they come."""

import json
import random
import time
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from event_reader import EventReader
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.scheduler.kv_events import EventSockets, PageEvents, make_kv_events, number_of
from rayfin.actors.settings import kv_events
from rayfin.actors.settings.kv_events import KVEventsConfig, KVEventSource, read_kv_events
from rayfin.actors.timing import KV_EVENTS_AGAIN_SECONDS
from rayfin.cache.page_tables import PageTables
from rayfin.cache.prefix_index import HashChain, PrefixIndex

PAGE = 4
ON = KVEventsConfig(enable_kv_cache_events=True)


class Pages:
    """An index whose pages come and go, and what a reader should know of it."""

    def __init__(self, events: PageEvents, seed: int = 0) -> None:
        self.index = PrefixIndex(24, PAGE)
        self.index.observer = events
        self.random = random.Random(seed)
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self._pages: dict[int, int] = {}

    def add(self, page: int, *starts: int) -> None:
        tokens = np.array([start for start in starts for _ in range(PAGE)], np.int32)
        chain = HashChain(PAGE)
        chain.extend(tokens)
        *before, own = chain.hashes
        parent = before[-1] if before else None
        if self.index.add(page, own, tokens[-PAGE:], parent):
            name = int.from_bytes(own[-8:], "big")
            above = int.from_bytes(parent[-8:], "big") if parent else None
            self.known[name] = above, tuple(tokens[-PAGE:].tolist())
            self._pages[page] = name

    def drop(self, page: int) -> None:
        if self.index.drop(page):
            del self.known[self._pages.pop(page)]

    def change(self) -> None:
        draw = self.random.random()
        page = self.random.randrange(24)
        if draw < 0.02:
            self.index.clear()
            self.known.clear()
            self._pages.clear()
        self.drop(page)
        if draw < 0.7:
            self.add(page, *self.random.choices(range(3), k=self.random.randint(1, 3)))


@pytest.mark.parametrize("buffer_steps", [3, 10_000])
@pytest.mark.parametrize("seed", range(10))
def test_readers_know_the_index(seed: int, buffer_steps: int) -> None:
    """One from the start, one that misses messages and asks again, one that comes late."""
    events = PageEvents(replace(ON, buffer_steps=buffer_steps), PAGE, 0, 0.0)
    pages, readers = Pages(events, seed), [EventReader(), EventReader(), EventReader()]
    for turn in range(60):
        for _ in range(pages.random.randint(0, 4)):
            pages.change()
        for message in events.messages(float(turn)):
            for place, reader in enumerate(readers):
                hears = place == 0 or (place == 1 and pages.random.random() < 0.7)
                if (hears or (place == 2 and turn >= 40)) and not reader.read(*message):
                    reader.next = 0
                    for again in events.buffer:
                        assert reader.read(*again), "a gap in what is sent again"
        assert readers[0].pages == pages.known
    for again in events.buffer:
        assert readers[1].read(*again) or again[0] < readers[1].next
    assert readers[2].pages == pages.known


def test_pages_go_to_late_readers_behind_those_before_them() -> None:
    events = PageEvents(ON, PAGE, 0, 0.0)
    pages = Pages(events)
    pages.add(0, 1)
    pages.add(1, 1, 2)
    pages.drop(0)
    pages.add(0, 1)
    [(number, batch)] = events.messages(0.0)
    cleared, stored = msgpack.unpackb(batch)[1]
    assert number == 0 and cleared == {"type": "AllBlocksCleared"}
    assert stored["token_ids"] == [1] * 4 + [2] * 4 and stored["parent_block_hash"] is None


def test_readers_of_the_engine_before_hear_of_the_new_one() -> None:
    """Also those that had read fewer of its messages than are sent by now."""
    reader = EventReader()
    assert reader.read(0, msgpack.packb([0.0, [], 0]))
    reader.pages[5] = None, (1,)
    events = PageEvents(ON, PAGE, 0, 100.0)
    pages = Pages(events)
    list(events.messages(100.0))
    pages.add(0, 1)
    for message in events.messages(101.0):  # the first one was missed
        assert reader.read(*message)
    assert reader.pages != pages.known
    for message in events.messages(100.0 + KV_EVENTS_AGAIN_SECONDS):
        assert reader.read(*message)
    assert reader.pages == pages.known
    assert not list(events.messages(1000.0)), "nothing has changed"


def test_extra_keys_are_sent() -> None:
    events = PageEvents(ON, PAGE, 0, 0.0)
    tokens = np.ones(PAGE, np.int32)
    list(events.messages(0.0))
    events.stored(b"a" * 32, None, tokens, ("salt",))
    [(_, batch)] = events.messages(0.0)
    assert msgpack.unpackb(batch)[1][0]["extra_keys"] == [["salt"]]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"endpoint": "tcp://router:0"}, "endpoint"),
        ({"replay_endpoint": "5558"}, "replay_endpoint"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events"),
        ({"publisher": "kafka"}, "publisher"),
        ({"topics": "x"}, "topics"),
        ([], "object"),
    ],
)
def test_what_is_wrong_is_named(config: Any, word: str) -> None:
    with pytest.raises(InvalidConfig, match=word) as raised:
        read_kv_events(config)
    assert raised.value.param == "kv_events_config"


def test_without_the_package_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"rayfin\[events\]"):
        EngineArgs(kv_events_config={"enable_kv_cache_events": True})
    EngineArgs(kv_events_config={"enable_kv_cache_events": False})


def test_vllms_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "find_spec", lambda name: name)
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@pod@m", "hwm": 9}'
    read = read_kv_events(json.loads(text))
    assert read.enabled and (read.topic, read.hwm) == ("kv@pod@m", 9)
    assert not read_kv_events(None).enabled
    assert make_kv_events(read_kv_events(None), "a/engine/1", PAGE, None, "h") is None
    with pytest.raises(InvalidConfig, match="prefix cache"):
        make_kv_events(read, "a/engine/1", PAGE, None, "h")


def test_pages_of_the_scheduler_before_are_sent_behind_those_before_them() -> None:
    """Also those with extra keys, and those whose first page is gone."""
    before = PrefixIndex(8, PAGE)
    right: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for start, keys in ((0, ()), (4, ("salt",))):
        chain, tokens = HashChain(PAGE, keys), np.arange(4 * PAGE, dtype=np.int32)
        chain.extend(tokens)
        parents = [None, *chain.hashes]
        for number, (own, parent) in enumerate(zip(chain.hashes, parents, strict=False)):
            its = tokens[number * PAGE :][:PAGE]
            before.add(start + number, own, its, parent, keys)
            above = None if parent is None else int.from_bytes(parent[-8:], "big")
            right[int.from_bytes(own[-8:], "big")] = above, tuple(its.tolist())
    gone = before.hashes()[0]
    before.drop(0)
    del right[int.from_bytes(gone[-8:], "big")]
    changes = before.changes()
    assert changes is not None
    tables, reader = PageTables(2, 8, PAGE, prefix_caching=True), EventReader()
    assert tables.index is not None
    events = tables.index.observer = PageEvents(ON, PAGE, 0, 0.0)
    tables.restore(changes.named)
    [(number, batch)] = events.messages(0.0)
    assert reader.read(number, batch) and reader.pages == right
    stored = msgpack.unpackb(batch)[1][1:]
    assert [[None] * 3, [["salt"]] * 4] == sorted((own["extra_keys"] for own in stored), key=len)


def test_each_engine_has_a_number() -> None:
    names = ("a/engine/0", "a/engine-x/7", "a/engine/prefill-0", "a/engine/prefill-12", "llm-7-0")
    assert [number_of(name) for name in names] == [0, 7, 100, 112, 0]


def test_over_sockets(tmp_path: Any) -> None:
    """A reader that joins late asks for what it has missed, and then hears the rest."""
    zmq = pytest.importorskip("zmq")
    again = f"ipc://{tmp_path}/replay"
    config = replace(ON, endpoint="tcp://*:0", replay_endpoint=again, topic="kv@a")
    events = PageEvents(config, PAGE, 0, time.time())
    pages, reader = Pages(events), EventReader()
    pages.add(0, 1)
    sockets = EventSockets(config, events, 0, "127.0.0.1")
    sockets.start()
    while sockets.source is None:
        time.sleep(0.001)
    place = sockets.source.endpoint
    assert place.startswith("tcp://127.0.0.1:") and not place.endswith(":0")
    assert sockets.source == KVEventSource(0, place, again, "kv@a")
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
        context.socket(zmq.DEALER) as ask,
    ):
        for socket in (sub, ask):
            socket.set(zmq.RCVTIMEO, 20_000)
            socket.set(zmq.LINGER, 0)
        sub.connect(place)
        sub.subscribe("kv@")
        ask.connect(again)
        while not reader.pages:
            ask.send_multipart([b"", (0).to_bytes(8, "big")])
            _, topic, number, batch = ask.recv_multipart()
            while int.from_bytes(number, "big", signed=True) != -1:
                assert topic == b"kv@a"
                assert reader.read(int.from_bytes(number, "big"), batch)
                _, topic, number, batch = ask.recv_multipart()
        assert reader.pages == pages.known
        page = 1
        while not sub.poll(100):
            pages.add(page, 1, page)
            page += 1
        while reader.pages != pages.known:
            _, number, batch = sub.recv_multipart()
            reader.read(int.from_bytes(number, "big"), batch)
    sockets.close()
    sockets.join(10)
    assert not sockets.is_alive()
