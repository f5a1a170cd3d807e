"""The Ray shell of an Engine: a thread that steps, and the methods that clients call.

    submit        requests and aborts                      (concurrency group "requests")
    subscribe     one client's output, a message per step  (a group and thread per client)
    wait_for_end  nothing: it ends with the process        ("end")
    the others    start, claim, pulse, ...: never wait for a step           ("control")

These methods only use queues; the engine belongs to the loop's thread. A supervisor owns this actor
while it sends pulses. Without them another supervisor may claim it; in the end the actor kills its
runners and exits.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import (
    EngineUnavailable,
    Fenced,
    InvalidRequest,
    NotOwner,
    RayfinError,
    RequestHandedBack,
    RunnerGroupFailed,
)
from rayfin.actors.messages import (
    Command,
    Ended,
    EngineInfo,
    EngineRequest,
    Int32Array,
    PagesAt,
    Seat,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.parts import RequestPart
from rayfin.actors.processes.environment import lower_priority
from rayfin.actors.processes.identity import Process, this_process
from rayfin.actors.processes.lifeline import Lifeline
from rayfin.actors.processes.logs import set_up
from rayfin.actors.processes.registry import NAMESPACE
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.executor import Executor
from rayfin.actors.scheduler.faults.runner_pinger import RunnerPinger
from rayfin.actors.scheduler.inbox import WAKE, ClientLinks, ClientMessage, EngineCall
from rayfin.actors.scheduler.kv_events import EventSockets, make_kv_events
from rayfin.actors.scheduler.page_tier import request_to_warm
from rayfin.actors.scheduler.profiled_executor import profiled
from rayfin.actors.scheduler.runner_group import RunnerGroup
from rayfin.actors.scheduler.stats import log_status
from rayfin.actors.scheduler.subscriptions import MAX_CLIENTS, Subscriptions
from rayfin.actors.scheduler.weight_desk import WeightDesk, catch_up, joined_version
from rayfin.actors.settings.kv_events import read_kv_events
from rayfin.actors.timing import (
    CLIENT_LEASE_SECONDS,
    LOBBY_TICK_SECONDS,
    LOOP_ANSWER_SECONDS,
    LOOP_COMMAND_SECONDS,
    PEER_READ_SECONDS,
    SPARE_AFTER_CLAIM_SECONDS,
    SUPERVISOR_CLAIM_SECONDS,
    SUPERVISOR_LEASE_SECONDS,
)
from rayfin.actors.weights.coordinator_actor import (
    chunks_of,
    coordinator_name,
    decided_version,
    fetch_version,
    start_coordinator,
    store_here,
)
from rayfin.actors.weights.version import EngineWeights, Vote, WeightOrder, WeightVersion

logger = logging.getLogger(__name__)


MOST_HELD = 65_536
"""Pages whose digests go with a heartbeat; routers guess what a larger cache has."""

UNCLAIMED = ""
"""The owner of an engine that was started ahead of its supervisor, who is the first that asks."""

STREAMS = [f"stream-{seat}" for seat in range(MAX_CLIENTS)]
OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "num_cpus": 0,
    "enable_task_events": False,  # Ray's GCS would keep a record of each call
    "concurrency_groups": {
        **{"requests": 1, "control": 6, "prepare": 1, "end": 1, "weights": 1, "warm": 4},
        **dict.fromkeys(STREAMS, 1),
    },
}


@dataclass(frozen=True, slots=True)
class EngineStart:
    """How a scheduler starts its engine."""

    args: EngineArgs
    placement: PlacementGroup | None = None
    owner: str | None = None  # its supervisor; None if it lives with its creator
    generation: int = 0
    runners: Sequence[Process] = ()  # of the scheduler before this one


@dataclass(frozen=True, slots=True)
class EngineClaim:
    """The answer to a supervisor that wants to adopt an engine."""

    granted: bool
    compatible: bool  # it can be granted once the owner stops its pulse
    silence: float = 0.0  # seconds since the owner's last pulse
    info: EngineInfo | None = None
    placement: PlacementGroup | None = None
    process: Process | None = None
    starting: bool = False  # it can be granted once the engine has started


@ray.remote(**OPTIONS)
class SchedulerActor:
    """One engine's scheduler, with the runners that it drives."""

    def __init__(
        self,
        name: str,
        client_lease: float = CLIENT_LEASE_SECONDS,
        supervisor_lease: float = SUPERVISOR_LEASE_SECONDS,
        claim_after: float = SUPERVISOR_CLAIM_SECONDS,
        ahead: EngineArgs | None = None,
    ) -> None:
        lower_priority()
        self._name = name
        self._client_lease = client_lease
        self._inbox: queue.SimpleQueue[ClientMessage | EngineCall] = queue.SimpleQueue()
        self._subscriptions = Subscriptions()
        self._links = ClientLinks(self._subscriptions, self._inbox)
        self._lifeline = Lifeline(supervisor_lease, self._leave)
        self._claims = threading.Lock()
        self._claim_after = claim_after
        # A claim may come before the call that starts an engine ahead.
        owner = None if ahead is None else UNCLAIMED
        self._started = EngineStart(ahead or EngineArgs(), owner=owner)
        self._engine: Engine | None = None
        self._desk: WeightDesk | None = None
        self._group: RunnerGroup | None = None
        self._executor: Executor | None = None  # the group, as the engine sees it
        self._kv_events: EventSockets | None = None
        self._failure: str | None = None
        self._ticked = time.monotonic()
        self._leaving = False
        self._has_others = False  # whether there are other engines of the model

    @ray.method(concurrency_group="control")
    def start(self, start: EngineStart) -> EngineInfo:
        """Starts or adopts the runners and the loop; returns when the engine is ready.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
        """
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("scheduler.start")
        self._started = start
        set_up(start.args.log_format, start.args.log_level, engine=self._name)
        if start.owner is not None:
            self._lifeline.watch()
        with self._lifeline.work():
            self._group = RunnerGroup(
                start.args,
                self._name,
                start.placement,
                generation=start.generation,
                known=start.runners,
                detached=start.owner is not None,
                on_wait=self._tick,
                may_restart=self._is_current,
                on_prepared=partial(self._inbox.put, WAKE),
            )
            desk = WeightDesk(
                self._name,
                store_here(start.args.weight_dir, self._name),
                self._group,
                self._call,
                self._hand_back,
                partial(start_coordinator, coordinator_name(self._name)),
                fetch := partial(fetch_version, self._name),
            )
            ask = partial(decided_version, coordinator_name(self._name))
            self._group.version = joined_version(desk.store, ask(), fetch)
            desk.store.touch()
            self._executor = profiled(self._group, start.args.profile_dir)
            engine = Engine(self._group.start(), self._executor)
            tables = engine.lifecycle.state.tables
            events = read_kv_events(start.args.kv_events_config)
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            about = events, self._name, tables.page_size, tables.index, host
            self._kv_events = make_kv_events(*about)
            tables.restore(self._group.names)
            if self._kv_events is not None:
                self._kv_events.start()
            engine.updates.begin(self._group.version)
            self._desk, self._engine = desk, engine
            try:
                catch_up(engine, joined_version(desk.store, ask(), fetch))
            except BaseException:
                self._engine = None
                raise
        threading.Thread(target=self._loop, name="engine", daemon=True).start()
        RunnerPinger(self._group, engine, self._report_broken).watch()
        desk.watch()
        if start.owner != UNCLAIMED:
            self._group.spares.watch()
        log_status(engine.stats, partial(logger.info, "engine %s: %s", self._name))
        return self._info()

    @ray.method(concurrency_group="control")
    def claim(self, owner: str, args: EngineArgs, identity: str) -> EngineClaim:
        """Makes ``owner`` the supervisor of this engine if the last one has stopped its pulse.

        A claim that was granted is granted again: its first answer may have come too late.

        Args:
            identity: of ``args`` in the supervisor's process. A supervisor of another version of
                the code gets a different one, and no engine.
        """
        with self._claims:
            silence = self._lifeline.silence
            start = self._started
            same = args == start.args and identity == start.args.identity
            if self._failure or not same or start.owner is None:
                return EngineClaim(False, False)
            unclaimed = start.owner == UNCLAIMED
            if self._engine is None:
                return EngineClaim(False, unclaimed, starting=unclaimed)
            known = start.owner in (UNCLAIMED, owner)
            if silence < self._claim_after and not known:
                return EngineClaim(False, True, silence)
            if not known:
                logger.warning("supervisor %s takes over from %s", owner, start.owner)
            self._started = replace(start, owner=owner)
            self._lifeline.heard()
            if unclaimed and self._group is not None:
                self._group.spares.rest(SPARE_AFTER_CLAIM_SECONDS)
                self._group.spares.watch()
        return EngineClaim(True, True, silence, self._info(), start.placement, _process())

    @ray.method(concurrency_group="control")
    def pulse(self, owner: str) -> EngineStats:
        """Renews the supervisor's lease; returns the counters.

        Raises:
            NotOwner: it has another supervisor.
            EngineUnavailable: it has failed.
        """
        if owner != self._started.owner:
            raise NotOwner(f"engine {self._name} has another supervisor")
        self._lifeline.heard()
        return self._stats(self._running_engine())

    @ray.method(concurrency_group="control")
    def info(self) -> EngineInfo:
        """The engine's limits.

        Raises:
            EngineUnavailable: it has not started, or has failed.
        """
        return self._info()

    @ray.method(concurrency_group="control")
    def stats(self) -> EngineStats:
        """A snapshot of the counters.

        Raises:
            EngineUnavailable: it has not started, or has failed.
        """
        return self._stats(self._running_engine())

    @ray.method(concurrency_group="control")
    def check_integrity(self) -> None:
        """Checks the cache's invariants; for an idle engine.

        Raises:
            CacheError: an invariant is broken.
        """
        self._running_engine().check_integrity()

    @ray.method(concurrency_group="control")
    def process(self) -> Process:
        """This process, for those who must wait for its end."""
        return _process()

    @ray.method(concurrency_group="end")
    def wait_for_end(self) -> None:
        """Never returns: the call fails when this process dies, which tells the supervisor so."""
        threading.Event().wait()

    @ray.method(concurrency_group="control")
    def runners(self) -> list[Process]:
        """The runners' processes."""
        return self._group.processes if self._group else []

    @ray.method(concurrency_group="control")
    def drain(self) -> None:
        """Hands new and background requests back from now on; the others may finish."""
        self._inbox.put(ClientMessage("", drain=True))

    @ray.method(concurrency_group="control")
    def evict(self) -> None:
        """Hands all requests back, with the tokens that they have."""
        self._inbox.put(ClientMessage("", drain=True, evict=True))

    @ray.method(concurrency_group="control")
    def close_subscriptions(self) -> int:
        """Ends the subscriptions after their queued output; returns the number of clients left."""
        return self._subscriptions.close_subscriptions()

    @ray.method(concurrency_group="requests")
    def submit(
        self,
        client: str,
        requests: list[EngineRequest],
        aborts: list[int],
        stopped: list[int] | None = None,
    ) -> None:
        """Passes a client's requests and the keys that it aborts; also renews its lease.

        ``stopped`` are the keys of requests whose text contains a stop string.
        """
        self._subscriptions.renew(client)
        self._inbox.put(ClientMessage(client, requests, aborts, stopped or []))

    @ray.method(concurrency_group="control")
    def attach(self, client: str) -> Seat:
        """Returns how the client gets its tokens: by ``subscribe``, or past Ray by a socket where
        both are on one machine (inbox.py); also renews its lease.

        Raises:
            EngineUnavailable: there are ``MAX_CLIENTS`` clients.
        """
        self._subscriptions.renew(client)
        return Seat(STREAMS[self._subscriptions.seat(client)], self._links.address())

    def subscribe(
        self, client: str, heartbeat: float | None = None, again: bool = False
    ) -> Iterator[TokenDeltas]:
        """Yields the client's output: one message for each step that has any.

        Must be called in the concurrency group that ``attach`` returned, so that the client has its
        own thread. To a client with a socket it only brings the end.

        Also yields the engine's counters every ``heartbeat`` seconds. Ends when the client's lease
        expires (``submit`` renews it), when it unsubscribes, and after ``MESSAGES_PER_CALL``; then
        a call with ``again`` continues without loss.
        """
        yield from self._subscriptions.read(client, self._beat, heartbeat, again=again)

    @ray.method(concurrency_group="requests")
    def unsubscribe(self, client: str) -> None:
        """Ends the subscription and aborts the client's requests."""
        self._inbox.put(ClientMessage(client, leaves=True))

    @ray.method(concurrency_group="control")
    def recall(self, tenant: str, request_ids: list[str]) -> list[TokenLog | None]:
        """Returns the delivered tokens of the tenant's requests; None for unknown ones.

        Those that still run are aborted: the caller continues them.
        """
        logs: list[TokenLog | None] = self._call(lambda engine: engine.recall(tenant, request_ids))
        return logs

    @ray.method(concurrency_group="control")
    def manage(self, command: Command) -> EngineStats:
        """Carries out an operator's command between two steps; returns the counters after it.

        Raises:
            EngineUnavailable: the command failed.
        """
        engine = self._running_engine()
        self._call(lambda engine: engine.carry_out(command), command.seconds)
        return self._stats(engine)

    @ray.method(concurrency_group="prepare")
    def prepare(self, part: RequestPart) -> RayfinError | None:
        """Has the runners prepare what requests with ``part`` need.

        Returns:
            Why they cannot serve it, or None.
        """
        engine, executor = self._running_engine(), self._executor
        assert executor is not None, "an engine that runs has runners"
        try:
            part.check(engine.config.parts)
        except InvalidRequest as refusal:
            return refusal
        pending, deadline = executor.prepare(part.needs), time.monotonic() + LOOP_COMMAND_SECONDS
        while not pending.done() and time.monotonic() < deadline:
            time.sleep(LOBBY_TICK_SECONDS)
        return pending.error() if pending.done() else None

    @ray.method(concurrency_group="warm")
    def warm(
        self, tokens: Int32Array, keys: tuple[str, ...], pages_at: PagesAt
    ) -> tuple[int, float]:
        """Reads pages that another engine has into the cache, and no more.

        Args:
            keys: what keys and values depend on beside ``tokens``.

        Returns:
            How many of the first pages of ``tokens`` are in the cache, and how many seconds the
            rest takes to be computed; 0.0 if nothing has been computed here yet.
        """
        self._has_others = True
        arrived: Future[int] = Future()
        page_size = self._running_engine().config.page_size
        request = request_to_warm(tokens, keys, pages_at, page_size)
        self._call(lambda engine: engine.lifecycle.tier.warm(request, arrived.set_result))
        pages = arrived.result(PEER_READ_SECONDS + LOOP_ANSWER_SECONDS)

        def rest(engine: Engine) -> float:
            return engine.lifecycle.state.prompt_cost.seconds(pages * page_size, len(tokens))

        return pages, self._call(rest)

    @ray.method(concurrency_group="weights")
    def stage_weights(self, version: WeightVersion, chunks: Sequence[Any]) -> Vote:
        """Says whether the engine can serve a version; see ``WeightDesk.stage``.

        Args:
            chunks: refs of its file's bytes.
        """
        return self._running_desk().stage(version, [ray.get(chunk) for chunk in chunks])

    @ray.method(concurrency_group="weights")
    def export_weights(self, digest: str) -> list[Any]:
        """The file of what this engine serves, as refs of its bytes; empty if that is another."""
        current = self._running_desk().store.current
        whole = current.digest == digest and Path(current.place).is_file()
        return chunks_of(current) if whole else []

    @ray.method(concurrency_group="control")
    def weights(self, order: WeightOrder) -> EngineWeights:
        """Carries out an order of a coordinator; see ``WeightDesk.carry_out``."""
        return self._running_desk().carry_out(order)

    def _running_desk(self) -> WeightDesk:
        self._running_engine()
        assert self._desk is not None, "an engine that runs has a desk"
        return self._desk

    def _hand_back(self) -> None:
        self._inbox.put(ClientMessage("", evict=True))

    @ray.method(concurrency_group="control")
    def snapshot(self) -> EngineSnapshot:
        """Running and waiting requests and page owners, between two steps."""
        snapshot: EngineSnapshot = self._call(lambda engine: engine.snapshot(self._name))
        return snapshot

    def _call(self, function: Callable[[Engine], Any], seconds: float = LOOP_ANSWER_SECONDS) -> Any:
        call = EngineCall(function)
        self._inbox.put(call)
        return call.answer.result(seconds)

    def _beat(self) -> TokenDeltas:
        message = TokenDeltas.only()
        message.stats = self._stats(engine := self._running_engine())
        index = engine.lifecycle.state.tables.index
        if index is not None and self._has_others:
            message.held = index.digests(MOST_HELD)
        return message

    def _stats(self, engine: Engine) -> EngineStats:
        stats = engine.stats()
        stats.seconds_since_tick = time.monotonic() - self._ticked
        if self._group is not None:
            stats.generation = self._group.generation
            stats.spare_runners = self._group.spares.num_ready
        if self._kv_events is not None:
            stats.kv_events = self._kv_events.source
        return stats

    def _info(self) -> EngineInfo:
        config = self._running_engine().config
        return EngineInfo.of(self._name, config, self._started.args.identity)

    def _running_engine(self) -> Engine:
        if self._failure is not None:
            raise EngineUnavailable(f"engine {self._name} failed: {self._failure}")
        if self._engine is None:
            raise EngineUnavailable(f"engine {self._name} is starting")
        return self._engine

    def _loop(self) -> None:
        engine = self._running_engine()
        try:
            while True:
                if failpoints.ACTIVE:
                    failpoints.ACTIVE.hit("scheduler.tick")
                self._tick()
                self._process_inbox(engine)
                self._subscriptions.post(engine.step())
                for client in self._subscriptions.silent(self._client_lease):
                    logger.warning("client %s has gone; its requests are aborted", client)
                    self._drop(engine, client)
        except Fenced as fenced:
            logger.error("engine %s: %s; this scheduler exits", self._name, fenced)
            os._exit(1)
        except Exception as error:
            logger.exception("engine %s cannot go on", self._name)
            self._failure = f"{type(error).__name__}: {error}"
            moved = RequestHandedBack(f"engine {self._name} failed: {error}")
            lost = moved if isinstance(error, RunnerGroupFailed) else EngineUnavailable(str(error))
            self._subscriptions.post(engine.fail_all(lost))
        while True:
            message = self._inbox.get()
            if isinstance(message, EngineCall):
                message.reply(engine)
                continue
            for request in message.requests:
                self._refuse(request, RequestHandedBack(f"engine {self._name} has failed"))

    def _tick(self) -> None:
        self._ticked = time.monotonic()

    def _process_inbox(self, engine: Engine) -> None:
        """Processes all messages; waits for one if there is no step to run."""
        block = not engine.has_steps
        patience = LOBBY_TICK_SECONDS if engine.has_work else self._client_lease / 4
        while True:
            try:
                message = self._inbox.get(block, timeout=patience)
            except queue.Empty:
                return
            block = False
            if isinstance(message, EngineCall):
                message.reply(engine)
                continue
            for key in message.aborts:
                engine.abort(message.client, key)
            for key in message.stopped:
                engine.abort(message.client, key, "stop")
            for request in message.requests:
                self._add(engine, request)
            if message.leaves:
                self._drop(engine, message.client)
            if message.drain:
                engine.drain()
            if message.evict:
                moved = RequestHandedBack(f"engine {self._name} is being stopped")
                self._subscriptions.post(engine.fail_all(moved))
            if message.broken is not None and not engine.has_work:
                engine.replace_runners(RunnerGroupFailed(message.broken))

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except RayfinError as error:
            self._refuse(request, error)

    def _refuse(self, request: EngineRequest, error: RayfinError) -> None:
        refusal = TokenDeltas.only(Ended(request.key, "error", error=error))
        self._subscriptions.post({request.client: refusal})

    def _drop(self, engine: Engine, client: str) -> None:
        engine.abort_client(client)
        self._subscriptions.close(client)

    def _report_broken(self, message: str) -> None:
        self._inbox.put(ClientMessage("", broken=message))

    def _is_current(self) -> bool:
        """Whether this scheduler still has its name, and is not about to exit."""
        if self._leaving:
            return False
        if self._started.owner is None:
            return True
        try:
            holder = ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError:
            return False
        return bool(holder._actor_id.hex() == ray.get_runtime_context().get_actor_id())

    def _leave(self) -> None:
        """Kills the runners, frees the placement and exits: no supervisor needs this engine."""
        logger.warning("engine %s has no supervisor any more: it exits", self._name)
        self._leaving = True
        try:
            if self._group is not None:
                self._group.close()
            if self._started.placement is not None:
                remove_placement_group(self._started.placement)
        finally:
            os._exit(0)


def _process() -> Process:
    return this_process(ray.get_runtime_context().get_node_id())
