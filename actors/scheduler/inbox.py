"""Messages from the scheduler actor's methods to the engine's thread."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.engine import Engine


@dataclass(slots=True)
class ClientMessage:
    """A client's requests and aborts, or an order of the actor's other methods."""

    client: str
    requests: list[EngineRequest] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    leaves: bool = False
    drain: bool = False  # accept no more requests
    evict: bool = False  # hand all requests back
    broken: str | None = None  # the runners died while nothing ran


WAKE = ClientMessage("")
"""Only wakes the thread of an idle engine."""


@dataclass(slots=True)
class EngineCall:
    """A function that the engine's thread calls between two steps."""

    ask: Callable[[Engine], Any]
    answer: Future[Any] = field(default_factory=Future)

    def reply(self, engine: Engine) -> None:
        """Sets the answer, or the exception: a failing call does not stop the loop."""
        try:
            self.answer.set_result(self.ask(engine))
        except Exception as error:
            self.answer.set_exception(error)
