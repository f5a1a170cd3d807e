"""What the doors of a scheduler actor hand to the thread that steps."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.engine import Engine


@dataclass(slots=True)
class ClientMessage:
    """A client's requests and what it gives up, or a word of whoever looks after the engine."""

    client: str
    requests: list[EngineRequest] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    leaves: bool = False
    drain: bool = False  # take no more requests
    evict: bool = False  # send those that are left elsewhere
    broken: str | None = None  # the runners died while nothing ran


@dataclass(slots=True)
class EngineCall:
    """What the loop is asked between two steps."""

    ask: Callable[[Engine], Any]
    answer: Future[Any] = field(default_factory=Future)

    def reply(self, engine: Engine) -> None:
        """Answers; what goes wrong is the asker's to know, and no reason to stop the loop."""
        try:
            self.answer.set_result(self.ask(engine))
        except Exception as error:
            self.answer.set_exception(error)
