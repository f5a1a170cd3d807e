"""The engine of an ``LLM``: in this process or as Ray actors, with the same tokens."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.errors import InvalidConfig, RayfinError
from rayfin.actors.messages import Command, Ended, EngineInfo, EngineRequest, TokenDeltas
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.actors.runner.parallel.rank import group_size
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.settings.kv_events import read_kv_events
from rayfin.actors.timing import OFFLINE_LEASE_SECONDS
from rayfin.deployments.offline.weights import LocalWeights

if TYPE_CHECKING:
    from rayfin.actors.runner.inline import InlineExecutor
    from rayfin.deployments.client.weights import UpdateOptions, Weights


class OfflineEngine(Protocol):
    """A synchronous engine for one caller."""

    info: EngineInfo

    def run(self, requests: list[EngineRequest]) -> Iterator[TokenDeltas]:
        """Runs the requests, which have distinct keys, and yields deltas until all have ended.

        Closing the iterator early aborts the rest.
        """
        ...

    def abort(self, key: int) -> None:
        """Aborts one request of the current ``run``."""
        ...

    def stats(self) -> EngineStats: ...

    def carry_out(self, command: Command) -> None:
        """Carries out a command while no request runs.

        Raises:
            EngineUnavailable: it failed.
        """
        ...

    def update_weights(
        self, weights: "Weights", label: str, options: "UpdateOptions"
    ) -> dict[str, Any]:
        """Changes the weights while no request runs; see ``LLM.update_weights``."""
        ...

    def check_integrity(self) -> None: ...

    def close(self) -> None:
        """Frees the model."""
        ...


def load_engine(args: EngineArgs) -> "tuple[Engine, EngineInfo, InlineExecutor]":
    """Loads the scheduler and the model runner into this process, without Ray.

    Raises:
        InvalidConfig: the model cannot be served in one process.
    """
    if group_size(args) > 1:
        name = "tensor" if args.tensor_parallel_size > 1 else "pipeline"
        raise InvalidConfig(
            f"{name}_parallel_size over 1 needs executor='ray': a process for each device",
            f"{name}_parallel_size",
        )
    if read_kv_events(args.kv_events_config).enabled:
        raise InvalidConfig("kv_events_config needs executor='ray'", "kv_events_config")
    from rayfin.actors.runner.inline import InlineExecutor  # imports torch
    from rayfin.actors.runner.model_runner import ModelRunner

    runner = ModelRunner(args)
    facts, limits = runner.profile()
    # A step in flight behind another gains nothing where both run here, one after the other.
    local = facts.device == "cpu"
    config = resolve(replace(args, steps_in_flight=1) if local else args, facts, limits)
    executor = InlineExecutor(runner, config)
    engine = Engine(config, executor, lease_seconds=OFFLINE_LEASE_SECONDS if local else None)
    return engine, EngineInfo.of("inline", config), executor


class InlineEngine:
    """The scheduler and the model runner in this process, without Ray."""

    def __init__(self, args: EngineArgs) -> None:
        self._engine, self.info, executor = load_engine(args)
        self._weights = LocalWeights(args, executor)

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

    def carry_out(self, command: Command) -> None:
        self._engine.carry_out(command)

    def check_integrity(self) -> None:
        self._engine.check_integrity()

    def update_weights(
        self, weights: "Weights", label: str, options: "UpdateOptions"
    ) -> dict[str, Any]:
        staged = self._weights.stage(weights, label, options)
        updates = self._engine.updates
        updates.pause("keep")
        try:
            while not updates.is_paused:
                self._engine.step()
            self._weights.commit(self._engine, staged)
        finally:
            updates.resume()
        return staged.as_json()

    def close(self) -> None:
        self._weights.close()
        del self._engine, self._weights


def start_engine(executor: str, args: EngineArgs) -> OfflineEngine:
    """Starts the engine of an executor, "inline" or "ray".

    Raises:
        InvalidConfig: the name is unknown, or the model cannot be served.
    """
    if executor == "inline":
        return InlineEngine(args)
    if executor == "ray":
        if "ray" not in sys.modules:  # some of its variables are read as it is imported
            set_ray_environment()
        from rayfin.deployments.offline.ray_engine import (
            RayEngine,  # imports Ray
        )

        return RayEngine(args)
    raise InvalidConfig(f"executor must be 'inline' or 'ray', got {executor!r}", "executor")
