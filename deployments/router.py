"""Which engine takes a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayfin.actors.messages import EngineRequest

RUNNING_TOKENS = 64
"""A running request's share of an engine, in prompt tokens that wait: what it may yet sample."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes requests, as one ingress sees it."""

    name: str
    running: int = 0  # requests, of all ingresses, at its last heartbeat
    waiting: int = 0
    waiting_tokens: int = 0  # of prompts
    sent: int = 0  # requests that this ingress has sent it since
    sent_tokens: int = 0
    page_size: int = 16  # of its cache, in tokens
    num_pages: int = 0

    @property
    def load(self) -> int:
        """Work ahead of a newcomer, in tokens."""
        requests = self.running + self.waiting + self.sent
        return self.waiting_tokens + self.sent_tokens + RUNNING_TOKENS * requests


class Router(Protocol):
    """Decides where a request runs; knows no connection and sends nothing."""

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates, of which there is at least one."""
        ...


class LeastLoaded:
    """The engine with the least work; those that are even take turns."""

    def __init__(self) -> None:
        self._last = ""

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        chosen = cheapest(candidates, lambda own: own.load, self._last)
        self._last = chosen.name
        return chosen


def cheapest(
    candidates: Sequence[Candidate], cost: Callable[[Candidate], int], last: str
) -> Candidate:
    """The candidate of the least cost; of even ones the next after the one named ``last``."""
    least = min(map(cost, candidates))
    even = sorted((own for own in candidates if cost(own) == least), key=lambda own: own.name)
    return next((own for own in even if own.name > last), even[0])
