"""Coordinator and receiver of a deployment as actors, which others find by their names."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfin.actors.errors import EngineUnavailable, RayfinError
from rayfin.actors.processes.registry import NAMESPACE, engine_names, find_actor
from rayfin.actors.timing import MODEL_LOAD_SECONDS, WEIGHTS_SILENT_SECONDS, WEIGHTS_UNUSED_SECONDS
from rayfin.actors.weights.coordinator import EnginePort, WeightCoordinator
from rayfin.actors.weights.store import WeightStore, store_of
from rayfin.actors.weights.version import EngineWeights, Vote, WeightOrder, WeightVersion

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Of a file that goes to other nodes, in one object."""

SUFFIX, RECEIVER_SUFFIX = "-weights", "-receiver"
OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000, "max_restarts": 0}


def coordinator_name(engine: str) -> str:
    """The name of the coordinator of an engine's deployment; engines are app/deployment/number."""
    return engine.rpartition("/")[0] + SUFFIX


class _RemoteEngine:
    """An ``EnginePort`` by Ray."""

    def __init__(self, name: str, scheduler: Any) -> None:
        self._name, self._scheduler = name, scheduler

    async def stage(self, version: WeightVersion, chunks: Sequence[Any]) -> Vote:
        call = self._scheduler.stage_weights.remote(version, list(chunks))
        vote: Vote = await self._answer(call, MODEL_LOAD_SECONDS)
        return vote

    async def order(self, order: WeightOrder) -> EngineWeights:
        seconds = MODEL_LOAD_SECONDS if order.what == "commit" else WEIGHTS_SILENT_SECONDS
        state: EngineWeights = await self._answer(self._scheduler.weights.remote(order), seconds)
        return state

    async def _answer(self, call: Any, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await call
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError):
                raise error.cause from None
            raise EngineUnavailable(f"engine {self._name}: {error.cause!r}") from error
        except (RayError, TimeoutError) as error:
            raise EngineUnavailable(f"engine {self._name}: {type(error).__name__}") from error


@ray.remote(**OPTIONS)
class WeightCoordinatorActor:
    """``WeightCoordinator`` of the engines whose names begin as its own."""

    def __init__(self, name: str) -> None:
        self._prefix = name.removesuffix(SUFFIX) + "/"
        self._coordinator = WeightCoordinator(self._find)
        self._found = time.monotonic()
        self._ready: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def _find(self) -> Mapping[str, EnginePort]:
        try:
            names = await asyncio.to_thread(engine_names, self._prefix)
            actors = {name: find_actor(name) for name in names}
        except (RayError, RuntimeError) as error:  # Ray's registry restarts
            raise EngineUnavailable(f"Ray's registry does not answer: {error}") from error
        if names:
            self._found = time.monotonic()
        return {
            name: _RemoteEngine(name, actor) for name, actor in actors.items() if actor is not None
        }

    async def begin(self) -> None:
        """Ends what the coordinator before has left; returns when that is done."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.ensure_future(self._coordinator.recover())
        if not self._tasks:
            self._tasks = [
                asyncio.ensure_future(self._coordinator.watch()),
                asyncio.ensure_future(self._leave()),
            ]
        await asyncio.shield(self._ready)

    async def update(
        self, version: WeightVersion, chunks: Sequence[Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See ``WeightCoordinator.update``; the report as JSON."""
        await self.begin()
        report = await self._coordinator.update(version, chunks, **options)
        return report.as_json()

    async def abandon(self) -> None:
        """See ``WeightCoordinator.abandon``."""
        self._coordinator.abandon()

    async def pause(self, options: Mapping[str, Any]) -> None:
        """See ``WeightCoordinator.pause``."""
        await self.begin()
        await self._coordinator.pause(**options)

    async def resume(self) -> None:
        """See ``WeightCoordinator.resume``."""
        await self.begin()
        await self._coordinator.resume()

    async def states(self) -> dict[str, EngineWeights]:
        """See ``WeightCoordinator.states``."""
        await self.begin()
        return await self._coordinator.states()

    async def decided(self) -> WeightVersion:
        """The version that all engines serve, or are about to."""
        return self._coordinator.decided

    async def _leave(self) -> None:
        while time.monotonic() - self._found < WEIGHTS_UNUSED_SECONDS:
            await asyncio.sleep(WEIGHTS_UNUSED_SECONDS / 10)
            with suppress(RayError, EngineUnavailable):
                await self._find()
        os._exit(0)


def start_coordinator(name: str) -> Any:
    """The coordinator ``name``, which is started if there is none; None of an engine alone."""
    if name == SUFFIX:
        return None
    actor_class: Any = WeightCoordinatorActor  # Ray's stubs lose `options` on a decorated class
    actor = actor_class.options(
        name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(name)
    actor.begin.remote()
    return actor


def store_here(weight_dir: str | None, engine: str) -> WeightStore:
    """This node's store of an engine's deployment, of this Ray cluster; or of the engine alone.

    Raises:
        InvalidConfig: others may write there.
    """
    session = ray.get_runtime_context().get_session_name()
    return store_of(weight_dir, session, *engine.split("/")[:-1] or [engine])


def decided_version(name: str) -> WeightVersion:
    """What the coordinator ``name`` has decided; the base where there is none."""
    if (actor := find_actor(name)) is None:
        return WeightVersion()
    try:
        version: WeightVersion = ray.get(actor.decided.remote(), timeout=WEIGHTS_SILENT_SECONDS)
    except (RayError, TimeoutError):
        return WeightVersion()
    return version


@ray.remote(num_cpus=0, max_restarts=0)
class WeightReceiverActor:
    """A ``WeightReceiver`` in a process of its own. Another one begins where this has ended."""

    def __init__(self, weight_dir: str | None, engine: str) -> None:
        from rayfin.actors.weights.receiver import WeightReceiver  # imports torch

        self._receiver = WeightReceiver(store_here(weight_dir, engine))
        self._receiver.watch()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the receiver."""
        return getattr(self._receiver, method)(*arguments)


def start_receiver(weight_dir: str | None, engine: str) -> Any:
    """The receiver of an engine's deployment, which is started on this node if there is none."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = WeightReceiverActor  # Ray's stubs lose `options` on a decorated class
    return actor_class.options(
        name=engine.rpartition("/")[0] + RECEIVER_SUFFIX,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=here,
    ).remote(weight_dir, engine)


def chunks_of(version: WeightVersion) -> list[Any]:
    """The file of a version as objects of Ray."""
    whole = np.memmap(version.place, np.uint8, "r")
    return [ray.put(whole[at : at + CHUNK_BYTES]) for at in range(0, len(whole), CHUNK_BYTES)]


def fetch_version(engine: str, version: WeightVersion) -> Iterator[Any]:
    """Yields the bytes of a version's file from an engine beside ``engine`` that serves it."""
    for name in engine_names(engine.rpartition("/")[0] + "/"):
        actor = None if name == engine else find_actor(name)
        if actor is None:
            continue
        try:
            asked = actor.export_weights.remote(version.digest)
            chunks = ray.get(asked, timeout=WEIGHTS_SILENT_SECONDS)
            for chunk in chunks:
                yield ray.get(chunk, timeout=WEIGHTS_SILENT_SECONDS)
        except (RayError, TimeoutError) as error:  # torn bytes have another digest
            logger.warning("engine %s does not give the weights: %s", name, error)
            return
        if chunks:
            return
