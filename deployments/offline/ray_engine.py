"""The engine of an ``LLM`` as Ray actors, made of the same classes as the inline one."""

import asyncio
import itertools
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidRequest, RayfinError
from rayfin.actors.messages import Command, EngineRequest, TokenDeltas
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.actors.scheduler.subscriptions import MESSAGES_PER_CALL
from rayfin.actors.supervision.supervisor import Supervisor
from rayfin.deployments.client.lease_renewal import Renewal

T = TypeVar("T")

_engine_numbers = itertools.count()


class RayEngine:
    """An engine on this process' Ray cluster, or on a new local one."""

    def __init__(self, args: EngineArgs) -> None:
        self._started_ray = start_ray()
        number = next(_engine_numbers)
        self._client = f"offline-{os.getpid()}-{number}"
        self._renewal: Renewal | None = None
        self._supervisor = Supervisor(args, f"offline-engine-{os.getpid()}-{number}")
        try:
            self.info = _wait_for(self._supervisor.start())
        except RayfinError:
            self.close()
            raise
        self._scheduler: Any = self._supervisor.scheduler
        self._open: set[int] = set()
        self._messages = self._subscribe()
        self._renewal = Renewal(lambda: self._scheduler.submit.remote(self._client, [], []))

    def run(self, requests: list[EngineRequest]) -> Iterator[TokenDeltas]:
        self._open = {request.key for request in requests}
        addressed = [replace(request, client=self._client) for request in requests]
        self._scheduler.submit.remote(self._client, addressed, [])
        try:
            while self._open:
                message = next(self._messages)
                self._open -= {ended.key for ended in message.ended}
                yield message
        except (RayError, StopIteration) as error:
            raise EngineUnavailable(f"the engine died: {error}") from error
        finally:
            for key in list(self._open):
                self.abort(key)

    def _subscribe(self) -> Iterator[TokenDeltas]:
        group = ray.get(self._scheduler.attach.remote(self._client)).group
        options = {"num_returns": "streaming", "concurrency_group": group}
        subscribe = self._scheduler.subscribe.options(**options)
        count, again = MESSAGES_PER_CALL, False
        while count == MESSAGES_PER_CALL:
            count = 0
            for ref in subscribe.remote(self._client, None, again):
                count += 1
                message: TokenDeltas = ray.get(ref)
                yield message
            again = True

    def abort(self, key: int) -> None:
        self._open.discard(key)
        self._scheduler.submit.remote(self._client, [], [key])

    def stats(self) -> EngineStats:
        stats: EngineStats = ray.get(self._scheduler.stats.remote())
        return stats

    def carry_out(self, command: Command) -> None:
        ray.get(self._scheduler.manage.remote(command))

    def update_weights(self, weights: Any, label: str, options: object) -> dict[str, Any]:
        raise InvalidRequest("update_weights needs executor='inline'", "executor")

    def check_integrity(self) -> None:
        ray.get(self._scheduler.check_integrity.remote())

    def close(self) -> None:
        if self._renewal is not None:
            self._renewal.close()
        self._supervisor.stop()
        if self._started_ray:
            ray.shutdown()


def start_ray() -> bool:
    """Starts a local Ray if this process has none; returns whether it did."""
    if ray.is_initialized():
        return False
    set_ray_environment()
    ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    return True


def _wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``, run in a thread if an event loop runs (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
