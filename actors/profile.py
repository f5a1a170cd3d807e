"""Profiles of an engine's steps: the order that its scheduler and all of its runners get."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rayfin.actors.errors import NotFound
from rayfin.actors.parts import Need, PartFacts, RequestPart, first_of

MAX_STEPS = 1000
DEFAULT_STEPS = 64


@dataclass(frozen=True, slots=True)
class SchedulerSpan:
    """What the scheduler knows of a step; times are in ns since 1970, as those of runners."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ProfileOrder(RequestPart):
    """Starts a profile of the next steps, or ends it and writes it; no request has it."""

    stop: bool = False
    prefix: str = ""  # of the file's name
    delay: int = 0  # steps that are left out first
    steps: int = DEFAULT_STEPS
    spans: tuple[SchedulerSpan, ...] = ()  # of the scheduler, in the order that stops

    @property
    def needs(self) -> tuple[Need, ...]:
        return (Need(b"profile", self),)

    def check(self, served: Sequence[PartFacts]) -> None:
        """Raises:
        NotFound: the engine takes no profiles.
        """
        if first_of(served, ProfileFacts) is None:
            raise NotFound("This server takes no profiles: it needs --profile-dir.", "profile_dir")


@dataclass(frozen=True, slots=True)
class ProfileFacts(PartFacts):
    """The engine takes profiles."""

    of: ClassVar[type[RequestPart]] = ProfileOrder
