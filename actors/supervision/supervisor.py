"""Starts one engine or adopts one, watches it, and repairs it in place.

A plain class that a Serve replica or an ``LLM`` holds. Under Serve the actors are detached: they
outlive their supervisor, the next one claims them, and streams never notice.

    the scheduler dies, hangs, or has failed   it is replaced under its name; the new one takes the
                                               runners over with the model that they have loaded
    the supervisor dies                        the next one of the same application and settings
                                               claims the engine when its pulse has stopped
    both die                                   the next supervisor finds runners that have no
                                               scheduler, and starts one for them
    nobody comes                               scheduler and runners exit when their leases run out
"""

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, NotOwner, RayfinError, RunnerGroupFailed
from rayfin.actors.messages import EngineInfo, EngineStats
from rayfin.actors.processes.identity import Process, is_stopped
from rayfin.actors.processes.registry import (
    NAMESPACE,
    describe,
    end_process,
    engine_names,
    find_actor,
    kill_named,
    runner_name,
    when_name_is_free,
)
from rayfin.actors.runner.parallel.rank import group_size
from rayfin.actors.scheduler.actor import EngineClaim, EngineStart, SchedulerActor
from rayfin.actors.timing import (
    CLIENT_LEAVE_SECONDS,
    DRAIN_POLL_SECONDS,
    ENGINE_STALL_SECONDS,
    ENGINE_STALL_STEPS,
    EVICTION_SECONDS,
    HANDOVER_SECONDS,
    LOOP_STUCK_SECONDS,
    MAX_REPAIR_PAUSE_SECONDS,
    MISSED_PULSES,
    PULSE_ANSWER_SECONDS,
    PULSE_SECONDS,
)

logger = logging.getLogger(__name__)


MAX_FAILURES = 3
"""Failed attempts in a row to repair an engine, after which Serve shall replace the replica."""


