"""Tells readers outside which pages an engine has, as vLLM does: ``--kv-events-config``.

    engine's thread ──stored, removed, cleared──► queue ──► this thread ──PUB──► readers
                                                                       ◄─ROUTER─► replay

A message is ``[topic, number, batch]``, a number 8 bytes (big-endian), and a batch a msgpack array
``[seconds, events, engine]``. An event is a map with a ``type`` as in vLLM 0.33. The name of a page
is the last 8 bytes of its hash. Numbers begin at 0 with ``AllBlocksCleared`` and all pages: at the
start, again after a minute, and before the first ones are no more in the buffer. Readers take that
for a restart, so they can always ask for everything from 0, and no page outlives its engine.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgpack

from rayfin.actors.adapters.part import UNNAMED
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.kv_events import KVEventsConfig, KVEventSource
from rayfin.actors.timing import KV_EVENTS_AGAIN_SECONDS, KV_EVENTS_POLL_SECONDS
from rayfin.cache.prefix_index import PrefixIndex, Tokens

logger = logging.getLogger(__name__)

EVENTS_OF_A_BATCH = 1024
END = (-1).to_bytes(8, "big", signed=True)


class _Stored(NamedTuple):
    page_hash: bytes
    parent: bytes | None
    tokens: bytes  # int32
    keys: tuple[str, ...]


_Change = _Stored | bytes | Literal["cleared"]
"""A page that is known now, the hash of one that is known no longer, or none is."""


class PageEvents:
    """An ``IndexObserver``: the changes of an index as messages, apart from any socket.

    The engine's thread calls the observer's methods, another one ``messages``.
    """

    def __init__(self, config: KVEventsConfig, page_size: int, engine: int, now: float) -> None:
        self.buffer: list[tuple[int, bytes]] = []
        self._config = config
        self._page_size = page_size
        self._engine = engine
        self._changes: queue.SimpleQueue[_Change] = queue.SimpleQueue()
        self._known: dict[bytes, _Stored] = {}  # by hash: what readers know
        self._number = 0
        self._most = config.buffer_steps  # messages in the buffer
        self._again: float | None = now + KV_EVENTS_AGAIN_SECONDS

    def stored(
        self, page_hash: bytes, parent: bytes | None, tokens: Tokens, keys: tuple[str, ...]
    ) -> None:
        """A page can be found; ``parent`` is the hash of the page before it."""
        self._changes.put(_Stored(page_hash, parent, tokens.tobytes(), keys))

    def removed(self, page_hash: bytes) -> None:
        """A page cannot be found any more."""
        self._changes.put(page_hash)

    def cleared(self) -> None:
        """No page can be found."""
        self._changes.put("cleared")

    def messages(self, now: float, wait: float = 0.0) -> Iterator[tuple[int, bytes]]:
        """Yields numbers and batches of what has changed, and waits for it so many seconds."""
        changes: list[_Change] = []
        try:
            changes.append(self._changes.get(timeout=wait) if wait else self._changes.get_nowait())
            while len(changes) < EVENTS_OF_A_BATCH:
                changes.append(self._changes.get_nowait())
        except queue.Empty:
            pass
        for change in changes:
            self._follow(change)
        late = self._again is not None and now >= self._again
        lost = self._changes.qsize() > self._config.max_queue_size
        full = bool(changes) and self._number >= self._most
        if not self._number or late or lost or full:
            while not self._changes.empty():  # what comes meanwhile has a message of its own
                self._follow(self._changes.get_nowait())
            self._number, self._again = 0, None if late else self._again
            self.buffer.clear()
            every = self._in_order()
            self._most = max(self._config.buffer_steps, 2 * len(every) // EVENTS_OF_A_BATCH)
            changes = ["cleared", *every[:EVENTS_OF_A_BATCH]]
            yield self._message(changes, now)
            for start in range(EVENTS_OF_A_BATCH, len(every), EVENTS_OF_A_BATCH):
                yield self._message(every[start : start + EVENTS_OF_A_BATCH], now)
        elif changes:
            yield self._message(changes, now)

    def _follow(self, change: _Change) -> None:
        if isinstance(change, _Stored):
            self._known[change.page_hash] = change
        elif isinstance(change, bytes):
            self._known.pop(change, None)
        else:
            self._known.clear()

    def _in_order(self) -> list[_Stored]:
        """All pages, each behind the one before it."""
        ordered: dict[bytes, _Stored] = {}
        for page in self._known.values():
            chain = []
            while page is not None and page.page_hash not in ordered:
                chain.append(page)
                page = self._known.get(page.parent) if page.parent else None  # type: ignore[assignment]
            ordered.update((each.page_hash, each) for each in reversed(chain))
        return list(ordered.values())

    def _message(self, changes: Sequence[_Change], now: float) -> tuple[int, bytes]:
        events: list[dict[str, Any]] = []
        for change in changes:
            last = events[-1] if events else {}
            if isinstance(change, _Stored):
                name, parent, keys = _name(change.page_hash), _name(change.parent), change.keys
                tokens = memoryview(change.tokens).cast("i").tolist()
                if last.get("type") == "BlockStored" and last["block_hashes"][-1] == parent:
                    last["block_hashes"].append(name)
                    last["token_ids"] += tokens
                    last["extra_keys"].append(keys or None)
                    continue
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [name],
                        "parent_block_hash": parent,
                        "token_ids": tokens,
                        "block_size": self._page_size,
                        "medium": "GPU",
                        **UNNAMED,
                        "extra_keys": [keys or None],
                        "group_idx": 0,
                        "kv_cache_spec_kind": "full_attention",
                    }
                )
            elif change == "cleared":
                events.append({"type": "AllBlocksCleared"})
            elif last.get("type") == "BlockRemoved":
                last["block_hashes"].append(_name(change))
            else:
                gone = {"block_hashes": [_name(change)], "medium": "GPU", "group_idx": 0}
                events.append({"type": "BlockRemoved", **gone})
        message = self._number, msgpack.packb([now, events, self._engine])
        self._number += 1
        self.buffer.append(message)
        return message


def _name(page_hash: bytes | None) -> int | None:
    return None if page_hash is None else int.from_bytes(page_hash[-8:], "big")


class EventSockets(threading.Thread):
    """The thread that sends ``events``, and answers readers that have missed some.

    Args:
        host: that readers on other machines find this one by.
    """

    def __init__(
        self, config: KVEventsConfig, events: PageEvents, engine: int, host: str = "localhost"
    ) -> None:
        super().__init__(name="kv events", daemon=True)
        import zmq

        self._zmq, self._config, self._events = zmq, config, events
        self._engine, self._host = engine, host
        self._ends = threading.Event()
        self.source: KVEventSource | None = None  # once readers can connect; for any thread

    def run(self) -> None:
        """Sends until ``close``."""
        zmq, config, again = self._zmq, self._config, None
        with zmq.Context() as context, context.socket(zmq.PUB) as pub:
            pub.set(zmq.LINGER, 0)
            pub.set_hwm(config.hwm)
            if "*" in config.endpoint or not config.endpoint.startswith("tcp"):
                place = self._bind(pub, config.endpoint)
            else:
                place = _at(config.endpoint, self._engine)
                pub.connect(place)
            replay = context.socket(zmq.ROUTER)
            replay.set(zmq.LINGER, 0)
            if config.replay_endpoint is not None:
                again = self._bind(replay, config.replay_endpoint)
            self.source = KVEventSource(self._engine, place, again, config.topic)
            with replay:
                self._serve(pub, replay)

    def close(self) -> None:
        """Ends the thread."""
        self._ends.set()

    def _bind(self, socket: Any, endpoint: str) -> str:
        """Binds, once the scheduler before this one is gone; pages are served meanwhile.

        Returns:
            Where readers find it.
        """
        place = _at(endpoint, self._engine)
        while not self._ends.is_set():
            try:
                socket.bind(place)
                bound: str = socket.get(self._zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
                return bound.replace("//0.0.0.0:", f"//{self._host}:")
            except self._zmq.ZMQError as error:
                logger.warning("kv_events_config: %s cannot be bound: %s", place, error)
                self._ends.wait(1.0)
        return place

    def _serve(self, pub: Any, replay: Any) -> None:
        topic = self._config.topic.encode()
        while not self._ends.is_set():
            for number, batch in self._events.messages(time.time(), KV_EVENTS_POLL_SECONDS):
                pub.send_multipart([topic, number.to_bytes(8, "big"), batch])
            while replay.poll(0):
                reader, *words = replay.recv_multipart()
                if len(words) != 2 or len(words[1]) != 8:
                    continue  # not a question
                first = int.from_bytes(words[1], "big")
                for number, batch in self._events.buffer:
                    if number >= first:
                        about = [topic, number.to_bytes(8, "big"), batch]
                        replay.send_multipart([reader, b"", *about])
                replay.send_multipart([reader, b"", b"", END, b""])


PREFILL_NUMBERS = 100
"""Here those engines begin that prefill for others; the numbers in all names begin at 0."""


def number_of(name: str) -> int:
    """Returns an engine's number, of its name's end."""
    last = name.rpartition("/")[2]
    number = last.removeprefix("prefill-")
    first = 0 if number == last else PREFILL_NUMBERS
    return first + int(number) if number.isdecimal() else 0


def _at(endpoint: str, engine: int) -> str:
    """Where engine ``engine`` is: its number is added to the port, or to another name. Port 0 is
    any for each."""
    if not engine or not endpoint.startswith("tcp") or endpoint.endswith(":0"):
        return f"{endpoint}_{engine}" if engine else endpoint
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + engine}"


def make_kv_events(
    config: KVEventsConfig, name: str, page_size: int, index: PrefixIndex | None, host: str
) -> EventSockets | None:
    """Notes what ``index`` gets from now on, if ``config`` asks for it; ``start`` sends it.

    Args:
        name: of the engine; the number at its end is added to the ports.
        host: where this machine is found.

    Raises:
        InvalidConfig: there is no prefix cache.
    """
    if not config.enabled:
        return None
    if index is None:
        raise InvalidConfig("kv_events_config needs a prefix cache", "kv_events_config")
    engine = number_of(name)
    events = PageEvents(config, page_size, engine, time.time())
    index.observer = events
    return EventSockets(config, events, engine, host)
