"""A LoRA adapter as a part of a request, and what runners and engines report of adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.metric import LATENCY_BOUNDS, Family, counter, gauge
from rayfin.actors.parts import Need, PartFacts, PartUsage, RequestPart, first_of

SHORT_DIGEST = 16
"""Hex digits by which an engine's reports name an adapter."""

UNNAMED = {"lora_id": None, "lora_name": None}
"""What vLLM's events of pages say of an adapter that has no name there."""

LOAD_RESULTS = ("ok", "failed")
ADAPTERS_INFO = Family(
    name="lora_requests_info",
    kind="gauge",
    help="The time of the report; the labels name adapters of running and of waiting requests.",
    labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    alias=True,
    alias_only=True,
)
ADAPTER_LOAD = Family(
    name="adapter_load_seconds",
    kind="histogram",
    help="Of a LoRA adapter, until the runner has it.",
    bounds=LATENCY_BOUNDS,
)
ADAPTERS_RESIDENT = Family(
    name="adapters_resident", kind="gauge", help="LoRA adapters in the runner."
)


def short(digest: str) -> str:
    """The part of a digest that reports carry."""
    return digest[:SHORT_DIGEST]


@dataclass(slots=True, frozen=True)
class AdapterRef(RequestPart):
    """A LoRA adapter: its content's digest, and where a runner gets the content."""

    digest: str  # AdapterFiles.digest, SHA-256 in hex
    name: str  # as clients call it; for messages and metrics
    path: str  # its folder
    store: str = ""  # the actor that holds the content; "" reads the folder

    @property
    def key(self) -> str:
        """Pages depend on the content alone."""
        return f"adapter:{self.digest}"

    @property
    def needs(self) -> tuple[Need, ...]:
        return (Need(bytes.fromhex(self.digest), self),)

    def check(self, served: Sequence[PartFacts]) -> None:
        if first_of(served, AdapterFacts) is None:
            raise InvalidRequest("this engine serves no adapters: it needs --enable-lora", "model")


@dataclass(slots=True, frozen=True)
class AdapterFacts(PartFacts):
    """A model that computes with adapters; ``at_once`` is max_loras."""

    of: ClassVar[type[RequestPart]] = AdapterRef


@dataclass(slots=True, frozen=True)
class AdapterUsage(PartUsage):
    """What a runner did with adapters since its last result."""

    resident: tuple[str, ...] = ()  # short digests of those that it holds now
    bytes: int = 0  # that they take
    load_seconds: tuple[float, ...] = ()  # of each adapter that it read
    failed: int = 0  # adapters that it could not read
    evicted: int = 0  # adapters that made room for others


@dataclass(slots=True, frozen=True)
class AdapterStats:
    """The adapters of an engine: in a heartbeat, and in the metrics."""

    max_loras: int = 0  # in one step; 0: it serves none
    running: tuple[str, ...] = ()  # names, of requests that hold a slot
    waiting: tuple[str, ...] = ()  # names, of requests that hold none
    resident: frozenset[str] = frozenset()  # short digests, as of the runner's last news
    bytes: int = gauge("adapter_bytes", "Memory of those adapters.")
    loading: int = gauge("adapters_loading", "Adapters that requests wait for.")
    requests_waiting: int = gauge(
        "num_requests_waiting_for_adapters",
        "Those requests; they are among the deferred ones.",
    )
    loads: dict[str, int] = counter(
        "adapter_loads", "LoRA adapters that the runner read.", "result", LOAD_RESULTS
    )
    evicted: int = counter(
        "adapter_evictions", "Adapters that left the runner's memory for others."
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the labels of ``ADAPTERS_INFO``: the most adapters of a step, and names."""
        return str(self.max_loras), ",".join(self.running), ",".join(self.waiting)
