"""Starts or adopts one engine, watches it, and repairs it in place.

A plain class in a Serve replica or in an ``LLM``. Under Serve the actors are detached: they outlive
their supervisor, the next one claims them, and streams continue.

    the scheduler dies, hangs or fails   it is replaced under its name; the new one adopts the
                                         runners with the model that they have loaded
    the supervisor dies                  the next one of the same application and settings claims
                                         the engine when its pulse has stopped
    both die                             the next supervisor finds the runners and starts a
                                         scheduler for them
    no supervisor follows                scheduler and runners exit when their leases run out

An engine may also be started before the process that will watch it: ``early_engine.py``.

``actors/timing.py`` defines when.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RaySystemError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, NotOwner, RayfinError, RunnerGroupFailed
from rayfin.actors.messages import EngineInfo
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.plugins import contained, plugins, set_up_plugins
from rayfin.actors.processes.identity import Process, is_stopped
from rayfin.actors.processes.registry import (
    describe,
    end_process,
    find_actor,
    kill_named,
    runner_name,
    when_name_is_free,
)
from rayfin.actors.scheduler.actor import UNCLAIMED, EngineStart
from rayfin.actors.settings.spare_runners import seats
from rayfin.actors.supervision.adoption import (
    claim_engine,
    engines_without_scheduler,
    has_runners,
    numbered,
    other_model_exists,
)
from rayfin.actors.supervision.placement import bundles, create_scheduler, pick_cluster_device
from rayfin.actors.timing import (
    CLIENT_LEAVE_SECONDS,
    DRAIN_POLL_SECONDS,
    EVICTION_SECONDS,
    LOOP_STUCK_SECONDS,
    MAX_REPAIR_PAUSE_SECONDS,
    MISSED_PULSES,
    PULSE_ANSWER_SECONDS,
    PULSE_SECONDS,
    ROOM_SECONDS,
    RUNNER_PING_SECONDS,
)

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Repairs that fail in a row before the health check fails and Serve replaces the replica."""


