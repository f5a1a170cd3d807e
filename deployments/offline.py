"""Two ways for an ``LLM`` to run an engine: in this process, or as actors. Same tokens."""

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError

from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, RayfinError
from rayfin.actors.messages import Ended, EngineInfo, EngineRequest, EngineStats, TokenDeltas
from rayfin.actors.priority import keep_workers_equal
from rayfin.actors.runner.place import group_size
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.subscriptions import MESSAGES_PER_CALL
from rayfin.actors.supervisor import Supervisor

T = TypeVar("T")

_engine_numbers = itertools.count()

RENEW_SECONDS = 4.0  # under a third of the scheduler's client lease


class OfflineEngine(Protocol):
    """An engine for one caller that waits."""

    info: EngineInfo

    def run(self, requests: list[EngineRequest]) -> Iterator[TokenDeltas]:
        """Runs the requests (distinct keys) and yields news until every one has ended.

        Leaving the iterator early aborts the rest.
        """
        ...

    def abort(self, key: int) -> None:
        """Ends one request of the ``run`` under way."""
        ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None:
        """Frees the model."""
        ...


class InlineEngine:
    """The plain classes in this process: no Ray at all."""

    def __init__(self, args: EngineArgs) -> None:
        from rayfin.actors.runner.inline import InlineExecutor  # torch: only this executor needs it
        from rayfin.actors.runner.model_runner import ModelRunner

        runner = ModelRunner(args)
        facts, limits = runner.profile()
        config = resolve(replace(args, max_lease=1), facts, limits)  # no call to hide here
        self._engine = Engine(config, InlineExecutor(runner, config))
        self.info = EngineInfo(
            name="inline",
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_logprobs=config.max_logprobs,
        )

    def run(self, requests: list[EngineRequest]) -> Iterator[TokenDeltas]:
        engine = self._engine
        try:
            for request in requests:
                try:
                    engine.add(request)
                except RayfinError as error:
                    yield TokenDeltas.only(Ended(request.key, "error", error=error))
            while engine.has_work:
                yield from engine.step().values()
        finally:
            engine.abort_client("")

    def abort(self, key: int) -> None:
        self._engine.abort("", key)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check_integrity(self) -> None:
        self._engine.check_integrity()

    def close(self) -> None:
        del self._engine


class RayEngine:
    """The same engine as actors, on the Ray of this process, or on a new local one."""

    def __init__(self, args: EngineArgs) -> None:
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            keep_workers_equal()
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        number = next(_engine_numbers)
        self._client = f"offline-{os.getpid()}-{number}"
        self._closed = threading.Event()
        self._supervisor = Supervisor(args, f"offline-engine-{os.getpid()}-{number}")
        try:
            self.info = _wait_for(self._supervisor.start())
        except RayfinError:
            self.close()
            raise
        self._scheduler: Any = self._supervisor.scheduler
        self._open: set[int] = set()
        self._messages = self._subscribe()
        threading.Thread(target=self._keep_alive, daemon=True).start()

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
            raise EngineUnavailable(f"the engine is gone: {error}") from error
        finally:
            for key in list(self._open):
                self.abort(key)

    def _subscribe(self) -> Iterator[TokenDeltas]:
        subscribe = self._scheduler.subscribe.options(num_returns="streaming")
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

    def check_integrity(self) -> None:
        ray.get(self._scheduler.check_integrity.remote())

    def close(self) -> None:
        self._closed.set()
        self._supervisor.stop()
        if self._started_ray:
            ray.shutdown()

    def _keep_alive(self) -> None:
        while not self._closed.wait(RENEW_SECONDS):
            self._scheduler.submit.remote(self._client, [], [])


def _wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, in a thread of its own where an event loop runs (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def start_engine(executor: str, args: EngineArgs) -> OfflineEngine:
    """The engine of an executor's name, "inline" or "ray".

    Raises:
        InvalidConfig: another name, or a model that cannot be served.
    """
    if executor == "inline":
        if group_size(args) > 1:
            name = "tensor" if args.tensor_parallel_size > 1 else "pipeline"
            raise InvalidConfig(
                f"{name}_parallel_size over 1 needs executor='ray': a process for each device",
                f"{name}_parallel_size",
            )
        return InlineEngine(args)
    if executor == "ray":
        return RayEngine(args)
    raise InvalidConfig(f"executor must be 'inline' or 'ray', got {executor!r}", "executor")
