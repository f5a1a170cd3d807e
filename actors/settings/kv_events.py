"""Where an engine tells which pages it has: ``kv_events_config``, with vLLM's keys."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from rayfin.actors.errors import InvalidConfig

ENDPOINT = re.compile(r"tcp://[^\s/]+:\d{1,5}|(ipc|inproc)://\S+")


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """Where readers find the events of an engine, as vLLM's ``/kv_event_sources`` says it."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """vLLM's ``KVEventsConfig``."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # "zmq", or "null" for none; None: zmq if it is enabled
    # Of the first engine; another adds its number to the port. Port 0 is any that is free.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # batches that wait for a reader that is slow, before some are dropped
    max_queue_size: int = 100_000  # of events on their way to the socket, before all begins again
    topic: str = ""

    @property
    def enabled(self) -> bool:
        """Whether there is something to publish."""
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events(config: Mapping[str, Any] | None) -> KVEventsConfig:
    """Reads ``kv_events_config``.

    Raises:
        InvalidConfig: an unknown key, a value of another kind, or a package is missing.
    """
    if not isinstance(config, Mapping | None):
        _refuse("must be an object")
    given = dict(config or {})
    known = {field.name: field.default for field in fields(KVEventsConfig)}
    for key, value in given.items():
        if key not in known:
            _refuse(f"has no key {key!r}; it has {', '.join(known)}")
        default = known[key]
        kind = str if default is None else type(default)
        if type(value) is not kind and not (value is None and default is None):
            _refuse(f"{key} must be a {kind.__name__}, got {value!r}")
        if kind is int and value < 1:
            _refuse(f"{key} must be at least 1, got {value}")
        if key.endswith("endpoint") and value is not None and not ENDPOINT.fullmatch(value):
            _refuse(f"{key} must be like tcp://*:5557, with a port, got {value!r}")
        if key == "endpoint" and "*" not in value and value.endswith(":0"):
            _refuse(f"{key} is connected to without a *, so its port cannot be 0, got {value!r}")
    read = KVEventsConfig(**given)
    if read.publisher not in (None, "zmq", "null"):
        _refuse(f"publisher must be zmq or null, got {read.publisher!r}")
    if read.enabled and find_spec("zmq") is None:
        _refuse("needs pyzmq: pip install 'rayfin[events]'")
    return read


def _refuse(rule: str) -> None:
    raise InvalidConfig(f"kv_events_config {rule}", "kv_events_config")
