"""The Ray shell of an Engine: a thread that steps, and three doors to it.

    submit      requests and aborts come in                   (concurrency group "requests")
    subscribe   one client's news, a message per step         ("streams", a thread per client)
    the others  start, info, stats: never wait for a step     ("control")

The doors only touch queues; the engine is the loop thread's alone.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, RayfinError
from rayfin.actors.group import RunnerGroup
from rayfin.actors.messages import (
    Ended,
    EngineInfo,
    EngineRequest,
    EngineStats,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.priority import step_behind_runners
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.subscriptions import Subscriptions

logger = logging.getLogger(__name__)

MAX_CLIENTS = 64
CLIENT_LEASE_SECONDS = 15.0
"""A client that has not been heard of for this long is gone, and its requests with it."""

RECALL_SECONDS = 5.0  # that a question may wait for the loop

OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "num_cpus": 0,
    "concurrency_groups": {"requests": 1, "streams": MAX_CLIENTS, "control": 4},
}


@dataclass(slots=True)
class _Mail:
    """What a door hands to the loop."""

    client: str
    requests: list[EngineRequest] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    leaves: bool = False


@dataclass(slots=True)
class _Recall:
    """A question to the loop."""

    tenant: str
    request_ids: list[str]
    logs: Future[list[TokenLog | None]] = field(default_factory=Future)


@ray.remote(**OPTIONS)
class SchedulerActor:
    """One engine's scheduler, with the runners that it drives."""

    def __init__(self, name: str, client_lease: float = CLIENT_LEASE_SECONDS) -> None:
        step_behind_runners()
        self._name = name
        self._client_lease = client_lease
        self._inbox: queue.SimpleQueue[_Mail | _Recall] = queue.SimpleQueue()
        self._subscriptions = Subscriptions()
        self._engine: Engine | None = None
        self._group: RunnerGroup | None = None
        self._failure: str | None = None

    @ray.method(concurrency_group="control")
    def start(self, args: EngineArgs, placement: PlacementGroup | None = None) -> EngineInfo:
        """Starts the runners, loads the model, then steps for ever; returns when it is ready.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
        """
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("scheduler.start")
        self._group = RunnerGroup(args, placement)
        self._engine = Engine(self._group.start(), self._group)
        threading.Thread(target=self._loop, name="engine", daemon=True).start()
        return self._info()

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
        return self._running_engine().stats()

    @ray.method(concurrency_group="control")
    def check_integrity(self) -> None:
        """The cache's own check; for an idle engine.

        Raises:
            CacheError: an invariant is broken.
        """
        self._running_engine().check_integrity()

    @ray.method(concurrency_group="control")
    def runner_pids(self) -> list[int]:
        """Process ids of the runners, for operators and fault tests."""
        return self._group.pids() if self._group is not None else []

    @ray.method(concurrency_group="requests")
    def submit(
        self,
        client: str,
        requests: list[EngineRequest],
        aborts: list[int],
        stopped: list[int] | None = None,
    ) -> None:
        """Hands over a client's requests and the keys that it gives up; also renews its lease.

        ``stopped`` are the keys of requests whose text has met a stop string.
        """
        self._subscriptions.renew(client)
        self._inbox.put(_Mail(client, requests, aborts, stopped or []))

    @ray.method(concurrency_group="streams")
    def subscribe(self, client: str, heartbeat: float | None = None) -> Iterator[TokenDeltas]:
        """The client's news as they come: one message per step that has any.

        With ``heartbeat``, also one every so many seconds, with the engine's counters. Ends when
        the client's lease runs out (``submit`` renews it) or it unsubscribes.
        """
        yield from self._subscriptions.read(client, self._beat, heartbeat)

    @ray.method(concurrency_group="requests")
    def unsubscribe(self, client: str) -> None:
        """Ends the subscription and aborts what is left of the client's requests."""
        self._inbox.put(_Mail(client, leaves=True))

    @ray.method(concurrency_group="control")
    def recall(self, tenant: str, request_ids: list[str]) -> list[TokenLog | None]:
        """What the tenant's requests have been told so far; None where nothing is known.

        One that still runs is aborted: whoever asks goes on with it.
        """
        mail = _Recall(tenant, request_ids)
        self._inbox.put(mail)
        return mail.logs.result(RECALL_SECONDS)

    def _beat(self) -> TokenDeltas:
        message = TokenDeltas.only()
        message.stats = self._running_engine().stats()
        return message

    def _info(self) -> EngineInfo:
        config = self._running_engine().config
        return EngineInfo(
            name=self._name,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_logprobs=config.max_logprobs,
        )

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
                self._read_mail(engine)
                self._subscriptions.post(engine.step())
                for client in self._subscriptions.silent(self._client_lease):
                    logger.warning("client %s has gone; its requests are aborted", client)
                    self._drop(engine, client)
        except Exception as error:
            logger.exception("engine %s cannot go on", self._name)
            self._failure = f"{type(error).__name__}: {error}"
            self._subscriptions.post(engine.fail_all(error))

    def _read_mail(self, engine: Engine) -> None:
        """Takes in all mail; sleeps until there is some when the engine is idle."""
        block = not engine.has_work
        while True:
            try:
                mail = self._inbox.get(block, timeout=self._client_lease / 4)
            except queue.Empty:
                return
            block = False
            if isinstance(mail, _Recall):
                mail.logs.set_result(engine.recall(mail.tenant, mail.request_ids))
                continue
            for key in mail.aborts:
                engine.abort(mail.client, key)
            for key in mail.stopped:
                engine.abort(mail.client, key, "stop")
            for request in mail.requests:
                self._add(engine, request)
            if mail.leaves:
                self._drop(engine, mail.client)

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except RayfinError as error:
            refusal = TokenDeltas.only(Ended(request.key, "error", error=error))
            self._subscriptions.post({request.client: refusal})

    def _drop(self, engine: Engine, client: str) -> None:
        engine.abort_client(client)
        self._subscriptions.close(client)