class Supervisor:
    """One engine's placement group, scheduler actor and runners.

    Args:
        name: of the engine; where ``detached``, what its name begins with: it ends with the
            smallest number that is free.
        detached: the actors outlive this process, and this one may adopt those of another.
            Otherwise they die with it.
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
        self._trouble: str | None = None
        self.stats = EngineStats()  # at the last pulse
        self._watching: asyncio.Task[None] | None = None

    @property
    def scheduler(self) -> Any:
        """The handle of the SchedulerActor."""
        return self._scheduler

    async def start(self) -> EngineInfo:
        """Adopts or starts the engine; returns when it takes requests.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            EngineUnavailable: the cluster has no room, or something died on the way.
        """
        try:
            if self._id is None:
                self._place(self.name)
                return await self._launch()
            info = await self._adopt()
            if info is None:
                await asyncio.to_thread(self._place_first_free)
                info = await self._launch()
        except BaseException:
            self.stop()
            raise
        self._watching = asyncio.create_task(self._watch())
        return info

    def check(self) -> None:
        """Whether the engine is well, or about to be repaired; waits for nothing.

        Raises:
            EngineUnavailable: several repairs in a row have failed.
        """
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("supervisor.check")
        if self._failures >= MAX_FAILURES:
            raise EngineUnavailable(f"engine {self.name}: {self._trouble}")

    async def drain(self, seconds: float) -> None:
        """Sends new requests elsewhere, lets the others finish for ``seconds``, then moves them.

        Returns when nothing is left, or when the engine is dead.
        """
        try:
            if await self._has_another_model_beside():
                await asyncio.sleep(handover := min(HANDOVER_SECONDS, seconds))
                seconds -= handover
            await self._scheduler.drain.remote()
            if not await self._idle(seconds):
                await self._scheduler.evict.remote()
                await self._idle(EVICTION_SECONDS)
            await self._left_by_all(CLIENT_LEAVE_SECONDS)
        except RayError as error:
            logger.warning("engine %s is gone before it has drained: %s", self.name, error)

    def stop(self) -> None:
        """Kills scheduler and runners, and gives the resources back."""
        if self._watching is not None:
            self._watching.cancel()
        if self._scheduler is None:
            return
        ray.kill(self._scheduler)
        for rank in range(group_size(self._args)):
            kill_named(runner_name(self.name, rank))
        if self._placement is not None:
            remove_placement_group(self._placement)

    async def _has_another_model_beside(self) -> bool:
        """Whether an engine of the same Serve deployment gives other tokens than this one."""
        prefix = self.name.rpartition("/")[0] + "/"
        for name in await asyncio.to_thread(engine_names, prefix):
            if name != self.name and (scheduler := find_actor(name)) is not None:
                with suppress(RayError, EngineUnavailable, TimeoutError):
                    info = await asyncio.wait_for(scheduler.info.remote(), PULSE_ANSWER_SECONDS)
                    if info.identity != self._args.identity:
                        return True
        return False

    def _place(self, name: str) -> None:
        """Takes the engine's name, and asks for its resources."""
        self.name = name
        self._scheduler = self._new_scheduler()
        options = {} if self._id is None else {"name": name, "lifetime": "detached"}
        self._placement = placement_group(bundles(self._args), strategy="PACK", **options)

    def _place_first_free(self) -> None:
        """The first number whose name is free, and that left no placement group behind."""
        prefix, number = self.name, 0
        while True:
            name = f"{prefix}{number}"
            try:
                if not self._find_runners(name):
                    self._place(name)
                    return
            except ValueError:  # the name is taken
                logger.debug("engine %s is another supervisor's", name)
            number += 1

    async def _launch(self) -> EngineInfo:
        """Starts the engine of the scheduler at hand."""
        assert self._placement is not None
        runners = self._processes[1:]
        start = EngineStart(self._args, self._placement, self._id, self._generation, runners)
        try:
            await self._placement.ready()
            process = await self._scheduler.process.remote()
            self._processes[:1] = [process]
            info: EngineInfo = await self._scheduler.start.remote(start)
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

    def _new_scheduler(self) -> Any:
        """A scheduler actor under the engine's name.

        Raises:
            ValueError: the name is taken.
        """
        actor_class: Any = SchedulerActor  # Ray's stubs lose `options` on a decorated class
        options = {"name": self.name, "namespace": NAMESPACE}
        if self._id is not None:
            options["lifetime"] = "detached"
        return actor_class.options(**options).remote(self.name)

    async def _adopt(self) -> EngineInfo | None:
        """An engine of the same settings that nobody supervises any more; None: there is none.

        One whose supervisor has died recently is waited for: its lease has yet to run out.
        """
        while True:
            waiting = False
            for name in await asyncio.to_thread(engine_names, self.name):
                claim = await self._claim(name)
                if claim is not None and claim.granted:
                    return await self._take(name, claim)
                waiting |= claim is not None and claim.compatible and claim.silence > PULSE_SECONDS
            if not waiting:
                return await self._adopt_runners()
            await asyncio.sleep(PULSE_SECONDS / 2)

    async def _claim(self, name: str) -> EngineClaim | None:
        scheduler = find_actor(name)
        if scheduler is None:
            return None
        try:
            ask = scheduler.claim.remote(self._id, self._args, self._args.identity)
            claim: EngineClaim = await asyncio.wait_for(ask, PULSE_ANSWER_SECONDS)
        except (RayError, TimeoutError) as error:
            logger.warning("engine %s cannot be claimed: %s", name, error)
            return None
        if claim.granted:
            self._scheduler = scheduler
        return claim

    async def _take(self, name: str, claim: EngineClaim) -> EngineInfo:
        assert claim.info is not None and claim.process is not None
        self.name, self._placement = name, claim.placement
        self._processes = [claim.process, *await self._scheduler.runners.remote()]
        logger.warning("adopted engine %s", name)
        return claim.info

    async def _adopt_runners(self) -> EngineInfo | None:
        """An engine that has lost supervisor and scheduler, but not yet its runners."""
        prefix = self.name
        for name in await asyncio.to_thread(engine_names, prefix):
            try:
                if find_actor(name) is None and self._find_runners(name):
                    self._placement = get_placement_group(name)
                    self.name = name
                    self._scheduler = self._new_scheduler()
                    return await self._launch()
            except ValueError as error:  # another was faster, or the placement group is gone
                logger.warning("the runners of %s cannot be adopted: %s", name, error)
            self.name = prefix
        return None

    def _find_runners(self, name: str) -> bool:
        """Whether a runner of an engine of this name and size is there."""
        ranks = range(group_size(self._args))
        return any(find_actor(runner_name(name, rank)) is not None for rank in ranks)

    async def _watch(self) -> None:
        """Looks after the engine for ever, or until another supervisor does."""
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            try:
                trouble = await self._pulse()
                if trouble is not None:
                    await self._repair(trouble)
            except NotOwner as error:
                logger.error("this supervisor was taken for dead: %s", error)
                self._scheduler = None  # not ours to stop
                self._failures, self._trouble = MAX_FAILURES, str(error)
                return
            except Exception as error:
                self._failures += 1
                self._trouble = str(error)
                logger.exception("engine %s cannot be repaired", self.name)
                await asyncio.sleep(min(2.0**self._failures, MAX_REPAIR_PAUSE_SECONDS))

    async def _pulse(self) -> str | None:
        """What is wrong with the scheduler; None: nothing, so far."""
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
            self._generation = stats.generation
            if stats.seconds_since_tick > LOOP_STUCK_SECONDS:
                return f"its loop has not turned for {stats.seconds_since_tick:.0f} s"
            self._failures = 0
        if self._missed and self._processes and is_stopped(self._processes[0]):
            return "its process is stopped"
        return f"{self._missed} pulses missed" if self._missed >= MISSED_PULSES else None

    async def _repair(self, trouble: str) -> None:
        """A new scheduler under the same name, a generation later."""
        logger.error("engine %s: %s; its scheduler is replaced", self.name, trouble)
        self._trouble = trouble
        await asyncio.to_thread(self._end_scheduler)
        self._missed = 0
        self._generation += 1
        self._scheduler = await asyncio.to_thread(when_name_is_free, self._new_scheduler)
        await self._launch()

    def _end_scheduler(self) -> None:
        if self._processes and not end_process(self._processes[0]):
            raise EngineUnavailable(f"the old scheduler cannot be killed: {self._processes[0]}")
        ray.kill(self._scheduler)

    async def _idle(self, seconds: float) -> bool:
        """Waits until nothing runs or waits; False after ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats: EngineStats = await self._scheduler.stats.remote()
            if not stats.running + stats.waiting:
                return True
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return False

    async def _left_by_all(self, seconds: float) -> None:
        """Waits until the clients have read all that was sent: what has not arrived when the engine
        ends is computed again."""
        end = time.monotonic() + seconds
        while await self._scheduler.close_subscriptions.remote() and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)


def bundles(args: EngineArgs) -> list[dict[str, float]]:
    """What an engine asks of the cluster; its device is not "auto".

    A bundle lies on one node: the ranks of a stage are together, stages as near as they go.
    """
    each = float(args.tensor_parallel_size)
    bundle = {"CPU": each, "GPU": each} if args.device == "cuda" else {"CPU": each}
    return [bundle] * args.pipeline_parallel_size


def check_progress(stats: EngineStats) -> None:
    """Health is progress: a busy engine is healthy however busy, a silent one with work is not.

    Raises:
        EngineUnavailable: it has stalled.
    """
    patience = max(ENGINE_STALL_SECONDS, ENGINE_STALL_STEPS * stats.last_step_seconds)
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
