"""Starts one engine and watches it: a plain class that a Serve replica or an ``LLM`` holds."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, RayfinError
from rayfin.actors.group import describe
from rayfin.actors.messages import EngineInfo, EngineStats
from rayfin.actors.scheduler.actor import SchedulerActor

logger = logging.getLogger(__name__)

NAMESPACE = "rayfin"
"""Ray namespace in which the scheduler actors are registered, so that every ingress finds them."""

DRAIN_POLL_SECONDS = 0.1
STALL_SECONDS = 60.0
STALL_STEPS = 100
"""An engine has stalled when it has work and finished no step for this long, or this many steps."""


class Supervisor:
    """One engine's placement group and scheduler actor (which owns the runners).

    Everything it starts belongs to the process that holds it and dies with it.
    """

    def __init__(self, args: EngineArgs, name: str) -> None:
        self.name = name
        self._args = replace(args, device=pick_cluster_device(args.device))
        self._placement: PlacementGroup | None = None
        self._scheduler: Any = None

    @property
    def scheduler(self) -> Any:
        """The handle of the SchedulerActor."""
        return self._scheduler

    async def start(self) -> EngineInfo:
        """Places and starts the engine; returns when it takes requests.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            EngineUnavailable: the cluster has no room, or something died on the way.
        """
        bundle = {"CPU": 1.0, "GPU": 1.0} if self._args.device == "cuda" else {"CPU": 1.0}
        self._placement = placement_group([bundle], strategy="STRICT_PACK")
        actor_class: Any = SchedulerActor  # Ray's stubs lose `options` on a decorated class
        options = {"name": self.name, "namespace": NAMESPACE}
        self._scheduler = actor_class.options(**options).remote(self.name)
        try:
            await self._placement.ready()
            info: EngineInfo = await self._scheduler.start.remote(self._args, self._placement)
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError):
                raise error.cause from None
            raise EngineUnavailable(describe(error)) from error
        except RayError as error:
            raise EngineUnavailable(describe(error)) from error
        logger.info("engine %s is ready: %s", self.name, info)
        return info

    async def check(self, timeout: float = 5.0) -> EngineStats:
        """Asks for progress, never for a step.

        Raises:
            EngineUnavailable: the engine is dead, or has work and does not advance.
        """
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("supervisor.check")
        try:
            stats: EngineStats = await asyncio.wait_for(self._scheduler.stats.remote(), timeout)
        except RayTaskError as error:
            raise EngineUnavailable(str(error.cause)) from None
        except (RayError, TimeoutError) as error:
            raise EngineUnavailable(f"engine {self.name} does not answer: {error}") from None
        check_progress(stats)
        return stats

    async def drain(self, seconds: float) -> None:
        """Returns when nothing runs or waits, or after ``seconds``, or when the engine is dead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                stats = await self.check()
            except EngineUnavailable:
                return
            if not stats.running + stats.waiting:
                return
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def stop(self) -> None:
        """Kills the scheduler, and with it the runners, and gives the resources back."""
        if self._scheduler is not None:
            ray.kill(self._scheduler)
        if self._placement is not None:
            remove_placement_group(self._placement)


def check_progress(stats: EngineStats) -> None:
    """Health is progress: a busy engine is healthy however busy, a silent one with work is not.

    Raises:
        EngineUnavailable: it has stalled.
    """
    patience = max(STALL_SECONDS, STALL_STEPS * stats.last_step_seconds)
    if stats.seconds_since_progress > patience:
        raise EngineUnavailable(
            f"no step finished for {stats.seconds_since_progress:.0f} s with "
            f"{stats.running + stats.waiting} requests at hand"
        )


def pick_cluster_device(device: str) -> Any:
    """``auto`` takes a GPU if the cluster has one: the supervisor's own node may well have none."""
    if device != "auto":
        return device
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return "cuda" if resources.get("GPU", 0) else "cpu"
