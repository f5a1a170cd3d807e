"""The engine of an ``LLM`` as Ray actors, made of the same classes as the inline one."""

import asyncio
import itertools
import logging
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidRequest, RayfinError
from rayfin.actors.messages import Command, EngineRequest, Int32Array, Int64Array, TokenDeltas
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.actors.scheduler.subscriptions import MESSAGES_PER_CALL
from rayfin.actors.supervision.supervisor import Supervisor
from rayfin.deployments.client.lease_renewal import Renewal

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3  # of an engine while one call of ``run`` waits for it

_engine_numbers = itertools.count()


class RayEngine:
    """An engine on this process' Ray cluster, or on a new local one.

    If it dies, it is started again, and open requests go on after their tokens so far.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._started_ray = start_ray()
        self._args = args
        self._client = ""
        self._renewal: Renewal | None = None
        self._open: dict[int, EngineRequest] = {}
        try:
            self._start()
        except RayfinError:
            self.close()
            raise

    def run(self, requests: list[EngineRequest]) -> Iterator[TokenDeltas]:
        self._open = {request.key: request for request in requests}
        delivered: list[tuple[Int64Array, Int32Array]] = []  # keys and tokens of each message
        restarts = 0
        try:
            self._submit(requests)
            while self._open:
                try:
                    message = next(self._messages)
                except (RayError, StopIteration) as error:
                    if restarts == MAX_RESTARTS:
                        raise EngineUnavailable(f"the engine died: {error}") from error
                    restarts += 1
                    logger.warning("the engine died and is started again: %s", error)
                    self._restart()
                    self._submit(_continued(self._open, delivered))
                    continue
                delivered.append((message.keys, message.tokens))
                for ended in message.ended:
                    self._open.pop(ended.key, None)
                yield message
        finally:
            for key in list(self._open):
                self.abort(key)

    def _start(self) -> None:
        number = next(_engine_numbers)
        self._client = f"offline-{os.getpid()}-{number}"
        self._supervisor = Supervisor(self._args, f"offline-engine-{os.getpid()}-{number}")
        try:
            self.info = _wait_for(self._supervisor.start())
        except RayError as error:
            raise EngineUnavailable(f"the engine cannot be started: {error}") from error
        self._scheduler: Any = self._supervisor.scheduler
        self._messages = self._subscribe()
        self._renewal = Renewal(lambda: self._scheduler.submit.remote(self._client, [], []))

    def _restart(self) -> None:
        self._leave()
        self._start()

    def _leave(self) -> None:
        if self._renewal is not None:
            self._renewal.close()
            self._renewal = None
        self._supervisor.stop()

    def _submit(self, requests: list[EngineRequest]) -> None:
        addressed = [replace(request, client=self._client) for request in requests]
        self._scheduler.submit.remote(self._client, addressed, [])

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
        self._open.pop(key, None)
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
        self._leave()
        if self._started_ray:
            ray.shutdown()


def _continued(
    requests: dict[int, EngineRequest], delivered: list[tuple[Int64Array, Int32Array]]
) -> list[EngineRequest]:
    """The requests with their outputs so far: tokens depend on seed and position alone.

    Args:
        delivered: keys and tokens of each message, in their order.
    """
    outputs: dict[int, list[int]] = {key: list(each.output) for key, each in requests.items()}
    for keys, tokens in delivered:
        for key, token in zip(keys.tolist(), tokens.tolist(), strict=True):
            if key in outputs:
                outputs[key].append(token)
    return [replace(request, output=outputs[key]) for key, request in requests.items()]


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
