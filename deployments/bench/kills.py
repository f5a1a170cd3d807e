"""Kills amid a run, which a server has to bear."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.processes.identity import Process
from rayfin.actors.processes.registry import NAMESPACE, end_process, find_actor
from rayfin.actors.timing import VICTIM_ANSWER_SECONDS, VICTIM_POLL_SECONDS, VICTIM_SECONDS

ROLES = ("scheduler", "runner", "engine")


@dataclass(frozen=True, slots=True)
class Kill:
    """One of ROLES, and seconds of the run's clock."""

    role: str
    at: float


def read_kill(text: str) -> Kill:
    """Reads ROLE@SECONDS.

    Raises:
        InvalidConfig: it is something else.
    """
    role, _, at = text.partition("@")
    if role not in ROLES or not at.replace(".", "", 1).isdigit():
        raise InvalidConfig(f"kill must be {', '.join(ROLES)} @SECONDS, got {text!r}", "kill")
    return Kill(role, float(at))


@dataclass(slots=True)
class Kills:
    """Kills at their times; ``struck`` are those when something was killed.

    Args:
        kill: kills something of a role.
    """

    kills: Iterable[Kill]
    kill: Callable[[str], None]
    struck: list[float] = field(default_factory=list)

    async def run(self, now: Callable[[], float]) -> None:
        """Kills all of them, or those until it is cancelled."""
        for each in sorted(self.kills, key=lambda each: each.at):
            await asyncio.sleep(each.at - now())
            self.struck.append(now())
            await asyncio.to_thread(self.kill, each.role)


class EngineKiller:
    """Kills processes of the engines of a Ray cluster, one engine after the other.

    Raises:
        InvalidConfig: this process finds no cluster.
    """

    def __init__(self) -> None:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError:
            raise InvalidConfig(
                "kill needs the server's Ray cluster, and none is found here: set RAY_ADDRESS",
                "kill",
            ) from None
        self._number = 0

    def __call__(self, role: str) -> None:
        """Kills a scheduler, a runner or both, and all runners of that engine.

        Raises:
            InvalidConfig: no engine answers for a minute.
        """
        scheduler, runners = self._engine()
        if role != "runner":
            ray.kill(scheduler)
        for process in runners[:1] if role == "runner" else runners if role == "engine" else []:
            end_process(process)

    def _engine(self) -> tuple[Any, list[Process]]:
        """The next engine that answers: its scheduler and its runners."""
        deadline = time.monotonic() + VICTIM_SECONDS
        while time.monotonic() < deadline:
            actors = list_named_actors(all_namespaces=True)
            names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
            engines = sorted(
                {name.partition("/runner/")[0] for name in names if "/runner/" in name}
            )
            self._number += 1
            scheduler = find_actor(engines[self._number % len(engines)]) if engines else None
            runners = [] if scheduler is None else _runners_of(scheduler)
            if runners:
                return scheduler, runners
            time.sleep(VICTIM_POLL_SECONDS)
        raise InvalidConfig("no engine of the cluster answers", "kill")


def _runners_of(scheduler: Any) -> list[Process]:
    """Returns an engine's runners; none if its scheduler does not answer."""
    try:
        runners: list[Process] = ray.get(scheduler.runners.remote(), timeout=VICTIM_ANSWER_SECONDS)
    except RayError:
        return []
    return runners