class Supervisor:
    """One engine's placement group, scheduler actor and runners.

    Args:
        name: the engine's name. If ``detached``, its prefix: the smallest free number follows.
        detached: the actors outlive this process, which may adopt those of another. Otherwise they
            die with it.
    """

    def __init__(self, args: EngineArgs, name: str, *, detached: bool = False) -> None:
        self.name = name
        self._args = replace(args, device=pick_cluster_device(args.device))
        self._id = uuid.uuid4().hex if detached else None
        self._placement: PlacementGroup | None = None
        self._scheduler: Any = None
        self._processes: list[Process] = []  # of the scheduler, then of the runners
        self._generation = 0
        self._missed = 0
        self._failures = 0
        self._reason: str | None = None
        self.stats = EngineStats()  # at the last pulse
        set_up_plugins(tuple(args.plugin or ()))
        self._loggers = [
            contained(each, "stat_logger", Counter())
            for each in plugins(args.plugin, "stat_logger")
        ]
        self._watching: asyncio.Task[None] | None = None
        self._death = DeathWatch()

    @property
    def scheduler(self) -> Any:
        """The handle of the SchedulerActor."""
        return self._scheduler

    async def start(self) -> EngineInfo:
        """Adopts or starts the engine; returns when it accepts requests.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            EngineUnavailable: the cluster has no room, or a process died meanwhile.
        """
        try:
            if self._id is None:
                self._place(self.name)
                return await self._launch()
            info = await self._adopt(self._id)
            if info is None:
                await asyncio.to_thread(self._place_first_free)
                info = await self._launch()
        except BaseException:
            self.stop()
            raise
        self._watching = asyncio.create_task(self._watch())
        return info

    def place_ahead(self) -> None:
        """Names an engine for the first supervisor of the same settings that claims it.

        Call :meth:`launch_ahead` next. If none claims it, it leaves when its lease runs out.
        """
        self._id = UNCLAIMED
        self._place_first_free()

    async def launch_ahead(self) -> None:
        """Starts the engine of :meth:`place_ahead`; returns when it accepts requests.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            EngineUnavailable: the cluster has no room, or a process died meanwhile.
        """
        try:
            await self._launch()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Returns at once if the engine is healthy or under repair.

        Raises:
            EngineUnavailable: several repairs in a row have failed.
        """
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("supervisor.check")
        if self._failures >= MAX_FAILURES:
            raise EngineUnavailable(f"engine {self.name}: {self._reason}")

    async def is_replaced(self) -> bool:
        """Whether the deployment has an engine with another model, or of another version."""
        return await other_model_exists(self.name, self._args.identity)

    async def drain(self, seconds: float) -> None:
        """Hands new requests back; after ``seconds`` the unfinished ones as well.

        Returns when no request is left, when the engine is dead, or when there is none.
        """
        # Serve ends a replica also while its supervisor waits for an engine that it may claim.
        if self._scheduler is None:
            return
        try:
            await self._scheduler.drain.remote()
            if not await self._wait_until_idle(seconds):
                await self._scheduler.evict.remote()
                await self._wait_until_idle(EVICTION_SECONDS)
            await self._wait_until_clients_left(CLIENT_LEAVE_SECONDS)
        except RayError as error:
            logger.warning("engine %s died before it was drained: %s", self.name, error)

    def stop(self) -> None:
        """Kills scheduler, runners and spares, and frees their resources."""
        if self._watching is not None:
            self._watching.cancel()
            self._death.close()
        # After ray.shutdown() these calls would start another Ray.
        if self._scheduler is None or not ray.is_initialized():
            return
        ray.kill(self._scheduler)
        for seat in range(seats(self._args)):
            kill_named(runner_name(self.name, seat))
        if self._placement is not None:
            remove_placement_group(self._placement)

    def _place(self, name: str) -> None:
        """Registers the engine's name and requests its resources."""
        self.name = name
        self._scheduler = self._create_scheduler()
        options = {} if self._id is None else {"name": name, "lifetime": "detached"}
        strategy = self._args.place.strategy
        self._placement = placement_group(bundles(self._args), strategy=strategy, **options)

    def _place_first_free(self) -> None:
        prefix, number = self.name, 0
        while True:
            name = f"{prefix}{number}"
            try:
                if not has_runners(name, self._args):
                    self._place(name)
                    return
            except ValueError:  # the name is taken
                logger.debug("engine %s belongs to another supervisor", name)
            except RaySystemError as error:  # its placement group is, of an engine that ends
                logger.info("engine %s cannot be placed: %s", name, error)
                ray.kill(self._scheduler)
            number += 1

    async def _wait_for_room(self, placement: PlacementGroup) -> None:
        """Returns when the bundles have their resources; a log line says what they wait for."""
        ready = asyncio.ensure_future(placement.ready())
        await asyncio.wait([ready], timeout=ROOM_SECONDS)
        if not ready.done():
            there = ray.cluster_resources()  # type: ignore[no-untyped-call]
            wanted = bundles(self._args)
            lacking = sorted({name for bundle in wanted for name in bundle if name not in there})
            why = f"no node has {', '.join(lacking)}" if lacking else "others hold what is there"
            logger.warning("engine %s waits for room, bundles %s: %s", self.name, wanted, why)
        await ready

    async def _launch(self) -> EngineInfo:
        assert self._placement is not None
        runners = self._processes[1:]
        start = EngineStart(self._args, self._placement, self._id, self._generation, runners)
        try:
            await self._wait_for_room(self._placement)
            process = await self._scheduler.process.remote()
            self._processes[:1] = [process]
            info: EngineInfo = await self._scheduler.start.remote(start)
            if self._id != UNCLAIMED:  # else it may have its supervisor by now
                self._processes[1:] = await self._scheduler.runners.remote()
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError) and not isinstance(
                error.cause, RunnerGroupFailed
            ):
                raise error.cause from None
            raise EngineUnavailable(describe(error)) from error
        except RayError as error:
            raise EngineUnavailable(describe(error)) from error
        logger.info("engine %s is ready: %s", self.name, info)
        return info

    def _create_scheduler(self) -> Any:
        ahead = self._args if self._id == UNCLAIMED else None
        return create_scheduler(self.name, detached=self._id is not None, ahead=ahead)

    async def _adopt(self, owner: str) -> EngineInfo | None:
        claimed = await claim_engine(self.name, owner, self._args)
        if claimed is None:
            return await self._adopt_runners()
        self.name, self._scheduler, claim = claimed
        self._placement = claim.placement
        assert claim.info is not None and claim.process is not None
        self._processes = [claim.process, *await self._scheduler.runners.remote()]
        logger.info("adopted engine %s", self.name)
        return claim.info

    async def _adopt_runners(self) -> EngineInfo | None:
        names = await asyncio.to_thread(numbered, self.name)
        for name in engines_without_scheduler(names, self._args):
            try:
                placement = get_placement_group(name)
                self._scheduler = create_scheduler(name, detached=True)
            except ValueError as error:  # another was faster, or the placement group is gone
                logger.warning("the runners of %s cannot be adopted: %s", name, error)
                continue
            self.name, self._placement = name, placement
            return await self._launch()
        return None

    async def _watch(self) -> None:
        while True:
            await self._death.wait(self._scheduler, PULSE_SECONDS)
            try:
                reason = await self._pulse()
                if reason is not None:
                    await self._repair(reason)
            except NotOwner as error:
                logger.error("another supervisor has claimed the engine: %s", error)
                self._scheduler = None  # stop() must not kill it
                self._death.close()
                self._failures, self._reason = MAX_FAILURES, str(error)
                return
            except Exception as error:
                self._failures += 1
                self._reason = str(error)
                logger.exception("engine %s cannot be repaired", self.name)
                await asyncio.sleep(min(2.0**self._failures, MAX_REPAIR_PAUSE_SECONDS))

    async def _pulse(self) -> str | None:
        """Returns why the scheduler must be replaced, or None if it need not be."""
        try:
            pulse = self._scheduler.pulse.remote(self._id)
            stats: EngineStats = await asyncio.wait_for(pulse, PULSE_ANSWER_SECONDS)
        except RayTaskError as error:
            if isinstance(error.cause, NotOwner):
                raise error.cause from None
            return str(error.cause)
        except ActorDiedError as error:
            return describe(error)
        except (RayError, TimeoutError):
            self._missed += 1
        else:
            self._missed = 0
            self.stats = stats
            for each in self._loggers:
                each.log(self.name, stats)
            self._generation = stats.generation
            if stats.seconds_since_tick > LOOP_STUCK_SECONDS:
                return f"its loop has not turned for {stats.seconds_since_tick:.0f} s"
            self._failures = 0
        if self._missed and self._processes and is_stopped(self._processes[0]):
            return "its process is stopped"
        return f"{self._missed} pulses missed" if self._missed >= MISSED_PULSES else None

    async def _repair(self, reason: str) -> None:
        logger.error("engine %s: %s; replacing its scheduler", self.name, reason)
        self._reason = reason
        keeping = asyncio.create_task(self._keep_runners())
        try:
            await asyncio.to_thread(self._end_scheduler)
            self._missed = 0
            self._generation += 1
            create = self._create_scheduler
            self._scheduler = await asyncio.to_thread(when_name_is_free, create)
            await self._launch()
        finally:
            keeping.cancel()

    async def _keep_runners(self) -> None:
        """Renews the leases of runners that have no scheduler, until it is cancelled.

        On a busy machine a new scheduler may take longer to come than a lease lasts. Then they
        would exit, and their successors would load the model once more.
        """
        names = [runner_name(self.name, seat) for seat in range(seats(self._args))]
        while True:
            for name in names:
                try:
                    runner = await asyncio.to_thread(find_actor, name)
                    if runner is not None:
                        runner.ping.remote()
                except Exception as error:  # any of Ray's: the next round tries again
                    logger.warning("%s cannot be pinged: %s", name, error)
            await asyncio.sleep(RUNNER_PING_SECONDS)

    def _end_scheduler(self) -> None:
        if self._processes and not end_process(self._processes[0]):
            raise EngineUnavailable(f"the old scheduler cannot be killed: {self._processes[0]}")
        ray.kill(self._scheduler)

    async def _wait_until_idle(self, seconds: float) -> bool:
        """Returns False if requests are left after ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats: EngineStats = await self._scheduler.stats.remote()
            if not stats.running + stats.waiting:
                return True
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return False

    async def _wait_until_clients_left(self, seconds: float) -> None:
        # Tokens that a client has not read when the engine ends are computed again elsewhere.
        end = time.monotonic() + seconds
        while await self._scheduler.close_subscriptions.remote() and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)


class DeathWatch:
    """One call that an actor never answers: Ray fails it when the actor's process dies."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._end: asyncio.Task[None] | None = None

    async def wait(self, actor: Any, seconds: float) -> None:
        """Returns after so many seconds, or as soon as the actor is dead.

        Args:
            actor: a handle with a method ``wait_for_end``; another one than before ends that
                watch.
        """
        if self._end is None or actor is not self._actor:
            self.close()
            self._actor, self._end = actor, asyncio.create_task(_until_dead(actor))
        await asyncio.wait({self._end}, timeout=seconds)

    def close(self) -> None:
        """Ends the watch."""
        if self._end is not None:
            self._end.cancel()


async def _until_dead(actor: Any) -> None:
    while True:
        try:
            await actor.wait_for_end.remote()
        except ActorDiedError:
            return
        except Exception as error:  # any of Ray's; pulses tell meanwhile
            logger.debug("the watch begins again: %s", error)
        await asyncio.sleep(PULSE_SECONDS)
