"""The client of a server's ``/admin`` routes, and the table of its engines."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from time import monotonic
from types import TracebackType
from typing import Any

import httpx
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.bench.endpoint import client_settings, describe, refusal

STYLES = {"ready": "green", "draining": "yellow", "asleep": "dim", "lost": "red"}
COLUMNS = (
    *("engine", "state", "running", "waiting", "waiting tokens", "pages"),
    *("prompt tokens/s", "output tokens/s", "requests/s", "prefix hits", "preempted"),
    *("sessions", "parked", "recomputed", "pages read", "pages missed"),
    "model",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer of ``/admin/engines`` and its time."""

    at: float  # seconds
    engines: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine's state, and its rates per second between two samples."""

    engine: str
    state: str
    running: int
    waiting: int
    waiting_tokens: int
    pages_held: int
    pages_total: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    requests_per_second: float
    prefix_hit_rate: float | None  # of the prompt tokens admitted; None: there were none
    preemptions: int  # since the engine's start
    sessions: int  # that keep their pages over their pauses
    parked: int  # turns that wait until their session may
    tokens_recomputed: int  # that sessions had and lost, since the engine's start
    pages_read: dict[str, int]  # by where they were: disk, p2p, host; since then
    pages_missed: int  # asked for there, and missing or late
    model: str

    def cells(self) -> list[str]:
        hits = "-" if self.prefix_hit_rate is None else f"{self.prefix_hit_rate:.0%}"
        sources = " ".join(f"{count} {name}" for name, count in self.pages_read.items())
        return [
            *(self.engine, self.state, str(self.running), str(self.waiting)),
            *(str(self.waiting_tokens), f"{self.pages_held}/{self.pages_total}"),
            f"{self.prompt_tokens_per_second:.1f}",
            f"{self.output_tokens_per_second:.1f}",
            f"{self.requests_per_second:.1f}",
            *(hits, str(self.preemptions), str(self.sessions), str(self.parked)),
            *(str(self.tokens_recomputed), sources or "0", str(self.pages_missed), self.model),
        ]


@dataclass(frozen=True, slots=True)
class Status:
    rows: list[Row]

    @classmethod
    def between(cls, first: Sample, second: Sample) -> "Status":
        seconds = max(second.at - first.at, 1e-9)
        before = {engine["name"]: engine["stats"] for engine in first.engines}
        return cls([_row(engine, before.get(engine["name"]), seconds) for engine in second.engines])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Server(AbstractContextManager["Server"]):
    """The operator's routes of a server."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    @classmethod
    def connect(cls, url: str, key: str | None) -> "Server":
        """Connects to the server whose API is at ``url``.

        Raises:
            InvalidConfig: the URL is malformed, or the key is missing.
        """
        if not key:
            raise InvalidConfig(
                "admin_api_key is required: the one that the server was started with",
                "admin_api_key",
            )
        settings = client_settings(url, key)
        settings["base_url"] = settings["base_url"].removesuffix("/v1") + "/"
        return cls(httpx.Client(**settings))

    def sample(self) -> Sample:
        return Sample(monotonic(), self._call("GET", "engines"))

    def command(
        self, command: str, engine: str | None, model: str | None = None
    ) -> list[dict[str, Any]]:
        """Sends a command and returns the engines that it was for."""
        return self._call("POST", command, engine=engine, model=model)

    def requests_left(self, engines: list[dict[str, Any]]) -> int:
        """Counts the unfinished requests of ``engines``, as ``command`` returns them.

        Raises:
            ServerError: an engine does not answer.
        """
        names = {engine["name"] for engine in engines}
        current = [engine for engine in self.sample().engines if engine["name"] in names]
        for engine in current:
            if engine["state"] == "lost":
                raise ServerError(f"engine {engine['engine']} does not answer")
        return sum(engine["stats"]["running"] + engine["stats"]["waiting"] for engine in current)

    def _call(self, method: str, path: str, **query: str | None) -> list[dict[str, Any]]:
        params = {name: value for name, value in query.items() if value is not None}
        address = str(self._client.base_url).rstrip("/")
        try:
            response = self._client.request(method, f"admin/{path}", params=params)
        except httpx.HTTPError as error:
            raise ServerError(f"{address}: {describe(error)}") from None
        if response.status_code == 404 and "unknown_url" in response.text:
            raise ServerError(
                f"{address} has no /admin: start the server with --admin-api-key, or set --url to "
                "its --admin-port"
            )
        if response.is_error:
            raise refusal(response)
        engines: list[dict[str, Any]] = response.json()["engines"]
        return engines

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()


def lines(status: Status) -> list[str]:
    """The table as text, for a file or a pipe."""
    return [
        ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, row.cells(), strict=True))
        for row in status.rows
    ] or ["no engine"]


def table(status: Status) -> RenderableType:
    """The table for a terminal."""
    result = Table(*COLUMNS)
    for column in result.columns[2:-1]:
        column.justify = "right"
    for row in status.rows:
        number, state, *rest = row.cells()
        result.add_row(number, Text(state, style=STYLES[state]), *rest)
    return result


def _row(engine: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> Row:
    stats = engine["stats"]
    since = stats if before is None or before["steps"] > stats["steps"] else before

    def grown(name: str) -> int:
        return int(stats[name] - since[name])

    finished = sum(stats["finished"].values()) - sum(since["finished"].values())
    queries, pages = grown("prefix_queries"), stats["pages_read"]
    return Row(
        engine=engine["engine"],
        state=engine["state"],
        running=stats["running"],
        waiting=stats["waiting"],
        waiting_tokens=stats["waiting_tokens"],
        pages_held=stats["pages_held"],
        pages_total=stats["pages_total"],
        prompt_tokens_per_second=grown("prompt_tokens") / seconds,
        output_tokens_per_second=grown("generation_tokens") / seconds,
        requests_per_second=finished / seconds,
        prefix_hit_rate=grown("prefix_hits") / queries if queries else None,
        preemptions=stats["preemptions"],
        sessions=stats["sessions_seated"],
        parked=stats["parked"],
        tokens_recomputed=stats["session_tokens_again"],
        pages_read={name.split()[0]: count for name, count in pages.items() if "arrived" in name},
        pages_missed=sum(count for name, count in pages.items() if "arrived" not in name),
        model=engine["model"],
    )
